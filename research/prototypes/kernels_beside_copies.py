"""Experiment: which kernels, waits or memory of a plan slow the copies of its graph.

    python research/prototypes/kernels_beside_copies.py OUT.json TRACE PLANS NAME

The forward pass of plan NAME with one thing changed at a time: each op is itself, a spin kernel, or another kernel;
copies are of the plan's memory or of buffers of their own, and ops wait for them or not. OUT has, per graph, its time
without the profiler, and from one profiled replay each copy (direction, stream, start and duration in ns, bytes), the
streams of kernels with their number and largest grid, the memsets, and the copies of the first replay after a pause.
"""

from __future__ import annotations

import ctypes
import gzip
import json
import math
import statistics
import sys
import time
from collections.abc import Callable, Container
from functools import partial
from pathlib import Path
from typing import Any, Literal

import torch
from slow_copies import KINDS, REPLAYS, Bench, _copy_of, _ns, record

import gpusim
from gpusim.gpu.calibrate.microbench import event_ns
from gpusim.gpu.device import provenance, require_gpu, set_precision
from gpusim.gpu.profiling import exported_events, profiled
from gpusim.gpu.replay.execute import InitialState
from gpusim.gpu.replay.memory_replay import ProgramRecorder, state_on_gpu, with_buffers
from gpusim.gpu.replay.memory_run import MemoryRunner
from gpusim.memplan.evaluate import MemoryEvaluator
from gpusim.memplan.plan import read_memory_plan
from gpusim.memplan.program import Program, needed
from gpusim.memplan.storages import Storages

#: Ways of an op to wait for copies: before its memory is freed, as planned; the same, but ops go on in the stream of
#: the copy, or the edges from op and copy are in the reverse order; for the first copy only; after every copy; only at
#: the end; and copies on the ops' own stream.
Waits = Literal["planned", "swapped", "reversed", "first", "each", "end", "none"]
#: Records a kernel in place of an op, given the place of the op in the pass, as a fraction.
Kernel = Callable[["Parts", float], object]
PAUSE_S = 0.5


class Parts:
    """The forward pass of a plan, recorded with some of its parts."""

    def __init__(self, bench: Bench, runner: MemoryRunner, storages: Storages, program: Program) -> None:
        self.bench, self.runner, self.program = bench, runner, program
        sizes = {i.storage: storages.bytes[i.storage] for i in program if i.kind == "out"}
        self.host = {s: torch.empty(n, dtype=torch.uint8, pin_memory=True) for s, n in sizes.items()}
        self.own = {s: torch.empty(n, dtype=torch.uint8, device="cuda") for s, n in sizes.items()}
        self.needs = {id(i): needed(storages, i) for i in program if i.kind in ("run", "again")}
        self.targets = list(dict.fromkeys(runner.trace.ops[i.op].target for i in program if i.kind == "run"))
        self.last: torch.Tensor | None = None
        self.recording = object()

    def eager(self, state: InitialState) -> None:
        """Run all ops without copies, so that each op's inputs are there."""
        self.last, self.recording = None, object()
        self.runner.drop_temporaries()
        state.restore()
        for instruction in self.program:
            if instruction.kind == "run":
                self.runner.run(instruction.op)
        torch.cuda.synchronize()

    def reverse(self, bench: Bench, stream: torch.cuda.Stream) -> None:
        """Reverse the order of the nodes that the next node of a recording stream depends on."""
        handle = ctypes.c_void_p(stream.cuda_stream)
        status, number, recording = ctypes.c_int(), ctypes.c_ulonglong(), ctypes.c_void_p()
        nodes, edges, count = ctypes.POINTER(ctypes.c_void_p)(), ctypes.c_void_p(), ctypes.c_size_t()
        facts = [ctypes.byref(each) for each in (status, number, recording, nodes, edges, count)]
        if code := bench.driver.cuStreamGetCaptureInfo_v3(handle, *facts):
            raise RuntimeError(f"error {code} of cuStreamGetCaptureInfo")
        turned = (ctypes.c_void_p * count.value)(*[nodes[n] for n in range(count.value)][::-1])
        anew = ctypes.c_uint(1)
        if code := bench.driver.cuStreamUpdateCaptureDependencies_v2(handle, turned, None, count, anew):
            raise RuntimeError(f"error {code} of cuStreamUpdateCaptureDependencies")

    def work(
        self,
        bench: Bench,
        *,
        real: Container[str] = (),
        kernel: Kernel = lambda parts, _: parts.bench.short(),
        own: bool = True,
        waits: Waits = "planned",
    ) -> None:
        """Record it: ops of the targets `real` as themselves, all others as `kernel`."""
        ends: dict[int, torch.cuda.Event] = {}
        ops, outs = bench.ops, bench.outs
        waited = False
        for number, instruction in enumerate(self.program):
            storage = instruction.storage
            if instruction.kind == "run":
                with torch.cuda.stream(ops):
                    if self.runner.trace.ops[instruction.op].target in real:
                        self.runner.run(instruction.op)
                    else:
                        kernel(self, number / len(self.program))
            elif instruction.kind == "out":
                self.last = self.own[storage] if own else self.runner.memory(storage)
                stream = ops if waits == "none" else outs
                if waits != "none":
                    stream.wait_stream(ops)
                with torch.cuda.stream(stream):
                    self.host[storage].copy_(self.last, non_blocking=True)
                ends[storage] = stream.record_event()
                if waits == "each":
                    ops.wait_event(ends[storage])
            elif waits in ("planned", "swapped", "reversed", "first") and instruction.kind in ("free", "barrier"):
                waiting = [ends.pop(s) for s in ([storage] if instruction.kind == "free" else list(ends)) if s in ends]
                if waits == "swapped" and waiting:
                    outs.wait_stream(ops)
                    ops, outs = outs, ops
                elif waits in ("planned", "reversed") or not waited:
                    for each in waiting:
                        ops.wait_event(each)
                        if waits == "reversed":
                            self.reverse(bench, ops)
                waited = waited or bool(waiting)
        for stream in (outs, ops):
            if stream is not bench.ops and waits != "none":
                bench.ops.wait_stream(stream)


