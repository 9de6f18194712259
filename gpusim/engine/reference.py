"""The reference engine, on SimPy: readable, with each rule in one place, and able to record everything.

SimPy provides time, events and processes. Its Resource and Container are not used: they are FIFO with head-of-line
blocking and would fix the dispatcher's policy. The block dispatcher is `gpusim.engine.placement` or
`gpusim.engine.pool`; the front end and the hardware queues are below. At equal times, ends come before arrivals and
arrivals before starts, then launch order decides.
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
from gpusim.engine.causes import COPY_ENGINE, FRONT_END, GRID_SLOT, HELD, LOSSES, NOTHING, Causes, Loss, closed
from gpusim.engine.placement import SmPlacement
from gpusim.engine.pool import SmPool
from gpusim.errors import PlanError
from gpusim.formats.hardware import HardwareModel
from gpusim.plan.tasks import MAX_TIME_NS, Plan, Task, check_plan, start_interval_ns
from gpusim.rules import copies, launch, lost_time, products, queues, start_interference

#: Priority after all arrivals at the same time.
LATE = EventPriority(NORMAL + 1)

COPY_DIRECTIONS = ("h2d", "d2h")


class ReferenceEngine:
    """SimPy engine that decides the rules; see `gpusim.engine.base.Engine`."""

    name = "reference"

    def run(self, plan: Plan, hardware: HardwareModel, record: bool = True) -> Timeline:
        """Simulate `plan`, with causes, occupancy and bandwidth over time if `record`. Raises `PlanError`."""
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
        start_ns, end_ns = tuple(map(round, simulation.start)), tuple(map(round, simulation.end))
        return Timeline(
            plan=plan,
            start_ns=start_ns,
            end_ns=end_ns,
            ready_ns=tuple(map(round, simulation.ready)),
            occupied=tuple(device.occupied) if device else (),
            bandwidth=tuple(device.bandwidth) if device else (),
            causes=simulation.noted.causes(plan, start_ns, end_ns, hardware) if record else None,
        )


class _Noted:
    """Recorder of the causes of each task during a simulation (`gpusim.engine.causes.Causes`)."""

    def __init__(self, tasks: int) -> None:
        self.last = [-1] * tasks
        self.interference_ns = [0.0] * tasks
        self.product_ns = [0.0] * tasks
        self.launched_ns = [0.0] * tasks
        self.held = [NOTHING] * tasks
        self.held_by = [-1] * tasks
        self.losses: list[list[Loss]] = [[] for _ in range(tasks)]

    def causes(self, plan: Plan, start_ns: tuple[int, ...], end_ns: tuple[int, ...], hardware: HardwareModel) -> Causes:
        """Return the recorded causes of a finished simulation."""
        return Causes(
            last=tuple(self.last),
            interference_ns=tuple(self.interference_ns),
            product_ns=tuple(self.product_ns),
            launched_ns=tuple(self.launched_ns),
            held=tuple(HELD[held] for held in self.held),
            held_by=tuple(self.held_by),
            losses=closed(self.losses, plan, start_ns, end_ns, hardware),
        )


class _Simulation:
    """One simulation run: tasks wait for predecessors, pass the front end or a hardware queue, then share a device."""

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
        self.noted = _Noted(count)
        self.branches = plan.branches
        self.events_left = self.events = budget.EVENTS * budget.work_of(plan, hardware)
        self.devices: dict[int, _Device] = {}
        for task in plan.tasks:
            if task.device not in self.devices:
                self.devices[task.device] = _Device(self, record)
        before = _queue_predecessors(plan)
        self.successors = _successors(plan, before)
        if plan.mode == "graph":
            for task in plan.tasks:
                self.devices[task.device].pending += task.kind in COPY_DIRECTIONS
            for index, task in enumerate(plan.tasks):
                self.env.process(self._graph_node(index, task, before[index]))
        else:
            _Host(self, before)

    def _graph_node(self, index: int, task: Task, previous: int | None) -> Generator[simpy.Event, Any, None]:
        """Process of a graph node: wait for the predecessors and the launch gap, then go to the front end."""
        costs = self.hardware.graph
        preds = {*task.deps, *([] if previous is None else [previous])}
        if preds:
            yield self.env.all_of([self.ended[p] for p in sorted(preds)])
            last = max(preds, key=self.finish_order.__getitem__)
            gap_ns = launch.gap_ns(costs, self.branches, len(preds), task.extra_ns)
            siblings = self.successors[last]
            place = siblings.index(index)
            lost_ns = self.noted.interference_ns[last] + self.noted.product_ns[last]
            wait_ns = launch.ready_delay_ns(costs, gap_ns, lost_ns, place, len(siblings))
            copied = {node for node in (index, *preds) if self.plan.tasks[node].kind in COPY_DIRECTIONS}
            self.noted.last[index] = last
            switch_ns = copies.switch_ns(self.hardware.copies, index in copied, last in copied, bool(copied - {index}))
            yield self.env.timeout(wait_ns + switch_ns)
        self.ready[index] = self.env.now
        self.devices[task.device].arrive(index, task)

    def count_event(self, index: int) -> None:
        """Take one event from the budget. Raises `PlanError` if it is exhausted."""
        self.events_left -= 1
        if self.events_left < 0:
            raise budget.too_many_events(self.events, index, self.env.now)

    def note_held(self, index: int, held: int, by: int) -> None:
        """Record the resource and task that a starting task had to wait for, if any."""
        if self.env.now > self.ready[index] and by >= 0:
            self.noted.held[index], self.noted.held_by[index] = held, by

    def finished(self, index: int, other_starts: int, beside_ns: float) -> None:
        """Record the end of a task.

        While it ran, `other_starts` other kernels have started on its GPU, and others have run there for `beside_ns`.
        """
        self.end[index] = self.env.now
        if self.plan.mode == "graph":
            graph, task = self.hardware.graph, self.plan.tasks[index]
            self.noted.interference_ns[index] = start_interference.lost_ns(graph, other_starts)
            if task.product:
                ran_ns = self.end[index] - self.start[index]
                self.noted.product_ns[index] = products.lost_ns(graph, task.dur_ns, beside_ns, ran_ns)
        self.finish_order[index] = len(self.finish_order)
        self.ended[index].succeed()


def _queue_predecessors(plan: Plan) -> list[int | None]:
    """Return each task's predecessor in its queue."""
    last: dict[tuple[int, int], int] = {}
    before: list[int | None] = []
    for index, task in enumerate(plan.tasks):
        before.append(last.get((task.device, task.queue)))
        last[(task.device, task.queue)] = index
    return before


