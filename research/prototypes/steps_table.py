"""Steps of plans and of DistributedDataParallel as a table, and how often their order was predicted.

    python research/prototypes/steps_table.py validate/results/parallel_steps_h200_20261126.json 4

Times in us; then medians of errors, and pairs of steps whose 95 % intervals do not overlap.
"""

from __future__ import annotations

import json
import statistics
import sys
from itertools import combinations
from pathlib import Path
from typing import Any


def main() -> None:
    """Print the table."""
    cases = json.loads(Path(sys.argv[1]).read_text())["cases"]
    steps: dict[tuple[Any, ...], list[dict[str, Any]]] = {}
    for case in cases:
        if case["gpus"] == int(sys.argv[2]):
            steps.setdefault((case["network"], case["batch"], case.get("exchanges", "NCCL")), []).append(case)
    for (network, batch, exchanges), rows in steps.items():
        for row in rows:
            if exchanges != "NCCL" and row["policy"] == "ddp":
                continue
            low, high = row.get("interval_ns", (0, 0))
            measured_ns, ddp = row["measured_ns"], row["baselines"]
            print(
                f"| {network}, {batch} | {exchanges} | {row['policy'].removeprefix('parallel_')} "
                f"| {row['predicted_ns'] / 1e3:,.0f} | {measured_ns / 1e3:,.0f} | {low / 1e3:,.0f}-{high / 1e3:,.0f} "
                f"| {error(row):+.1%} | {ddp['ddp_graph'] / measured_ns:.2f} | {ddp['ddp'] / measured_ns:.2f} |"
            )
    rows = [row for of in steps.values() for row in of]
    for name, some in {
        "all": rows,
        "DDP": [row for row in rows if row["policy"] == "ddp"],
        "by shared memory": [row for row in rows if "exchanges" in row],
    }.items():
        off = [abs(error(row)) for row in some]
        if off:
            print(f"{name}: {len(off)} steps, median error {statistics.median(off):.1%}, largest {max(off):.1%}")
    apart = 0
    for step, of in steps.items():
        for one, other in combinations([row for row in of if "interval_ns" in row], 2):
            (low, high), (other_low, other_high) = one["interval_ns"], other["interval_ns"]
            if max(low, other_low) <= min(high, other_high):
                continue
            apart += 1
            predicted_ns = one["predicted_ns"] - other["predicted_ns"]
            if predicted_ns * (one["measured_ns"] - other["measured_ns"]) <= 0:
                print(f"wrong or equal order: {step}, {one['policy']} and {other['policy']}")
    print(f"{apart} pairs of a step lie apart")


def error(row: dict[str, Any]) -> float:
    """Return the error of a prediction."""
    return float(row["predicted_ns"] / row["measured_ns"] - 1)


if __name__ == "__main__":
    main()
