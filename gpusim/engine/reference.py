"""The reference engine, on SimPy: readable, each rule in its own place, able to record everything.

SimPy gives time, events and processes. Its Resource and Container are not used: they are FIFO with head-of-line
blocking and would decide the dispatcher's policy for us. The block dispatcher is `gpusim.engine.pool`, the front end
and the hardware queues are below. Equal times are settled by what happened: ends before arrivals before starts, then
launch order.
"""

from __future__ import annotations

import heapq
import math
from collections import deque
from collections.abc import Generator
from dataclasses import dataclass, field
from typing import Any

import simpy
from simpy.events import NORMAL, URGENT, EventPriority

from gpusim.engine import budget
from gpusim.engine.base import Timeline
from gpusim.engine.budget import check_costs
from gpusim.engine.placement import SmPlacement
from gpusim.engine.pool import SmPool
from gpusim.errors import PlanError
from gpusim.hardware.model import HardwareModel
from gpusim.plan.tasks import MAX_TIME_NS, Plan, Task, check_plan

#: After all arrivals of the same instant.
LATE = EventPriority(NORMAL + 1)

COPY_DIRECTIONS = ("h2d", "d2h")


class ReferenceEngine:
    """Simulates a plan task by task; see `gpusim.engine.base.Engine`."""

    name = "reference"

    def run(self, plan: Plan, hardware: HardwareModel, record: bool = True) -> Timeline:
        """Simulate `plan`; `record` keeps residency and bandwidth over time. Raises `PlanError`."""
        check_plan(plan)
        check_costs(hardware)
        simulation = _Simulation(plan, hardware, record)
        simulation.env.run()
        missing = [index for index, end in enumerate(simulation.end) if end < 0]
        if missing:
            raise PlanError(f"task {missing[0]} never ran: the plan's queues wait for each other")
        longest_ns = round(max(simulation.end, default=0.0))
        if longest_ns > MAX_TIME_NS:
            raise budget.too_long(longest_ns)
        device = simulation.devices[min(simulation.devices)] if simulation.devices else None
        return Timeline(
            plan=plan,
            start_ns=tuple(round(t) for t in simulation.start),
            end_ns=tuple(round(t) for t in simulation.end),
            ready_ns=tuple(round(t) for t in simulation.ready),
            occupied=tuple(device.occupied) if device else (),
            bandwidth=tuple(device.bandwidth) if device else (),
        )


class _Simulation:
    """One run: tasks wait for predecessors, then pass the front end or their hardware queue, then share a device."""

    def __init__(self, plan: Plan, hardware: HardwareModel, record: bool) -> None:
        self.env = simpy.Environment()
        self.plan = plan
        self.hardware = hardware
        count = len(plan)
        self.start = [-1.0] * count
        self.end = [-1.0] * count
        self.ready = [-1.0] * count
        self.ended = [self.env.event() for _ in range(count)]
        self.finish_order: dict[int, int] = {}
        self.lost_ns = [0.0] * count
        self.branch_ns = hardware.graph.branch_ns if plan.branches else 0.0
        self.events_left = self.events = budget.EVENTS * budget.work_of(plan, hardware)
        self.devices: dict[int, _Device] = {}
        for task in plan.tasks:
            if task.device not in self.devices:
                self.devices[task.device] = _Device(self, record)
        before = _queue_predecessors(plan)
        self.successors = _successors(plan, before)
        if plan.mode == "graph":
            for index, task in enumerate(plan.tasks):
                self.env.process(self._graph_node(index, task, before[index]))
        else:
            _Host(self, before)

    def _graph_node(self, index: int, task: Task, previous: int | None) -> Generator[simpy.Event, Any, None]:
        """A node starts once its predecessors have ended and the front end gets to it."""
        costs = self.hardware.graph
        preds = {*task.deps, *([] if previous is None else [previous])}
        if preds:
            yield self.env.all_of([self.ended[p] for p in sorted(preds)])
            last = max(preds, key=self.finish_order.__getitem__)
            gap_ns = costs.chain_ns + costs.join_ns * (len(preds) - 1) + task.extra_ns
            gap_ns += self.branch_ns + self.lost_ns[last]
            siblings = self.successors[last]
            yield self.env.timeout(gap_ns + costs.fork_ns * max(0, min(siblings.index(index), len(siblings) - 2)))
        self.ready[index] = self.env.now
        self.devices[task.device].arrive(index, task)

    def count_event(self, index: int) -> None:
        """One step of the budget; raises `PlanError` where there are none left."""
        self.events_left -= 1
        if self.events_left < 0:
            raise budget.too_many_events(self.events, index, self.env.now)

    def finished(self, index: int, starts_beside: int) -> None:
        """A task has ended, and so many others have started on its GPU since it did."""
        self.end[index] = self.env.now
        self.lost_ns[index] = self.hardware.graph.lost_ns(starts_beside)
        self.finish_order[index] = len(self.finish_order)
        self.ended[index].succeed()


