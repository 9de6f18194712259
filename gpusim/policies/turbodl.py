"""TurboDL: the critical path on its own stream, other paths overlap it as far as the GPU has room.

Source: Jin, Wu, Shi, He, Zhou, "TurboDL: Improving the CNN Training on GPU With Fine-Grained Multi-Streaming
Scheduling" (IEEE Transactions on Computers 70(4), 2021). Only the abstract was available: a critical-path
based, asynchronous parallelisation for training that considers the architecture of the whole network together with GPU
resources, uses concurrent kernels and Hyper-Q, and overlaps synchronisation with computation in other streams.
The rules, as derived from it:

1. The priority of an op is its bottom level: the longest chain of measured times from its start to the end of the step.
2. The longest chain, the critical path, has the first stream to itself, and its ops never wait for room.
3. The other ops are cut into paths the same way, longest first. A path stays on one side stream, so it needs no
   internal synchronisation. There are no more streams than Hyper-Q has hardware queues in use: beyond that, streams
   would share a queue and wait for each other needlessly.
4. Ops of the side streams are launched by descending bottom level as soon as they are ready and the running ops leave
   enough threads, registers, shared memory and block slots.

Filled in, since the body of the paper was not available: rule 4 runs on a planned clock, on which each op takes its
time alone. It decides the launch order and the side stream of each path (the free one with the least assigned work
when the path's first op starts). Ops that fit overtake an op that does not, except while the critical path waits: then
only the most urgent op may start. An op that needs more room than other ops can ever leave starts once nothing else
runs. The paper's asynchrony, waits by events in place of waits by the host, holds for every schedule here.
"""

from __future__ import annotations

import heapq

from gpusim.plan.graph import OpGraph
from gpusim.plan.schedule import Schedule
from gpusim.policies.shared.base import spread_views

#: Smaller room is rounding error.
EPSILON = 1e-9


def turbodl(graph: OpGraph, streams: int) -> Schedule:
    """Return the critical path on stream 0 and other paths on side streams, in the order of a planned clock."""
    return _Clock(graph, min(streams, graph.hardware.stream.queues)).run()


def paths(graph: OpGraph) -> list[list[int]]:
    """Cut the ops with kernels into paths, each from the remaining op with the greatest bottom level.

    The first path is the critical path. Paths are sorted by descending bottom level of their first ops.
    """
    preds, succs = graph.work_preds, graph.work_succs
    bottom = graph.bottom_ns
    left = set(preds)
    cut_paths = []
    for head in sorted(preds, key=lambda op: (-bottom[op], op)):
        path: list[int] = []
        op: int | None = head if head in left else None
        while op is not None:
            path.append(op)
            left.discard(op)
            after = [s for s in succs[op] if s in left]
            op = min(after, key=lambda s: (-bottom[s], s), default=None)
        if path:
            cut_paths.append(path)
    return cut_paths