def cases(parts: Parts) -> dict[str, dict[str, Any]]:
    """Return the graphs by name."""
    every = parts.targets
    numbers = torch.ones(8 << 20, device="cuda")
    one = torch.ones(1, device="cuda")
    square = torch.randn(4096, 4096, device="cuda")
    product = torch.empty(4096, 4096, device="cuda")
    total = torch.empty((), device="cuda")

    def add(count: int) -> Kernel:
        return lambda *_: numbers[:count].add_(1)

    def once(first: float, last: float) -> Kernel:
        """One wide kernel between two places of the pass, and spins."""
        done: set[int] = set()

        def kernel(parts: Parts, place: float) -> None:
            if first <= place <= last and id(parts.recording) not in done:
                done.add(id(parts.recording))
                numbers.add_(1)
            parts.bench.short()

        return kernel

    kernels: dict[str, Kernel] = {
        "products of 1024": lambda p, _: torch.mm(p.bench.square, p.bench.square, out=p.bench.product),
        "products of 4096": lambda *_: torch.mm(square, square, out=product),
        **{f"sums of {count >> 10} Ki elements": add(count) for count in (4 << 10, 64 << 10, 128 << 10, 256 << 10)},
        **{f"sums of {count >> 20} Mi elements": add(count) for count in (1 << 20, 2 << 20, 4 << 20, 8 << 20)},
        "totals of 8 Mi elements": lambda *_: torch.sum(numbers, dim=(0,), out=total),
        "totals of one element, 8 Mi times": lambda *_: torch.sum(one.expand(8 << 20), dim=(0,), out=total),
        "long spins": lambda p, _: p.bench.long(),
        "memsets of 96 bytes": lambda p, _: (p.bench.memset(96), p.bench.short()),
        "writes to the memory copied last": lambda p, _: p.last.add_(1) if p.last is not None else p.bench.short(),
        "spins, after one sum of 8 Mi elements": once(0.0, 1.0),
        "spins, one sum in the middle": once(0.5, 1.0),
        "spins, one sum near the end": once(0.9, 1.0),
    }
    out: dict[str, dict[str, Any]] = {
        "all ops, own memory": {"real": every},
        "all ops, the plan's memory": {"real": every, "own": False},
        "spins, own memory": {},
        "spins, the plan's memory": {"own": False},
        "all ops, waits after each copy": {"real": every, "waits": "each"},
        "all ops, waits at the end": {"real": every, "waits": "end"},
        "all ops, waits for the first copy and at the end": {"real": every, "waits": "first"},
        "all ops, copies on their stream": {"real": every, "waits": "none"},
        "all ops, go on in the copy's stream": {"real": every, "waits": "swapped"},
        "spins, go on in the copy's stream": {"waits": "swapped"},
        "all ops, edges reversed": {"real": every, "waits": "reversed"},
    }
    out |= {f"{name} in place of ops": {"kernel": kernel} for name, kernel in kernels.items()}
    out |= {f"spins, {target} as they are": {"real": [target]} for target in every}
    out |= {f"all ops, {target} as spins": {"real": [t for t in every if t != target]} for target in every}
    return out


