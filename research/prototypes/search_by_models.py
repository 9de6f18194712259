"""What a search by one model and a choice by another would give, in the dense neighbourhoods.

    python research/prototypes/search_by_models.py validate/results/neighbours_h200_20261124.json

`found` are the schedules near the best by blocks, near the best by the pool, or all of a step. Of them a model chooses
the one predicted fastest, or four that are tried. Regret is over the fastest measured schedule of the step. Then, for
the blocks' predictions: errors by number of streams, and how what is measured beyond them grows with events.
"""

from __future__ import annotations

import statistics
import sys
from collections.abc import Sequence
from pathlib import Path

from gpusim.formats.results import ResultCase
from gpusim.validation.models import predicted_by_models
from gpusim.validation.neighbours import BY_BLOCKS, BY_POOL
from gpusim.validation.statistics import by_step

BLOCKS, POOL = "blocks", "one pool of SMs"
GROUPS = {"blocks": {BY_BLOCKS}, "pool": {BY_POOL}, "either": {BY_BLOCKS, BY_POOL}}


def main() -> None:
    """Print a row for each way: regret by step, and its mean; then a row for each step."""
    steps = {name: by_step(cases) for name, cases in predicted_by_models(Path(sys.argv[1])).items()}
    print("steps:", ", ".join(steps[BLOCKS]))
    for found, policies in GROUPS.items():
        for chooser in (BLOCKS, POOL):
            for tried in (1, 4):
                regrets = []
                for of_step in steps[chooser].values():
                    group = sorted((c for c in of_step if c.policy in policies), key=lambda c: c.predicted_ns)
                    best_ns = min(case.measured_ns for case in of_step)
                    regrets.append(min(case.measured_ns for case in group[:tried]) / best_ns - 1)
                each = ", ".join(f"{regret:.1%}" for regret in regrets)
                print(f"found by {found}, {tried} best by {chooser}: {each}; mean {statistics.fmean(regrets):.2%}")
    for step, of_step in steps[BLOCKS].items():
        print_errors(step, [case for case in of_step if case.streams > 1])


def print_errors(step: str, cases: Sequence[ResultCase]) -> None:
    """Print the median error for each number of streams, and the slope and correlation of lost time and events."""
    by_streams = [
        f"{streams}: {statistics.median(errors):+.1%} ({len(errors)})"
        for streams in sorted({case.streams for case in cases})
        if (errors := [case.predicted_ns / case.measured_ns - 1 for case in cases if case.streams == streams])
    ]
    events = [case.events for case in cases]
    lost_ns = [case.measured_ns - case.predicted_ns for case in cases]
    slope_ns = statistics.linear_regression(events, lost_ns).slope
    print(
        f"{step}: {', '.join(by_streams)}; {slope_ns:.0f} ns an event ({statistics.correlation(events, lost_ns):.2f})"
    )


if __name__ == "__main__":
    main()
