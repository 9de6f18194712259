"""Why a schedule is not faster: every ns between its makespan and the critical path, put down to one cause.

The critical path is the longest chain of dependent kernels, each at its time alone, with the least gap between them:
no schedule is faster. In a schedule every kernel is late against that ideal: it waits although its data are there (for
its stream, the front end, the host ...), or it takes longer than alone (SMs, issue slots, DRAM ...). From the task that
ends last back along the dependencies that came last, these delays lead from the ideal to the makespan. Where the ideal
itself would have waited for somebody else, there is slack: delays are forgiven, the earliest first. What is left adds
up to the gap exactly.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Final

from gpusim.analysis.recorded import causes_of
from gpusim.engine.base import Timeline
from gpusim.engine.causes import BLOCKS, COPY, DRAM, ISSUE, REGISTERS, SMEM, SPLIT, THREADS, alone_ns
from gpusim.formats.hardware import HardwareModel
from gpusim.notebook import html_table, short_name, short_repr
from gpusim.plan.graph import OpGraph
from gpusim.rules import launch, queues
from gpusim.units import format_ns

if TYPE_CHECKING:
    from gpusim.analysis.explain_pair import Pair

DEPENDENCY: Final = "dependency"
QUEUE: Final = "queue"
STARTS_BESIDE: Final = "starts beside"
GRAPH_GAPS: Final = "graph gaps"
LAUNCH: Final = "launch"
FRONT_END: Final = "front end"
GRID_SLOT: Final = "grid slot"
CAUSES: Final = (
    DEPENDENCY, QUEUE, STARTS_BESIDE, GRAPH_GAPS, LAUNCH, FRONT_END, GRID_SLOT, COPY, BLOCKS, THREADS, REGISTERS,
    SMEM, SPLIT, ISSUE, DRAM,
)  # fmt: skip
"""All causes (docs/commands/explain.md). `DEPENDENCY` occurs between two ops, never in a step's gap."""

#: Ends of one instant are rounded to whole ns.
_ROUNDING_NS = 1.0


@dataclass(frozen=True, slots=True)
class Delay:
    """Time that one task lost to one cause."""

    task: int
    cause: str
    by: int | None
    """The task that held it up, where one did."""
    from_ns: float
    until_ns: float
    """When: for lost run time, the stretch in which it was lost."""
    lost_ns: float

    def within(self, begin_ns: float, end_ns: float) -> Delay | None:
        """The part that lies between two times, in proportion."""
        begin, end = max(begin_ns, self.from_ns), min(end_ns, self.until_ns)
        if end <= begin or self.until_ns <= self.from_ns:
            return None
        part = (end - begin) / (self.until_ns - self.from_ns)
        return replace(self, from_ns=begin, until_ns=end, lost_ns=self.lost_ns * part)


@dataclass(frozen=True, slots=True)
class StepGap:
    """A whole step: its delays add up to `makespan_ns - critical_path_ns`."""

    makespan_ns: int
    critical_path_ns: float
    delays: tuple[Delay, ...]
    """Along the path that ended last, in order of time, without what slack forgave."""

    @property
    def gap_ns(self) -> float:
        """Makespan less critical path."""
        return self.makespan_ns - self.critical_path_ns


@dataclass(frozen=True, slots=True, repr=False)
class Explained:
    """A simulated schedule with all its delays; made by `explain`."""

    graph: OpGraph
    timeline: Timeline
    hardware: HardwareModel
    preds: tuple[tuple[int, ...], ...]
    """For each task those whose data it needs, whatever stream they are in."""
    data_ns: tuple[float, ...]
    """When each task's data were there and the least gap had passed."""
    last: tuple[int | None, ...]
    """Of those, the one that came last."""
    delays: tuple[tuple[Delay, ...], ...]
    """For each task its waits and its losses, in order of time."""

    def step(self) -> StepGap:
        """What lies between the makespan and the critical path."""
        ends = self.timeline.end_ns
        if not ends:
            return StepGap(0, 0.0, ())
        ideal_ns = _ideal_ns(self)
        alone = [alone_ns(task, self.hardware) for task in self.timeline.plan.tasks]
        longest_ns = max(start + time for start, time in zip(ideal_ns, alone, strict=True))
        path = [ends.index(self.timeline.makespan_ns)]
        while (before := self.last[path[-1]]) is not None:
            path.append(before)
        kept: list[Delay] = []
        for place, task in enumerate(reversed(path)):
            if place:
                before = path[len(path) - place]
                slack_ns = ideal_ns[task] - (ideal_ns[before] + alone[before] + _gap_ns(self, task))
                _forgive(kept, slack_ns)
            kept += self.delays[task]
            # What the delays do not cover is rounding.
            late_ns = ends[task] - (ideal_ns[task] + alone[task])
            _forgive(kept, sum(delay.lost_ns for delay in kept) - late_ns)
        _forgive(kept, longest_ns - (ideal_ns[path[0]] + alone[path[0]]))
        return StepGap(self.timeline.makespan_ns, longest_ns, tuple(kept))

    def window(self, begin_ns: float, end_ns: float) -> list[Delay]:
        """Delays of all tasks between two times, on the path or not; longest first."""
        within = (delay.within(begin_ns, end_ns) for delays in self.delays for delay in delays)
        return sorted((d for d in within if d is not None and d.lost_ns > 0.0), key=lambda d: (-d.lost_ns, d.task))

    def between(self, first: str, second: str) -> Pair:
        """What happened between two ops: names, numbers, or `LAYER OPERATOR`.

        Raises `UnknownNameError`, and `OptionError` for an op without kernels or twice the same.
        """
        from gpusim.analysis.explain_pair import explain_pair, find_op

        return explain_pair(self, find_op(self.graph, first), find_op(self.graph, second))

    def causes_ns(self) -> dict[str, float]:
        """Time of the step's gap by cause, the largest first."""
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
    """The delays of every task of a timeline that was simulated with `hardware` from a plan of `graph`."""
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
    """Time by cause, in the order of `CAUSES`; only causes that occur."""
    by_cause = {cause: sum(delay.lost_ns for delay in delays if delay.cause == cause) for cause in CAUSES}
    return {cause: lost_ns for cause, lost_ns in by_cause.items() if lost_ns > 0.0}