def _queue_predecessors(plan: Plan) -> list[int | None]:
    """For each task the one before it in its queue."""
    last: dict[tuple[int, int], int] = {}
    before: list[int | None] = []
    for index, task in enumerate(plan.tasks):
        before.append(last.get((task.device, task.queue)))
        last[(task.device, task.queue)] = index
    return before


def _successors(plan: Plan, before: list[int | None]) -> list[list[int]]:
    """For each task, those that wait for it, in launch order."""
    found: list[list[int]] = [[] for _ in range(len(plan))]
    for index, (task, previous) in enumerate(zip(plan.tasks, before, strict=True)):
        for p in {*task.deps, *([] if previous is None else [previous])}:
            found[p].append(index)
    return found


@dataclass
class _CopyEngine:
    """One direction of copies: one at a time, first come first served."""

    waiting: deque[int] = field(default_factory=deque)
    active: int | None = None
    remaining_bytes: float = 0.0
    rate: float = 0.0


class _Device:
    """A GPU: its front end, its SMs, its two copy engines. One timer runs to the next end of any work on it."""

    def __init__(self, simulation: _Simulation, record: bool) -> None:
        self.simulation = simulation
        self.env = simulation.env
        self.hardware = simulation.hardware
        by_block = simulation.hardware.contention.sharing_exponent > 0
        self.pool = SmPlacement(simulation.hardware) if by_block else SmPool(simulation.hardware)
        self.front_end_ns = self.hardware.graph.front_end_ns if simulation.plan.mode == "graph" else 0.0
        self.front_end_free = 0.0
        self.waiting: list[tuple[float, int, int]] = []
        self.starts = 0
        self.started: dict[int, int] = {}
        """How many starts there were when a task had started, its own among them."""
        self.copies = {direction: _CopyEngine() for direction in COPY_DIRECTIONS}
        self.record = record
        self.occupied: list[tuple[int, float]] = []
        self.bandwidth: list[tuple[int, float]] = []
        self._updated = 0.0
        self._timer = 0

    def arrive(self, index: int, task: Task) -> None:
        """A task is ready: to the front end, or to its copy engine."""
        self.simulation.count_event(index)
        if task.kind in COPY_DIRECTIONS:
            self._advance()
            self.copies[task.kind].waiting.append(index)
            self._update()
        else:
            heapq.heappush(self.waiting, (self.env.now, -task.priority, index))
            self._serve(max(self.env.now, self.front_end_free))

    def _serve(self, at: float) -> None:
        self._at(at, LATE, self._start_next)

    def _start_next(self) -> None:
        """Start the task that has been ready longest, if the front end and a grid slot are free."""
        if not self.waiting or self.env.now < self.front_end_free or self.pool.full:
            return
        index = heapq.heappop(self.waiting)[-1]
        self.simulation.count_event(index)
        self._advance()
        self.simulation.start[index] = self.env.now
        self.pool.start(index, self.simulation.plan.tasks[index])
        self.starts += 1
        self.started[index] = self.starts
        self.front_end_free = self.env.now + self.front_end_ns
        self._update()
        if self.waiting:
            self._serve(self.front_end_free)

    def _advance(self) -> None:
        """Bring all work up to now."""
        elapsed = self.env.now - self._updated
        self._updated = self.env.now
        if elapsed:
            self.pool.advance(elapsed)
            for copy in self.copies.values():
                copy.remaining_bytes -= elapsed * copy.rate

    def _update(self) -> None:
        """Share rates out again and set the timer to the next end."""
        self.pool.update()
        self._update_copies()
        if self.record:
            now = round(self.env.now)
            _note(self.occupied, now, self.pool.occupied)
            _note(self.bandwidth, now, self.pool.traffic_bytes_per_ns)
        ends = [end for end in (self.pool.next_end(), self._next_copy_end()) if end is not None]
        self._timer += 1
        if ends:
            delay, index = min(ends)
            timer = self._timer
            self._at(self.env.now + delay, URGENT, lambda: self._end(index, timer))

    def _end(self, index: int, timer: int) -> None:
        if timer != self._timer:
            return  # the rates have changed since
        self.simulation.count_event(index)
        self._advance()
        task = self.simulation.plan.tasks[index]
        all_of_it, starts_beside = True, 0
        if task.kind in COPY_DIRECTIONS:
            self.copies[task.kind].active = None
        else:
            all_of_it = self.pool.finish(index)
            starts_beside = self.starts - self.started[index]
        self._update()
        if not all_of_it:
            return
        self.simulation.finished(index, starts_beside)
        if self.waiting:
            self._serve(max(self.env.now, self.front_end_free))

    def _update_copies(self) -> None:
        """Give each free engine its next copy; two directions at once share the link."""
        rates = self.hardware.copies
        for copy in self.copies.values():
            if copy.active is None and copy.waiting:
                copy.active = copy.waiting.popleft()
                task = self.simulation.plan.tasks[copy.active]
                self.simulation.start[copy.active] = self.env.now
                full = rates.h2d_bytes_per_ns if task.kind == "h2d" else rates.d2h_bytes_per_ns
                copy.remaining_bytes = task.copy_bytes + rates.latency_ns * full
        both = all(copy.active is not None for copy in self.copies.values())
        total = rates.h2d_bytes_per_ns + rates.d2h_bytes_per_ns
        shared = min(1.0, rates.both_bytes_per_ns / total) if both else 1.0
        for direction, copy in self.copies.items():
            full = rates.h2d_bytes_per_ns if direction == "h2d" else rates.d2h_bytes_per_ns
            copy.rate = full * shared if copy.active is not None else 0.0

    def _next_copy_end(self) -> tuple[float, int] | None:
        ends = [
            (max(0.0, copy.remaining_bytes / copy.rate), copy.active)
            for copy in self.copies.values()
            if copy.active is not None
        ]
        return min(ends, default=None)

    def _at(self, time: float, priority: EventPriority, action: Any) -> None:
        """Call `action` at `time`; smaller priorities first."""
        event = simpy.Event(self.env)
        event._ok = True
        event._value = None
        event.callbacks.append(lambda _: action())
        delay = max(0.0, time - self.env.now)
        while self.env.now + delay < time:  # rounded down: the front end would find itself still busy, for good
            delay = math.nextafter(delay, math.inf)
        self.env.schedule(event, priority=priority, delay=delay)


