"""Time of a call with its copies in the graph, and around it. Needs a GPU.

    python research/prototypes/copies_inside.py OUT.json recommendation.py:recommendation_small,train,48,tf32 ...

Each step is optimized as by `validate/compile.toml`. The chosen schedule is recorded four times without copies and four
times with them, and each recording is called in turn, launches slow: us a call of many in a row, and of one on the host
and on the GPU alone, with the launch and the graph alone. Writes after each step. Run it in the repository's root.
"""

from __future__ import annotations

import json
import statistics
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from gpusim.gpu.capture.models import load_step
from gpusim.gpu.device import provenance, require_gpu, set_precision
from gpusim.gpu.launch_state import make_launches_slow
from gpusim.gpu.optimize import make, measure
from gpusim.gpu.optimize.measure import Asked
from gpusim.gpu.optimize.peers import tensors_of
from gpusim.gpu.replay.timing import host_ns_behind, queued_ns

RECORDINGS, CALLS, ROUNDS = 4, 300, 5
BEGIN = time.perf_counter()


def say(text: object) -> None:
    print(f"[{time.perf_counter() - BEGIN:6.1f}]", text, flush=True)


def in_a_row_us(call: Any, batches: Any) -> float:
    torch.cuda.synchronize()
    begin = time.perf_counter()
    for number in range(CALLS):
        call(*batches[number % len(batches)])
    torch.cuda.synchronize()
    return (time.perf_counter() - begin) / CALLS * 1e6


def median_us(measure_ns: Any, call: Any) -> float:
    return round(statistics.median(measure_ns(call) for _ in range(ROUNDS)) / 1e3, 1)


def measured(fast: Any, batches: Any) -> dict[str, float]:
    """Return the times of one recording, in us."""
    (variant,) = fast._variants.values()
    make_launches_slow()
    in_a_row_us(fast, batches)

    def call() -> None:
        fast(*batches[0])

    return {
        "in a row": round(statistics.median(in_a_row_us(fast, batches) for _ in range(ROUNDS)), 1),
        "host": median_us(host_ns_behind, call),
        "launch": median_us(host_ns_behind, variant.ready.run),
        "gpu": median_us(queued_ns, call),
        "graph": median_us(queued_ns, variant.ready.run),
    }


def main(out: str, *specs: str) -> None:
    rows: list[dict[str, Any]] = []
    device = require_gpu()
    as_called = make.as_called
    for text in specs:
        spec, mode, batch, dtype = text.split(",")
        set_precision(dtype)
        step = load_step(
            spec, mode=mode, batch=int(batch), dtype=dtype, memory_format="contiguous", device=device, seed=0
        )
        ready: dict[str, list[Any]] = {"around": [], "inside": []}

        def told(
            candidate: Any, trace: Any, executor: Any, limit: Any, kept: Any, *rest: Any, ready: Any = ready
        ) -> Any:
            results = candidate.captured.returned.copied(kept)
            given = candidate.captured, trace, candidate.schedule
            for _ in range(RECORDINGS):
                ready["around"].append(executor.prepare(*given))
                ready["inside"].append(executor.prepare_call(*given, results))
            return replace(candidate, ready=ready["inside"][0])

        make.as_called = told
        asked = Asked(spec, mode, int(batch), dtype, "contiguous", (), (), 8, 9.0, 0)
        fast = measure.optimized(step, step.module, asked, say)
        make.as_called = as_called
        batches = measure.batches_of(step)
        (variant,) = fast._variants.values()
        times: dict[str, list[dict[str, float]]] = {"around": [], "inside": []}
        for number in range(RECORDINGS):
            for way, recordings in ready.items():
                variant.ready = recordings[number]
                times[way].append(measured(fast, batches))
                say(f"{way}: {times[way][-1]}")
        inputs = tensors_of(step)
        head = provenance("python research/prototypes/copies_inside.py", lambda fast=fast, inputs=inputs: fast(*inputs))
        rows.append({"step": text, "us": times, **head})
        Path(out).write_text(json.dumps(rows, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main(*sys.argv[1:])
