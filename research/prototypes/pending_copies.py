"""Experiment: which part of a plan slows its copies, pending copies, waits, kernels or buffers.

    python research/prototypes/pending_copies.py OUT.json TRACE PLANS NAME

Synthetic graphs have branches of pending copies; `skeleton` graphs have the waits and copies of plan NAME, with a spin
kernel for each op and buffers of their own, whole or in part; `plan` is the plan itself: whole, its forward pass alone,
launched without a graph, and its host buffers copied in a row.
"""

from __future__ import annotations

import gzip
import json
import statistics
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from slow_copies import COPIES, KINDS, REPLAYS, SIZE, Bench, _copy_of, _ns, record

import gpusim
from gpusim.gpu.calibrate.copies import Direction
from gpusim.gpu.calibrate.microbench import event_ns
from gpusim.gpu.device import provenance, require_gpu, set_precision
from gpusim.gpu.profiling import exported_events, profiled
from gpusim.gpu.replay.memory_replay import ProgramRecorder, state_on_gpu, with_buffers
from gpusim.gpu.replay.memory_run import MemoryRunner
from gpusim.memplan.evaluate import MemoryEvaluator
from gpusim.memplan.plan import read_memory_plan
from gpusim.memplan.program import Program, needed
from gpusim.units import MIB

Work = Callable[[Bench], None]
OTHER: dict[Direction, Direction] = {"d2h": "h2d", "h2d": "d2h"}


def pending(direction: Direction, other: Direction, branches: int, size: int = SIZE) -> Work:
    """Copies in a row, and branches with a copy each that waits for all of them."""

    def work(bench: Bench) -> None:
        bench.row(direction)
        bench.join(bench.backs if direction == "h2d" else bench.outs)
        used = bench.branches[:branches]
        bench.fork(*used)
        for stream, copy in zip(used, bench.copies(size, branches, other), strict=True):
            with torch.cuda.stream(stream):
                copy()
        bench.join(*used)

    return work


def two_rows(first: Direction) -> Work:
    """Copies in a row, then as many in the other direction."""

    def work(bench: Bench) -> None:
        for direction in (first, OTHER[first]):
            bench.row(direction)
            bench.join(bench.backs if direction == "h2d" else bench.outs)

    return work


def both_turns(count: int, size: int = SIZE, directions: tuple[Direction, ...] = ("d2h", "h2d")) -> Work:
    """Turns of copies and kernels out, then back; the next kernel runs beside each copy."""

    def work(bench: Bench) -> None:
        for direction in directions:
            stream = bench.backs if direction == "h2d" else bench.outs
            for copy in bench.copies(size, count, direction):
                bench.short()
                stream.wait_stream(bench.ops)
                with torch.cuda.stream(stream):
                    copy()
                bench.short()
                bench.ops.wait_stream(stream)

    return work


class Skeleton:
    """Waits and copies of a program, with spin kernels for its ops."""

    def __init__(self, program: Program, sizes: dict[int, int]) -> None:
        self.program = program
        self.host = {s: torch.empty(n, dtype=torch.uint8, pin_memory=True) for s, n in sizes.items()}
        self.device = {s: torch.empty(n, dtype=torch.uint8, device="cuda") for s, n in sizes.items()}

    def work(self, bench: Bench, kinds: tuple[str, ...] = ("out", "back"), kernels: bool = True) -> None:
        """Record it; only the copies of these kinds."""
        ends: dict[tuple[str, int], torch.cuda.Event] = {}
        last: dict[str, torch.cuda.Event] = {}
        streams = {"out": bench.outs, "back": bench.backs}

        def wait(*keys: tuple[str, int]) -> None:
            for key in keys:
                if key in ends:
                    bench.ops.wait_event(ends.pop(key))

        for instruction in self.program:
            s, kind = instruction.storage, instruction.kind
            if kind in ("run", "again"):
                wait(*[key for key in ends if key[0] == "back" and key[1] in self.needs[id(instruction)]])
                if kernels:
                    bench.short()
            elif kind == "free":
                wait(("out", s))
            elif kind in ("out", "back"):
                if kind not in kinds:
                    continue
                stream = streams[kind]
                stream.wait_stream(bench.ops)
                with torch.cuda.stream(stream):
                    pair = (self.host[s], self.device[s])
                    to, source = pair if kind == "out" else pair[::-1]
                    to.copy_(source, non_blocking=True)
                ends[kind, s] = last[kind] = stream.record_event()
            else:
                for event in last.values():
                    bench.ops.wait_event(event)
                last.clear()
        for event in last.values():
            bench.ops.wait_event(event)

    needs: dict[int, frozenset[int]]


def profile_of(replay: Callable[[], object]) -> dict[str, Any]:
    """Return copies, and the share of each copy's time in which kernels run, of the second of some replays."""
    replay()
    torch.cuda.synchronize()
    with profiled() as session:
        for _ in range(REPLAYS):
            replay()
            torch.cuda.synchronize()
            time.sleep(0.002)
    gpu = sorted((e for e in exported_events(session) if e.get("cat") in KINDS), key=lambda e: e["ts"])
    count = len(gpu) // REPLAYS
    one = gpu[count : 2 * count]
    begin = one[0]["ts"]
    kernels = [(e["ts"], e["ts"] + e["dur"]) for e in one if e["cat"] != "gpu_memcpy"]
    copies = []
    for event in (e for e in one if e["cat"] == "gpu_memcpy"):
        first, last = event["ts"], event["ts"] + event["dur"]
        busy = sum(max(0.0, min(last, b) - max(first, a)) for a, b in kernels)
        copies.append([*_copy_of(event, begin), round(busy / event["dur"], 3)])
    span = one[-1]["ts"] + one[-1]["dur"] - begin
    return {"nodes": count, "span_ns": _ns(span), "copies": copies}


