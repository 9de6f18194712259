"""Attribution of the time between a schedule's makespan and the critical path to causes.

The critical path is the longest chain of dependent kernels, each at its time alone, with the minimum gap between them:
no schedule is faster. Against that ideal, a kernel of a schedule is delayed if it waits although its data are ready
(for its stream, the front end, the host ...) or takes longer than alone (SMs, issue slots, DRAM, L2 misses ...). The
delays on the path from the task that ends last back along the last dependencies lead from the ideal to the makespan.
If the ideal schedule itself waits for another chain, there is slack, which cancels delays, the earliest first. The
remaining delays add up to the gap exactly.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Final

from gpusim.analysis.recorded import causes_of
from gpusim.engine.base import Timeline
from gpusim.engine.causes import BLOCKS, CARVEOUT, COPY, DRAM, ISSUE, REGISTERS, SMEM, THREADS, alone_ns
from gpusim.formats.hardware import HardwareModel
from gpusim.notebook import ShortRepr, html_table, short_name, short_repr
from gpusim.plan.graph import OpGraph
from gpusim.plan.tasks import Task
from gpusim.rules import launch, queues
from gpusim.units import format_ns

if TYPE_CHECKING:
    from gpusim.analysis.explain_pair import Pair

DEPENDENCY: Final = "dependency"
QUEUE: Final = "queue"
START_INTERFERENCE: Final = "start interference"
PRODUCTS: Final = "products beside others"
GRAPH_GAPS: Final = "graph gaps"
LAUNCH: Final = "launch"
FRONT_END: Final = "front end"
GRID_SLOT: Final = "grid slot"
MISSES: Final = "L2 misses"
CAUSES: Final = (
    DEPENDENCY, QUEUE, START_INTERFERENCE, PRODUCTS, GRAPH_GAPS, LAUNCH, FRONT_END, GRID_SLOT, COPY, BLOCKS, THREADS,
    REGISTERS, SMEM, CARVEOUT, ISSUE, DRAM, MISSES,
)  # fmt: skip
"""All causes (docs/commands/explain.md). `DEPENDENCY` occurs between two ops, never in the gap of a step."""

#: Rounding error of times in a timeline.
_ROUNDING_NS = 1.0


@dataclass(frozen=True, slots=True, repr=False)
class Delay(ShortRepr):
    """Time that one task lost to one cause."""

    task: int
    cause: str
    by: int | None
    """Task that delayed it, or None."""
    from_ns: float
    until_ns: float
    """Interval of the delay; for lost run time, the interval in which it was lost."""
    lost_ns: float

    def within(self, begin_ns: float, end_ns: float) -> Delay | None:
        """Return the part of the delay between two times, in proportion, or None."""
        begin, end = max(begin_ns, self.from_ns), min(end_ns, self.until_ns)
        if end <= begin or self.until_ns <= self.from_ns:
            return None
        part = (end - begin) / (self.until_ns - self.from_ns)
        return replace(self, from_ns=begin, until_ns=end, lost_ns=self.lost_ns * part)


@dataclass(frozen=True, slots=True)
class StepGap:
    """Gap of a whole step; its delays add up to `makespan_ns - critical_path_ns`."""

    makespan_ns: int
    critical_path_ns: float
    delays: tuple[Delay, ...]
    """Delays along the path that ended last, in order of time, after cancelling by slack."""

    @property
    def gap_ns(self) -> float:
        """Makespan minus critical path."""
        return self.makespan_ns - self.critical_path_ns


@dataclass(frozen=True, slots=True, repr=False)
class Explained:
    """A simulated schedule with all its delays; made by `explain`."""

    graph: OpGraph
    timeline: Timeline
    hardware: HardwareModel
    preds: tuple[tuple[int, ...], ...]
    """Predecessors of each task by data, on any stream."""
    data_ns: tuple[float, ...]
    """Time at which each task's data were ready and the minimum gap had passed."""
    last: tuple[int | None, ...]
    """Predecessor of each task that ended last."""
    delays: tuple[tuple[Delay, ...], ...]
    """Waits and losses of each task, in order of time."""

    def step(self) -> StepGap:
        """Return the gap between the makespan and the critical path."""
        ends = self.timeline.end_ns
        if not ends:
            return StepGap(0, 0.0, ())
        ideal_ns = _ideal_ns(self)
        alone = [_cached_ns(task, self.hardware) for task in self.timeline.plan.tasks]
        longest_ns = max(start + time for start, time in zip(ideal_ns, alone, strict=True))
        path = [ends.index(self.timeline.makespan_ns)]
        while (before := self.last[path[-1]]) is not None:
            path.append(before)
        kept: deque[Delay] = deque()
        kept_ns = 0.0  # the sum of `kept`: adding them up for every task would take minutes for a large step
        for place, task in enumerate(reversed(path)):
            if place:
                before = path[len(path) - place]
                slack_ns = ideal_ns[task] - (ideal_ns[before] + alone[before] + _gap_ns(self, task))
                kept_ns -= _forgive(kept, slack_ns)
            kept += self.delays[task]
            kept_ns += sum(delay.lost_ns for delay in self.delays[task])
            # The remainder is rounding.
            late_ns = ends[task] - (ideal_ns[task] + alone[task])
            kept_ns -= _forgive(kept, kept_ns - late_ns)
        _forgive(kept, longest_ns - (ideal_ns[path[0]] + alone[path[0]]))
        return StepGap(self.timeline.makespan_ns, longest_ns, tuple(kept))

    def window(self, begin_ns: float, end_ns: float) -> list[Delay]:
        """Return the delays of all tasks between two times, on the path or not, longest first."""
        within = (delay.within(begin_ns, end_ns) for delays in self.delays for delay in delays)
        return sorted((d for d in within if d is not None and d.lost_ns > 0.0), key=lambda d: (-d.lost_ns, d.task))

    def between(self, first: str, second: str) -> Pair:
        """Return the overlap and mutual delays of two ops, given by name, number, or `LAYER OPERATOR`.

        Raises `UnknownNameError`, and `OptionError` for an op without kernels or two equal ops.
        """
        from gpusim.analysis.explain_pair import explain_pair, find_op

        return explain_pair(self, find_op(self.graph, first), find_op(self.graph, second))

    def causes_ns(self) -> dict[str, float]:
        """Return the time of the step's gap by cause, largest first."""
        return dict(sorted(totals_ns(self.step().delays).items(), key=lambda item: -item[1]))

    def __repr__(self) -> str:
        gap = self.step()
        most = next(iter(self.causes_ns().items()), None)
        where = f"{short_name(self.graph.trace.name)} on {short_name(self.hardware.label)}"
        text = f"{where}: {format_ns(gap.gap_ns)} above the critical path"
        return short_repr("Explained", text if most is None else f"{text}, most for {most[0]}")

    def _repr_html_(self) -> str:
        gap = self.step()
        rows = [
            (cause, format_ns(lost_ns), f"{lost_ns / gap.gap_ns:.0%}" if gap.gap_ns else "")
            for cause, lost_ns in self.causes_ns().items()
        ]
        title = (
            f"{self.graph.trace.name} on {self.hardware.label}: makespan {format_ns(gap.makespan_ns)}, "
            f"critical path {format_ns(gap.critical_path_ns)}, between them {format_ns(gap.gap_ns)}"
        )
        return html_table(title, ("cause", "time", "share"), rows)


