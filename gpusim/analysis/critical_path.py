"""The critical path of a simulated schedule: the chain of waits and run times that determined its end.

The path leads from the task that ends last back to the start, through the last wait of each task: for a predecessor,
its stream, the front end, a grid slot, a copy engine or the host. Waits and run times on the path
are contiguous, so they add up to the makespan. The path belongs to one schedule: shortening a kernel on it can make
another path critical.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from gpusim.analysis.recorded import causes_of
from gpusim.engine.base import Timeline
from gpusim.engine.causes import alone_ns
from gpusim.formats.hardware import HardwareModel

Cause = Literal["start", "dependency", "stream", "front end", "grid slot", "copy engine", "launch"]
"""Cause that determined the start of a task.

`start`: none; `dependency`: a task of another stream had to end; `stream`: the previous task of its stream had to end;
`front end`: it was starting another task; `grid slot`, `copy engine`: another task had to end to make room; `launch`:
the host had not launched it yet, or the head of its hardware queue blocked it (stream mode only).
"""


@dataclass(frozen=True, slots=True)
class PathStep:
    """One task on the critical path."""

    task: int
    cause: Cause
    wait_ns: int
    """Time from the event that determined its start (an end, a start, or the start of the step) to its start."""
    start_ns: int
    leave_ns: int
    """Time at which the path continues with the next task: its end, or its start if it only kept the front end busy."""
    slowed_ns: int
    """Part of its time on the path beyond its time alone."""

    @property
    def run_ns(self) -> int:
        """Its time on the path."""
        return self.leave_ns - self.start_ns


@dataclass(frozen=True, slots=True)
class CriticalPath:
    """Steps in order of time; their waits and run times add up to the makespan."""

    steps: tuple[PathStep, ...]

    @property
    def tasks(self) -> tuple[int, ...]:
        """Tasks with run time on the path."""
        return tuple(step.task for step in self.steps if step.run_ns)

    def totals_ns(self) -> dict[str, int]:
        """Return the parts of the makespan, in ns: `alone`, `slowed`, and the wait for each cause that occurs."""
        by_cause = {
            "alone": sum(step.run_ns - step.slowed_ns for step in self.steps),
            "slowed": sum(step.slowed_ns for step in self.steps),
        }
        for step in self.steps:
            if step.wait_ns:
                by_cause[step.cause] = by_cause.get(step.cause, 0) + step.wait_ns
        return by_cause


def critical_path(timeline: Timeline, hardware: HardwareModel) -> CriticalPath:
    """Return the critical path of a timeline simulated with `hardware`; empty for an empty plan."""
    if not timeline.end_ns:
        return CriticalPath(())
    return CriticalPath(tuple(reversed(list(_Backwards(timeline, hardware).steps()))))


@dataclass(frozen=True, slots=True)
class Wait:
    """The wait that determined the start of a task."""

    task: int
    cause: Cause
    blocker: int | None
    """Task that determined its start, or None."""
    from_ns: int
    """End of the blocker, or its start if it only kept the front end busy."""
    start_ns: int

    @property
    def wait_ns(self) -> int:
        """Time from the event that determined its start to its start."""
        return self.start_ns - self.from_ns


def waits(timeline: Timeline, hardware: HardwareModel) -> list[Wait]:
    """Return the wait of each task of a timeline simulated with `hardware`."""
    walk = _Backwards(timeline, hardware)
    deciding = []
    for task, start_ns in enumerate(timeline.start_ns):
        decision = walk.decision(task)
        blocker = decision.task if decision.task >= 0 else None
        deciding.append(Wait(task, decision.cause, blocker, decision.at_ns, start_ns))
    return deciding


@dataclass(frozen=True, slots=True)
class _Decision:
    """Cause, task (or -1) and time of the event that determined a start."""

    cause: Cause
    task: int
    at_ns: int


_FROM_THE_START = _Decision("start", -1, 0)
_LAUNCHED = _Decision("launch", -1, 0)


class _Backwards:
    """Walk from the last end back to the first start."""

    def __init__(self, timeline: Timeline, hardware: HardwareModel) -> None:
        self.timeline = timeline
        self.hardware = hardware
        self.causes = causes_of(timeline, hardware)

    def steps(self) -> Iterator[PathStep]:
        """Yield the steps of the path, last first."""
        starts, ends = self.timeline.start_ns, self.timeline.end_ns
        task, leave_ns = ends.index(self.timeline.makespan_ns), self.timeline.makespan_ns
        seen = {task}
        while True:
            decision = self.decision(task)
            if decision.task in seen:  # ambiguous order of simultaneous events
                decision = _FROM_THE_START
            run_ns = leave_ns - starts[task]
            yield PathStep(
                task=task,
                cause=decision.cause,
                wait_ns=starts[task] - decision.at_ns,
                start_ns=starts[task],
                leave_ns=leave_ns,
                slowed_ns=max(0, run_ns - round(alone_ns(self.timeline.plan.tasks[task], self.hardware))),
            )
            if decision.task < 0:
                return
            task, leave_ns = decision.task, decision.at_ns
            seen.add(task)

    def decision(self, index: int) -> _Decision:
        """Return the event that determined a task's start."""
        timeline, causes = self.timeline, self.causes
        last, tasks = causes.last[index], timeline.plan.tasks
        if held := causes.held[index]:
            by = causes.held_by[index]
            return _Decision(held, by, (timeline.start_ns if held == "front end" else timeline.end_ns)[by])
        if last < 0:
            return _LAUNCHED if timeline.plan.mode == "stream" else _FROM_THE_START
        same = (tasks[last].device, tasks[last].queue) == (tasks[index].device, tasks[index].queue)
        return _Decision("stream" if same else "dependency", last, timeline.end_ns[last])
