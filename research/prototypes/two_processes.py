"""What a second process on the GPU costs a replayed step, by the work of that process.

    python research/prototypes/two_processes.py OUT.json TRACE...

The step's sequential graph and that of `critical_path` are timed in turns, alone and beside another process: one that
holds memory and runs nothing, one that runs kernels of one block, and one that replays the same sequential graph. Alone
is timed before and after each. The GPU shares its time between processes; MPS is not used.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from threading import Thread
from typing import Any

import msgspec
import torch

from gpusim.defaults import DEFAULT_SEED
from gpusim.gpu.device import provenance, require_gpu, set_precision
from gpusim.gpu.replay.cudagraph import GraphRecorder, RecordedGraph
from gpusim.gpu.replay.execute import Runner, make_initial
from gpusim.gpu.replay.timing import time_interleaved
from gpusim.plan.graph import OpGraph
from gpusim.plan.schedule import Schedule
from gpusim.policies.registry import policy_by_name
from gpusim.trace.store import read_trace
from gpusim.units import MIB
from gpusim.validation.chosen import hardware_of

STREAMS = 8
#: Work of the other process, in the order of measurement; "" is none.
BESIDE = ("", "", "idle", "", "one block", "same step", "")
READY = "ready"
HELD_BYTES = 1024 * MIB
SPIN_CYCLES, SPINS = 40_000, 200


def recorder_of(path: Path) -> tuple[OpGraph, GraphRecorder]:
    """Rebuild a step on the GPU."""
    trace = read_trace(path)
    set_precision(trace.model.dtype)
    graph = OpGraph.build(trace, hardware_of(trace))
    runner = Runner(trace, require_gpu())
    runner.bind(make_initial(trace, torch.device("cuda"), DEFAULT_SEED).tensors)
    return graph, GraphRecorder(runner, graph.preds)


def sequential(graph: OpGraph, recorder: GraphRecorder) -> RecordedGraph:
    return recorder.record(Schedule.in_recorded_order(len(graph)), warm=True)


def occupy(work: str, path: Path) -> None:
    """Do the other process's work until the input ends."""
    held = torch.zeros(HELD_BYTES // 4, device=require_gpu())

    def spin() -> None:
        for _ in range(SPINS):
            torch.cuda._sleep(SPIN_CYCLES)

    run = spin
    if work == "same step":
        run = sequential(*recorder_of(path)).replay
        run()
    torch.cuda.synchronize()
    print(READY, flush=True)
    waiting = Thread(target=sys.stdin.read, daemon=True)
    waiting.start()
    while waiting.is_alive():
        if work == "idle":
            waiting.join()
        else:
            run()
            torch.cuda.synchronize()
    del held


@contextmanager
def another(work: str, path: Path) -> Iterator[None]:
    """Have another process do `work` within the context."""
    if not work:
        yield
        return
    words = [sys.executable, __file__, "--beside", work, "-", str(path)]
    with subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        if process.stdout.readline().strip() != READY:
            raise SystemExit(f"the process beside, '{work}', ended")
        yield
        assert process.stdin is not None
        process.stdin.close()


def main() -> None:
    """Write the times of each step by the work beside it, after each."""
    arguments = argparse.ArgumentParser()
    arguments.add_argument("out", type=Path)
    arguments.add_argument("traces", type=Path, nargs="+")
    arguments.add_argument("--beside", default="", help=argparse.SUPPRESS)
    given = arguments.parse_args()
    if given.beside:
        return occupy(given.beside, given.traces[0])
    require_gpu()
    command = "python research/prototypes/two_processes.py OUT.json TRACE..."
    result: dict[str, Any] = provenance(command, partial(torch.cuda._sleep, 2_000_000)) | {"streams": STREAMS}
    result["steps"] = {}
    for path in given.traces:
        graph, recorder = recorder_of(path)
        concurrent = policy_by_name("critical_path")(graph, STREAMS)
        graphs = {"sequential": sequential(graph, recorder), "critical_path": recorder.record(concurrent, warm=True)}
        rows = result["steps"].setdefault(graph.trace.name, [])
        for work in BESIDE:
            with another(work, path):
                times = time_interleaved({name: each.replay for name, each in graphs.items()}, launches=lambda: None)
            rows.append({"beside": work, **{name: msgspec.to_builtins(each) for name, each in times.items()}})
            print(graph.trace.name, work or "alone", {name: each.median_ns for name, each in times.items()}, flush=True)
            given.out.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    return None


if __name__ == "__main__":
    main()
