"""The measured timeline of a replayed schedule beside the simulated one, for Perfetto.

The profiler slows a replay (by 30 % for GoogLeNet training 8 on an H200) and shows lanes of the executor's own choice,
not the streams of the capture: good for looking, not for timing.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from gpusim.plan.partitions import Partition
from gpusim.runtime.cudagraph import GraphRecorder
from gpusim.runtime.device import explain_out_of_memory, require_gpu, set_precision
from gpusim.runtime.execute import Runner, make_initial
from gpusim.runtime.microbench import GPU_CATEGORIES
from gpusim.runtime.profiling import exported_events, profiled
from gpusim.trace.dependencies import dependencies
from gpusim.trace.schema import Trace


@explain_out_of_memory
def measured_events(
    trace: Trace,
    order: list[int],
    streams: list[int],
    seed: int,
    *,
    variants: Sequence[int] = (),
    partitions: Sequence[Partition] = (),
) -> list[dict[str, Any]]:
    """GPU events of one profiled replay. Raises `GpuError` without a GPU."""
    device = require_gpu()
    set_precision(trace.model.dtype)
    runner = Runner(trace, device)
    runner.bind(make_initial(trace, device, seed).tensors)
    recorder = GraphRecorder(runner, dependencies(trace))
    recorded = recorder.record(order, streams, variants=variants, partitions=partitions)
    for _ in range(3):
        recorded.replay()
    torch.cuda.synchronize()
    with profiled() as session:
        recorded.replay()
        torch.cuda.synchronize()
    return [event for event in exported_events(session) if event.get("cat") in GPU_CATEGORIES]
