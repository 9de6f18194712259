"""Errors of replayed plans that copy, by three measurements of the link to the host.

    python research/prototypes/links_of_plans.py STEP ...

Prints, for each plan of these steps that copies, the error of its predicted time with the link that capture measured,
the one that its replay measured, and that of the hardware model.
"""

from __future__ import annotations

import sys
from pathlib import Path

import msgspec

from gpusim.formats.results import read_results
from gpusim.memplan.evaluate import MemoryEvaluator
from gpusim.memplan.plan import MemoryPlan
from gpusim.plan.graph import OpGraph
from gpusim.trace.store import read_trace
from gpusim.validation.again import trace_files
from gpusim.validation.chosen import hardware_of
from gpusim.validation.memory_again import plans_path, read_replayed_plans

RESULTS = Path(__file__).parents[2] / "validate" / "results" / "memory_h200_20261126.json"


def main(steps: list[str]) -> None:
    """Print the rows."""
    files = trace_files(RESULTS)
    for case, replayed in zip(read_results(RESULTS).cases, read_replayed_plans(plans_path(RESULTS)), strict=True):
        if case.trace not in steps or case.streams == 1:
            continue
        trace = read_trace(files[case.trace])
        truth = trace.ground_truth
        assert truth is not None
        errors = []
        for link in (truth.link, case.link, None):
            other = msgspec.structs.replace(trace, ground_truth=msgspec.structs.replace(truth, link=link))
            evaluator = MemoryEvaluator(OpGraph.build(other, hardware_of(other)))
            plan = MemoryPlan.from_document(replayed.plan, evaluator.graph.trace)
            step_ns = evaluator.evaluate(plan, barriers_first=replayed.barriers_first).step_ns
            errors.append(f"{100 * (step_ns / case.measured_ns - 1):+6.1f} %")
        print(f"{case.trace:22} {case.policy:14} {case.memory_budget_bytes or '':12} {' '.join(errors)}")


if __name__ == "__main__":
    main(sys.argv[1:])
