"""Smallest budget that `least_time` names when it refuses one, with and without copies between two uses (rule 7).

    python research/prototypes/smallest_budgets.py TRACE... --json OUT

TRACE is a file or a bundled name. Needs no GPU.
"""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path
from typing import Any

from gpusim.formats.hardware import load_hardware
from gpusim.memplan.evaluate import MemoryEvaluator
from gpusim.memplan.lower_bound import LowerBound
from gpusim.memplan.policies.base import Setting
from gpusim.memplan.policies.least_time import LeastTime
from gpusim.plan.graph import OpGraph
from gpusim.trace.store import bundled_traces, read_trace


def row(name: str) -> dict[str, Any]:
    """Return the sizes of one step, and the CPU time of the search."""
    trace = read_trace(bundled_traces().get(name, Path(name)))
    evaluator = MemoryEvaluator(OpGraph.build(trace, load_hardware("h200")))
    planner = LeastTime(Setting(evaluator.graph, evaluator.storages), evaluator)
    without_bytes = planner.least_peak.peak_bytes
    began = time.process_time()
    return {
        "trace": trace.name,
        "without_bytes": without_bytes,
        "with_bytes": planner.smallest.peak_bytes,
        "search_s": round(time.process_time() - began, 1),
        "one_op_bytes": LowerBound(evaluator).least_bytes,
    }


def main() -> None:
    """Print a line for each step."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("traces", nargs="+")
    parser.add_argument("--json", type=Path, required=True)
    asked = parser.parse_args()
    rows = [row(name) for name in asked.traces]
    for each in rows:
        print(f"{each['trace']}: {each['with_bytes'] / each['without_bytes']:.3f}, {each['search_s']} s")
    asked.json.write_text(json.dumps(rows, indent=1) + "\n")


if __name__ == "__main__":
    main()