def _true_preds(graph: OpGraph, timeline: Timeline) -> tuple[tuple[int, ...], ...]:
    """For each task of the plan those whose data it needs; a plan leaves out what the order of a stream implies."""
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
    """The least time from the end of a predecessor to a task's start."""
    if explained.timeline.plan.mode == "graph":
        return launch.least_gap_ns(explained.hardware.graph, explained.timeline.plan.tasks[task].extra_ns)
    return queues.least_gap_ns(explained.hardware.stream)


def _ideal_ns(explained: Explained) -> list[float]:
    """Start of each task if nothing but dependencies, gaps and times alone counted; the plan's order is legal."""
    tasks = explained.timeline.plan.tasks
    ideal: list[float] = []
    for task, before in enumerate(explained.preds):
        gap_ns = _gap_ns(explained, task)
        ideal.append(max((ideal[p] + alone_ns(tasks[p], explained.hardware) + gap_ns for p in before), default=0.0))
    return ideal


def _delays(explained: Explained) -> Iterator[tuple[Delay, ...]]:
    timeline, hardware = explained.timeline, explained.hardware
    ends, ready, causes = timeline.end_ns, timeline.ready_ns, causes_of(timeline, hardware)
    stream_mode = timeline.plan.mode == "stream"
    previous: dict[tuple[int, int], int] = {}
    for index, task in enumerate(timeline.plan.tasks):
        before, last = previous.get((task.device, task.queue)), causes.last[index]
        previous[(task.device, task.queue)] = index
        steps: list[tuple[str, float, int | None]] = []  # what held it, until when, and who
        if stream_mode:
            launched_ns = queues.launched_start_ns(hardware.stream, causes.launched_ns[index])
            steps.append((LAUNCH, min(launched_ns, ready[index]), None))
            steps.append((QUEUE, ready[index], before if before == last else None))
        else:
            if before is not None and before not in explained.preds[index]:
                steps.append((QUEUE, min(ends[before] + _gap_ns(explained, index), ready[index]), before))
            if last >= 0:
                until_ns = ends[last] + _gap_ns(explained, index) + causes.interference_ns[last]
                steps.append((STARTS_BESIDE, min(until_ns, ready[index]), None))
            steps.append((GRAPH_GAPS, ready[index], None))
        held = causes.held[index] or FRONT_END
        steps.append((held, timeline.start_ns[index], causes.held_by[index] if causes.held[index] else None))
        rows = _one_after_another(index, explained.data_ns[index], steps)
        rows += [Delay(index, r.cause, r.by, r.from_ns, r.until_ns, r.lost_ns) for r in causes.losses[index]]
        yield tuple(rows)


def _one_after_another(task: int, now_ns: float, steps: Sequence[tuple[str, float, int | None]]) -> list[Delay]:
    """Waits from `now_ns` on; what is over by then held nothing up."""
    rows = []
    for cause, until_ns, by in steps:
        if until_ns > now_ns + _ROUNDING_NS:
            rows.append(Delay(task, cause, by, now_ns, until_ns, until_ns - now_ns))
            now_ns = until_ns
    return rows


def _forgive(delays: list[Delay], slack_ns: float) -> None:
    """Take `slack_ns` off the earliest delays; less than nothing is rounding, and goes to the latest of them."""
    if slack_ns < 0.0:
        if delays:
            delays[-1] = replace(delays[-1], lost_ns=delays[-1].lost_ns - slack_ns)
        return
    while delays and slack_ns > 0.0:
        first = delays[0]
        if first.lost_ns > slack_ns:
            delays[0] = replace(first, lost_ns=first.lost_ns - slack_ns)
            return
        slack_ns -= first.lost_ns
        delays.pop(0)
