"""What do updates in parts, and additions in place of sorted ids, change in one process? Needs a GPU.

    STEP=validate/networks/recommendation.py:recommendation_large,train,48,tf32
    python research/prototypes/updates_and_bags.py OUT $STEP whole,sorted 132,sorted 132,added 33,added

A contender is the number of blocks at which a part of an update ends, or `whole`, and `sorted` or `added` for gradients
of embedding bags. Each is optimized as by `validate/compile.toml`; then all are timed in turns, beside torch.compile's
own graph. Writes OUT/times.json, and each contender's trace.
"""

from __future__ import annotations

import copy
import json
import sys
from pathlib import Path
from typing import Any

import torch

from gpusim.gpu.capture.models import load_step
from gpusim.gpu.device import provenance, require_gpu, set_precision
from gpusim.gpu.inductor import functional
from gpusim.gpu.isolate import stopwatch
from gpusim.gpu.optimize import choose, lists, measure
from gpusim.gpu.optimize.measure import Asked, said
from gpusim.gpu.optimize.peers import make, tensors_of
from gpusim.trace.store import write_trace

OWN, WHOLE = "torch_compile_own_graph", 1 << 60


def main(folder: str, text: str, *contenders: str) -> None:
    out, say = Path(folder), stopwatch()
    out.mkdir(parents=True, exist_ok=True)
    spec, mode, batch, dtype = text.split(",")
    device = require_gpu()
    set_precision(dtype)  # type: ignore[arg-type]
    step = load_step(spec, mode=mode, batch=int(batch), dtype=dtype, memory_format="contiguous", device=device, seed=0)  # type: ignore[arg-type]
    asked = Asked(spec, mode, int(batch), dtype, "contiguous", (), (), 8, 9.0, 0)  # type: ignore[arg-type]
    added, best = functional.with_embedding_bags, choose._best_recording
    calls: dict[str, Any] = {}
    rows: dict[str, dict[str, Any]] = {}
    for name in contenders:
        blocks, bags = name.split(",")
        lists.ENOUGH_BLOCKS = WHOLE if blocks == "whole" else int(blocks)  # type: ignore[misc]
        functional.with_embedding_bags = added if bags == "added" else dict
        tried: list[Any] = []

        def recorded(first: Any, recordings: Any, trace: Any, *rest: Any, tried: list[Any] = tried) -> Any:
            candidate = best(first, recordings, trace, *rest)
            tried.append((candidate.time_ns, trace, candidate))
            return candidate

        choose._best_recording = recorded
        say(f"== {name}")
        fast = measure.optimized(step, copy.deepcopy(step.module), asked, say)
        assert fast.gain is not None
        gain = fast.gain
        say(f"{said(gain)}; {gain.policy} on {gain.streams}, {gain.text}")
        calls[name] = fast
        rows[name] = {
            "policy": gain.policy,
            "streams": gain.streams,
            "frontend": gain.frontend,
            "predicted_call_ns": gain.predicted_call_ns,
            "graph_ns": gain.optimized_ns,
            "device_ns": gain.device_ns,
            "sequential_ns": gain.sequential_ns,
            "predicted_sequential_ns": gain.predicted_sequential_ns,
        }
        for _, trace, candidate in sorted(tried, key=lambda each: each[0])[:1]:
            write_trace(trace, out / f"{name.replace(',', '-')}.json.gz")
            schedule = candidate.schedule
            rows[name]["fastest_trial"] = {
                "policy": schedule.policy,
                "order": schedule.order,
                "streams": schedule.streams,
            }
        torch.cuda.synchronize()
        keep(out, text, rows, fast, step)
    calls[OWN] = make(OWN, step).call
    rows[OWN] = {}
    say("timing all in turns")
    for name, time in measure.times_in_turns(calls, measure.batches_of(step)).items():
        rows[name]["call_ns"] = time.median_ns
        say(f"{name}: {time.median_ns / 1e3:.1f} us a call")
    keep(out, text, rows, calls[contenders[0]], step)


def keep(out: Path, text: str, rows: dict[str, Any], fast: Any, step: Any) -> None:
    inputs = tensors_of(step)
    head = provenance("python research/prototypes/updates_and_bags.py", lambda: fast(*inputs))
    (out / "times.json").write_text(json.dumps({"step": text, "contenders": rows, **head}, indent=1), encoding="utf-8")


if __name__ == "__main__":
    main(*sys.argv[1:])
