"""OR-tools against the search and the bounds: a table in research/2026-11-23-search.md.

    pip install ortools && python benchmarks/optimiser.py [--seconds 20] [-o research/2026-11-23-search.md]

Two questions, for a few steps on one GPU whose SMs are shared out as one pool (`gpusim.engine.pool`):

1. *Schedules.* CP-SAT solves the step as a scheduling problem: precedences with gaps, SM resources as cumulative
   constraints, and contention as two modes of each op: it runs at its time alone on a machine of which there is one
   (the oldest), or takes 1 + a x cover times as long. It is given the best quick policy's starts as a hint. Its own
   become priorities of the list scheduler, whose schedule is simulated. The plain search gets as much time, and a third
   run gives half of it to each.
2. *Bounds.* Kernels share SMs in parts, so fixed times and demands are no relaxation of the engine's rules: the optimum
   of that problem is not a bound. A linear relaxation remains valid: chains of kernels, each partly the oldest, whose
   slow-down and area are shared out (GLOP). It is compared with `gpusim.bounds.bounds`.

ortools is not a dependency of gpusim; only this comparison needs it.
"""

from __future__ import annotations

import argparse
import os
import time
from dataclasses import dataclass
from pathlib import Path

from ortools.linear_solver import pywraplp
from ortools.sat.python import cp_model
from page import fill

from gpusim.bounds.bounds import bounds
from gpusim.engine.fast import FastEngine
from gpusim.formats.hardware import load_hardware
from gpusim.plan.graph import OpGraph
from gpusim.plan.lower import lower
from gpusim.plan.schedule import Schedule
from gpusim.policies.ios import one_pool
from gpusim.policies.registry import POLICIES, stream_counts
from gpusim.policies.shared.list_scheduling import FastLists
from gpusim.search.explore import DEFAULT_STREAMS
from gpusim.search.neighbourhood import refine
from gpusim.search.priorities import SHARES, local_search
from gpusim.trace.store import load_trace

TRACES = (
    "squeezenet1_1-infer-b1",
    "googlenet-infer-b1",
    "inception_v3-infer-b1",
    "googlenet-train-b8",
    "resnet50-train-b8",
)
HARDWARE = "h200"
#: Units of a resource; demands are rounded up to these.
CAPACITY = 1000
SEED = 0


@dataclass(frozen=True)
class Solved:
    """CP-SAT's solution of a step."""

    status: str
    objective_ns: float
    """Makespan in CP-SAT's own model, in ns."""
    schedule: Schedule
    """Best list schedule derived from its start times."""


def solve(graph: OpGraph, seconds: float, hint: Schedule) -> Solved | None:
    """Solve the step as a scheduling problem, from the starts of `hint`; None where CP-SAT finds no solution in
    time.
    """
    model = cp_model.CpModel()
    preds = graph.work_preds
    slowdown = graph.hardware.contention.younger_slowdown
    horizon = round(sum(graph.solo_ns) * (1 + slowdown)) + len(graph)
    timeline = FastEngine().run(lower(graph, hint), graph.hardware)
    hinted = dict(zip((task.op for task in reversed(timeline.plan.tasks)), reversed(timeline.start_ns), strict=True))
    starts, ends, oldest = {}, {}, []
    used: list[list[tuple[cp_model.IntervalVar, int]]] = [[] for _ in range(4)]
    for op in preds:
        tasks = graph.tasks[op]
        alone = round(sum(task.dur_ns for task in tasks))
        gaps = round(sum(graph.chain_ns + task.extra_ns for task in tasks[1:]))
        beside = round(sum(task.dur_ns * (1 + slowdown * task.demand.cover) for task in tasks))
        start, end = model.new_int_var(0, horizon, f"s{op}"), model.new_int_var(0, horizon, f"e{op}")
        is_oldest = model.new_bool_var(f"o{op}")
        length = model.new_int_var(alone + gaps, beside + gaps, f"l{op}")
        model.add(length == alone + gaps).only_enforce_if(is_oldest)
        model.add(length == beside + gaps).only_enforce_if(is_oldest.negated())
        interval = model.new_interval_var(start, length, end, f"i{op}")
        oldest.append(model.new_optional_interval_var(start, alone + gaps, end, is_oldest, f"a{op}"))
        for resource in range(4):
            need = sum(task.demand.resources[resource] * task.dur_ns for task in tasks) / max(1, alone)
            used[resource].append((interval, min(CAPACITY, round(CAPACITY * need))))
        model.add_hint(start, round(hinted[op]))
        starts[op], ends[op] = start, end
    model.add_no_overlap(oldest)
    for intervals in used:
        model.add_cumulative([i for i, _ in intervals], [need for _, need in intervals], CAPACITY)
    for op, before in preds.items():
        for p in before:
            model.add(starts[op] >= ends[p] + round(graph.chain_ns + graph.tasks[op][0].extra_ns))
    makespan = model.new_int_var(0, horizon, "makespan")
    model.add_max_equality(makespan, list(ends.values()))
    model.minimize(makespan)
    solver = cp_model.CpSolver()
    solver.parameters.max_time_in_seconds = seconds
    solver.parameters.num_workers = len(os.sched_getaffinity(0))
    solver.parameters.random_seed = SEED
    status = solver.solve(model)
    if status not in (cp_model.OPTIMAL, cp_model.FEASIBLE):
        return None
    priority = [0.0] * len(graph)
    for op, start in starts.items():
        priority[op] = -float(solver.value(start))
    lists = FastLists(graph)
    schedules = [
        lists.schedule(count, priority, share).schedule for count in stream_counts(DEFAULT_STREAMS) for share in SHARES
    ]
    best = min(schedules, key=lambda each: makespan_ns(graph, each))
    return Solved(solver.status_name(status), solver.objective_value, best)


