"""A rank's step as a CUDA graph, collectives included."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

import torch
import torch.distributed as dist

#: Runs before recording: libraries choose algorithms, and NCCL connects the ranks.
WARM_UP: Final = 3


def new_graph(generator: torch.Generator | None) -> torch.cuda.CUDAGraph:
    """Return a graph to record into; each of its replays advances the generator of a rank (`Rank.generator`)."""
    graph = torch.cuda.CUDAGraph()
    if generator is not None:
        graph.register_generator_state(generator)
    return graph


def recorded(
    run: Callable[[], object],
    device: torch.device,
    *,
    generator: torch.Generator | None = None,
    warm_up: int = WARM_UP,
    pool: Any = None,
) -> tuple[Callable[[], None] | None, str]:
    """Return a replay of a step on all ranks, or None and why a rank cannot record it.

    All ranks call it together. `generator` is that of the rank. Graphs that replay in turns may share a memory `pool`.
    """
    if device.type != "cuda":
        return None, "no GPU"
    graph, problem = new_graph(generator), ""
    try:
        stream = torch.cuda.Stream()
        with torch.cuda.stream(stream):
            for _ in range(warm_up):
                run()
        torch.cuda.synchronize(device)
        torch.cuda.empty_cache()
        # NCCL's monitoring thread queries events during the recording, which other modes refuse.
        with torch.cuda.graph(graph, pool=pool, stream=stream, capture_error_mode="thread_local"):
            run()
    except RuntimeError as cause:
        problem = str(cause).splitlines()[0]
    failed = torch.tensor(float(bool(problem)), device=device)
    dist.all_reduce(failed)
    if failed.item():
        return None, problem or "another rank cannot record it"
    return graph.replay, ""
