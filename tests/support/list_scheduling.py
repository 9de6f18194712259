"""Readable list scheduler, the reference for `gpusim.engine.compiled.lists`."""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import dataclass

from gpusim.engine import budget
from gpusim.engine.pool import SmPool
from gpusim.plan.graph import OpGraph
from gpusim.plan.tasks import MAX_TIME_NS, start_interval_ns
from gpusim.policies.shared.base import spread_views
from gpusim.policies.shared.list_scheduling import MIN_SHARE, ListSchedule
from gpusim.rules.launch import gap_ns
from gpusim.rules.start_interference import lost_ns

Resources = tuple[float, float, float, float]
"""Shares of the GPU's threads, registers, shared memory and block slots."""


@dataclass(slots=True)
class _Lane:
    """A stream: its op, the op's next kernel, and its earliest start (-1: it runs, or there is none)."""

    op: int = -1
    kernel: int = 0
    start_at: float = -1.0
    started: int = 0
    """Number of kernels started by then, its own included."""
    ended_at: float = 0.0
    used: bool = False


def list_schedule(
    graph: OpGraph, streams: int, priority: Sequence[float], min_share: float = MIN_SHARE
) -> ListSchedule:
    """Schedule ready ops by descending `priority` (by op index) on `streams` streams."""
    return _Scheduler(graph, streams, priority, min_share).run()


