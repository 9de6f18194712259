"""Explore: every policy, the search, the bounds, the attribution of the gain, the verdict."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Collection
from dataclasses import dataclass

import gpusim
from gpusim.engine.base import Timeline
from gpusim.engine.batch import BatchEngine
from gpusim.engine.reference import ReferenceEngine
from gpusim.hardware.model import HardwareModel
from gpusim.plan.graph import OpGraph
from gpusim.plan.lower import lower
from gpusim.plan.schedule import Schedule, check_streams, make_schedule
from gpusim.policies.base import Assignment
from gpusim.policies.list_scheduling import list_schedule
from gpusim.policies.registry import POLICIES
from gpusim.search.bounds import Bounds, bounds
from gpusim.search.local import local_search
from gpusim.search.refine import Refined, refine
from gpusim.search.verdict import Verdict, verdict
from gpusim.trace.schema import Trace

DEFAULT_STREAMS = 8
DEFAULT_BUDGET_S = 9.0
MAX_BUDGET_S = 86_400.0
SEARCH = "search"
#: How much better than every policy a searched schedule must be predicted to be. A search finds what the model
#: overrates too: on an H200, nine searched schedules were predicted 3.9 % better than the best policy and came out
#: 0.2 % better, the worst 4 % slower (docs/fidelity.md). Trying the best few on the GPU needs no such margin.
SEARCH_MARGIN = 0.06

#: Share of the budget that goes to the search over list schedules; the rest refines the best schedules found.
LISTS_SHARE = 0.2

Report = Callable[[str, float, int], None]
"""Progress of long work: what is going on, the share done in [0, 1], the best makespan so far in ns."""


@dataclass(frozen=True)
class Row:
    """One schedule that was simulated."""

    policy: str
    streams: int
    makespan_ns: int
    speedup: float
    """Over the sequential graph."""
    peak_bytes: int
    assignment: Assignment


@dataclass(frozen=True)
class Attribution:
    """Where the gain from eager to the best schedule comes from, in ns saved."""

    eager_ns: int | None
    """Measured with the trace; None where it was not, or on another GPU."""
    launch_ns: int | None
    """Saved by launching the same kernels from a CUDA graph."""
    concurrency_ns: int
    """Saved by streams alone, ops in recorded order."""
    order_ns: int
    """Saved by a better order and placement on as many streams."""


@dataclass(frozen=True)
class Explored:
    """All that `gpusim explore` found."""

    trace: Trace
    hardware: HardwareModel
    rows: tuple[Row, ...]
    best: Row
    sequential_ns: int
    bounds: Bounds
    attribution: Attribution
    verdict: Verdict
    schedule: Schedule
    timeline: Timeline
    evaluations: int
    interrupted: bool
    seed: int

    def best_of(self, policy: str) -> Row:
        """The fastest row of a policy."""
        return min((row for row in self.rows if row.policy == policy), key=lambda row: row.makespan_ns)


def explore(
    trace: Trace,
    hardware: HardwareModel,
    *,
    streams: int = DEFAULT_STREAMS,
    budget_s: float = DEFAULT_BUDGET_S,
    seed: int = 0,
    evaluations: int | None = None,
    also: Collection[str] = (),
    policies: Collection[str] | None = None,
    on_row: Callable[[Row], None] = lambda row: None,
    report: Report = lambda what, share, best_ns: None,
) -> Explored:
    """Look for the fastest schedule on up to `streams` streams within about `budget_s` seconds of search.

    The search also ends after `evaluations` schedules, where given: then the same seed finds the same on any machine.
    Policies marked slow run only where `also` names them, and are on top of the budget. `policies` names the only ones
    to run besides the sequential one, slow or not. `on_row` gets each row as it is found.
    Raises `OptionError` for a stream count out of range, `PlanError` for a kernel the GPU cannot run.
    """
    check_streams(streams)
    graph = OpGraph.build(trace, hardware)
    engine = BatchEngine(graph)

    def simulate(assignment: Assignment) -> tuple[int, int]:
        """Makespan and peak memory."""
        found = engine.evaluate([assignment.order], [assignment.streams], peak=True, threads=1)
        assert found.peak_bytes is not None
        return int(found.makespan_ns[0]), int(found.peak_bytes[0])

    sequential_ns, _ = simulate(POLICIES["sequential"](graph, 1))
    rows: list[Row] = []

    def add(policy: str, used: int, assignment: Assignment) -> None:
        makespan_ns, peak_bytes = simulate(assignment)
        rows.append(Row(policy, used, makespan_ns, sequential_ns / makespan_ns, peak_bytes, assignment))
        on_row(rows[-1])

    bound = bounds(graph)
    for policy, make in POLICIES.items():
        if policies is None:
            wanted = not make.slow or policy in also
        else:
            wanted = policy == "sequential" or policy in policies
        if not wanted:
            continue
        report(f"policy {policy}", 0.0, min((row.makespan_ns for row in rows), default=sequential_ns))
        for count in make.stream_counts(stream_counts(streams)):
            add(policy, count, make(graph, count))
    found = _search(graph, [row.assignment for row in rows], streams, budget_s, seed, evaluations, bound, report)
    for assignment in found.assignments:
        add(SEARCH, max(assignment.streams) + 1, assignment)
    best = choose(rows, hardware, sequential_ns)
    program = list_schedule(graph, best.streams, [-float(op) for op in range(len(graph))], 0.0).assignment
    program_ns = min(simulate(program)[0], sequential_ns)
    truth = trace.ground_truth if trace.provenance.gpu.name == hardware.gpu else None
    attribution = Attribution(
        eager_ns=truth.eager.median_ns if truth else None,
        launch_ns=truth.eager.median_ns - sequential_ns if truth else None,
        concurrency_ns=sequential_ns - program_ns,
        order_ns=program_ns - best.makespan_ns,
    )
    made_by = f"gpusim {gpusim.__version__}, {hardware.label}, seed {seed}"
    schedule = make_schedule(
        trace,
        best.assignment.order,
        best.assignment.streams,
        policy=best.policy,
        made_by=made_by,
        predicted_ns=best.makespan_ns,
    )
    return Explored(
        trace=trace,
        hardware=hardware,
        rows=tuple(rows),
        best=best,
        sequential_ns=sequential_ns,
        bounds=bound,
        attribution=attribution,
        verdict=verdict(hardware, sequential_ns, best.makespan_ns, best.policy, best.streams, bound),
        schedule=schedule,
        timeline=ReferenceEngine().run(lower(graph, best.assignment.order, best.assignment.streams), graph.hardware),
        evaluations=found.evaluations,
        interrupted=found.interrupted,
        seed=seed,
    )


def _search(
    graph: OpGraph,
    made: list[Assignment],
    streams: int,
    budget_s: float,
    seed: int,
    evaluations: int | None,
    bound: Bounds,
    report: Report,
) -> Refined:
    """Search over list schedules first, then over changes of the best of them and of what the policies `made`."""
    lists = local_search(
        graph,
        streams,
        budget_s=LISTS_SHARE * budget_s,
        seed=seed,
        evaluations=None if evaluations is None else max(1, round(LISTS_SHARE * evaluations)),
        lower_bound_ns=bound.largest[0],
        progress=lambda share, best_ns: report("search", LISTS_SHARE * share, round(best_ns)),
    )
    found = refine(
        graph,
        [*made, *(candidate.assignment for candidate in lists.candidates)],
        streams,
        budget_s=0.0 if lists.interrupted else (1 - LISTS_SHARE) * budget_s,
        seed=seed,
        evaluations=None if evaluations is None else max(1, evaluations - lists.evaluations),
        lower_bound_ns=bound.largest[0],
        progress=lambda share, best_ns: report("search", LISTS_SHARE + (1 - LISTS_SHARE) * share, round(best_ns)),
    )
    return dataclasses.replace(
        found,
        evaluations=found.evaluations + lists.evaluations,
        interrupted=found.interrupted or lists.interrupted,
    )


def choose(rows: list[Row], hardware: HardwareModel, sequential_ns: int) -> Row:
    """The row to recommend: the fastest policy, or a searched schedule that is predicted to win clearly over it.

    The sequential row stays where nothing is predicted to win beyond the model's uncertainty.
    """
    fastest = min((row for row in rows if row.policy != SEARCH), key=lambda row: (row.makespan_ns, row.streams))
    searched = min((row for row in rows if row.policy == SEARCH), key=lambda row: row.makespan_ns, default=fastest)
    if searched.makespan_ns < fastest.makespan_ns * (1 - SEARCH_MARGIN):
        fastest = searched
    if fastest.makespan_ns * (1 + hardware.uncertainty.schedule_frac) > sequential_ns:
        return next(row for row in rows if row.policy == "sequential")
    return fastest


def stream_counts(limit: int) -> tuple[int, ...]:
    """Stream counts to try for each policy: all small ones, then powers of two, and the limit."""
    return tuple(sorted({n for n in (2, 3, 4, 6, 8, 16, 32, 64, 128) if n < limit} | {limit}))
