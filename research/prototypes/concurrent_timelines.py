"""Where a schedule on several streams takes longer than predicted: by prefixes, stand-in kernels and profiled kernels.

    python research/prototypes/concurrent_timelines.py OUT.json.gz SECONDS RESULTS.json:TRACE:STREAMS,STREAMS[:real] ...

Each step runs as its sequential graph and under one stored schedule for each number of streams, recorded as

- real: its own kernels; and a graph of each eighth more of the order, which shows where the time is lost;
- spin: a kernel of one thread in place of each, of the same duration. Only starts, gaps and edges are left;
- hold: kernels of as many blocks, threads and shared memory that only wait. Starts and places of blocks are left;
- serial: its own kernels, each waiting for the one before. Memory and edges of the schedule are left, without company.

With `:real` only the first is recorded. All are timed without a profiler first; then kernels are profiled. Each replay
has its kernels in order of time: start and duration in ns, the executor's stream, the name's number, and its blocks.
"""

from __future__ import annotations

import gzip
import json
import math
import sys
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from time import monotonic
from typing import Any

import torch

from gpusim.gpu.calibrate.block_kernels import MAX_SMEM, _compiled
from gpusim.gpu.device import provenance, require_gpu, set_precision
from gpusim.gpu.profiling import exported_events, profiled
from gpusim.gpu.replay.cudagraph import GraphRecorder
from gpusim.gpu.replay.execute import Runner, make_initial
from gpusim.gpu.replay.timing import pick_typical, time_interleaved
from gpusim.plan.graph import OpGraph
from gpusim.plan.schedule import Schedule
from gpusim.trace.store import read_trace
from gpusim.validation.again import trace_files
from gpusim.validation.chosen import hardware_of
from gpusim.validation.replayed import SUFFIX, read_replayed

RECORDINGS, ROUNDS, ROUND_MS = 3, 9, 4.0
PREFIXES, PREFIX_ROUNDS = 8, 5
REPLAYS = 9
#: Time of a kernel that does nothing, and the SM clock of an H200.
EMPTY_NS, CYCLES_PER_NS = 900.0, 1.98
#: Policies whose schedule is taken first.
POLICIES = ("recommended", "critical_path", "turbodl", "nimble", "random")

WAIT_SOURCE = """
extern "C" __global__ void wait(int cycles) {
    if (threadIdx.x == 0) {
        long long begin = clock64();
        while (clock64() - begin < cycles) {}
    }
    __syncthreads();
}
"""


class Ladder(GraphRecorder):
    """Recorder of a schedule's own kernels or of kernels that stand in for them."""

    def __init__(self, runner: Runner, graph: OpGraph) -> None:
        super().__init__(runner, graph.preds)
        self.graph = graph
        self.kernel = _compiled(WAIT_SOURCE, "wait")
        self.kernel(grid=(1, 1, 1), block=(32, 1, 1), args=[1000])
        torch.cuda.synchronize()
        self.kind, self.ops = "real", len(graph)

    def made(self, kind: str, schedule: Schedule, ops: int = 0) -> Any:
        """Record a schedule, its first `ops` ops or all of them, with kernels of this kind."""
        self.kind, self.ops = kind, ops or len(self.graph)
        return self.record(schedule, warm=True)

    def _run(self, order: Sequence[int], streams: Sequence[int], sync: Any, lanes: Sequence[Any]) -> None:
        first, events, last = lanes[0], {}, None
        real = self.kind in ("real", "serial")
        if real:
            with torch.cuda.stream(first):
                self.runner.reserve(sync.early)
        start = torch.cuda.Event()
        start.record(first)
        for stream in sync.roots:
            lanes[stream].wait_event(start)
        used = {0}
        for place, op in enumerate(order[: self.ops]):
            stream = lanes[streams[op]]
            if streams[op] not in used:
                used.add(streams[op])
                stream.wait_event(start)
            for before in sync.waits[place]:
                stream.wait_event(events[before])
            if self.kind == "serial" and last is not None:
                stream.wait_event(last)
            with torch.cuda.stream(stream):
                if real:
                    self.runner.release(sync.releases[place])
                    self.runner.run(op)
                else:
                    self._stand_in(op)
            if self.kind == "serial" or op in sync.records:
                last = torch.cuda.Event()
                last.record(stream)
                if op in sync.records:
                    events[op] = last
        for stream in sorted(used - {0}):
            end = torch.cuda.Event()
            end.record(lanes[stream])
            first.wait_event(end)

    def _stand_in(self, op: int) -> None:
        for kernel, task in zip(self.graph.trace.ops[op].kernels, self.graph.tasks[op], strict=True):
            blocks, threads, smem_bytes, waves = 1, 32, 0, 1
            if self.kind == "hold" and kernel.kind == "kernel":
                blocks, threads = math.prod(kernel.grid), math.prod(kernel.block)
                smem_bytes = min(kernel.smem_bytes, MAX_SMEM)
                waves = math.ceil(blocks / (self.graph.hardware.limits.sms * resident(threads, smem_bytes)))
            cycles = round(max(0.0, task.dur_ns - EMPTY_NS) / waves * CYCLES_PER_NS)
            self.kernel(grid=(blocks, 1, 1), block=(threads, 1, 1), args=[cycles], shared_mem=smem_bytes)


