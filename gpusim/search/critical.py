"""The critical path of a simulated schedule: what decided, step by step, that it ended when it did.

From the task that ends last back to the start: what each task on the way waited for last, be it a predecessor, the
task before it in its stream, the front end, a grid slot, a copy engine or the host. The waits and the run times on the
path lie end to end, so they add up to the makespan. It is a property of one schedule: shortening a kernel on it makes
another path critical.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from gpusim.engine.base import Timeline
from gpusim.hardware.model import HardwareModel
from gpusim.plan.tasks import Task

Cause = Literal["start", "dependency", "stream", "front end", "grid slot", "copy engine", "launch"]
"""Why a task started when it did.

`start`: nothing held it; `dependency`: a task of another stream had to end, `stream`: the one before it in its own;
`front end`: it was starting another task; `grid slot`, `copy engine`: another task had to end to make room; `launch`:
the host had not launched it yet, or the head of its hardware queue blocked it (stream mode only).
"""

#: Times are rounded to whole ns each: a sum of two may be off by this much.
_ROUNDING_NS = 2

COPIES = ("h2d", "d2h")


@dataclass(frozen=True, slots=True)
class PathStep:
    """One task on the critical path."""

    task: int
    cause: Cause
    wait_ns: int
    """From what decided its start (an end, a start, or the begin of the step) to its start."""
    start_ns: int
    leave_ns: int
    """When the path goes on to the next task: its end, or its start where it only kept the front end busy."""
    slowed_ns: int
    """Part of its time on the path that it would not take alone."""

    @property
    def run_ns(self) -> int:
        """Its time on the path, slowed or not."""
        return self.leave_ns - self.start_ns


@dataclass(frozen=True, slots=True)
class CriticalPath:
    """Steps in order of time; their waits and run times add up to the makespan."""

    steps: tuple[PathStep, ...]

    @property
    def tasks(self) -> tuple[int, ...]:
        """The tasks that run on it."""
        return tuple(step.task for step in self.steps if step.run_ns)

    def totals_ns(self) -> dict[str, int]:
        """What the makespan consists of: `alone`, `slowed`, and the wait for each cause that occurs."""
        found = {
            "alone": sum(step.run_ns - step.slowed_ns for step in self.steps),
            "slowed": sum(step.slowed_ns for step in self.steps),
        }
        for step in self.steps:
            if step.wait_ns:
                found[step.cause] = found.get(step.cause, 0) + step.wait_ns
        return found


def critical_path(timeline: Timeline, hardware: HardwareModel) -> CriticalPath:
    """The critical path of a timeline that was simulated with `hardware`; empty for an empty plan."""
    if not timeline.end_ns:
        return CriticalPath(())
    return CriticalPath(tuple(reversed(list(_Backwards(timeline, hardware).steps()))))


@dataclass(frozen=True, slots=True)
class Wait:
    """Why a task did not start sooner."""

    task: int
    cause: Cause
    blocker: int | None
    """The task that decided its start; None where that was no task's doing."""
    from_ns: int
    """When the blocker ended, or started where it only kept the front end busy."""
    start_ns: int

    @property
    def wait_ns(self) -> int:
        """From what decided its start to its start."""
        return self.start_ns - self.from_ns


def wait_of(timeline: Timeline, hardware: HardwareModel, task: int) -> Wait:
    """What decided the start of one task of a timeline that was simulated with `hardware`."""
    found = _Backwards(timeline, hardware).decision(task)
    blocker = found.task if found.task >= 0 else None
    return Wait(task, found.cause, blocker, found.at_ns, timeline.start_ns[task])


def waits(timeline: Timeline, hardware: HardwareModel) -> list[Wait]:
    """What decided the start of each task; see `wait_of`."""
    walk = _Backwards(timeline, hardware)
    found = []
    for task, start_ns in enumerate(timeline.start_ns):
        decision = walk.decision(task)
        blocker = decision.task if decision.task >= 0 else None
        found.append(Wait(task, decision.cause, blocker, decision.at_ns, start_ns))
    return found


@dataclass(frozen=True, slots=True)
class _Decision:
    """What decided a start: the task, whether it was its end or only its start, and when."""

    cause: Cause
    task: int
    at_ns: int


_FROM_THE_START = _Decision("start", -1, 0)
_LAUNCHED = _Decision("launch", -1, 0)


