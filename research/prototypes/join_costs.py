"""Errors of stored schedules by the delay of a kernel with several predecessors (`GraphCosts.join_ns`).

    python research/prototypes/join_costs.py validate/results/kinds_h200_20261123.json ...

By groups of steps: mostly convolutional or not, fitting the L2 cache on one stream or not, and those of networks that a
constant was fitted on. Recommendation models, whose lookups have a rule of their own, are a group. Schedules with other
kernels are left out.
"""

from __future__ import annotations

import statistics
import sys
from collections import defaultdict
from pathlib import Path

import msgspec

from gpusim.engine.fast import FastEngine
from gpusim.plan.lower import lower
from gpusim.quantiles import quantile
from gpusim.rules.l2_cache import usable_bytes
from gpusim.validation.again import replayed_schedules

COSTS_NS = (0.0, 100.0, 140.0, 170.0, 200.0, 240.0)
Group = tuple[str, str]


def main() -> None:
    """Print a Markdown row for each group and cost."""
    engine = FastEngine()
    errors: dict[Group, dict[float, dict[str, list[float]]]] = defaultdict(
        lambda: {cost_ns: defaultdict(list) for cost_ns in COSTS_NS}
    )
    for file in map(Path, sys.argv[1:]):
        for case, graph, schedule in replayed_schedules(file):
            if case.streams < 2 or schedule.has_variants or schedule.partitions:
                continue
            plan, hardware = lower(graph, schedule, memory=False), graph.hardware
            fits = graph.memory_touched.one_stream_bytes <= usable_bytes(hardware.memory)
            kind = "other kinds" if graph.less_known else "mostly convolutional"
            if case.fitted or "recommendation" in case.network:
                kind = "fitted" if case.fitted else "recommendation"
            for cost_ns, of_step in errors[kind, "fit" if fits else "do not fit"].items():
                costs = msgspec.structs.replace(hardware.graph, join_ns=cost_ns)
                makespan_ns = engine.run(plan, msgspec.structs.replace(hardware, graph=costs)).makespan_ns
                of_step[case.trace].append(makespan_ns / case.measured_ns - 1)
    print("| steps | that | number, schedules | ns | mean of steps | bias of steps | median | 95 % | largest |")
    print("|---|---|--:|--:|--:|--:|--:|--:|--:|")
    for (kind, fits_cache), by_cost in errors.items():
        for cost_ns, of_steps in by_cost.items():
            sizes = sorted(abs(error) for each in of_steps.values() for error in each)
            mean = statistics.fmean(statistics.fmean(map(abs, each)) for each in of_steps.values())
            bias = statistics.fmean(map(statistics.fmean, of_steps.values()))
            cells = f"{mean:.2%} | {bias:+.2%} | {statistics.median(sizes):.2%} | {quantile(sizes, 0.95):.2%}"
            print(
                f"| {kind} | {fits_cache} | {len(of_steps)}, {len(sizes)} | {cost_ns:.0f} | {cells} | {sizes[-1]:.2%} |"
            )


if __name__ == "__main__":
    main()
