"""Predicted step time of `least_time` near the least peak, with and without copies between two uses (rule 7).

    python research/prototypes/near_least_peak.py TRACE... --json OUT

TRACE is a file or a bundled name; budgets are shares of the least peak. Needs no GPU.
"""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path
from typing import Any
from unittest import mock

from gpusim.formats.hardware import load_hardware
from gpusim.memplan.evaluate import MemoryEvaluator
from gpusim.memplan.policies import least_time
from gpusim.memplan.policies.base import Setting
from gpusim.plan.graph import OpGraph
from gpusim.trace.store import bundled_traces, read_trace

SHARES = (1.0, 1.02, 1.05, 1.1)


def rows(name: str, larger_budgets: tuple[float, ...]) -> list[dict[str, Any]]:
    """One row for each budget, with the plan that the rule finds from these larger budgets, and the one without."""
    evaluator = MemoryEvaluator(
        OpGraph.build(read_trace(bundled_traces().get(name, Path(name))), load_hardware("h200"))
    )
    setting = Setting(evaluator.graph, evaluator.storages)
    found = []
    for share in SHARES:
        row: dict[str, Any] = {
            "trace": evaluator.graph.trace.name,
            "share": share,
            "keep_all_ns": evaluator.keep_all_ns,
        }
        for key, larger in (("without", ()), ("with", larger_budgets)):
            planner = least_time.LeastTime(setting, evaluator)
            row["budget_bytes"] = round(share * planner.least_peak.peak_bytes)
            began = time.process_time()
            with mock.patch.object(least_time, "LARGER_BUDGETS", larger):
                plan = planner.best(row["budget_bytes"])
            row[f"{key}_planning_s"] = round(time.process_time() - began, 1)
            outcome = evaluator.evaluate(plan)
            row[f"{key}_ns"], row[f"{key}_peak_bytes"] = outcome.step_ns, outcome.peak_bytes
        found.append(row)
    return found


def main() -> None:
    """Print a line for each budget."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("traces", nargs="+")
    parser.add_argument("--json", type=Path, required=True)
    asked = parser.parse_args()
    larger_budgets = least_time.LARGER_BUDGETS
    every = []
    for name in asked.traces:
        for row in rows(name, larger_budgets):
            every.append(row)
            times = " ".join(f"{row[f'{key}_ns'] / row['keep_all_ns']:.3f}" for key in ("without", "with"))
            print(f"{row['trace']:24} {row['share']:.2f} {times} {row['with_planning_s']} s", flush=True)
        asked.json.write_text(json.dumps(every, indent=1) + "\n")


if __name__ == "__main__":
    main()