class _Clock:
    """Planned run of the ops, each with its time alone."""

    def __init__(self, graph: OpGraph, streams: int) -> None:
        self.graph = graph
        self.preds, self.succs = graph.work_preds, graph.work_succs
        op_paths = paths(graph)
        self.path_of = {op: number for number, path in enumerate(op_paths) for op in path}
        self.side = range(1, streams) if streams > 1 else range(1)
        self.stream_of_path: dict[int, int] = {0: 0}
        self.given_ns = [0.0] * streams
        self.path_ns = [sum(graph.solo_ns[op] for op in path) for path in op_paths]
        self.idle = set(range(streams))
        self.room = [1.0, 1.0, 1.0, 1.0]
        self.demand = {op: self._demand(op) for op in self.preds}
        self.ready: dict[tuple[int | None, bool, tuple[float, ...]], list[tuple[float, int]]] = {}
        """Ready ops by the stream of their paths, if assigned, and by demand, most urgent first."""
        self.urgent: list[tuple[float, int]] = []
        self.urgent_new: list[tuple[float, int]] = []
        """Heaps with the most urgent op of each list of `ready`, of paths with and without a stream; they may also hold
        ops that are no longer the first of their lists."""
        self.listed: set[int] = set()
        """Ops in `urgent` and `urgent_new`."""
        self.running: list[tuple[float, int]] = []
        self.order: list[int] = []

    def run(self) -> Schedule:
        """Start all ops that may start, advance to the next end, and repeat until all ops have run."""
        waiting = {op: len(before) for op, before in self.preds.items()}
        for op, count in waiting.items():
            if not count:
                self._is_ready(op)
        now = 0.0
        while self.ready or self.running:
            self._start(now)
            now = self.running[0][0]
            while self.running and self.running[0][0] <= now:
                op = heapq.heappop(self.running)[1]
                self.idle.add(self.stream_of_path[self.path_of[op]])
                self._occupy(op, -1.0)
                for after in self.succs[op]:
                    waiting[after] -= 1
                    if not waiting[after]:
                        self._is_ready(after)
        streams = {op: self.stream_of_path[path] for op, path in self.path_of.items()}
        return spread_views(self.graph, self.order, streams)

    def _alike(self, op: int) -> tuple[int | None, bool, tuple[float, ...]]:
        """Return the key of ops that start under equal conditions: either the most urgent of them can, or none."""
        path = self.path_of[op]
        return self.stream_of_path.get(path), path == 0, self.demand[op]

    def _is_ready(self, op: int) -> None:
        ops = self.ready.setdefault(self._alike(op), [])
        heapq.heappush(ops, (-self.graph.bottom_ns[op], op))
        if ops[0][1] == op:
            self._list(ops[0])

    def _list(self, first: tuple[float, int]) -> None:
        if first[1] not in self.listed:
            self.listed.add(first[1])
            heapq.heappush(self.urgent if self.path_of[first[1]] in self.stream_of_path else self.urgent_new, first)

    def _start(self, now: float) -> None:
        """Start ready ops by priority where stream and room allow."""
        passed = []
        while self.idle:
            heaps = [self.urgent, self.urgent_new] if self._free() else [self.urgent]
            heaps = [heap for heap in heaps if heap]
            if not heaps:
                break
            first = heapq.heappop(min(heaps, key=lambda heap: heap[0]))
            op = first[1]
            self.listed.discard(op)
            alike = self._alike(op)
            ops = self.ready.get(alike)
            if not ops or ops[0] != first:
                continue  # another op is the first of its list now, and is in a heap itself
            stream = self._stream(self.path_of[op])
            if stream in self.idle and (self.path_of[op] == 0 or self._fits(op)):
                heapq.heappop(ops)
                if ops:
                    self._list(ops[0])
                else:
                    del self.ready[alike]
                self._launch(op, stream, now)
                continue
            passed.append(first)
            if 0 in self.idle and stream in self.idle:
                break  # the critical path waits for this op: less urgent ones must not take its room
        for first in passed:
            self._list(first)

    def _stream(self, path: int) -> int:
        """Return the stream of a path, or the idle side stream that it would get; -1 if none is idle."""
        if path in self.stream_of_path:
            return self.stream_of_path[path]
        return min(self._free(), key=lambda stream: (self.given_ns[stream], stream), default=-1)

    def _free(self) -> list[int]:
        """Return the idle side streams."""
        return [stream for stream in self.side if stream in self.idle]

    def _launch(self, op: int, stream: int, now: float) -> None:
        path = self.path_of[op]
        if path not in self.stream_of_path:
            self.stream_of_path[path] = stream
            self.given_ns[stream] += self.path_ns[path]
        self.idle.discard(stream)
        self.order.append(op)
        self._occupy(op, 1.0)
        heapq.heappush(self.running, (now + self.graph.solo_ns[op], op))

    def _demand(self, op: int) -> tuple[float, ...]:
        """Return the demand of an op for each resource, the maximum over its kernels."""
        return tuple(max(need) for need in zip(*(task.demand.resources for task in self.graph.tasks[op]), strict=True))

    def _occupy(self, op: int, sign: float) -> None:
        self.room = [left - sign * need for left, need in zip(self.room, self.demand[op], strict=True)]

    def _fits(self, op: int) -> bool:
        return all(need <= left + EPSILON for left, need in zip(self.room, self.demand[op], strict=True))
