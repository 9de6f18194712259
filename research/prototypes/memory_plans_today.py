"""Comparison of the measured memory plans with those that the policies make today (no arguments).

For each row of a published policy without a budget in the newest results of `memory`, `memory_again` and
`memory_superneurons`: time and peak of the measured plan and of today's, both predicted by today's rules. Prints the
rows that differ, with the measured time, in ms and MiB, and the recipes whose row of that step and policy is as today;
then the number of rows.
"""

from __future__ import annotations

from pathlib import Path

from gpusim.formats.results import newest_results, read_results
from gpusim.memplan.evaluate import MemoryEvaluator
from gpusim.memplan.policies.base import Setting
from gpusim.memplan.policies.registry import MEMORY_POLICIES
from gpusim.plan.graph import OpGraph
from gpusim.trace.store import read_trace
from gpusim.validation.again import trace_files
from gpusim.validation.chosen import hardware_of
from gpusim.validation.memory_again import memory_again

RECIPES = ("memory", "memory_again", "memory_superneurons")


def main() -> None:
    as_today: dict[tuple[str, str], list[str]] = {}
    differing: list[tuple[tuple[str, str], str]] = []
    for recipe in RECIPES:
        results = newest_results(Path("validate/results"), recipe)
        then, files = read_results(results), trace_files(results)
        evaluators: dict[str, MemoryEvaluator] = {}
        for case in memory_again(results, then, files).cases:
            if case.memory_budget_bytes or MEMORY_POLICIES[case.policy].takes_budget:
                continue
            if case.trace not in evaluators:
                trace = read_trace(files[case.trace])
                evaluators[case.trace] = MemoryEvaluator(OpGraph.build(trace, hardware_of(trace)))
            evaluator = evaluators[case.trace]
            today = evaluator.evaluate(MEMORY_POLICIES[case.policy](Setting(evaluator.graph, evaluator.storages)))
            key = (case.trace, case.policy)
            if (today.step_ns, today.peak_bytes) == (case.predicted_ns, case.predicted_peak_bytes):
                as_today.setdefault(key, []).append(recipe)
            else:
                times = [round(ns / 1e6, 2) for ns in (case.measured_ns, case.predicted_ns, today.step_ns)]
                peaks = [peak >> 20 for peak in (case.predicted_peak_bytes, today.peak_bytes)]
                differing.append((key, f"{recipe} {case.trace} {case.policy} {times} {peaks}"))
    for key, row in differing:
        print(f"{row}, as today in {', '.join(as_today.get(key, ['none']))}")
    rows = len(differing) + sum(map(len, as_today.values()))
    print(f"{len(differing)} of {rows} rows differ")


if __name__ == "__main__":
    main()