def said(name: str, case: dict[str, Any]) -> None:
    """Print the rates of large copies by eighths, each direction."""
    text = ""
    for direction in ("d2h", "h2d"):
        rates = [c[4] / c[3] for c in case["copies"] if c[0] == direction and c[4] > 3 * MIB]
        parts = [rates[n * len(rates) // 6 : (n + 1) * len(rates) // 6] for n in range(6)] if rates else []
        text += f" {direction} " + " ".join(f"{statistics.median(p):.1f}" for p in parts if p)
    print(f"{name}: {case.get('replay_ns', case['span_ns']) / 1e3:.0f} us{text}", flush=True)


def synthetic() -> dict[str, Work]:
    """Return the graphs without a plan."""
    cases: dict[str, Work] = {}
    for d in ("d2h", "h2d"):
        cases |= {f"{d}, {n} {o} pending": pending(d, o, n) for o in ("h2d", "d2h") for n in (1, 8, 40)}
        cases[f"{d} row, then the other"] = two_rows(d)
    for count in (8, 40):
        cases[f"turns, {count} each way"] = both_turns(count)
        cases[f"turns back, then out, {count} each way"] = both_turns(count, directions=("h2d", "d2h"))

    def again(bench: Bench) -> None:
        for _ in range(4):
            both_turns(COPIES)(bench)

    cases["turns, 40 each way, 4 times"] = again
    return cases


def main() -> None:
    """Write all cases."""
    out, trace_path, plans_path, wanted = sys.argv[1:]
    require_gpu()
    command = "python research/prototypes/pending_copies.py " + " ".join(sys.argv[1:])
    result: dict[str, Any] = provenance(command, partial(torch.cuda._sleep, 2_000_000)) | {"cases": {}}
    cases = result["cases"]
    bench = Bench()
    bench.pairs(SIZE, COPIES)

    def keep(name: str, replay: Callable[[], object], graph: bool = True) -> None:
        case = profile_of(replay)
        if graph:
            case["replay_ns"] = round(event_ns(replay, calls=1, rounds=7))
        cases[name] = case
        said(name, case)
        Path(out).write_text(json.dumps(result), encoding="utf-8")

    def safely(name: str, make: Callable[[], Callable[[], object]], graph: bool = True) -> None:
        try:
            keep(name, make(), graph)
        except Exception as error:
            print(f"{name}: {type(error).__name__}: {error}", flush=True)
            torch.cuda.synchronize()

    graph = gpusim.load(trace_path).graph
    device = require_gpu()
    set_precision(graph.trace.model.dtype)
    evaluator, runner = MemoryEvaluator(graph), MemoryRunner(graph.trace, device)
    state, initial_bytes = state_on_gpu(graph.trace, device, 0)
    runner.bind(state.tensors)
    recorder = ProgramRecorder(evaluator, runner, initial_bytes)
    entries = json.loads(gzip.decompress(Path(plans_path).read_bytes()))["plans"]
    entry = next(each["plan"] for each in entries if each["plan"]["policy"] == wanted)
    path = Path("/tmp/pending.memory.json")
    path.write_text(json.dumps(entry), encoding="utf-8")
    outcome = with_buffers(recorder, evaluator, evaluator.evaluate(read_memory_plan(path, graph.trace)), print)
    storages, program = evaluator.storages, outcome.program
    sizes = {i.storage: storages.bytes[i.storage] for i in program if i.kind == "out"}

    recorded = recorder.record(program, warm=True)
    keep("plan", recorded.replay)
    first_back = next(n for n, i in enumerate(program) if i.kind == "back")
    last_out = max(n for n, i in enumerate(program) if i.kind == "out")
    del recorded
    skeleton = Skeleton(program, sizes)
    skeleton.needs = {id(i): needed(storages, i) for i in program if i.kind in ("run", "again")}
    forward = Skeleton.__new__(Skeleton)
    forward.__dict__ |= skeleton.__dict__ | {"program": program[: max(first_back, last_out)]}
    parts: dict[str, Work] = {
        "skeleton": skeleton.work,
        "skeleton, out alone": partial(skeleton.work, kinds=("out",)),
        "skeleton, back alone": partial(skeleton.work, kinds=("back",)),
        "skeleton without kernels": partial(skeleton.work, kernels=False),
        "skeleton of the forward pass": forward.work,
    }
    for name, work in (parts | synthetic()).items():
        safely(name, lambda work=work: record(bench, work).replay)  # type: ignore[misc]

    def plan_buffers(direction: Direction) -> Work:
        """Copy the plan's own host buffers in a row."""

        def work(bench: Bench) -> None:
            stream = bench.backs if direction == "h2d" else bench.outs
            bench.fork(stream)
            with torch.cuda.stream(stream):
                for storage, size in sizes.items():
                    pair = (recorder.programs.buffers.of(storage, size), skeleton.device[storage])
                    to, source = pair if direction == "d2h" else pair[::-1]
                    to.copy_(source, non_blocking=True)
            bench.join(stream)

        return work

    for direction in ("d2h", "h2d"):
        safely(f"plan's buffers {direction} in a row", lambda d=direction: record(bench, plan_buffers(d)).replay)  # type: ignore[misc]
    state.restore()
    safely("plan, forward pass", lambda: recorder.record(program[: max(first_back, last_out + 1)], warm=True).replay)
    runner.drop_temporaries()
    state.restore()
    needs = [needed(storages, instruction) for instruction in program]

    def eager() -> None:
        with torch.cuda.stream(recorder.lanes.ops):
            recorder.programs.run(program, needs)
            runner.drop_temporaries()

    safely("plan without a graph", lambda: eager, graph=False)


if __name__ == "__main__":
    main()
