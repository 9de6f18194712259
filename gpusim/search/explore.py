"""Exploration of a step: policies, search, bounds, attribution of the gain, and verdict."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence

from gpusim.bounds.bounds import bounds
from gpusim.defaults import DEFAULT_BUDGET_S, DEFAULT_SEED, DEFAULT_STREAMS, MEMORY_ACTIONS, SEARCH
from gpusim.engine.compiled.warm import COMPILING, needs_compiling, warm_up
from gpusim.engine.evaluate import Evaluator
from gpusim.errors import MemoryLimitError, PlanError
from gpusim.formats.hardware import HardwareModel
from gpusim.formats.schedule import Partition
from gpusim.memplan.lowering import schedule_of
from gpusim.plan.graph import OpGraph
from gpusim.plan.schedule import Schedule, check_streams
from gpusim.plan.sync import StepSync
from gpusim.policies.registry import POLICIES, stream_counts
from gpusim.search.budget import NOTHING_FOUND, POLICIES_WITH_VARIANTS, WITH_SEARCH, Report, search_all
from gpusim.search.events import events_of
from gpusim.search.explored import Explored, Row, conclude
from gpusim.search.memory_actions import ACTIONS_LEAD, Acting, search_memory_actions
from gpusim.search.variants import PartitionsTried, policies_on_fastest, tried_variants
from gpusim.units import format_bytes
from gpusim.version import __version__

#: A step with more ops is large: only policies with linear time run, on the requested number of streams, and no search,
#: which could not try enough schedules.
LARGE_STEP_OPS = 5_000
#: Maximum share of the budget for compilation at a first start; the rest is for the search in any case.
COMPILING_SHARE = 5 / 6
#: Share of the budget for schedules with memory actions, if policies exceed the memory limit.
MEMORY_SHARE = 0.4


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

    The search also ends after `evaluations` simulations, if given: then the same seed gives the same result on any
    machine. Each part of the search ends with the batch that reaches its share of them, and always tries its seeds.
    Otherwise compilation at a first start counts as search, up to `COMPILING_SHARE` of the budget. Slow policies run
    only if named in `also`, in addition to the budget. `policies` names the only ones to run besides the sequential
    one, slow or not. If the trace has variants, schedules with them are searched as well, and the same policies run on
    those that are fastest alone; with `splits`, schedules on these SM partitions are searched, too. Schedules above
    `memory_limit_bytes` are not recommended; if policies exceed it, schedules with memory actions are searched for
    `MEMORY_SHARE` of the budget. `on_row` gets each row when it is found.

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
    step_sync = StepSync.of(graph.trace, graph.preds, {})

    def add(policy: str, used: int, schedule: Schedule, name: str = "") -> None:
        evaluated = evaluator.evaluate(schedule)
        stamped = schedule.made(name or policy, made_by, evaluated.makespan_ns)
        speedup = sequential_ns / evaluated.makespan_ns
        events = events_of(graph, schedule, step_sync)
        rows.append(Row(policy, used, evaluated.makespan_ns, speedup, evaluated.peak_bytes, stamped, events=events))
        on_row(rows[-1])

    bound = bounds(graph)
    large = len(graph) > LARGE_STEP_OPS
    left_out: list[str] = []
    ran: list[str] = []
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
        ran.append(policy)
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
    if searched.variants is not None and not searched.interrupted:
        for schedule in policies_on_fastest(graph, streams, ran):
            add(POLICIES_WITH_VARIANTS, schedule.stream_count, schedule, f"{schedule.policy} with variants")
    problem, simulated, interrupted = "", searched.evaluations, searched.interrupted
    if limited:
        assert memory_limit_bytes is not None
        captured = sorted((row for row in rows if not row.schedule.has_variants), key=lambda row: row.compared_ns)
        try:
            acting = search_memory_actions(
                graph,
                [row.schedule for row in captured],
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
            rows.append(_with_actions(acting, sequential_ns, made_by))
            on_row(rows[-1])
    best = _choose_within(graph, rows, memory_limit_bytes, sequential_ns, problem)
    concluded = conclude(graph, best, sequential_ns, bound, memory_limit_bytes)
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


def _with_actions(acting: Acting, sequential_ns: int, made_by: str) -> Row:
    """Return the row of a schedule with memory actions."""
    outcome = acting.outcome
    plan = outcome.plan.made(MEMORY_ACTIONS, made_by, outcome.step_ns, outcome.peak_bytes)
    schedule = schedule_of(outcome.program).made(MEMORY_ACTIONS, made_by, outcome.step_ns)
    speedup = sequential_ns / outcome.step_ns
    return Row(
        MEMORY_ACTIONS, plan.streams, outcome.step_ns, speedup, outcome.peak_bytes, schedule, plan, acting.events
    )


def _choose_within(
    graph: OpGraph, rows: list[Row], memory_limit_bytes: int | None, sequential_ns: int, problem: str
) -> Row:
    """Return the row to recommend within the limit: with memory actions if no other keeps it, or by `ACTIONS_LEAD`.

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
    best = choose(plain, graph.hardware, sequential_ns, graph.less_known)
    ahead = [row for row in acting if row.compared_ns < best.compared_ns * (1 - ACTIONS_LEAD)]
    return ahead[0] if ahead else best


def choose(rows: list[Row], hardware: HardwareModel, sequential_ns: int, less_known: bool = False) -> Row:
    """Return the row to recommend: that whose interval ends first, as rows are compared.

    So a searched schedule, or one with variants, must be ahead by as much as it may take longer than others, and the
    sequential row stays if no gain exceeds the model's uncertainty.
    """

    def latest_ns(row: Row) -> float:
        _, more = hardware.uncertainty.margins(
            row.makespan_ns,
            sequential_ns,
            row.streams,
            other_kernels=row.schedule.has_variants,
            searched=row.schedule.searched,
            less_known=less_known,
        )
        return row.compared_ns * (1 + more)

    return min(rows, key=lambda row: (latest_ns(row), row.policy in WITH_SEARCH, row.streams))
