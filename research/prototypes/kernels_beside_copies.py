"""Experiment: which kernels, waits or memory of a plan slow the copies of its graph.

    python research/prototypes/kernels_beside_copies.py OUT.json TRACE PLANS NAME

The forward pass of plan NAME with one thing changed at a time: each op is itself, a spin kernel, or another kernel;
copies are of the plan's memory or of buffers of their own, and ops wait for them or not. OUT has, per graph, its time
without the profiler, and from one profiled replay each copy (direction, stream, start and duration in ns, bytes), the
streams of kernels, and the number of memsets.
"""

from __future__ import annotations

import gzip
import json
import statistics
import sys
import time
from collections import Counter
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

#: Ways of an op to wait for copies: before its memory is freed, as planned; after every copy; only at the end; and
#: copies on the ops' own stream.
Waits = Literal["planned", "each", "end", "none"]
Kernel = Callable[["Parts"], object]


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

    def eager(self, state: InitialState) -> None:
        """Run all ops without copies, so that each op's inputs are there."""
        self.runner.drop_temporaries()
        state.restore()
        for instruction in self.program:
            if instruction.kind == "run":
                self.runner.run(instruction.op)
        torch.cuda.synchronize()

    def work(
        self,
        bench: Bench,
        *,
        real: Container[str] = (),
        kernel: Kernel = lambda parts: parts.bench.short(),
        own: bool = True,
        waits: Waits = "planned",
    ) -> None:
        """Record it: ops of the targets `real` as themselves, all others as `kernel`."""
        ends: dict[int, torch.cuda.Event] = {}
        for instruction in self.program:
            storage = instruction.storage
            if instruction.kind == "run":
                if self.runner.trace.ops[instruction.op].target in real:
                    self.runner.run(instruction.op)
                else:
                    kernel(self)
            elif instruction.kind == "out":
                self.last = self.own[storage] if own else self.runner.memory(storage)
                stream = bench.ops if waits == "none" else bench.outs
                if waits != "none":
                    stream.wait_stream(bench.ops)
                with torch.cuda.stream(stream):
                    self.host[storage].copy_(self.last, non_blocking=True)
                ends[storage] = stream.record_event()
                if waits == "each":
                    bench.ops.wait_event(ends[storage])
            elif waits == "planned" and instruction.kind in ("free", "barrier"):
                for each in [storage] if instruction.kind == "free" else list(ends):
                    if each in ends:
                        bench.ops.wait_event(ends.pop(each))
        if waits != "none":
            bench.ops.wait_stream(bench.outs)


def cases(parts: Parts) -> dict[str, dict[str, Any]]:
    """Return the graphs by name."""
    every = parts.targets
    kernels: dict[str, Kernel] = {
        "products": lambda p: torch.mm(p.bench.square, p.bench.square, out=p.bench.product),
        "elementwise": lambda p: p.bench.large.add_(1),
        "long spins": lambda p: p.bench.long(),
        "memsets of 96 bytes": lambda p: (p.bench.memset(96), p.bench.short()),
        "writes to the memory copied last": lambda p: p.last.add_(1) if p.last is not None else p.bench.short(),
    }
    out: dict[str, dict[str, Any]] = {
        "all ops, own memory": {"real": every},
        "all ops, the plan's memory": {"real": every, "own": False},
        "spins, own memory": {},
        "spins, the plan's memory": {"own": False},
        "all ops, own memory, waits after each copy": {"real": every, "waits": "each"},
        "all ops, own memory, waits at the end": {"real": every, "waits": "end"},
        "all ops, own memory, copies on their stream": {"real": every, "waits": "none"},
    }
    out |= {f"spins, {target} as they are": {"real": [target]} for target in every}
    out |= {f"all ops, {target} as spins": {"real": [t for t in every if t != target]} for target in every}
    out |= {f"{name} in place of ops": {"kernel": kernel} for name, kernel in kernels.items()}
    return out


def profile_of(replay: Callable[[], object]) -> dict[str, Any]:
    """Return copies, streams and memsets of the second of some profiled replays."""
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
    streams = Counter(e["args"].get("stream") for e in one if e["cat"] == "kernel")
    memsets = [[e["args"].get("stream"), _ns(e["ts"] - begin), _ns(e["dur"])] for e in one if e["cat"] == "gpu_memset"]
    copies = [_copy_of(e, begin) for e in one if e["cat"] == "gpu_memcpy"]
    return {"nodes": count, "kernel_streams": dict(streams), "memsets": memsets, "copies": copies}


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
        print(f"{name}: {case.get('replay_ns', 0) / 1e3:.0f} us, {shown} {case.get('error', '')}", flush=True)
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
        parts.last = None


if __name__ == "__main__":
    main()