def _successors(plan: Plan, before: list[int | None]) -> list[list[int]]:
    """Return each task's successors, in launch order."""
    successors: list[list[int]] = [[] for _ in range(len(plan))]
    for index, (task, previous) in enumerate(zip(plan.tasks, before, strict=True)):
        for p in {*task.deps, *([] if previous is None else [previous])}:
            successors[p].append(index)
    return successors


@dataclass
class _CopyEngine:
    """Copy engine of one direction: one copy at a time, first come first served."""

    waiting: deque[int] = field(default_factory=deque)
    active: int | None = None
    last_ended: int = -1
    remaining_bytes: float = 0.0
    rate: float = 0.0


class _Device:
    """A GPU: front end, SMs and two copy engines, with one timer for the next end of any work."""

    def __init__(self, simulation: _Simulation, record: bool) -> None:
        self.simulation = simulation
        self.env = simulation.env
        self.hardware = simulation.hardware
        by_block = simulation.hardware.contention.sharing_exponent > 0
        self.pool = SmPlacement(simulation.hardware) if by_block else SmPool(simulation.hardware)
        self.front_end_free = 0.0
        self.waiting: list[tuple[float, int]] = []
        self.starts = 0
        self.started: dict[int, int] = {}
        """Number of starts up to and including that of a task, by task."""
        self.unended = 0
        """Kernels that have started and not ended."""
        self.several_ns = 0.0
        """Time with several of them, up to `several_at`, the last start or end of a kernel."""
        self.several_at = 0.0
        self.several_before: dict[int, float] = {}
        """`several_ns` at the start of a task, by task."""
        self.last_started = -1
        self.room_at = 0.0
        """Last time at which a task freed a grid slot of a full GPU, in ns."""
        self.room_by = -1
        """The task that freed it."""
        self.copies = {direction: _CopyEngine() for direction in COPY_DIRECTIONS}
        self.started_copies = self.pending = 0
        """Copies that have started, and copies of a CUDA graph that have yet to."""
        self.copied = False
        """True once there has been a copy; plans without copies skip the copy engines."""
        self.sm_rate = 1.0
        """Rate of kernels next to the active copies."""
        self.record = record
        self.occupied: list[tuple[int, float]] = []
        self.bandwidth: list[tuple[int, float]] = []
        self._updated = 0.0
        self._timer = 0

    def arrive(self, index: int, task: Task) -> None:
        """Hand a ready task to the front end or to its copy engine."""
        self.simulation.count_event(index)
        if task.kind in COPY_DIRECTIONS:
            self._advance()
            self.copied = True
            self.copies[task.kind].waiting.append(index)
            self._update()
        else:
            heapq.heappush(self.waiting, (self.env.now, index))
            self._serve(max(self.env.now, self.front_end_free))

    def _serve(self, at: float) -> None:
        self._at(at, LATE, self._start_next)

    def _start_next(self) -> None:
        """Start the task that has been ready for longest, if the front end and a grid slot are free."""
        if not self.waiting or self.env.now < self.front_end_free or self.pool.full:
            return
        index = heapq.heappop(self.waiting)[1]
        self.simulation.count_event(index)
        self._advance()
        self.simulation.start[index] = self.env.now
        by_front_end = self.front_end_free > self.room_at
        held, by = (FRONT_END, self.last_started) if by_front_end else (GRID_SLOT, self.room_by)
        self.simulation.note_held(index, held, by)
        self.last_started = index
        task = self.simulation.plan.tasks[index]
        self.pool.start(index, task, self._wait_ns(index, task))
        self.starts += 1
        self.started[index] = self.starts
        self._count_several(1)
        self.several_before[index] = self.several_ns
        in_graph = self.simulation.plan.mode == "graph"
        self.front_end_free = self.env.now + start_interval_ns(task, self.hardware, in_graph)
        self._update()
        if self.waiting:
            self._serve(self.front_end_free)

    def _count_several(self, change: int) -> None:
        """Count the time with several running kernels up to now, when one starts (1) or ends (-1)."""
        if self.unended > 1:
            self.several_ns += self.env.now - self.several_at
        self.several_at = self.env.now
        self.unended += change

    def _wait_ns(self, index: int, task: Task) -> float:
        """Return how much longer a starting task takes because of active and pending copies, in ns."""
        if not task.on_copy_engine:
            return 0.0
        h2d, d2h = (self.copies[direction].active for direction in COPY_DIRECTIONS)
        counts = self.started_copies, self.pending
        wait_ns = copies.memset_wait_ns(self.hardware.copies, d2h is not None, h2d is not None, *counts)
        if self.record and wait_ns > 0.0:
            by, now = d2h if h2d is None else h2d, self.env.now
            self.simulation.noted.losses[index].append(Loss(LOSSES[lost_time.COPY], by, now, now + wait_ns, wait_ns))
        return wait_ns

    def _advance(self) -> None:
        """Advance all work to now."""
        elapsed = self.env.now - self._updated
        if elapsed:
            if self.record:
                self._note_losses(elapsed)
            self.pool.advance(elapsed * self.sm_rate)
            if self.copied:
                for copy in self.copies.values():
                    copy.remaining_bytes -= elapsed * copy.rate
        self._updated = self.env.now

    def _note_losses(self, elapsed: float) -> None:
        """Record the time that each task lost since the last change."""
        since, until, losses = self._updated, self.env.now, self.simulation.noted.losses
        for index, cause, by, part in self.pool.losses():
            lost_ns = part * (elapsed * self.sm_rate)
            losses[index].append(Loss(LOSSES[cause], by if by >= 0 else None, since, until, lost_ns))
        lost_ns = lost_time.copy_part(self.sm_rate, 1.0) * elapsed
        active = [(direction, copy) for direction, copy in self.copies.items() if copy.active is not None]
        if active and lost_ns > 0.0:
            for index in self.pool.indices:
                losses[index].append(Loss(LOSSES[lost_time.COPY], active[0][1].active, since, until, lost_ns))
        for direction, copy in active:
            full = copies.full_bytes_per_ns(self.hardware.copies, direction == "h2d")
            lost_ns = lost_time.copy_part(copy.rate, full) * elapsed
            if lost_ns > 0.0 and copy.active is not None:
                other_copy = next((other.active for _, other in active if other is not copy), None)
                losses[copy.active].append(Loss(LOSSES[lost_time.COPY], other_copy, since, until, lost_ns))

    def _update(self) -> None:
        """Recompute rates and set the timer to the next end."""
        self.pool.update()
        if self.copied:
            self._update_copies()
        if self.record:
            now = round(self.env.now)
            _note(self.occupied, now, self.pool.occupied)
            _note(self.bandwidth, now, self.pool.traffic_bytes_per_ns)
        end = self._next_end()
        self._timer += 1
        if end is not None:
            delay, index = end
            timer = self._timer
            self._at(self.env.now + delay, URGENT, lambda: self._end(index, timer))

    def _end(self, index: int, timer: int) -> None:
        if timer != self._timer:
            return  # stale timer: the rates have changed
        self.simulation.count_event(index)
        self._advance()
        task = self.simulation.plan.tasks[index]
        all_of_it, other_starts, beside_ns = True, 0, 0.0
        if task.kind in COPY_DIRECTIONS:
            self.copies[task.kind].active = None
            self.copies[task.kind].last_ended = index
        else:
            was_full = self.pool.full
            all_of_it = self.pool.finish(index)
            if was_full and all_of_it:
                self.room_at, self.room_by = self.env.now, index
            other_starts = self.starts - self.started[index]
            if all_of_it:
                self._count_several(-1)
                beside_ns = self.several_ns - self.several_before.pop(index)
        self._update()
        if not all_of_it:
            return
        self.simulation.finished(index, other_starts, beside_ns)
        if self.waiting:
            self._serve(max(self.env.now, self.front_end_free))

    def _update_copies(self) -> None:
        """Start the next copy on each free engine and set the rates; both directions share the link."""
        rates = self.hardware.copies
        for copy in self.copies.values():
            if copy.active is None and copy.waiting:
                copy.active = copy.waiting.popleft()
                self.pending -= 1
                self.started_copies += 1
                task = self.simulation.plan.tasks[copy.active]
                self.simulation.start[copy.active] = self.env.now
                self.simulation.note_held(copy.active, COPY_ENGINE, copy.last_ended)
                copy.remaining_bytes = copies.work_bytes(rates, task.copy_bytes, task.kind == "h2d")
        both = all(copy.active is not None for copy in self.copies.values())
        for direction, copy in self.copies.items():
            rate = copies.bytes_per_ns(rates, direction == "h2d", both, bool(self.pool.indices))
            copy.rate = rate if copy.active is not None else 0.0
        self.sm_rate = copies.sm_rate(rates, sum(copy.active is not None for copy in self.copies.values()))

    def _next_end(self) -> tuple[float, int] | None:
        """Return the time to the next end of a task or of part of its blocks at the current rates, and that task."""
        end = self.pool.next_end()
        if not self.copied:
            return end
        ends = [] if end is None else [(end[0] / self.sm_rate, end[1])]
        for copy in self.copies.values():
            if copy.active is not None:
                ends.append((max(0.0, copy.remaining_bytes / copy.rate), copy.active))
        return min(ends, default=None)

    def _at(self, time: float, priority: EventPriority, action: Any) -> None:
        """Call `action` at `time`; smaller priorities first."""
        event = simpy.Event(self.env)
        event._ok = True
        event._value = None
        event.callbacks.append(lambda _: action())
        delay = max(0.0, time - self.env.now)
        while self.env.now + delay < time:  # rounded down: the front end would stay busy forever
            delay = math.nextafter(delay, math.inf)
        self.env.schedule(event, priority=priority, delay=delay)


