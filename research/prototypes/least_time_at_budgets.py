"""Plans of `least_time` at budgets between the least peak and that of keeping all, to compare two versions of gpusim.

    python research/prototypes/least_time_at_budgets.py TRACE... --json OUT

TRACE are files, as those of `validate/traces/memory.zip` and of `traces/`.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

from gpusim.memplan.evaluate import MemoryEvaluator
from gpusim.memplan.policies.base import Setting
from gpusim.memplan.policies.least_time import LeastTime
from gpusim.plan.graph import OpGraph
from gpusim.trace.store import read_trace
from gpusim.validation.chosen import hardware_of

#: Shares of the way from the least peak to that of keeping all.
SHARES = (0.0, 0.02, 0.05, 0.1, 0.2, 0.3, 0.45, 0.6, 0.72, 0.75, 0.8)


def rows_of(path: Path) -> list[dict[str, str | int | None]]:
    """Return the plan's peak and time without a budget, and at each budget."""
    trace = read_trace(path)
    graph = OpGraph.build(trace, hardware_of(trace))
    evaluator = MemoryEvaluator(graph)
    setting = Setting(graph, evaluator.storages)
    planner = LeastTime(setting, evaluator)
    least, most = planner.smallest.peak_bytes, setting.keep_all_bytes
    rows: list[dict[str, str | int | None]] = []
    for budget in (None, *(int(least + share * (most - least)) for share in SHARES)):
        outcome = evaluator.evaluate(planner.plan_for(budget))
        rows.append(
            {
                "trace": trace.name,
                "budget_bytes": budget,
                "peak_bytes": outcome.peak_bytes,
                "step_ns": outcome.step_ns,
            }
        )
    return rows


def main() -> None:
    """Write a row for each budget."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("traces", type=Path, nargs="+")
    parser.add_argument("--json", type=Path, required=True)
    arguments = parser.parse_args()
    rows = [row for path in arguments.traces for row in rows_of(path)]
    arguments.json.write_text("[\n" + ",\n".join(map(json.dumps, rows)) + "\n]\n", encoding="utf-8")


if __name__ == "__main__":
    main()
