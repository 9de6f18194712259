"""Errors of replayed plans that copy, by three measurements of the link to the host.

    python research/prototypes/links_of_plans.py [--results RESULTS.json] STEP ...

Prints, for each plan of these steps that copies, the error of its predicted time with the link that capture measured,
the one that its replay measured, and that of the hardware model; then the first two links, to the GPU and back, in
GB/s. Without `--results`: rows of `memory_h200_20261126`.
"""

from __future__ import annotations

import argparse
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


def main() -> None:
    """Print the rows."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--results", type=Path, default=RESULTS)
    parser.add_argument("steps", nargs="+")
    chosen = parser.parse_args()
    files = trace_files(chosen.results)
    plans = read_replayed_plans(plans_path(chosen.results))
    for case, replayed in zip(read_results(chosen.results).cases, plans, strict=True):
        if case.trace not in chosen.steps or case.streams == 1:
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
        links = [f"{link.h2d_bytes_per_ns:.1f} {link.d2h_bytes_per_ns:.1f}" for link in (truth.link, case.link) if link]
        print(f"{case.trace:22} {case.policy:14} {case.memory_budget_bytes or '':12} {' '.join([*errors, *links])}")


if __name__ == "__main__":
    main()
