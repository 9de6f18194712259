"""Experiment: do the edges of a graph decide on which streams the driver runs ops and copies, and how fast copies are.

    python research/prototypes/copy_edges.py OUT.json [TRACE PLANS NAME]...

Each plan is recorded with the edges of its nodes in several orders, and without those that follow from others
(`reduced`). A node's edges come from its predecessor in its own stream (`own`) and from other streams. OUT has, per
plan and order, the graph's time without the profiler, and from one profiled replay the copies (direction, stream, start
and duration in ns, bytes) and what each stream ran.
"""

from __future__ import annotations

import ctypes
import gzip
import json
import statistics
import sys
from functools import partial
from pathlib import Path
from typing import Any, Literal

import torch
from slow_copies import profile_of

import gpusim
from gpusim.gpu.calibrate.microbench import event_ns
from gpusim.gpu.device import provenance, require_gpu, set_precision
from gpusim.gpu.replay.memory_replay import ProgramRecorder, state_on_gpu, with_buffers
from gpusim.gpu.replay.memory_run import CudaLanes, MemoryRunner
from gpusim.memplan.evaluate import MemoryEvaluator
from gpusim.memplan.plan import read_memory_plan

#: Place of a node's own predecessor among its edges, for ops and for copies; as recorded, it is the first.
Order = Literal["first", "last"]
ORDERS: tuple[tuple[Order, Order], ...] = (("first", "first"), ("last", "first"), ("first", "last"), ("last", "last"))


#: Those to record; all if empty. The first of `ORDERS` is the replay's own.
WANTED: tuple[str, ...] = ("reduced", "own edge of ops first, of copies first")


class Edges:
    """Reads and sets what the next node of a recording stream depends on."""

    def __init__(self) -> None:
        self.driver = ctypes.CDLL("libcuda.so.1")

    def of(self, stream: torch.cuda.Stream) -> list[int]:
        status, number, graph = ctypes.c_int(), ctypes.c_ulonglong(), ctypes.c_void_p()
        nodes, edges, count = ctypes.POINTER(ctypes.c_void_p)(), ctypes.c_void_p(), ctypes.c_size_t()
        facts = [ctypes.byref(each) for each in (status, number, graph, nodes, edges, count)]
        if code := self.driver.cuStreamGetCaptureInfo_v3(ctypes.c_void_p(stream.cuda_stream), *facts):
            raise RuntimeError(f"error {code} of cuStreamGetCaptureInfo")
        return [nodes[n] or 0 for n in range(count.value)] if status.value == 1 else []

    def set(self, stream: torch.cuda.Stream, nodes: list[int]) -> None:
        handle, anew = ctypes.c_void_p(stream.cuda_stream), ctypes.c_uint(1)
        given = (ctypes.c_void_p * len(nodes))(*nodes)
        code = self.driver.cuStreamUpdateCaptureDependencies_v2(handle, given, None, ctypes.c_size_t(len(nodes)), anew)
        if code:
            raise RuntimeError(f"error {code} of cuStreamUpdateCaptureDependencies")

    def put_last(self, stream: torch.cuda.Stream, own: list[int]) -> None:
        """Put the stream's own predecessors behind the others."""
        nodes = self.of(stream)
        if nodes and own:
            self.set(stream, [each for each in nodes if each not in own] + own)


class ReducedLanes(CudaLanes):
    """Lanes without edges that follow from others."""

    def __init__(self, edges: Edges) -> None:
        super().__init__()
        self.edges = edges
        self.removed = 0
        self._began: dict[int, tuple[torch.cuda.Event, torch.cuda.Stream, int, list[int]]] = {}
        """Copy -> its stream, its number there, and what the ops' stream depended on when it was launched."""
        self._count: dict[int, int] = {}
        self._waited: dict[int, int] = {}
        """Stream of copies -> number of copies launched, and of the last one that ops have waited for."""
        self._nodes: dict[int, list[int]] = {}
        """Stream of copies -> nodes of its copies."""

    def wait(self, token: torch.cuda.Event) -> None:
        before = self.edges.of(self.ops)
        super().wait(token)
        if not before or id(token) not in self._began:
            return
        _, stream, number, ops = self._began[id(token)]
        copies = self._nodes[stream.stream_id]
        if self._waited.get(stream.stream_id, 0) >= number:
            self.edges.set(self.ops, before)
            self.removed += 1
            return
        self._waited[stream.stream_id] = number
        kept = [each for each in before if each not in ops and each not in copies[: number - 1]]
        self.removed += len(before) - len(kept)
        self.edges.set(self.ops, [*kept, copies[number - 1]])

    def finish(self) -> None:
        if not self.edges.of(self.ops):
            super().finish()
            return
        for stream in (self.outs, self.backs):
            last = [event for event, of, _, _ in self._began.values() if of is stream]
            if last:
                self.wait(last[-1])
        self._last.clear()

    def _copy(
        self, stream: torch.cuda.Stream, to: torch.Tensor, source: torch.Tensor, after: torch.cuda.Event | None
    ) -> torch.cuda.Event:
        recording = bool(self.edges.of(self.ops))
        ops, own = self.edges.of(self.ops), self.edges.of(stream) if recording else []
        key = stream.stream_id
        begin, end = torch.cuda.Event(), torch.cuda.Event()
        begin.record(self.ops)
        stream.wait_event(begin)
        if after is not None:
            stream.wait_event(after)
        if recording:
            wanted = list(ops)
            if self._count.get(key, 0) > self._waited.get(key, 0):
                wanted += [each for each in own if each not in wanted]
            if after is not None and id(after) in self._began:
                _, other, number, _ = self._began[id(after)]
                if self._waited.get(other.stream_id, 0) < number:
                    wanted.append(self._nodes[other.stream_id][number - 1])
            self.removed += len(set(self.edges.of(stream))) - len(set(wanted))
            self.edges.set(stream, list(dict.fromkeys(wanted)))
        with torch.cuda.stream(stream):
            to.copy_(source, non_blocking=True)
        end.record(stream)
        if recording:
            self._count[key] = self._count.get(key, 0) + 1
            self._nodes.setdefault(key, []).append(self.edges.of(stream)[0])
            self._began[id(end)] = (end, stream, self._count[key], ops)
        self.events += 2
        self._last[key] = end
        return end