def linear_bound_ns(graph: OpGraph) -> float:
    """Return the least makespan that chains and areas with contention allow, as one linear programme, in ns."""
    solver = pywraplp.Solver.CreateSolver("GLOP")
    preds = graph.work_preds
    slowdown = graph.hardware.contention.younger_slowdown
    makespan = solver.NumVar(0, solver.infinity(), "makespan")
    areas = [solver.Sum([])] * 4
    as_oldest, ends = [], {}
    for op, before in preds.items():
        length = solver.Sum([])
        for number, task in enumerate(graph.tasks[op]):
            share = solver.NumVar(0, task.dur_ns, "")  # the work that it does as the oldest
            took = task.dur_ns + slowdown * task.demand.cover * (task.dur_ns - share)
            length = length + took + (graph.chain_ns + task.extra_ns if number else 0.0)
            if any(task.demand.resources):
                as_oldest.append(share)
            areas = [area + need * took for area, need in zip(areas, task.demand.resources, strict=True)]
        end = solver.NumVar(0, solver.infinity(), "")
        solver.Add(end >= length)
        for p in before:
            solver.Add(end >= ends[p] + graph.chain_ns + graph.tasks[op][0].extra_ns + length)
        solver.Add(makespan >= end)
        ends[op] = end
    solver.Add(makespan >= solver.Sum(as_oldest))
    for area in areas:
        solver.Add(makespan >= area)
    solver.Minimize(makespan)
    assert solver.Solve() == pywraplp.Solver.OPTIMAL
    return float(solver.Objective().Value())


def makespan_ns(graph: OpGraph, schedule: Schedule) -> int:
    """Return the simulated makespan, in ns."""
    return FastEngine().run(lower(graph, schedule), graph.hardware).makespan_ns


def search(graph: OpGraph, seconds: float, also: list[Schedule]) -> int:
    """Return the makespan that the plain search finds from every quick policy and `also`, in ns."""
    quick = [policy for policy in POLICIES.values() if not policy.slow]
    schedules = [policy(graph, n) for policy in quick for n in policy.stream_counts(stream_counts(DEFAULT_STREAMS))]
    lists = local_search(graph, DEFAULT_STREAMS, budget_s=0.2 * seconds, seed=SEED)
    seeds = [*schedules, *also, *(candidate.schedule for candidate in lists.candidates)]
    return refine(graph, seeds, DEFAULT_STREAMS, budget_s=0.8 * seconds, seed=SEED).makespans_ns[0]


def line(name: str, seconds: float) -> str:
    """Return one row of the table."""
    graph = OpGraph.build(load_trace(name), one_pool(load_hardware(HARDWARE)))
    quick = [policy for policy in POLICIES.values() if not policy.slow]
    schedules = [policy(graph, n) for policy in quick for n in policy.stream_counts(stream_counts(DEFAULT_STREAMS))]
    hint = min(schedules, key=lambda each: makespan_ns(graph, each))
    search(graph, 0.1, [])  # to compile before the timing
    solution, half = solve(graph, seconds, hint), solve(graph, seconds / 2, hint)
    plain_ns = search(graph, seconds, [])
    both_ns = search(graph, seconds / 2, [half.schedule] if half else [])
    begin = time.perf_counter()
    linear_ns = linear_bound_ns(graph)
    linear_s = time.perf_counter() - begin
    bound_ns, bound = bounds(graph).largest
    solved = (
        "none found"
        if solution is None
        else f"{makespan_ns(graph, solution.schedule) / 1e3:,.0f} ({solution.status.lower()})"
    )
    cells = [
        f"`{name}`",
        f"{makespan_ns(graph, hint) / 1e3:,.0f}",
        f"{plain_ns / 1e3:,.0f}",
        solved,
        f"{both_ns / 1e3:,.0f}",
        f"{(plain_ns - both_ns) / plain_ns:+.1%}",
        f"{bound_ns / 1e3:,.0f} ({bound})",
        f"{linear_ns / 1e3:,.0f} ({linear_s:.1f} s)",
    ]
    return f"| {' | '.join(cells)} |"


def main() -> None:
    """Measure and write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=20.0, help="time for each way to look for a schedule")
    parser.add_argument("--trace", action="append", help="only these bundled traces")
    parser.add_argument("-o", dest="output", type=Path, help="the page whose part is replaced; without it, print")
    options = parser.parse_args()
    load = os.getloadavg()[0]
    rows = []
    for name in options.trace or TRACES:
        rows.append(line(name, options.seconds))
        print(rows[-1], flush=True)
    cores = len(os.sched_getaffinity(0))
    lines = [
        f"Makespans and bounds in us on `{HARDWARE}` as one pool, {options.seconds:g} s of {cores} cores for each way, "
        f"with other work on the machine: load {load:.1f} before, {os.getloadavg()[0]:.1f} after.",
        "",
        "| step | best quick policy | plain search | CP-SAT | half each | gain | largest bound | linear programme |",
        "|---|--:|--:|--:|--:|--:|--:|--:|",
        *rows,
    ]
    if options.output is None:
        print("\n".join(lines))
        return
    fill(options.output, "optimiser", "\n".join(lines))


if __name__ == "__main__":
    main()
