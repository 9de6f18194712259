"""Predict the schedules of results files again with the model of today, and compare the errors.

    python scripts/predict_again.py validate/results/fidelity_h200_20261121.json ...

For each file: errors of schedules on several streams as they were predicted when they were measured, and as they are
predicted now, on networks that no constant was fitted on and on the others (docs/fidelity.md).
"""

from __future__ import annotations

import statistics
import sys
from pathlib import Path

from gpusim.recipes.again import predict_again
from gpusim.report.fidelity import by_step, fidelity
from gpusim.report.results import ResultCase

HEADINGS = ("schedules", "n", "median", "90 % within", "95 % within", "largest", "bias", "tau, mean", "regret, mean")


def row(name: str, cases: list[ResultCase]) -> str | None:
    """One line of the table, or None where no case has several streams."""
    found = fidelity(cases)
    if found is None:
        return None
    numbers = [f"{share:.1%}" for share in (found.median, found.p90, found.p95, found.largest)]
    tau = f"{statistics.mean(found.tau):.2f}" if found.tau else ""
    regret = f"{statistics.mean(found.regret):.1%}" if found.regret else ""
    return f"| {name} | {found.schedules} | {' | '.join(numbers)} | {found.bias:+.1%} | {tau} | {regret} |"


def table(path: Path) -> list[str]:
    """The table of one results file."""
    then, now = predict_again(path)
    lines = [f"{path.name}", "", f"| {' | '.join(HEADINGS)} |", "|---|--:|--:|--:|--:|--:|--:|--:|--:|"]
    rows = []
    for name, fitted in (("networks left out", False), ("networks fitted on", True)):
        for when, results in (("then", then), ("now", now)):
            cases = [case for case in results.cases if case.fitted == fitted]
            rows.append(row(f"{name}, predicted {when}", cases))
    rows += [row(f"{step}, now", cases) for step, cases in by_step(now.cases).items()]
    return lines + [line for line in rows if line is not None]


def main(*files: str) -> None:
    """Print the table of each file."""
    for file in files:
        print("\n".join(table(Path(file))), end="\n\n")


if __name__ == "__main__":
    main(*sys.argv[1:])