class OrderedLanes(CudaLanes):
    """Lanes whose nodes have their edges in a given order."""

    def __init__(self, edges: Edges, ops: Order, copies: Order) -> None:
        super().__init__()
        self.edges, self.of_ops, self.of_copies = edges, ops, copies
        self._own: list[int] = []

    def wait(self, token: torch.cuda.Event) -> None:
        nodes = self.edges.of(self.ops)
        if len(nodes) == 1:
            self._own = nodes
        super().wait(token)
        if nodes and self.of_ops == "last":
            self.edges.put_last(self.ops, [each for each in self._own if each in self.edges.of(self.ops)])

    def _copy(
        self, stream: torch.cuda.Stream, to: torch.Tensor, source: torch.Tensor, after: torch.cuda.Event | None
    ) -> torch.cuda.Event:
        own = self.edges.of(stream)
        begin, end = torch.cuda.Event(), torch.cuda.Event()
        begin.record(self.ops)
        stream.wait_event(begin)
        if after is not None:
            stream.wait_event(after)
        if self.of_copies == "last":
            self.edges.put_last(stream, [each for each in own if each in self.edges.of(stream)])
        with torch.cuda.stream(stream):
            to.copy_(source, non_blocking=True)
        end.record(stream)
        self.events += 2
        self._last[stream.stream_id] = end
        return end


def of_plan(trace_path: str, plans_path: str, wanted: str) -> dict[str, Any]:
    """Return times and streams of a step's plan in all orders."""
    graph = gpusim.load(trace_path).graph
    device = require_gpu()
    set_precision(graph.trace.model.dtype)
    evaluator, runner = MemoryEvaluator(graph), MemoryRunner(graph.trace, device)
    state, initial_bytes = state_on_gpu(graph.trace, device, 0)
    runner.bind(state.tensors)
    entries = json.loads(gzip.decompress(Path(plans_path).read_bytes()))["plans"]
    entry = next(each["plan"] for each in entries if each["plan"]["policy"] == wanted)
    path = Path("/tmp/edges.memory.json")
    path.write_text(json.dumps(entry), encoding="utf-8")
    plan = read_memory_plan(path, graph.trace)
    recorder = ProgramRecorder(evaluator, runner, initial_bytes)
    outcome = with_buffers(recorder, evaluator, evaluator.evaluate(plan), print)
    result: dict[str, Any] = {}
    lanes: dict[str, CudaLanes] = {"reduced": ReducedLanes(Edges())}
    for ops, copies in ORDERS:
        lanes[f"own edge of ops {ops}, of copies {copies}"] = OrderedLanes(Edges(), ops, copies)
    for order in WANTED or lanes:
        name = f"{graph.trace.name} {wanted}, {order}"
        recorder.lanes = recorder.programs.lanes = lanes[order]
        try:
            recorded = recorder.record(outcome.program, warm=True)
            times = {"replay_ns": round(event_ns(recorded.replay, calls=1, rounds=7)), "predicted_ns": outcome.step_ns}
            case = times | {"peak_bytes": recorded.peak_bytes} | profile_of(recorded.replay)
            del recorded
        except Exception as error:
            print(f"{name}: {type(error).__name__}: {error}", flush=True)
            return result
        result[name] = case
        rates = {d: [c[4] / c[3] for c in case["copies"] if c[0] == d and c[4] > 3e6] for d in ("d2h", "h2d")}
        shown = ", ".join(f"{d} {statistics.median(r):.1f} GB/s" for d, r in rates.items() if r)
        kernels = sum(1 for each in case["streams"].values() if each[0])
        print(f"{name}: {case['replay_ns'] / 1e6:.3f} ms, {shown}, kernels on {kernels} streams", flush=True)
    return result


def main() -> None:
    """Write all cases."""
    out, *more = sys.argv[1:]
    require_gpu()
    command = "python research/prototypes/copy_edges.py " + " ".join(sys.argv[1:])
    result: dict[str, Any] = provenance(command, partial(torch.cuda._sleep, 2_000_000)) | {"plans": {}}
    for first in range(0, len(more), 3):
        result["plans"] |= of_plan(*more[first : first + 3])
        Path(out).write_text(json.dumps(result), encoding="utf-8")


if __name__ == "__main__":
    main()
