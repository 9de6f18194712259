"""Print a table of steps optimized with one freedom less each time: python scripts/make_ablation_table.py.

From the newest validate/results/kernels_*.json: the time of a call of the step in full, and for each ablation its time
over that of the step in full, timed in turns with it.
"""

from __future__ import annotations

from pathlib import Path
from typing import get_args

from gpusim.formats.results import Ablation, ResultCase, newest_results, read_results
from gpusim.validation.statistics import by_step

RESULTS = Path(__file__).resolve().parent.parent / "validate" / "results"
FULL = "optimize"


def cell(row: ResultCase | None) -> str:
    """Return an ablation's time over that of the step in full; empty where it was not measured."""
    return "" if row is None else f"{1 / row.over(FULL):.2f}x"


def lines(folder: Path = RESULTS) -> list[str]:
    """Return the table in Markdown. Raises `MeasurementError` where there are no results."""
    ablations = get_args(Ablation)
    head = ["step", "us in full", *ablations]
    rows = [f"|{'|'.join(head)}|", f"|---|{'--:|' * (len(head) - 1)}"]
    for step, cases in sorted(by_step(read_results(newest_results(folder, "kernels")).cases).items()):
        found = {case.ablation: case for case in cases}
        cells = [f"`{step}`", f"{found[None].measured_ns / 1e3:,.0f}", *(cell(found.get(each)) for each in ablations)]
        rows.append(f"|{'|'.join(cells)}|")
    return rows


if __name__ == "__main__":
    print("\n".join(lines()))