class _Host:
    """Stream mode: one host thread launches in order into hardware queues; a queue's head blocks what is behind it."""

    def __init__(self, simulation: _Simulation, before: list[int | None]) -> None:
        self.simulation = simulation
        self.env = simulation.env
        self.before = before
        self.costs = simulation.hardware.stream
        tasks = simulation.plan.tasks
        # Streams are dealt over the queues of their device in turn, in order of first launch.
        dealt: dict[int, int] = {}
        lanes: dict[tuple[int, int], tuple[int, int]] = {}
        for device, stream in simulation.plan.queues():
            lanes[(device, stream)] = (device, dealt.get(device, 0) % self.costs.queues)
            dealt[device] = dealt.get(device, 0) + 1
        self.queue_of = [lanes[(task.device, task.queue)] for task in tasks]
        self.queues: dict[tuple[int, int], deque[tuple[int, float]]] = {queue: deque() for queue in self.queue_of}
        self.busy: set[tuple[int, int]] = set()
        self.env.process(self._launch())

    def _launch(self) -> Generator[simpy.Event, Any, None]:
        for index, task in enumerate(self.simulation.plan.tasks):
            host_ns = (task.host_ns or self.costs.launch_ns) + self.costs.event_host_ns * len(task.deps)
            yield self.env.timeout(host_ns)
            queue = self.queue_of[index]
            self.queues[queue].append((index, self.env.now))
            if queue not in self.busy:
                self.busy.add(queue)
                self.env.process(self._issue(queue))

    def _issue(self, queue: tuple[int, int]) -> Generator[simpy.Event, Any, None]:
        """Issue the queue's entries in order; each waits at the head until it may start."""
        waiting = self.queues[queue]
        ended, end = self.simulation.ended, self.simulation.end
        while waiting:
            index, launched = waiting.popleft()
            task = self.simulation.plan.tasks[index]
            costs = dict.fromkeys(task.deps, self.costs.event_ns)
            previous = self.before[index]
            if previous is not None:
                costs[previous] = self.costs.chain_ns
            if any(end[p] < 0 for p in costs):
                yield self.env.all_of([ended[p] for p in costs])
            start = max([launched + self.costs.start_ns, *(end[p] + cost for p, cost in costs.items())])
            yield self.env.timeout(max(0.0, start - self.env.now))
            self.simulation.ready[index] = self.env.now
            self.simulation.devices[task.device].arrive(index, task)
        self.busy.discard(queue)


def _note(series: list[tuple[int, float]], now: int, value: float) -> None:
    """Append a step of a step function, replacing one at the same time."""
    if series and series[-1][0] == now:
        series[-1] = (now, value)
    elif not series or series[-1][1] != value:
        series.append((now, value))
