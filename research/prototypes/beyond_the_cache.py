"""Candidate rules for steps that do not fit the L2 cache on one stream: errors of replayed schedules under each.

    PYTHONPATH=.:scripts python research/prototypes/beyond_the_cache.py validate/results/kinds_h200_20261123.json ...

Today such steps have no misses beyond those in their captured times (`gpusim.plan.cache_misses`). Candidates:

- rule: today's rule for misses, launches included, also for these steps
- data: without launches, and a kernel reads no more from DRAM than it could have read from the cache in its time
- others' data: the same, but GEMM-like kernels lose nothing, as they load ahead
- others' reads: the same, and what is evicted costs nothing
- index_add: all kernels of `index_add` share one bandwidth, which one alone uses in full, as if bound by atomic
  additions in the L2 cache

Networks that a constant was fitted on count. Prints, for all such steps, each kind and each step: mean over steps of
the mean error, the median, the error of 95 %, the largest, and the bias, in percent. Takes about 8 minutes.
"""

from __future__ import annotations

import sys
from collections import defaultdict
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from unittest.mock import patch

import msgspec
import numpy as np
from set_uncertainty import kind_of

from gpusim.engine.fast import FastEngine
from gpusim.plan import cache_misses
from gpusim.plan.cache_misses import CHUNK_BYTES, NO_MISS
from gpusim.plan.graph import OpGraph
from gpusim.plan.lower import lower
from gpusim.plan.schedule import Schedule
from gpusim.plan.tasks import Plan, Task
from gpusim.quantiles import quantile
from gpusim.rules.l2_cache import lost_ns, usable_bytes
from gpusim.validation.again import replayed_schedules

ENGINE = FastEngine()
NAMES = ("today", "rule", "data", "others' data", "others' reads", "index_add")
Lost = Callable[[Task, float, float, float], float]


def with_misses(graph: OpGraph, schedule: Schedule, plan: Plan, lost: Lost) -> Plan:
    """Return the plan with longer kernels: `lost` of a task, its bytes read and evicted beyond one stream's, warps."""
    step = cache_misses._step_of(graph)
    chunks = int(usable_bytes(graph.hardware.memory)) // CHUNK_BYTES
    before = cache_misses._misses_of(graph, step, Schedule.in_recorded_order(len(graph)), chunks).by_op
    now = cache_misses._misses_of(graph, step, schedule, chunks).by_op
    tasks = []
    for task in plan.tasks:
        total_ns = sum(each.dur_ns for each in graph.tasks[task.op])
        if task.kind == "kernel" and total_ns and task.op in now:
            share, base, more = task.dur_ns / total_ns, before.get(task.op, NO_MISS), now[task.op]
            read_bytes = max(0, more.read_bytes - base.read_bytes) * share
            written_bytes = max(0, more.written_bytes - base.written_bytes) * share
            longer_ns = lost(task, read_bytes, written_bytes, cache_misses._warps(task, graph))
            task = msgspec.structs.replace(task, dur_ns=task.dur_ns + longer_ns)
        tasks.append(task)
    return replace(plan, tasks=tasks)


def sharing(graph: OpGraph, plan: Plan) -> Plan:
    """Return the plan with kernels of `index_add` that take the whole of a bandwidth no other kernel uses."""
    ops, full = graph.trace.ops, graph.hardware.memory.dram_bytes_per_ns
    tasks = [
        msgspec.structs.replace(task, dram_bytes=task.dur_ns * full)
        if task.kind == "kernel" and "index_add" in ops[task.op].target
        else task
        for task in plan.tasks
    ]
    return replace(plan, tasks=tasks)


def makespans_ns(graph: OpGraph, schedule: Schedule) -> list[float]:
    """Return the predictions under each of `NAMES`."""
    memory, plan = graph.hardware.memory, lower(graph, schedule)

    def lost(task: Task, read_bytes: float, written_bytes: float, warps: float) -> float:
        most_bytes = task.dur_ns * min(memory.l2_bytes_per_ns, warps * memory.warp_l2_bytes_per_ns)
        return lost_ns(memory, min(read_bytes, most_bytes), written_bytes, warps)

    def no_gemm(task: Task, *moved: float) -> float:
        return 0.0 if task.matrix else lost(task, *moved)

    def reads(task: Task, read_bytes: float, written_bytes: float, warps: float) -> float:
        return 0.0 if task.matrix else lost(task, read_bytes, 0.0, warps)

    with patch.object(OpGraph, "predicts_misses", True):
        by_rule = lower(graph, schedule)
    by_data = [with_misses(graph, schedule, plan, each) for each in (lost, no_gemm, reads)]
    plans = [plan, by_rule, *by_data, sharing(graph, plan)]
    return [ENGINE.run(each, graph.hardware).makespan_ns for each in plans]


def cells(errors: list[tuple[str, list[float]]]) -> str:
    """Return a cell for each candidate."""
    steps, values = np.array([step for step, _ in errors]), 100 * np.array([each for _, each in errors])
    found = []
    for column in values.T:
        sizes = np.abs(column)
        mean = np.mean([sizes[steps == step].mean() for step in np.unique(steps)])
        p95 = quantile(sorted(sizes), 0.95)
        found.append(f"{mean:.2f}: {np.median(sizes):.1f}, {p95:.1f}, {sizes.max():.1f}, {column.mean():+.1f}")
    return " | ".join(found)


def main() -> None:
    """Print a row for all steps, each kind and each step."""
    groups: dict[str, list[tuple[str, list[float]]]] = defaultdict(list)
    for file in map(Path, sys.argv[1:]):
        for case, graph, schedule in replayed_schedules(file):
            if case.streams < 2 or schedule.has_variants or schedule.partitions or not case.outputs_equal:
                continue
            if graph.predicts_misses or not graph.hardware.memory.l2_bytes_per_ns:
                continue
            errors = [makespan_ns / case.measured_ns - 1 for makespan_ns in makespans_ns(graph, schedule)]
            for group in ("all", kind_of(case.network), case.trace):
                groups[group].append((case.trace, errors))
    print(f"| | schedules | steps | {' | '.join(NAMES)} |")
    for group, of_group in groups.items():
        print(f"| {group} | {len(of_group)} | {len({step for step, _ in of_group})} | {cells(of_group)} |")


if __name__ == "__main__":
    main()