def resident(threads: int, smem_bytes: int) -> int:
    """Return the blocks of a waiting kernel on an SM: it has few registers."""
    return max(1, min(32, 2048 // (-(-threads // 32) * 32), 233472 // (smem_bytes + 1024)))


def schedules_of(
    results: Path, name: str, wanted: Sequence[int]
) -> tuple[OpGraph, dict[str, tuple[Schedule, int, str]]]:
    """Return a step and one of its replayed schedules for each number of streams, with its measured time in ns."""
    trace = read_trace(trace_files(results)[name])
    graph = OpGraph.build(trace, hardware_of(trace))
    found: dict[str, tuple[Schedule, int, str]] = {}
    for streams in wanted:
        each = [s for s in read_replayed(results.with_name(results.stem + SUFFIX)) if s.trace == name]
        fit = [s for s in each if s.schedule.stream_count == streams and not s.schedule.has_variants]
        best = min(fit, key=lambda s: POLICIES.index(s.policy) if s.policy in POLICIES else len(POLICIES))
        found[str(streams)] = (best.schedule.check(graph), best.measured_ns, best.policy)
    return graph, found


class Step:
    """A step on the GPU, with its recorder and schedules."""

    def __init__(self, results: str, name: str, streams: str, kinds: str = "real,spin,hold,serial") -> None:
        self.name, self.kinds = name, kinds.split(",")
        self.graph, stored = schedules_of(Path(results), name, [int(each) for each in streams.split(",")])
        self.schedules = {"1": Schedule.in_recorded_order(len(self.graph))} | {k: v[0] for k, v in stored.items()}
        self.stored = {k: {"measured_ns": v[1], "policy": v[2]} for k, v in stored.items()}
        trace = self.graph.trace
        set_precision(trace.model.dtype)
        runner = Runner(trace, require_gpu())
        self.state = make_initial(trace, require_gpu(), 0)
        runner.bind(self.state.tensors)
        self.ladder = Ladder(runner, self.graph)

    def document(self) -> dict[str, Any]:
        return {
            "trace": self.name,
            "stored": self.stored,
            "order": {k: list(v.order) for k, v in self.schedules.items()},
            "streams": {k: list(v.streams) for k, v in self.schedules.items()},
        }

    def recordings(self) -> Iterator[tuple[str, Callable[[], Any]]]:
        """Yield a name and a maker for each recording."""
        for kind in self.kinds:
            for streams, schedule in list(self.schedules.items())[kind == "serial" :]:
                yield f"{kind} {streams}", partial(self.ladder.made, kind, schedule)

    def timed(self) -> dict[str, Any]:
        """Return the times of all recordings without a profiler, and of prefixes."""
        set_precision(self.graph.trace.model.dtype)
        chosen, spread = {}, {}
        for name, make in self.recordings():
            self.state.restore()
            chosen[name], spread[name] = pick_typical(make, RECORDINGS if name.startswith("real") else 1)
        runs = {name: each.replay for name, each in chosen.items()}
        times = time_interleaved(runs, ROUNDS, ROUND_MS)
        return {name: {"ns": times[name].median_ns, "recordings_ns": spread[name]} for name in runs}

    def prefixes(self) -> dict[str, list[list[int]]]:
        """Return the times of graphs of the first ops of each schedule: ops and ns."""
        set_precision(self.graph.trace.model.dtype)
        found: dict[str, list[list[int]]] = {}
        for streams, schedule in self.schedules.items():
            counts = [len(self.graph) * part // PREFIXES for part in range(1, PREFIXES)]
            made = {count: self.ladder.made("real", schedule, count) for count in counts}
            times = time_interleaved({str(c): r.replay for c, r in made.items()}, PREFIX_ROUNDS, 2.0)
            found[streams] = [[count, times[str(count)].median_ns] for count in counts]
        return found

    def profiles(self) -> dict[str, Any]:
        """Return the kernels of each recording: rows of start, duration, stream and name, for each replay."""
        set_precision(self.graph.trace.model.dtype)
        found: dict[str, Any] = {}
        for name, make in self.recordings():
            if name.startswith(("spin", "hold")) and not name.endswith(" 1"):
                continue
            recorded = make()
            ns = time_interleaved({"": recorded.replay}, 3, 3.0)[""].median_ns
            found[name] = {"unprofiled_ns": ns} | timeline(recorded.replay)
        return found


def timeline(replay: Callable[[], object]) -> dict[str, Any]:
    """Return the events of some replays in a row."""
    for _ in range(3):
        replay()
    torch.cuda.synchronize()
    with profiled() as session:
        for _ in range(REPLAYS):
            replay()
            torch.cuda.synchronize()
    events = [e for e in exported_events(session) if e.get("cat") in ("kernel", "gpu_memset", "gpu_memcpy")]
    events.sort(key=lambda e: e["ts"])
    launches = {e["args"].get("correlation") for e in events}
    count = len(events) // REPLAYS
    by_launch: dict[int, list[dict[str, Any]]] = {}
    for place, event in enumerate(events):  # a launch of a graph has one number, else replays are told by their order
        launch = event["args"]["correlation"] if len(launches) == REPLAYS else place // count
        by_launch.setdefault(launch, []).append(event)
    names: dict[str, int] = {}
    replays = []
    for _, each in sorted(by_launch.items())[1:]:
        begin_us = each[0]["ts"]
        replays.append(
            [
                [
                    round((e["ts"] - begin_us) * 1e3),
                    round(e["dur"] * 1e3),
                    e["args"].get("stream"),
                    names.setdefault(e["name"], len(names)),
                    math.prod(e["args"].get("grid", [0])),
                    e["args"].get("graph node id", 0),
                ]
                for e in each
            ]
        )
    return {"names": list(names), "replays": replays, "args": events[0]["args"] if events else {}}


def main() -> None:
    """Write what was found after each step."""
    out, seconds, *wanted = sys.argv[1:]
    end = monotonic() + float(seconds)
    require_gpu()
    command = "python research/prototypes/concurrent_timelines.py OUT.json.gz " + " ".join(sys.argv[2:])
    result = provenance(command, partial(torch.cuda._sleep, 2_000_000)) | {"steps": []}
    steps: list[tuple[Step, dict[str, Any]]] = []
    with torch.no_grad():
        for each in wanted:
            begin = monotonic()
            try:
                step = Step(*each.split(":"))
                found = step.document()
                result["steps"].append(found)
                found["timed"] = step.timed()
                if len(step.kinds) > 1:
                    found["prefixes"] = step.prefixes()
                steps.append((step, found))
            except Exception as error:  # one step must not lose the others
                result.setdefault("failed", []).append([each, repr(error)])
            print(f"{each}: {monotonic() - begin:.1f} s", result.get("failed", [])[-1:], flush=True)
            Path(out).write_bytes(gzip.compress(json.dumps(result).encode(), 5))
            if monotonic() > end - float(seconds) / 2:
                break
        for step, found in steps:
            begin = monotonic()
            if begin > end:
                break
            try:
                found["profiles"] = step.profiles()
            except Exception as error:
                result.setdefault("failed", []).append([step.name, repr(error)])
            print(f"{step.name} profiled: {monotonic() - begin:.1f} s", result.get("failed", [])[-1:], flush=True)
            Path(out).write_bytes(gzip.compress(json.dumps(result).encode(), 5))


if __name__ == "__main__":
    main()