def profile_of(replay: Callable[[], object]) -> dict[str, Any]:
    """Return copies, streams and memsets of the second of some profiled replays, and the copies of the first."""
    replay()
    torch.cuda.synchronize()
    time.sleep(PAUSE_S)
    with profiled() as session:
        for _ in range(REPLAYS):
            replay()
            torch.cuda.synchronize()
            time.sleep(0.002)
    gpu = sorted((e for e in exported_events(session) if e.get("cat") in KINDS), key=lambda e: e["ts"])
    count = len(gpu) // REPLAYS
    first, one = gpu[:count], gpu[count : 2 * count]
    begin = one[0]["ts"]
    streams: dict[str, list[int]] = {}
    for event in one:
        if event["cat"] == "kernel":
            at = _ns(event["ts"] - begin)
            grid = math.prod(event["args"].get("grid", [0]))
            number, most, start, _ = streams.get(str(event["args"].get("stream")), [0, 0, at, at])
            streams[str(event["args"].get("stream"))] = [number + 1, max(most, grid), start, at]
    memsets = [[e["args"].get("stream"), _ns(e["ts"] - begin), _ns(e["dur"])] for e in one if e["cat"] == "gpu_memset"]
    return {
        "nodes": count,
        "kernel_streams": streams,
        "memsets": memsets,
        "copies": [_copy_of(e, begin) for e in one if e["cat"] == "gpu_memcpy"],
        "first_copies": [_copy_of(e, first[0]["ts"]) for e in first if e["cat"] == "gpu_memcpy"],
    }


def main() -> None:
    """Write all cases."""
    out, trace_path, plans_path, wanted = sys.argv[1:]
    device = require_gpu()
    command = "python research/prototypes/kernels_beside_copies.py " + " ".join(sys.argv[1:])
    result: dict[str, Any] = provenance(command, partial(torch.cuda._sleep, 2_000_000)) | {"cases": {}}
    bench = Bench()

    def keep(name: str, make: Callable[[], Callable[[], object]]) -> None:
        try:
            replay = make()
            case = {"replay_ns": round(event_ns(replay, calls=1, rounds=5))} | profile_of(replay)
        except Exception as error:
            case = {"error": f"{type(error).__name__}: {error}"}
            torch.cuda.synchronize()
        result["cases"][name] = case
        rates = [c[4] / c[3] for c in case.get("copies", ()) if c[4] > 3e6]
        parts = [rates[n * len(rates) // 4 : (n + 1) * len(rates) // 4] for n in range(4)]
        shown = " ".join(f"{statistics.median(p):.1f}" for p in parts if p)
        firsts = [c[4] / c[3] for c in case.get("first_copies", ()) if c[4] > 3e6] or [0.0]
        streams, used = len(case.get("kernel_streams", ())), len({c[1] for c in case.get("copies", ())})
        rest = f"kernels on {streams}, copies on {used}, first {firsts[0]:.1f} {case.get('error', '')}"
        print(f"{name}: {case.get('replay_ns', 0) / 1e3:.0f} us, {shown}, {rest}", flush=True)
        Path(out).write_text(json.dumps(result), encoding="utf-8")

    graph = gpusim.load(trace_path).graph
    set_precision(graph.trace.model.dtype)
    evaluator, runner = MemoryEvaluator(graph), MemoryRunner(graph.trace, device)
    state, initial_bytes = state_on_gpu(graph.trace, device, 0)
    runner.bind(state.tensors)
    recorder = ProgramRecorder(evaluator, runner, initial_bytes)
    entries = json.loads(gzip.decompress(Path(plans_path).read_bytes()))["plans"]
    entry = next(each["plan"] for each in entries if each["plan"]["policy"] == wanted)
    path = Path("/tmp/beside.memory.json")
    path.write_text(json.dumps(entry), encoding="utf-8")
    outcome = with_buffers(recorder, evaluator, evaluator.evaluate(read_memory_plan(path, graph.trace)), print)
    last_out = max(n for n, i in enumerate(outcome.program) if i.kind == "out")
    first_back = next((n for n, i in enumerate(outcome.program) if i.kind == "back"), last_out + 1)
    forward = outcome.program[: max(first_back, last_out + 1)]
    if any(i.kind == "back" for i in forward):
        forward = outcome.program[:first_back]
    recorded = {"plan": outcome.program, "plan, forward pass": forward}
    for name, program in recorded.items():
        state.restore()
        keep(name, lambda program=program: recorder.record(program, warm=True).replay)  # type: ignore[misc]
        runner.drop_temporaries()
    bench.short()
    bench.long()
    torch.mm(bench.square, bench.square, out=bench.product)
    parts = Parts(bench, runner, evaluator.storages, forward)
    for name, options in cases(parts).items():
        parts.eager(state)
        keep(name, lambda options=options: record(bench, partial(parts.work, **options)).replay)  # type: ignore[misc]


if __name__ == "__main__":
    main()
