"""Exploration of a step: policies, search, bounds, attribution of the gain, and verdict."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import numpy as np

from gpusim.bounds.bounds import Bounds, bounds
from gpusim.defaults import DEFAULT_BUDGET_S, DEFAULT_SEED, DEFAULT_STREAMS
from gpusim.engine.base import Timeline
from gpusim.engine.compiled.warm import COMPILING, needs_compiling, warm_up
from gpusim.engine.evaluate import Evaluator
from gpusim.engine.reference import ReferenceEngine
from gpusim.errors import MemoryLimitError, PlanError
from gpusim.formats.hardware import HardwareModel
from gpusim.formats.schedule import Partition
from gpusim.formats.trace import Trace
from gpusim.memplan.evaluate import MemoryEvaluator, Outcome
from gpusim.memplan.lowering import schedule_of
from gpusim.memplan.plan import MemoryPlan, write_memory_plan
from gpusim.notebook import ShortRepr, html_table, short_name, short_repr
from gpusim.plan.graph import OpGraph
from gpusim.plan.lower import lower
from gpusim.plan.schedule import Schedule, check_streams, write_schedule
from gpusim.policies.registry import POLICIES, stream_counts
from gpusim.policies.shared.list_scheduling import FastLists
from gpusim.search.budget import NOTHING_FOUND, SEARCH, SEARCHED, Report, search_all
from gpusim.search.memory_actions import MEMORY_ACTIONS, search_memory_actions
from gpusim.search.variants import PartitionsTried, VariantsTried, tried_variants
from gpusim.search.verdict import Verdict, verdict, verdict_rows
from gpusim.units import counted, format_bytes, format_ns
from gpusim.version import __version__

#: A step with more ops is large: only policies with linear time run, on the requested number of streams, and no search,
#: which could not try enough schedules.
LARGE_STEP_OPS = 5_000
#: Maximum share of the budget for compilation at a first start; the rest is for the search in any case.
COMPILING_SHARE = 5 / 6
#: Share of the budget for schedules with memory actions, if policies exceed the memory limit.
MEMORY_SHARE = 0.4
#: Predicted lead over every policy that a searched schedule needs to be recommended. A search also exploits errors of
#: the model: on an H200, nine searched schedules were predicted 3.9 % better than the best policy and were 0.2 %
#: better, the worst 4 % slower (research/2026-11-23-fidelity.md). A trial on the GPU needs no such margin.
SEARCH_MARGIN = 0.06


@dataclass(frozen=True, repr=False)
class Row(ShortRepr):
    """One simulated schedule."""

    policy: str
    streams: int
    makespan_ns: int
    speedup: float
    """Speed-up over the sequential graph."""
    peak_bytes: int
    schedule: Schedule
    plan: MemoryPlan | None = None
    """Memory actions of the schedule, with its streams and order; None if it has none."""


@dataclass(frozen=True, repr=False)
class Attribution(ShortRepr):
    """Attribution of the gain from eager to the best schedule, in ns saved."""

    eager_ns: int | None
    """Eager time measured at capture; None if not measured, or on another GPU."""
    launch_ns: int | None
    """Time saved by launching the same kernels from a CUDA graph."""
    concurrency_ns: int
    """Time saved by streams alone, with ops in recorded order."""
    kernels_ns: int
    """Time saved by other kernels; 0 if the best schedule runs the captured ones."""
    order_ns: int
    """Time saved by a better order and placement on as many streams."""
    memory_ns: int = 0
    """Time saved by memory actions, negative as they cost time; 0 if the best schedule has none."""


@dataclass(frozen=True, repr=False)
class Explored:
    """Result of `gpusim explore`."""

    graph: OpGraph
    rows: tuple[Row, ...]
    best: Row
    sequential_ns: int
    bounds: Bounds
    attribution: Attribution
    verdict: Verdict
    evaluations: int
    interrupted: bool
    seed: int
    variants: VariantsTried | None = None
    """Gain of variants; None if the trace has none."""
    partitions: tuple[PartitionsTried, ...] = ()
    """Gains of the tried splits of the SMs."""
    memory_limit_bytes: int | None = None
    """Memory limit of the best schedule."""
    left_out: tuple[str, ...] = ()
    """Policies left out as too slow on a large step, and the search."""

    @cached_property
    def timeline(self) -> Timeline:
        """Timeline of the recommended schedule, recorded by the reference engine on first use."""
        if self.best.plan is not None:
            evaluator = MemoryEvaluator(self.graph, ReferenceEngine())
            return evaluator.time(evaluator.program(self.best.plan), memory=True)
        return ReferenceEngine().run(lower(self.graph, self.schedule), self.graph.hardware)

    @property
    def trace(self) -> Trace:
        """Trace of the explored step."""
        return self.graph.trace

    @property
    def hardware(self) -> HardwareModel:
        """Hardware model, anchored to the trace."""
        return self.graph.hardware

    @property
    def schedule(self) -> Schedule:
        """Recommended schedule, without its memory actions (`memory_plan` has them)."""
        return self.best.schedule

    @property
    def memory_plan(self) -> MemoryPlan | None:
        """Recommended schedule with its memory actions; None if it has none."""
        return self.best.plan

    def best_of(self, policy: str) -> Row:
        """Return the fastest row of a policy."""
        return min((row for row in self.rows if row.policy == policy), key=lambda row: row.makespan_ns)

    @property
    def allowed(self) -> list[Row]:
        """Return the rows that keep the memory limit."""
        limit = self.memory_limit_bytes
        return [row for row in self.rows if limit is None or row.peak_bytes <= limit]

    @property
    def passed_over(self) -> Row | None:
        """Searched schedule predicted faster than the recommended one; None if there is none."""
        searched = [row for row in self.allowed if row.policy in SEARCHED and row.makespan_ns < self.best.makespan_ns]
        return min(searched, key=lambda row: row.makespan_ns, default=None)

    @property
    def passed_over_reason(self) -> str:
        """Reason why `passed_over` is not recommended, as a clause; empty if there is none."""
        if self.passed_over is None:
            return ""
        if self.best.policy == "sequential":
            return "its gain is within the model's uncertainty"
        return f"its lead is smaller than the model's known optimism ({100 * SEARCH_MARGIN:.0f} %)"

    def with_best(self, row: Row) -> Explored:
        """Return the same exploration with another row as the best, as found by a trial on the GPU."""
        concluded = _conclude(self.graph, row, self.sequential_ns, bounds(self.graph), self.memory_limit_bytes)
        return dataclasses.replace(
            self, best=row, bounds=concluded.bounds, attribution=concluded.attribution, verdict=concluded.verdict
        )

    def save(self, path: str | Path) -> None:
        """Write the recommended schedule as a file for `gpusim.replay` and `gpusim.simulate`. Raises `OutputError`.

        A schedule with memory actions is written as a memory plan.
        """
        if self.best.plan is not None:
            write_memory_plan(self.best.plan, self.trace, Path(path))
            return
        write_schedule(self.schedule, self.trace, Path(path))

    def __repr__(self) -> str:
        where = f"{short_name(self.trace.name)} on {short_name(self.hardware.label)}"
        worth = "worth it" if self.verdict.worth_it else "not worth it"
        return short_repr(
            "Explored", f"{where}: {self.best.speedup:.2f}x with {counted(self.best.streams, 'stream')}, {worth}"
        )

    def _repr_html_(self) -> str:
        rows = [
            (row.label, format_ns(row.time_ns), "measured" if row.measured else "predicted", row.advice)
            for row in self.verdict.rows
        ]
        title = f"{self.trace.name} on {self.hardware.label}: {self.verdict.sentence}"
        return html_table(title, ("way", "time", "", "advice"), rows)


def explore(
    graph: OpGraph,
    *,
    streams: int = DEFAULT_STREAMS,
    budget_s: float = DEFAULT_BUDGET_S,
    seed: int = DEFAULT_SEED,
    evaluations: int | None = None,
    also: Collection[str] = (),
    policies: Collection[str] | None = None,
    splits: Sequence[tuple[Partition, ...]] = (),
    memory_limit_bytes: int | None = None,
    on_row: Callable[[Row], None] = lambda row: None,
    report: Report = lambda stage, share, best_ns: None,
) -> Explored:
    """Search the fastest schedule on up to `streams` streams within about `budget_s` seconds of search.

    The search also ends after `evaluations` schedules, if given: then the same seed gives the same result on any
    machine. Otherwise compilation at a first start counts as search, up to `COMPILING_SHARE` of the budget. Slow
    policies run only if named in `also`, in addition to the budget. `policies` names the only ones to run besides the
    sequential one, slow or not. If the trace has variants, schedules with them are searched as well, and with `splits`,
    schedules on these SM partitions. Schedules above `memory_limit_bytes` are not recommended; if policies exceed it,
    schedules with memory actions are searched for `MEMORY_SHARE` of the budget. `on_row` gets each row when it is
    found.

    For a step with more than `LARGE_STEP_OPS` ops, slower policies and the search are left out.
    Raises `OptionError` for a stream count out of range, or if no schedule keeps the memory limit, also with memory
    actions.
    """
    check_streams(streams)
    if needs_compiling():
        report(COMPILING, 0.0, 0)
    compiling_s = warm_up(graph.hardware)
    if evaluations is None:
        budget_s -= min(compiling_s, COMPILING_SHARE * budget_s)
    evaluator = Evaluator(graph)
    made_by = f"gpusim {__version__}, {graph.hardware.label}, seed {seed}"
    sequential_ns = evaluator.makespan_ns(POLICIES["sequential"](graph, 1))
    rows: list[Row] = []

    def add(policy: str, used: int, schedule: Schedule) -> None:
        evaluated = evaluator.evaluate(schedule)
        stamped = schedule.made(policy, made_by, evaluated.makespan_ns)
        speedup = sequential_ns / evaluated.makespan_ns
        rows.append(Row(policy, used, evaluated.makespan_ns, speedup, evaluated.peak_bytes, stamped))
        on_row(rows[-1])

    bound = bounds(graph)
    large = len(graph) > LARGE_STEP_OPS
    left_out: list[str] = []
    for policy, make in POLICIES.items():
        if policies is None:
            wanted = not make.slow or policy in also
        else:
            wanted = policy == "sequential" or policy in policies
        if not wanted:
            continue
        if large and not make.linear:
            left_out.append(policy)
            continue
        report(f"policy {policy}", 0.0, min((row.makespan_ns for row in rows), default=sequential_ns))
        for count in make.stream_counts((streams,) if large else stream_counts(streams)):
            add(policy, count, make(graph, count))
    limited = memory_limit_bytes is not None and any(row.peak_bytes > memory_limit_bytes for row in rows)
    share = MEMORY_SHARE if limited else 0.0
    whole_s, whole_evaluations = budget_s, evaluations
    if limited:
        budget_s *= 1 - share
        evaluations = None if evaluations is None else max(1, round((1 - share) * evaluations))
    if large:
        left_out.append(SEARCH)
        searched = NOTHING_FOUND
    else:
        schedules = [row.schedule for row in rows]
        limits = (splits, memory_limit_bytes)
        searched = search_all(graph, schedules, streams, budget_s, seed, evaluations, bound, *limits, report)
    for name, refined in searched.rows:
        for schedule in refined.schedules:
            if name == SEARCH or schedule.variants or schedule.partitions:
                add(name, schedule.stream_count, schedule)
    problem, simulated, interrupted = "", searched.evaluations, searched.interrupted
    if limited:
        assert memory_limit_bytes is not None
        fastest = sorted((row for row in rows if not row.schedule.has_variants), key=lambda row: row.makespan_ns)
        try:
            acting = search_memory_actions(
                graph,
                [row.schedule for row in fastest],
                memory_limit_bytes,
                streams,
                budget_s=0.0 if interrupted else share * whole_s,
                seed=seed,
                evaluations=None if whole_evaluations is None else max(1, round(share * whole_evaluations)),
                progress=lambda done, best_ns: report(MEMORY_ACTIONS, done, round(best_ns)),
            )
        except PlanError as cause:
            problem = str(cause)
        else:
            simulated, interrupted = simulated + acting.evaluations, interrupted or acting.interrupted
            rows.append(_with_actions(acting.outcome, sequential_ns, made_by))
            on_row(rows[-1])
    best = _choose_within(graph, rows, memory_limit_bytes, sequential_ns, problem)
    concluded = _conclude(graph, best, sequential_ns, bound, memory_limit_bytes)
    return Explored(
        graph=graph,
        rows=tuple(rows),
        best=best,
        sequential_ns=sequential_ns,
        bounds=concluded.bounds,
        attribution=concluded.attribution,
        verdict=concluded.verdict,
        evaluations=simulated,
        interrupted=interrupted,
        seed=seed,
        variants=None if searched.variants is None else tried_variants(evaluator, searched.plain, searched.variants),
        partitions=tuple(
            PartitionsTried(
                each.schedules[0].partitions,
                evaluator.makespan_ns(each.schedules[0]),
                evaluator.makespan_ns(searched.plain.schedules[0]),
            )
            for each in searched.partitions
            if each.schedules
        ),
        memory_limit_bytes=memory_limit_bytes,
        left_out=tuple(left_out),
    )


@dataclass(frozen=True, slots=True)
class _Conclusion:
    """Values that depend on the choice of the best row."""

    bounds: Bounds
    attribution: Attribution
    verdict: Verdict


def _conclude(
    graph: OpGraph, best: Row, sequential_ns: int, bound: Bounds, memory_limit_bytes: int | None
) -> _Conclusion:
    """Return attribution and verdict for the best row; `bound` holds for the captured kernels."""
    trace, hardware, schedule = graph.trace, graph.hardware, best.schedule
    if schedule.variants:
        bound = bounds(graph.choosing(schedule.variants))
    if schedule.partitions:  # each has its own oldest kernel, unknown to that bound
        bound = dataclasses.replace(bound, contention_ns=0)
    streams = schedule.stream_count if best.plan else best.streams
    program_ns = min(_recorded_order_ns(graph, streams), sequential_ns)
    chosen_ns = _recorded_order_ns(graph.choosing(schedule.variants), streams) if schedule.variants else None
    kernels_ns = 0 if chosen_ns is None else program_ns - chosen_ns
    plain_ns = Evaluator(graph).makespan_ns(schedule) if best.plan else best.makespan_ns
    truth = trace.ground_truth if trace.provenance.gpu.name == hardware.gpu else None
    return _Conclusion(
        bounds=bound,
        attribution=Attribution(
            eager_ns=truth.eager.median_ns if truth else None,
            launch_ns=truth.eager.median_ns - sequential_ns if truth else None,
            concurrency_ns=sequential_ns - program_ns,
            kernels_ns=kernels_ns,
            order_ns=program_ns - kernels_ns - plain_ns,
            memory_ns=plain_ns - best.makespan_ns,
        ),
        verdict=verdict(
            hardware,
            sequential_ns,
            best.makespan_ns,
            best.policy,
            best.streams,
            bound,
            graph.may_lose_cache,
            schedule.has_variants,
            verdict_rows(
                graph,
                schedule,
                sequential_ns,
                best.makespan_ns,
                truth.eager.median_ns if truth else None,
                best.streams if best.plan else None,
            ),
            estimated=bool(trace.provenance.estimated),
            small_products=graph.small_products,
            within_bytes=memory_limit_bytes if best.plan else None,
        ),
    )


def _with_actions(found: Outcome, sequential_ns: int, made_by: str) -> Row:
    """Return the row of a schedule with memory actions."""
    plan = found.plan.made(MEMORY_ACTIONS, made_by, found.step_ns, found.peak_bytes)
    schedule = schedule_of(found.program).made(MEMORY_ACTIONS, made_by, found.step_ns)
    speedup = sequential_ns / found.step_ns
    return Row(MEMORY_ACTIONS, plan.streams, found.step_ns, speedup, found.peak_bytes, schedule, plan)


def _choose_within(
    graph: OpGraph, rows: list[Row], memory_limit_bytes: int | None, sequential_ns: int, problem: str
) -> Row:
    """Return the row to recommend within the limit: with memory actions if no other keeps it, or by a clear lead.

    Raises `MemoryLimitError` if no row keeps it; `problem` says why no memory actions do.
    """
    kept = [row for row in rows if memory_limit_bytes is None or row.peak_bytes <= memory_limit_bytes]
    if not kept:
        limit = memory_limit_bytes or 0
        least = format_bytes(min(row.peak_bytes for row in rows))
        first = f"memory limit {format_bytes(limit)}: the least that any schedule found needs is {least}"
        raise MemoryLimitError("; ".join(filter(None, (first, problem))))
    plain, acting = [row for row in kept if row.plan is None], [row for row in kept if row.plan is not None]
    if not plain:
        return acting[0]
    best = choose(plain, graph.hardware, sequential_ns, graph.may_lose_cache, graph.small_products)
    ahead = [row for row in acting if row.makespan_ns < best.makespan_ns * (1 - SEARCH_MARGIN)]
    return ahead[0] if ahead else best


def _recorded_order_ns(graph: OpGraph, streams: int) -> int:
    """Return the predicted time with ops in recorded order, each on the stream that becomes free first."""
    program = FastLists(graph).schedule(streams, -np.arange(len(graph), dtype=np.float64), 0.0).schedule
    return Evaluator(graph).makespan_ns(program)


def choose(
    rows: list[Row],
    hardware: HardwareModel,
    sequential_ns: int,
    may_lose_cache: bool = False,
    small_products: float = 0.0,
) -> Row:
    """Return the row to recommend: the fastest policy, or a searched schedule predicted clearly faster.

    The sequential row stays if no gain exceeds the model's uncertainty.
    """
    fastest = min(rows, key=lambda row: (row.policy in SEARCHED, row.makespan_ns, row.streams))
    searched = min((row for row in rows if row.policy in SEARCHED), key=lambda row: row.makespan_ns, default=fastest)
    if searched.makespan_ns < fastest.makespan_ns * (1 - SEARCH_MARGIN):
        fastest = searched
    late = 1 + hardware.uncertainty.late_frac(
        fastest.streams, may_lose_cache, fastest.schedule.has_variants, small_products
    )
    if fastest.makespan_ns * (1 + hardware.uncertainty.schedule_frac) * late > sequential_ns:
        return next((row for row in rows if row.policy == "sequential"), fastest)
    return fastest