class _Backwards:
    """The walk from the last end to the first start."""

    def __init__(self, timeline: Timeline, hardware: HardwareModel) -> None:
        self.timeline = timeline
        self.hardware = hardware
        self.previous: list[int | None] = []
        last: dict[tuple[int, int], int] = {}
        self.starts: dict[tuple[int, str], list[tuple[int, int]]] = {}
        self.ends: dict[tuple[int, str], list[tuple[int, int]]] = {}
        for index, task in enumerate(timeline.plan.tasks):
            self.previous.append(last.get((task.device, task.queue)))
            last[(task.device, task.queue)] = index
            self.starts.setdefault(_unit(task), []).append((timeline.start_ns[index], index))
            self.ends.setdefault(_unit(task), []).append((timeline.end_ns[index], index))
        for times in (*self.starts.values(), *self.ends.values()):
            times.sort()

    def steps(self) -> Iterator[PathStep]:
        """Steps from the last to the first."""
        starts, ends = self.timeline.start_ns, self.timeline.end_ns
        task, leave_ns = ends.index(self.timeline.makespan_ns), self.timeline.makespan_ns
        seen = {task}
        while True:
            decision = self.decision(task)
            if decision.task in seen:  # of several events at one instant the wrong one was blamed
                decision = _FROM_THE_START
            run_ns = leave_ns - starts[task]
            yield PathStep(
                task=task,
                cause=decision.cause,
                wait_ns=starts[task] - decision.at_ns,
                start_ns=starts[task],
                leave_ns=leave_ns,
                slowed_ns=max(0, run_ns - round(self._alone_ns(task))),
            )
            if decision.task < 0:
                return
            task, leave_ns = decision.task, decision.at_ns
            seen.add(task)

    def decision(self, index: int) -> _Decision:
        """What decided a task's start."""
        timeline = self.timeline
        if timeline.start_ns[index] > timeline.ready_ns[index]:
            found = self._who_kept_it(index)
            if found is not None:
                return found
        costs_ns = self._costs_ns(index)
        stream_mode = timeline.plan.mode == "stream"
        if not costs_ns:
            return _LAUNCHED if stream_mode else _FROM_THE_START
        ends = timeline.end_ns
        last = max(costs_ns, key=lambda p: (ends[p] + costs_ns[p], p == self.previous[index], -p))
        if stream_mode and timeline.ready_ns[index] > ends[last] + costs_ns[last] + _ROUNDING_NS:
            return _LAUNCHED
        return _Decision("stream" if last == self.previous[index] else "dependency", last, ends[last])

    def _costs_ns(self, index: int) -> dict[int, float]:
        """The predecessors of a task, each with what passes after its end, where that is not the same for all."""
        deps, previous = self.timeline.plan.tasks[index].deps, self.previous[index]
        stream = self.hardware.stream if self.timeline.plan.mode == "stream" else None
        costs = dict.fromkeys(deps, stream.event_ns if stream else 0.0)
        if previous is not None:
            costs[previous] = stream.chain_ns if stream else 0.0
        return costs

    def _who_kept_it(self, index: int) -> _Decision | None:
        """For a task that was ready before it started: who had the front end, its grid slot or its copy engine."""
        task, start_ns = self.timeline.plan.tasks[index], self.timeline.start_ns[index]
        unit = _unit(task)
        if task.kind not in COPIES and self.timeline.plan.mode == "graph":
            place = bisect_left(self.starts[unit], (start_ns, index))
            before_ns, before = self.starts[unit][place - 1] if place else (-1, -1)
            if before >= 0 and start_ns - before_ns <= self.hardware.graph.front_end_ns + _ROUNDING_NS:
                return _Decision("front end", before, before_ns)
        place = bisect_right(self.ends[unit], (start_ns, len(self.previous)))
        ended = [pair for pair in self.ends[unit][max(0, place - 2) : place] if pair[1] != index]
        if not ended:
            return None
        return _Decision("copy engine" if task.kind in COPIES else "grid slot", ended[-1][1], ended[-1][0])

    def _alone_ns(self, index: int) -> float:
        """Time of a task alone on its device."""
        task, copies = self.timeline.plan.tasks[index], self.hardware.copies
        if task.kind not in COPIES:
            return task.dur_ns
        rate = copies.h2d_bytes_per_ns if task.kind == "h2d" else copies.d2h_bytes_per_ns
        return copies.latency_ns + task.copy_bytes / rate


def _unit(task: Task) -> tuple[int, str]:
    """What starts a task: its device's front end, or one of its copy engines."""
    return task.device, task.kind if task.kind in COPIES else "front end"