class _Host:
    """Stream mode: one host thread launches in order into hardware queues; the head of a queue blocks later entries."""

    def __init__(self, simulation: _Simulation, before: list[int | None]) -> None:
        self.simulation = simulation
        self.env = simulation.env
        self.before = before
        self.costs = simulation.hardware.stream
        tasks = simulation.plan.tasks
        # Streams are assigned to the queues of their device round-robin, in order of first launch.
        dealt: dict[int, int] = {}
        lanes: dict[tuple[int, int], tuple[int, int]] = {}
        for device, stream in simulation.plan.queues():
            lanes[(device, stream)] = (device, queues.hardware_queue(self.costs, dealt.get(device, 0)))
            dealt[device] = dealt.get(device, 0) + 1
        self.queue_of = [lanes[(task.device, task.queue)] for task in tasks]
        self.queues: dict[tuple[int, int], deque[tuple[int, float]]] = {queue: deque() for queue in self.queue_of}
        self.busy: set[tuple[int, int]] = set()
        self.env.process(self._launch())

    def _launch(self) -> Generator[simpy.Event, Any, None]:
        for index, task in enumerate(self.simulation.plan.tasks):
            yield self.env.timeout(queues.host_launch_ns(self.costs, task.host_ns, len(task.deps)))
            queue = self.queue_of[index]
            self.simulation.noted.launched_ns[index] = self.env.now
            self.queues[queue].append((index, self.env.now))
            if queue not in self.busy:
                self.busy.add(queue)
                self.env.process(self._issue(queue))

    def _issue(self, queue: tuple[int, int]) -> Generator[simpy.Event, Any, None]:
        """Issue the entries of a queue in order; each waits at the head until it may start."""
        waiting = self.queues[queue]
        ended, end = self.simulation.ended, self.simulation.end
        while waiting:
            index, launched = waiting.popleft()
            task = self.simulation.plan.tasks[index]
            rules = dict.fromkeys(task.deps, queues.event_start_ns)
            previous = self.before[index]
            if previous is not None:
                rules[previous] = queues.stream_start_ns
            if any(end[p] < 0 for p in rules):
                yield self.env.all_of([ended[p] for p in rules])
            start = max(self.env.now, queues.launched_start_ns(self.costs, launched))
            may_start = [(start_ns(self.costs, end[p]), p == previous, -p) for p, start_ns in rules.items()]
            last_ns, _, last = max(may_start, default=(-1.0, False, 1))
            if last_ns >= start:
                start, self.simulation.noted.last[index] = last_ns, -last
            yield self.env.timeout(max(0.0, start - self.env.now))
            self.simulation.ready[index] = self.env.now
            self.simulation.devices[task.device].arrive(index, task)
        self.busy.discard(queue)


def _note(series: list[tuple[int, float]], now: int, value: float) -> None:
    """Append a step to a step function, replacing a step at the same time."""
    if series and series[-1][0] == now:
        series[-1] = (now, value)
    elif not series or series[-1][1] != value:
        series.append((now, value))