def explain(graph: OpGraph, timeline: Timeline, hardware: HardwareModel) -> Explained:
    """Return the delays of every task of a timeline simulated with `hardware` from a plan of `graph`."""
    preds = _true_preds(graph, timeline)
    explained = Explained(graph, timeline, hardware, preds, (), (), ())
    data_ns: list[float] = []
    last: list[int | None] = []
    for task, before in enumerate(preds):
        gap_ns = _gap_ns(explained, task)
        data_ns.append(max((timeline.end_ns[p] + gap_ns for p in before), default=0.0))
        last.append(max(before, key=lambda p: (timeline.end_ns[p], p), default=None))
    explained = replace(explained, data_ns=tuple(data_ns), last=tuple(last))
    return replace(explained, delays=tuple(_delays(explained)))


def totals_ns(delays: Sequence[Delay]) -> dict[str, float]:
    """Return the time by cause in the order of `CAUSES`, for causes that occur."""
    by_cause = {cause: sum(delay.lost_ns for delay in delays if delay.cause == cause) for cause in CAUSES}
    return {cause: lost_ns for cause, lost_ns in by_cause.items() if lost_ns > 0.0}


def _true_preds(graph: OpGraph, timeline: Timeline) -> tuple[tuple[int, ...], ...]:
    """Return each task's predecessors by data; a plan leaves out those implied by stream order."""
    place = {(task.op, task.kernel): index for index, task in enumerate(timeline.plan.tasks) if task.op >= 0}
    last_of = {op: index for (op, _), index in sorted(place.items())}
    preds = graph.work_preds
    true_preds = []
    for index, task in enumerate(timeline.plan.tasks):
        needed = set(task.deps)
        if task.kernel > 0 and (task.op, task.kernel - 1) in place:
            needed.add(place[(task.op, task.kernel - 1)])
        elif task.op in preds and task.kernel == 0:
            needed |= {last_of[p] for p in preds[task.op]}
        true_preds.append(tuple(sorted(needed - {index})))
    return tuple(true_preds)


