"""Predicted step time of `least_time` where convolutions may run variants of smaller workspace, by budget.

    python research/prototypes/least_time_variants.py TRACE... --json OUT

TRACE is a file with variants (`gpusim capture --variants`); budgets are shares of the peak of keeping all. A
convolution that with what must be there takes more than the budget runs its fastest variant that does not. Needs no
GPU.
"""

from __future__ import annotations

import argparse
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

from gpusim.errors import PlanError
from gpusim.formats.hardware import load_hardware
from gpusim.memplan.evaluate import MemoryEvaluator
from gpusim.memplan.layers import kind_of
from gpusim.memplan.lower_bound import LowerBound
from gpusim.memplan.memory import needs_at_once
from gpusim.memplan.plan import MemoryPlan
from gpusim.memplan.policies.base import Setting
from gpusim.memplan.policies.least_time import LeastTime
from gpusim.plan.allocator import rounded
from gpusim.plan.graph import OpGraph
from gpusim.plan.ranking import variant_ns
from gpusim.trace.store import read_trace

SHARES = (0.9, 0.85, 0.8, 0.75, 0.7, 0.65, 0.6, 0.55, 0.5)


def fitting(evaluator: MemoryEvaluator, budget_bytes: int) -> tuple[int, ...]:
    """Return the variant of each op that does not fit as captured: the fastest that fits, else the smallest."""
    graph = evaluator.graph
    chosen = [0] * len(graph)
    for index, (op, need_bytes) in enumerate(zip(graph.trace.ops, needs_at_once(evaluator.storages), strict=True)):
        if need_bytes <= budget_bytes or kind_of(op.target) != "conv":
            continue
        others_bytes = need_bytes - rounded(op.workspace_bytes)
        ways = [(op.workspace_bytes, variant_ns(graph, index, 0), 0)]
        for number, variant in enumerate(op.variants, 1):
            if variant.workspace_bytes is not None and not variant.covers:
                ways.append((variant.workspace_bytes, variant_ns(graph, index, number), number))
        fit = [way for way in ways if others_bytes + rounded(way[0]) <= budget_bytes]
        chosen[index] = min(fit, key=lambda way: way[1])[2] if fit else min(ways)[2]
    return tuple(chosen)


def planned(evaluator: MemoryEvaluator, variants: tuple[int, ...], budget_bytes: int) -> dict[str, Any]:
    """Return time and peak of our plan of the step with these variants; the reason where there is none."""
    step = evaluator.choosing(MemoryPlan(variants=variants))
    try:
        plan = LeastTime(Setting(step.graph, step.storages, budget_bytes), step).plan_for(budget_bytes)
        outcome = evaluator.evaluate(replace(plan, variants=variants, trace_hash=""))
    except PlanError as cause:
        return {"problem": str(cause)}
    parts = {"exposed_copy_ns": outcome.exposed_copy_ns, "recompute_ns": outcome.recompute_ns}
    return {"step_ns": outcome.step_ns, "peak_bytes": outcome.peak_bytes, "variants_ns": outcome.variants_ns, **parts}


def rows(file: Path) -> list[dict[str, Any]]:
    """Return one row for each budget."""
    evaluator = MemoryEvaluator(OpGraph.build(read_trace(file), load_hardware("h200")))
    keep_all = evaluator.evaluate(MemoryPlan())
    least = evaluator.choosing(MemoryPlan(variants=fitting(evaluator, 0)))
    found = []
    for share in SHARES:
        budget_bytes = round(share * keep_all.peak_bytes)
        variants = fitting(evaluator, budget_bytes)
        captured = planned(evaluator, (0,) * len(variants), budget_bytes)
        found.append(
            {
                "trace": evaluator.graph.trace.name,
                "share": share,
                "keep_all_ns": keep_all.step_ns,
                "keep_all_peak_bytes": keep_all.peak_bytes,
                "one_op_bytes": LowerBound(evaluator).least_bytes,
                "one_op_of_smallest_bytes": LowerBound(least).least_bytes,
                "captured": captured,
                "ops_with_variants": sum(map(bool, variants)),
                "with_variants": planned(evaluator, variants, budget_bytes),
            }
        )
    return found


def main() -> None:
    """Print a line for each budget."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("traces", nargs="+", type=Path)
    parser.add_argument("--json", type=Path, required=True)
    asked = parser.parse_args()
    every = [row for file in asked.traces for row in rows(file)]
    for row in every:
        ways = (row["captured"].get("step_ns"), row["with_variants"].get("step_ns"))
        texts = ["no plan" if step_ns is None else f"{step_ns / row['keep_all_ns'] - 1:+.1%}" for step_ns in ways]
        print(f"{row['trace']} {row['share']}: captured {texts[0]}, {row['ops_with_variants']} variants {texts[1]}")
    asked.json.write_text(json.dumps(every, indent=1) + "\n")


if __name__ == "__main__":
    main()
