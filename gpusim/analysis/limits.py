"""Limits of inter-op parallelism: the parallelism of a step, and the limits that keep a GPU from using it.

This answers the question of Pourghassemi et al., "On the Limits of Parallelizing CNNs on GPUs" (SPAA 2020), for one
captured step. The dependencies determine the parallelism: in the ASAP schedule, every op starts when its last
predecessor ends, on a GPU without limits. Losses follow from a chain of what-if simulations: the first has no limits,
each next one switches one more limit on, and the last is the best list schedule under all limits. The loss of a limit
is the time that it adds, so losses add up exactly. The loss of DRAM bandwidth includes that of L2 cache misses. A loss
depends on the order in which limits are switched on, so the order of `LIMITS` is part of the definition. A negative
loss is a scheduling anomaly (Graham, "Bounds on multiprocessing timing anomalies", 1969): the schedule found under the
stricter rules was better.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Final

from gpusim.analysis.gap import Gap, gap_to_bound
from gpusim.analysis.relaxed import DEPENDENCIES, LIMITS, SMS, STREAMS, relaxed
from gpusim.bounds.bounds import bounds
from gpusim.bounds.width import MAX_EXACT_OPS, width
from gpusim.defaults import DEFAULT_ENGINE, DEFAULT_STREAMS
from gpusim.engine.base import Engine, Timeline, engine_by_name
from gpusim.engine.evaluate import Evaluator
from gpusim.notebook import ShortRepr, html_table, short_name, short_repr
from gpusim.plan.graph import OpGraph
from gpusim.plan.lower import lower
from gpusim.plan.schedule import Schedule, check_streams
from gpusim.policies.registry import stream_counts
from gpusim.policies.sequential import sequential
from gpusim.policies.shared.list_scheduling import FastLists
from gpusim.search.budget import Report
from gpusim.search.priorities import SHARES
from gpusim.units import format_ns

STEP: Final = "step"
"""Name of the scope with all phases."""

#: Engine runs per what-if. The list scheduler's own simulation, in which delayed ops start later than in an engine,
#: selects them from all candidates.
_SHORTLIST = 3

Steps = tuple[tuple[int, int], ...]
"""A step function: (time in ns, value from that time on)."""


@dataclass(frozen=True, slots=True, repr=False)
class Loss(ShortRepr):
    """One what-if: makespan with this limit and all earlier ones switched on, and the time that it added."""

    limit: str
    makespan_ns: int
    loss_ns: int


@dataclass(frozen=True, slots=True, repr=False)
class Parallelism(ShortRepr):
    """Inter-op parallelism of a scope in its ASAP schedule, with kernels at their time alone and no costs."""

    work_ns: int
    """T1: the sum of all kernel times."""
    span_ns: int
    """T-infinity: the longest chain of dependent kernels."""
    running: Steps
    """Number of concurrent ops over time."""
    by_phase: tuple[tuple[str, Steps], ...]
    """Number of concurrent ops of each phase, all at the same times."""
    width: int
    """Maximum number of ops of which none depends on another, directly or not."""
    width_exact: bool
    """False above `MAX_EXACT_OPS` ops: `width` is then `maximum`, a lower bound."""

    @property
    def mean(self) -> float:
        """T1 over T-infinity: the time average of `running`, and the largest gain with any number of processors."""
        return self.work_ns / self.span_ns if self.span_ns else 0.0

    @property
    def maximum(self) -> int:
        """Maximum number of concurrent ops in the ASAP schedule."""
        return max((count for _, count in self.running), default=0)


@dataclass(frozen=True, slots=True, repr=False)
class Scope(ShortRepr):
    """Limits of one phase, or of the whole step."""

    name: str
    ops: int
    """Number of ops with kernels."""
    kernels: int
    parallelism: Parallelism
    sequential_ns: int
    """Predicted time of the sequential graph of these kernels."""
    unlimited_ns: int
    """Time of the longest op: the makespan without dependencies and limits of the GPU."""
    losses: tuple[Loss, ...]
    """Losses in the order of `LIMITS`."""
    streams: int
    """Number of streams of the best list schedule."""
    gap: Gap
    """Gap between the largest lower bound and that schedule."""

    @property
    def best_ns(self) -> int:
        """Time of the best list schedule under all limits."""
        return self.losses[-1].makespan_ns if self.losses else self.unlimited_ns

    @property
    def speedup(self) -> float:
        """Speed-up of the best list schedule over the sequential graph."""
        return self.sequential_ns / self.best_ns if self.best_ns else 1.0

    @property
    def potential_ns(self) -> int:
        """Possible gain: time of the sequential graph minus the longest op."""
        return self.sequential_ns - self.unlimited_ns

    @property
    def won_ns(self) -> int:
        """Part of the possible gain that the best list schedule reaches; the rest are losses."""
        return self.sequential_ns - self.best_ns

    def share(self, time_ns: int) -> float:
        """Return a time as share of the possible gain, in [0, 1] unless there was an anomaly."""
        return time_ns / self.potential_ns if self.potential_ns else 0.0


@dataclass(frozen=True, slots=True, repr=False)
class Limits:
    """Limits of a step by scope: its phases if there are several, and last the whole step."""

    trace: str
    hardware: str
    calibrated: bool
    streams: int
    """Maximum number of streams of the best schedule."""
    scopes: tuple[Scope, ...]

    def __repr__(self) -> str:
        step = self.scopes[-1]
        text = f"{short_name(self.trace)} on {short_name(self.hardware)}: {step.speedup:.2f}x"
        return short_repr("Limits", f"{text} at best, parallelism {step.parallelism.mean:.1f}")

    def _repr_html_(self) -> str:
        step = self.scopes[-1]
        rows = [(loss.limit, format_ns(loss.loss_ns), f"{step.share(loss.loss_ns):.0%}") for loss in step.losses]
        title = f"Limits of {self.trace} on {self.hardware}: time lost to each, and share of what there is to win"
        return html_table(title, ("limit", "lost", "share"), rows)


def limits(
    graph: OpGraph,
    *,
    streams: int = DEFAULT_STREAMS,
    engine: Engine | None = None,
    report: Report = lambda stage, share, best_ns: None,
) -> Limits:
    """Return the inter-op parallelism of a step and its losses, for each phase and for the whole step.

    Raises `OptionError` for a stream count out of range.
    """
    check_streams(streams)
    trace, hardware = graph.trace, graph.hardware
    runs = engine or engine_by_name(DEFAULT_ENGINE)
    phases = list(dict.fromkeys(op.phase for op, tasks in zip(trace.ops, graph.tasks, strict=True) if tasks))
    scopes: list[Scope] = []
    for name in [*phases, STEP] if len(phases) > 1 else [STEP]:
        report(f"limits of {name}", len(scopes) / (len(phases) + 1), 0)
        scopes.append(scope_limits(name, graph if name == STEP else phase_graph(graph, name), streams, runs))
    return Limits(trace.name, hardware.label, hardware.calibrated, streams, tuple(scopes))


def phase_graph(graph: OpGraph, phase: str) -> OpGraph:
    """Return the op graph of one phase: ops outside it take no time and have no dependents."""
    ops = graph.trace.ops
    outside = [bool(graph.tasks[op]) and ops[op].phase != phase for op in range(len(graph))]
    return replace(
        graph,
        preds=tuple(() if out else preds for out, preds in zip(outside, graph.preds, strict=True)),
        tasks=tuple(() if out else tasks for out, tasks in zip(outside, graph.tasks, strict=True)),
    )


def scope_limits(name: str, graph: OpGraph, streams: int, engine: Engine) -> Scope:
    """Return parallelism and losses of an op graph on up to `streams` streams."""
    free = relaxed(graph, ())
    apart = _apart(graph)
    unlimited_ns = Evaluator(free.without_dependencies(), engine).makespan_ns(apart)
    chained = relaxed(graph, (DEPENDENCIES,))
    asap = engine.run(lower(chained, apart, memory=False), chained.hardware)
    curve = parallelism(graph, asap)
    # From the strictest what-if to the loosest: the best schedule under more limits is a candidate under fewer.
    best: dict[str, tuple[int, Schedule]] = {}
    alone = carried = sequential(graph, 1)
    for place in reversed(range(1, len(LIMITS))):
        limit = LIMITS[place]
        counts = stream_counts(streams) if limit == STREAMS else (curve.width,)
        shares = SHARES if place >= LIMITS.index(SMS) else (0.0,)  # without that limit every op finds room
        best[limit] = _best(relaxed(graph, LIMITS[: place + 1]), counts, shares, carried, engine)
        carried = best[limit][1]
    times = {DEPENDENCIES: asap.makespan_ns, **{limit: best[limit][0] for limit in LIMITS[1:]}}
    losses: list[Loss] = []
    for limit in LIMITS:
        before = losses[-1].makespan_ns if losses else unlimited_ns
        losses.append(Loss(limit, times[limit], times[limit] - before))
    used = {stream for stream, tasks in zip(best[STREAMS][1].streams, graph.tasks, strict=True) if tasks}
    return Scope(
        name=name,
        ops=sum(bool(tasks) for tasks in graph.tasks),
        kernels=sum(len(tasks) for tasks in graph.tasks),
        parallelism=curve,
        sequential_ns=Evaluator(graph, engine).makespan_ns(alone),
        unlimited_ns=unlimited_ns,
        losses=tuple(losses),
        streams=len(used),
        gap=gap_to_bound(graph, best[STREAMS][1], bounds(graph), engine),
    )


def _apart(graph: OpGraph) -> Schedule:
    """Return the schedule with every op on its own stream, in recorded order."""
    ops = tuple(range(len(graph)))
    return Schedule(order=ops, streams=ops)


def _best(
    graph: OpGraph, counts: Iterable[int], shares: Iterable[float], carried: Schedule, engine: Engine
) -> tuple[int, Schedule]:
    """Return makespan and schedule of the best list schedule on any of these stream counts, or of `carried`.

    Priorities are bottom levels under the limits of `graph`; `shares` are shares of its blocks that an op waits for.
    """
    settings = [(count, share) for count in counts for share in shares if count > 0]
    chosen = [carried]
    if settings:
        lists = FastLists(graph)
        streams, waits = zip(*settings, strict=True)
        makespans = lists.makespans([graph.bottom_ns] * len(settings), streams, waits)
        distinct: dict[float, tuple[int, float]] = {}  # equal makespans mean the same schedule
        for makespan_ns, setting in sorted(zip(makespans.tolist(), settings, strict=True)):
            distinct.setdefault(makespan_ns, setting)
        shortlist = list(distinct.values())[:_SHORTLIST]
        chosen += [lists.schedule(count, graph.bottom_ns, share).schedule for count, share in shortlist]
    evaluator = Evaluator(graph, engine)
    times = [evaluator.makespan_ns(schedule) for schedule in chosen]
    fastest = min(range(len(chosen)), key=times.__getitem__)
    return times[fastest], chosen[fastest]


def parallelism(graph: OpGraph, asap: Timeline) -> Parallelism:
    """Return the parallelism of an op graph from its ASAP timeline."""
    spans: dict[int, tuple[int, int]] = {}
    for task, start, end in zip(asap.plan.tasks, asap.start_ns, asap.end_ns, strict=True):
        first, last = spans.get(task.op, (start, end))
        spans[task.op] = min(first, start), max(last, end)
    ops = graph.trace.ops
    phases = list(dict.fromkeys(ops[op].phase for op in sorted(spans)))
    changes = {phase: _changes([span for op, span in spans.items() if ops[op].phase == phase]) for phase in phases}
    times = sorted({time for change in changes.values() for time in change})
    by_phase = tuple((phase, _sums(changes[phase], times)) for phase in phases)
    running = tuple((time, sum(steps[number][1] for _, steps in by_phase)) for number, time in enumerate(times))
    preds = graph.work_preds
    exact = len(preds) <= MAX_EXACT_OPS
    place = {op: number for number, op in enumerate(preds)}
    return Parallelism(
        work_ns=round(sum(task.dur_ns for tasks in graph.tasks for task in tasks)),
        span_ns=asap.makespan_ns,
        running=running,
        by_phase=by_phase,
        width=width([[place[p] for p in preds[op]] for op in preds])
        if exact
        else max((count for _, count in running), default=0),
        width_exact=exact,
    )


def _changes(spans: Iterable[tuple[int, int]]) -> dict[int, int]:
    """Return the changes of the number of half-open intervals that contain a time, by time."""
    changes: dict[int, int] = {}
    for start, end in spans:
        changes[start] = changes.get(start, 0) + 1
        changes[end] = changes.get(end, 0) - 1
    return {time: change for time, change in changes.items() if change}


def _sums(changes: Mapping[int, int], times: Iterable[int]) -> Steps:
    """Return the step function with these changes, at these times."""
    level, steps = 0, []
    for time in times:
        level += changes.get(time, 0)
        steps.append((time, level))
    return tuple(steps)
