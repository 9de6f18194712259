"""Transfer of a schedule tuned for one GPU or batch to another, compared with the schedule tuned there.

A schedule has the stream and launch position of each op, so it applies wherever the same ops are: on another GPU, or in
a capture of the same network at another batch. Times at another batch come from that capture alone; nothing is scaled
between batches.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from gpusim.engine.evaluate import Evaluator
from gpusim.errors import OptionError
from gpusim.formats.trace import Trace
from gpusim.notebook import ShortRepr, html_table, short_name, short_repr
from gpusim.plan.graph import OpGraph
from gpusim.plan.schedule import Schedule
from gpusim.search.budget import Report
from gpusim.search.explore import explore
from gpusim.search.explored import Explored
from gpusim.units import counted, format_ns

#: Maximum number of traces times GPUs: each is explored, and each schedule is simulated on all of them.
MAX_SETTINGS = 64


@dataclass(frozen=True, slots=True, repr=False)
class Setting(ShortRepr):
    """A step on a GPU, and the schedule tuned for it."""

    trace: str
    batch: int
    hardware: str
    calibrated: bool
    """True if the hardware model was calibrated on that GPU."""
    policy: str
    streams: int
    tuned_ns: int
    """Predicted time of the tuned schedule."""
    sequential_ns: int
    """Predicted time of the sequential CUDA graph."""

    @property
    def name(self) -> str:
        """Trace and GPU, for example `googlenet-train-b8 on h200`."""
        return f"{self.trace} on {self.hardware}"


@dataclass(frozen=True, slots=True, repr=False)
class TransferRow(ShortRepr):
    """One schedule on one setting."""

    tuned_for: str
    """Setting for which the schedule was tuned."""
    used_on: str
    """Setting on which it is simulated."""
    time_ns: int
    best_ns: int
    """Time of the fastest of all these schedules there."""

    @property
    def lost_frac(self) -> float:
        """Time over the fastest schedule's time, minus 1."""
        return self.time_ns / self.best_ns - 1.0 if self.best_ns else 0.0


@dataclass(frozen=True, repr=False)
class Transfer:
    """Every schedule on every setting."""

    settings: tuple[Setting, ...]
    rows: tuple[TransferRow, ...]
    """Rows by `used_on`, then `tuned_for`, both in the order of `settings`."""

    @property
    def worst(self) -> TransferRow:
        """Row with the largest loss."""
        return max(self.rows, key=lambda row: row.lost_frac)

    @property
    def sentence(self) -> str:
        """Summary in one sentence."""
        if len(self.settings) == 1:
            return "Only one setting: there is nothing to compare."
        worst = self.worst
        if worst.lost_frac < 0.005:
            return "Every schedule is equally good on every setting: tune once."
        return (
            f"The schedule tuned for {worst.tuned_for} takes {worst.lost_frac:.1%} longer than the best known one on "
            f"{worst.used_on}; this is the largest loss."
        )

    def __repr__(self) -> str:
        worst = self.worst
        size = counted(len(self.settings), "setting")
        text = f"{size}, at most {worst.lost_frac:.1%} lost: {short_name(worst.tuned_for)}"
        return short_repr("Transfer", text)

    def _repr_html_(self) -> str:
        rows = [(row.tuned_for, row.used_on, format_ns(row.time_ns), f"{row.lost_frac:+.1%}") for row in self.rows]
        return html_table(self.sentence, ("tuned for", "used on", "time", "lost"), rows)


def transfer(
    graphs: Sequence[OpGraph],
    *,
    streams: int,
    budget_s: float,
    evaluations: int | None,
    seed: int,
    report: Report = lambda stage, share, best_ns: None,
) -> Transfer:
    """Tune a schedule for each op graph, and simulate each schedule on all of them.

    Raises `OptionError` if two of them do not have the same ops, or there are too many.
    """
    if not 1 <= len(graphs) <= MAX_SETTINGS:
        raise OptionError(f"{len(graphs)} settings of traces and GPUs; there can be 1 to {MAX_SETTINGS}")
    for graph in graphs[1:]:
        check_same_ops(graphs[0].trace, graph.trace)
    settings: list[Setting] = []
    schedules: list[Schedule] = []
    for number, graph in enumerate(graphs):
        report(f"tuning for {graph.trace.name} on {graph.hardware.label}", number / len(graphs), 0)
        explored = explore(graph, streams=streams, budget_s=budget_s, evaluations=evaluations, seed=seed)
        tuned_ns, schedule = _tuned(explored)
        settings.append(
            Setting(
                graph.trace.name,
                graph.trace.model.batch,
                graph.hardware.name,
                graph.hardware.calibrated,
                schedule.policy,
                schedule.stream_count,
                tuned_ns,
                explored.sequential_ns,
            )
        )
        schedules.append(schedule)
    rows: list[TransferRow] = []
    for used, graph in zip(settings, graphs, strict=True):
        evaluator = Evaluator(graph)
        times = [
            evaluator.makespan_ns(moved(schedule, made_for.trace, graph.trace).check(graph))
            for schedule, made_for in zip(schedules, graphs, strict=True)
        ]
        rows += [
            TransferRow(tuned.name, used.name, time_ns, min(times))
            for tuned, time_ns in zip(settings, times, strict=True)
        ]
    return Transfer(tuple(settings), tuple(rows))


def _tuned(explored: Explored) -> tuple[int, Schedule]:
    """Return the fastest schedule with captured kernels on the whole GPU, and its time; variants may lack elsewhere.

    Not the recommended one: a verdict of "not worth it" recommends one stream, which is tuned for nothing.
    """
    plain = [row for row in explored.rows if not row.schedule.variants and not row.schedule.partitions]
    best = min(plain, key=lambda row: row.makespan_ns)
    return best.makespan_ns, best.schedule


def check_same_ops(one: Trace, other: Trace) -> None:
    """Raise `OptionError` unless two traces have ops of the same names and operators."""
    targets = {op.name: op.target for op in one.ops}
    for op in other.ops:
        if targets.get(op.name) != op.target:
            raise OptionError(
                f"{other.name} and {one.name} are not the same step: '{op.name}' ({op.target}) is only in the first; "
                "a schedule fits captures of one network that differ in batch or GPU"
            )
    if len(one.ops) != len(other.ops):
        missing = sorted(set(targets) - {op.name for op in other.ops})
        raise OptionError(f"{one.name} and {other.name} are not the same step: '{missing[0]}' is only in the first")


def moved(schedule: Schedule, made_for: Trace, used_on: Trace) -> Schedule:
    """Return the schedule with op indices of another trace."""
    if made_for is used_on:
        return schedule
    place = {op.name: index for index, op in enumerate(used_on.ops)}
    new = [place[op.name] for op in made_for.ops]
    streams = [0] * len(new)
    for old, index in enumerate(new):
        streams[index] = schedule.streams[old]
    return replace(schedule, order=tuple(new[op] for op in schedule.order), streams=tuple(streams))
