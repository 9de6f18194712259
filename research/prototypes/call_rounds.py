"""Why does a call take longer at times? Times of many rounds, with what the host did meanwhile. Needs a GPU.

    python research/prototypes/call_rounds.py OUT.json FILE.py:FUNCTION,MODE,BATCH,DTYPE

A step, such as `validate/networks/recommendation.py:recommendation_small,train,48,tf32`, is optimized as by
`validate/compile.toml`. Then come rounds of calls, of launches of its graph alone, and of calls whose graph does
nothing, in turns, once before torch.compile's graph of the step is made and once after it. Of each round: us a call,
the thread's CPU time a call, the core it ended on, switches to other threads, page faults, Python's garbage
collections by generation, and the share of the host's time that other machines took (`steal`). Writes after each part.
Run it in the repository's root.
"""

from __future__ import annotations

import gc
import json
import os
import resource
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from gpusim.gpu.capture.models import load_step
from gpusim.gpu.device import provenance, require_gpu, set_precision
from gpusim.gpu.launch_state import make_launches_slow
from gpusim.gpu.optimize import measure
from gpusim.gpu.optimize.measure import Asked
from gpusim.gpu.optimize.peers import make, tensors_of

ROUNDS, ROUND_S = 40, 0.15
BEGIN = time.perf_counter()


def say(text: object) -> None:
    print(f"[{time.perf_counter() - BEGIN:6.1f}]", text, flush=True)


def stolen() -> tuple[int, int]:
    """Return the ticks of all cores so far, and those of them that other machines took."""
    ticks = list(map(int, Path("/proc/stat").read_text(encoding="utf-8").split("\n")[0].split()[1:]))
    return sum(ticks), ticks[7]


def core() -> int:
    return int(Path("/proc/self/stat").read_text(encoding="utf-8").rpartition(")")[2].split()[36])


def collections() -> list[int]:
    """Return the number of garbage collections so far, by generation."""
    return [each["collections"] for each in gc.get_stats()]


def one_round(call: Callable[[], object]) -> dict[str, Any]:
    """Return what is measured of calls in a row."""
    torch.cuda.synchronize()
    before, ticks, cpu_ns = resource.getrusage(resource.RUSAGE_THREAD), stolen(), time.thread_time_ns()
    begin, count, collected = time.perf_counter_ns(), 0, collections()
    while time.perf_counter_ns() - begin < ROUND_S * 1e9:
        for _ in range(50):
            call()
        count += 50
    issued_ns = time.perf_counter_ns() - begin
    torch.cuda.synchronize()
    taken_ns, cpu_ns = time.perf_counter_ns() - begin, time.thread_time_ns() - cpu_ns
    after, ticks_after = resource.getrusage(resource.RUSAGE_THREAD), stolen()
    return {
        "us": round(taken_ns / count / 1e3, 1),
        "issued_us": round(issued_ns / count / 1e3, 1),
        "cpu_us": round(cpu_ns / count / 1e3, 1),
        "core": core(),
        "switches": after.ru_nivcsw - before.ru_nivcsw,
        "waits": after.ru_nvcsw - before.ru_nvcsw,
        "collections": [now - then for now, then in zip(collections(), collected, strict=True)],
        "faults": after.ru_minflt - before.ru_minflt,
        "steal": round((ticks_after[1] - ticks[1]) / max(1, ticks_after[0] - ticks[0]), 4),
    }


def rounds(fast: Any, inputs: tuple[Any, ...]) -> dict[str, list[dict[str, Any]]]:
    """Return rounds in turns: of calls, of the graph alone, and of calls without a graph."""
    (variant,) = fast._variants.values()
    copies = variant.ready.copies

    class Nothing:
        def replay(self) -> None:
            pass

    def without_graph() -> None:
        fast(*inputs)

    found: dict[str, list[dict[str, Any]]] = {"call": [], "graph": [], "call without a graph": []}
    for _ in range(ROUNDS):
        make_launches_slow()
        found["call"].append(one_round(lambda: fast(*inputs)))
        found["graph"].append(one_round(variant.ready.run))
        graph, copies._graph = copies._graph, Nothing()
        found["call without a graph"].append(one_round(without_graph))
        copies._graph = graph
    return found


def main(out: str, text: str) -> None:
    device = require_gpu()
    spec, mode, batch, dtype = text.split(",")
    set_precision(dtype)
    step = load_step(spec, mode=mode, batch=int(batch), dtype=dtype, memory_format="contiguous", device=device, seed=0)
    asked = Asked(spec, mode, int(batch), dtype, "contiguous", (), (), 8, 9.0, 0)
    fast = measure.optimized(step, step.module, asked, say)
    inputs = tensors_of(step)
    head = provenance("python research/prototypes/call_rounds.py", lambda: fast(*inputs))
    parts: dict[str, Any] = {"step": text, "cores": os.cpu_count(), "alone": rounds(fast, inputs)}
    Path(out).write_text(json.dumps(head | parts, indent=1) + "\n", encoding="utf-8")
    peer = make("torch_compile_own_graph", step)
    parts["beside torch.compile's graph"] = rounds(fast, inputs)
    Path(out).write_text(json.dumps(head | parts, indent=1) + "\n", encoding="utf-8")
    say(f"{type(peer).__name__} lives until here")


if __name__ == "__main__":
    main(*sys.argv[1:])