def _gap_ns(explained: Explained, task: int) -> float:
    """Return the minimum time from the end of a predecessor to a task's start, in ns."""
    if explained.timeline.plan.mode == "graph":
        return launch.least_gap_ns(explained.hardware.graph, explained.timeline.plan.tasks[task].extra_ns)
    return queues.least_gap_ns(explained.hardware.stream)


def _cached_ns(task: Task, hardware: HardwareModel) -> float:
    """Return the time of a task alone, with its data in the L2 cache as when it was captured, in ns."""
    return alone_ns(task, hardware) - task.missed_ns


def _ideal_ns(explained: Explained) -> list[float]:
    """Return the start of each task with only dependencies, gaps and times alone; the plan's order must be legal."""
    tasks = explained.timeline.plan.tasks
    ideal: list[float] = []
    for task, before in enumerate(explained.preds):
        gap_ns = _gap_ns(explained, task)
        ideal.append(max((ideal[p] + _cached_ns(tasks[p], explained.hardware) + gap_ns for p in before), default=0.0))
    return ideal


def _delays(explained: Explained) -> Iterator[tuple[Delay, ...]]:
    timeline, hardware = explained.timeline, explained.hardware
    ends, ready, causes = timeline.end_ns, timeline.ready_ns, causes_of(timeline, hardware)
    stream_mode = timeline.plan.mode == "stream"
    previous: dict[tuple[int, int], int] = {}
    for index, task in enumerate(timeline.plan.tasks):
        before, last = previous.get((task.device, task.queue)), causes.last[index]
        previous[(task.device, task.queue)] = index
        steps: list[tuple[str, float, int | None]] = []  # cause, end and causing task of each wait
        if stream_mode:
            launched_ns = queues.launched_start_ns(hardware.stream, causes.launched_ns[index])
            steps.append((LAUNCH, min(launched_ns, ready[index]), None))
            steps.append((QUEUE, ready[index], before if before == last else None))
        else:
            if before is not None and before not in explained.preds[index]:
                steps.append((QUEUE, min(ends[before] + _gap_ns(explained, index), ready[index]), before))
            if last >= 0:
                until_ns = ends[last] + _gap_ns(explained, index) + causes.interference_ns[last]
                steps.append((START_INTERFERENCE, min(until_ns, ready[index]), None))
                steps.append((PRODUCTS, min(until_ns + causes.product_ns[last], ready[index]), None))
            steps.append((GRAPH_GAPS, ready[index], None))
        held = causes.held[index] or FRONT_END
        steps.append((held, timeline.start_ns[index], causes.held_by[index] if causes.held[index] else None))
        rows = _one_after_another(index, explained.data_ns[index], steps)
        rows += [Delay(index, r.cause, r.by, r.from_ns, r.until_ns, r.lost_ns) for r in causes.losses[index]]
        if task.missed_ns:
            rows.append(Delay(index, MISSES, None, timeline.start_ns[index], timeline.end_ns[index], task.missed_ns))
        yield tuple(rows)


def _one_after_another(task: int, now_ns: float, steps: Sequence[tuple[str, float, int | None]]) -> list[Delay]:
    """Return consecutive waits from `now_ns` on; those that end earlier caused no delay."""
    rows = []
    for cause, until_ns, by in steps:
        if until_ns > now_ns + _ROUNDING_NS:
            rows.append(Delay(task, cause, by, now_ns, until_ns, until_ns - now_ns))
            now_ns = until_ns
    return rows


def _forgive(delays: deque[Delay], slack_ns: float) -> float:
    """Subtract slack from the earliest delays; negative slack is rounding and is added to the latest delay.

    Returns the time subtracted.
    """
    if slack_ns < 0.0:
        if not delays:
            return 0.0
        delays[-1] = replace(delays[-1], lost_ns=delays[-1].lost_ns - slack_ns)
        return slack_ns
    left_ns = slack_ns
    while delays and left_ns > 0.0:
        first = delays[0]
        if first.lost_ns > left_ns:
            delays[0] = replace(first, lost_ns=first.lost_ns - left_ns)
            return slack_ns
        left_ns -= first.lost_ns
        delays.popleft()
    return slack_ns - left_ns
