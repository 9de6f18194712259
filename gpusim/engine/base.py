"""The engine interface: Plan + HardwareModel -> Timeline."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Final, Protocol

from gpusim.engine.causes import Causes
from gpusim.errors import UnknownNameError
from gpusim.formats.hardware import HardwareModel
from gpusim.notebook import html_table, short_repr
from gpusim.plan.tasks import Plan
from gpusim.units import counted, format_ns

ENGINES: Final = ("fast", "reference")


@dataclass(frozen=True, repr=False)
class Timeline:
    """Simulated start and end of each task of a plan, in ns from the start of the step, with the load over time."""

    plan: Plan
    start_ns: tuple[int, ...]
    end_ns: tuple[int, ...]
    ready_ns: tuple[int, ...]
    """Time at which each task was launched and its predecessors had ended, in ns."""
    occupied: tuple[tuple[int, float], ...] = ()
    """Steps (ns, occupied share of the GPU); empty if not recorded."""
    bandwidth: tuple[tuple[int, float], ...] = ()
    """Steps (ns, DRAM traffic in bytes per ns); empty if not recorded."""
    causes: Causes | None = None
    """Causes of waits and lost time; None if not recorded."""

    @property
    def makespan_ns(self) -> int:
        """Time from the start of the step to the end of its last task, in ns."""
        return max(self.end_ns, default=0)

    @cached_property
    def memory(self) -> tuple[tuple[int, int], ...]:
        """Steps (ns, live bytes); a buffer lives from the start of its first task to the end of its last."""
        changes: dict[int, int] = {0: self.plan.kept_bytes}
        for buffer in self.plan.buffers:
            begin = min(self.start_ns[task] for task in buffer.tasks)
            end = max(self.end_ns[task] for task in buffer.tasks)
            changes[begin] = changes.get(begin, 0) + buffer.bytes
            changes[end] = changes.get(end, 0) - buffer.bytes
        level, result = 0, []
        for time in sorted(changes):
            level += changes[time]
            result.append((time, level))
        return tuple(result)

    @property
    def peak_bytes(self) -> int:
        """Peak of the live bytes."""
        return max((level for _, level in self.memory), default=0)

    def __repr__(self) -> str:
        queues = len({(task.device, task.queue) for task in self.plan.tasks})
        size = f"{counted(len(self.plan), 'task')} on {counted(queues, 'stream')}"
        return short_repr("Timeline", f"{size}, {format_ns(self.makespan_ns)}")

    def _repr_html_(self) -> str:
        rows = [
            (task.name, task.queue, format_ns(start), format_ns(end))
            for task, start, end in zip(self.plan.tasks, self.start_ns, self.end_ns, strict=True)
        ]
        return html_table(f"Timeline of {format_ns(self.makespan_ns)}", ("task", "stream", "start", "end"), rows)


class Engine(Protocol):
    """A deterministic simulator: the same plan and hardware model give the same timeline on every machine."""

    name: str

    def run(self, plan: Plan, hardware: HardwareModel, record: bool = ...) -> Timeline:
        """Simulate `plan`, with its causes if `record`. Raises `PlanError` for a plan that cannot run."""
        ...


def engine_by_name(name: str) -> Engine:
    """Return the engine of a name in `ENGINES`. Raises `UnknownNameError`."""
    # Imported on demand: the fast engine needs numba, the reference engine SimPy.
    if name == "fast":
        from gpusim.engine.fast import FastEngine

        return FastEngine()
    if name == "reference":
        from gpusim.engine.reference import ReferenceEngine

        return ReferenceEngine()
    raise UnknownNameError("engine", name, ENGINES)


def concurrency(timeline: Timeline) -> float:
    """Return the mean number of concurrent tasks over the time in which any task runs."""
    busy = busy_ns(timeline.start_ns, timeline.end_ns)
    total = sum(e - s for s, e in zip(timeline.start_ns, timeline.end_ns, strict=True))
    return total / busy if busy else 0.0


def busy_ns(starts: Sequence[int], ends: Sequence[int]) -> int:
    """Return the length of the union of the intervals, in ns."""
    total, reach = 0, 0
    for start, end in sorted(zip(starts, ends, strict=True)):
        if end > reach:
            total += end - max(start, reach)
            reach = end
    return total