class _Scheduler:
    """State of one run: ready ops, running kernels, time."""

    def __init__(self, graph: OpGraph, streams: int, priority: Sequence[float], min_share: float) -> None:
        budget.check_costs(graph.hardware)
        self.graph = graph
        self.costs = graph.hardware.graph
        self.branches = streams > 1
        self.priority = priority
        self.min_share = min_share
        self.preds, self.succs = graph.work_preds, graph.work_succs
        self.waiting = {op: len(before) for op, before in self.preds.items()}
        self.ready: dict[Resources, list[tuple[float, int]]] = {}
        """Ready ops by demand of their first kernels: of one demand only the most urgent matters for finding room."""
        self.ready_at: dict[int, float] = {}
        self.lanes = [_Lane() for _ in range(streams)]
        self.idle = set(range(streams))
        self.stream_of: dict[int, int] = {}
        self.order: list[int] = []
        self.place: dict[int, int] = {}
        self.pool = SmPool(graph.hardware)
        self.now = 0.0
        self.front_end_free = 0.0
        self.starts = 0
        for op, count in self.waiting.items():
            if not count:
                self._is_ready(op)

    def _is_ready(self, op: int) -> None:
        demand = self.graph.tasks[op][0].demand.resources
        heapq.heappush(self.ready.setdefault(demand, []), (-self.priority[op], op))

    def run(self) -> ListSchedule:
        """Alternate between filling idle streams and advancing to the next start or end."""
        events = events_left = budget.EVENTS * (sum(map(len, self.graph.tasks)) + 1)
        while len(self.order) < len(self.preds) or len(self.idle) < len(self.lanes):
            events_left -= 1
            if events_left < 0:
                raise budget.too_many_events(events, None, None)
            self._fill()
            start = self._next_start()
            end = self.pool.next_end()
            if end is not None and (start is None or self.now + end[0] <= start[0]):
                self._advance(end[0])
                self._end(end[1])
            else:
                assert start is not None, "ops left, but nothing runs"
                self._advance(start[0] - self.now)
                self._start(start[1])
        if self.now > MAX_TIME_NS:
            raise budget.too_long(self.now)
        return ListSchedule(spread_views(self.graph, self.order, self.stream_of), self.now)

    def _next_start(self) -> tuple[float, int] | None:
        """Return time and stream of the front end's next start: the stream that has been ready longest."""
        if self.pool.full:
            return None
        waiting = [
            (max(lane.start_at, self.front_end_free), lane.start_at, self.place[lane.op], number)
            for number, lane in enumerate(self.lanes)
            if lane.start_at >= 0
        ]
        if not waiting:
            return None
        first = min(waiting)
        return first[0], first[3]

    def _advance(self, elapsed_ns: float) -> None:
        self.pool.advance(elapsed_ns)
        self.now += elapsed_ns

    def _start(self, number: int) -> None:
        lane = self.lanes[number]
        task = self.graph.tasks[lane.op][lane.kernel]
        self.front_end_free = self.now + start_interval_ns(task, self.graph.hardware, in_graph=True)
        self.pool.start(lane.op, task)
        self.pool.update()
        lane.start_at = -1.0
        self.starts += 1
        lane.started = self.starts

    def _end(self, op: int) -> None:
        """Handle a kernel's end: its op continues with the next one, or its stream is free and its successors may be
        ready.
        """
        self.pool.finish(op)
        self.pool.update()
        number = self.stream_of[op]
        lane = self.lanes[number]
        lane.kernel += 1
        tasks = self.graph.tasks[op]
        seen_at = self.now + lost_ns(self.costs, self.starts - lane.started)
        if lane.kernel < len(tasks):
            lane.start_at = seen_at + gap_ns(self.costs, self.branches, 1, tasks[lane.kernel].extra_ns)
            return
        lane.ended_at = seen_at
        self.idle.add(number)
        for after in self.succs[op]:
            self.waiting[after] -= 1
            if not self.waiting[after]:
                self.ready_at[after] = seen_at
                self._is_ready(after)

    def _fill(self) -> None:
        """Give idle streams their next ops: the most urgent, or a less urgent one that still finds room."""
        if not self.idle:
            return
        first = [(ops[0], demand) for demand, ops in self.ready.items() if ops]
        heapq.heapify(first)
        left: list[float] | None = None
        while self.idle and first:
            (_, op), demand = heapq.heappop(first)
            if self.min_share > 0 and not self._urgent(op):
                left = left or self._left()
                if _share(left, demand) < self.min_share:
                    continue
            ops = self.ready[demand]
            heapq.heappop(ops)
            if ops:
                heapq.heappush(first, (ops[0], demand))
            self._launch(op)
            left = None

    def _urgent(self, op: int) -> bool:
        """Whether no running op is more urgent than `op`."""
        return all(
            self.priority[lane.op] <= self.priority[op]
            for number, lane in enumerate(self.lanes)
            if number not in self.idle
        )

    def _launch(self, op: int) -> None:
        """Put an op on an idle stream; its first kernel may start after the gap and the joins."""
        number = self._stream_for(op)
        lane = self.lanes[number]
        edges = sum(self.stream_of[p] != number for p in self.preds[op]) + lane.used
        start = self.now
        if edges:
            begin = max(lane.ended_at, self.ready_at.get(op, 0.0))
            extra_ns = self.graph.tasks[op][0].extra_ns
            start = max(self.now, begin + gap_ns(self.costs, self.branches, edges, extra_ns))
        self.idle.discard(number)
        lane.op, lane.kernel, lane.start_at, lane.used = op, 0, start, True
        self.place[op] = len(self.order)
        self.order.append(op)
        self.stream_of[op] = number

    def _stream_for(self, op: int) -> int:
        """Return an idle stream of one of its predecessors, if any: that saves an event."""
        near = [self.stream_of[p] for p in self.preds[op] if self.stream_of[p] in self.idle]
        return near[-1] if near else min(self.idle)

    def _left(self) -> list[float]:
        """Return what is left of each resource after running and starting kernels."""
        left = [1.0, 1.0, 1.0, 1.0]
        for kernel in self.pool.running:
            for resource, need in enumerate(kernel.demand):
                left[resource] -= need * kernel.share
        for lane in self.lanes:
            if lane.start_at >= 0:
                for resource, need in enumerate(self.graph.tasks[lane.op][lane.kernel].demand.resources):
                    left[resource] -= need
        return left


def _share(left: Sequence[float], demand: Resources) -> float:
    """Return the share of its blocks that a kernel of this demand would get of the remaining resources."""
    shares = [max(0.0, room) / need for room, need in zip(left, demand, strict=True) if need > 0.0]
    return min(1.0, *shares) if shares else 1.0
