"""Predict the recommendation models of validate/results with other times of a lookup's idle blocks.

    python research/prototypes/idle_blocks.py [NS ...]

Prints median, largest and mean error of each step's schedules on several streams: if all blocks work, by the rule, and
with idle blocks that take NS in each lookup.
"""

from __future__ import annotations

import statistics
import sys
from collections import defaultdict
from collections.abc import Callable
from math import prod
from pathlib import Path

import msgspec

from gpusim.engine.fast import FastEngine
from gpusim.plan.kernels import Fits
from gpusim.plan.lower import lower
from gpusim.plan.tasks import Plan, Task
from gpusim.validation.again import replayed_schedules

RESULTS = Path(__file__).parent.parent.parent / "validate" / "results"
FILES = ("kinds_h200_20261123", "blind_kinds_h200_20261124", "blind_intervals_h200_20261126")


def main() -> None:
    """Print a table for each time."""
    runs = [
        (case, graph, lower(graph, schedule))
        for name in FILES
        for case, graph, schedule in replayed_schedules(RESULTS / f"{name}.json")
        if "recommendation" in case.trace and case.streams > 1
    ]

    def errors(name: str, change: Callable[[Task, Task], Task]) -> None:
        of_step: dict[str, list[float]] = defaultdict(list)
        for case, graph, plan in runs:
            fits, tasks = Fits(graph.hardware), []
            for task in plan.tasks:
                kernel = graph.trace.ops[task.op].kernels[task.kernel]
                fit = fits.of(kernel)
                full = msgspec.structs.replace(task, idle_ns=0.0, blocks=prod(kernel.grid), demand=fit.demand)
                tasks.append(change(task, full) if "EmbeddingBag" in task.name else task)
            changed = Plan(tuple(tasks), plan.mode, plan.buffers, plan.kept_bytes)
            predicted_ns = FastEngine().run(changed, graph.hardware).makespan_ns
            of_step[case.trace].append(predicted_ns / case.measured_ns - 1)
        print(name)
        for step, found in of_step.items():
            size = sorted(map(abs, found))
            print(f"  {step:32} {statistics.median(size):6.1%} {size[-1]:6.1%} {statistics.mean(found):+6.1%}")

    errors("all blocks work", lambda task, full: full)
    errors("the rule", lambda task, full: task)
    for text in sys.argv[1:]:
        given_ns = float(text)
        errors(f"{given_ns:,.0f} ns", lambda task, full, ns=given_ns: msgspec.structs.replace(task, idle_ns=ns))  # type: ignore[misc]


if __name__ == "__main__":
    main()
