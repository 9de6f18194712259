"""How much do recordings of one schedule differ, and does a second timing agree? Needs a GPU.

    python research/prototypes/recordings_again.py OUT.json torchvision:googlenet,infer,1,tf32 ...

Each step is optimized as by `validate/compile.toml`. Of the schedules that its trials find fastest, four of each front
end, and once more the one that is chosen, are recorded 12 times and timed in turns, twice. Writes all times. Run it in
the repository's root.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

from gpusim.gpu.capture.models import load_step
from gpusim.gpu.device import provenance, require_gpu, set_precision
from gpusim.gpu.optimize import choose, measure
from gpusim.gpu.optimize.measure import Asked
from gpusim.gpu.optimize.peers import tensors_of

RECORDINGS, SCHEDULES = 12, 4
BEGIN = time.perf_counter()


def say(text: object) -> None:
    print(f"[{time.perf_counter() - BEGIN:6.1f}]", text, flush=True)


def recorder(found: list[dict[str, Any]]) -> Callable[..., choose.Candidate]:
    """Return a stand-in for `choose._best_recording` that keeps the times of all recordings."""

    def best_recording(
        first: Any, recordings: list[Any], trace: Any, executor: Any, limit: int | None, prepare: Any, *_: float
    ) -> choose.Candidate:
        while len(recordings) < RECORDINGS and choose._has_room(trace, recordings, executor):
            recordings.append(prepare())
        ready = {str(n): each for n, each in enumerate(recordings)}
        predicted = dict.fromkeys(ready, first.predicted_ns)
        begin = time.perf_counter()
        times = executor.times_ns(ready, predicted)
        again = executor.times_ns(ready, predicted)
        found.append(
            {
                "frontend": first.captured.trace.model.frontend,
                "policy": first.schedule.policy,
                "streams": first.schedule.stream_count,
                "trial_ns": first.time_ns,
                "times_ns": list(times.values()),
                "again_ns": list(again.values()),
                "timing_s": round(time.perf_counter() - begin, 2),
            }
        )
        say(
            f"{first.schedule.policy} on {first.schedule.stream_count}: trial {first.time_ns}, {sorted(times.values())}"
        )
        fastest = min(ready, key=lambda name: times[name])
        return replace(first, ready=ready[fastest], time_ns=times[fastest])

    return best_recording


def main(out: str, *specs: str) -> None:
    rows: list[dict[str, Any]] = []
    device = require_gpu()
    choose.RECORDED_AGAIN = SCHEDULES
    for text in specs:
        spec, mode, batch, dtype = text.split(",")
        set_precision(dtype)
        step = load_step(
            spec, mode=mode, batch=int(batch), dtype=dtype, memory_format="contiguous", device=device, seed=0
        )
        found: list[dict[str, Any]] = []
        choose._best_recording = recorder(found)
        asked = Asked(spec, mode, int(batch), dtype, "contiguous", (), (), 8, 9.0, 0)
        fast = measure.optimized(step, step.module, asked, say)
        inputs = tensors_of(step)
        head = provenance(
            "python research/prototypes/recordings_again.py", lambda fast=fast, inputs=inputs: fast(*inputs)
        )
        rows.append({"step": text, "schedules": found, **head})
        Path(out).write_text(json.dumps(rows, indent=1), encoding="utf-8")


if __name__ == "__main__":
    main(*sys.argv[1:])
