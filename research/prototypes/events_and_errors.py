"""Errors of schedules of equal predicted time, by their events.

    python research/prototypes/events_and_errors.py validate/results/*_h200_*.json

Predicts the stored schedules of captured kernels again and compares each two of a step whose predicted times are at
most `NEAR_FRAC` apart: how often the one with fewer events has the smaller measured over predicted time, and how much
of that differs per event, by least squares through zero. Then the same for pairs with at least one searched schedule,
and with two: a searched one is also chosen for what the model overrates.
"""

from __future__ import annotations

import itertools
import statistics
import sys
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

from held_events import Again, predicted

from gpusim.defaults import SEARCH
from gpusim.validation.neighbours import BY_BLOCKS, BY_POOL
from gpusim.validation.recipe import WITHOUT_VARIANTS

NEAR_FRAC = 0.01
#: Searched schedules of captured kernels: the best, and others that a search passed.
SEARCHED = (SEARCH, WITHOUT_VARIANTS, BY_BLOCKS, BY_POOL)


def pairs(rows: Sequence[Again], searched: int) -> list[tuple[int, float]]:
    """Return, for each pair with other numbers of events, the more events and the more time beyond the prediction."""
    found = []
    for one, other in itertools.combinations(rows, 2):
        if sum(row.case.policy in SEARCHED for row in (one, other)) < searched:
            continue
        near = abs(one.predicted_ns[0] - other.predicted_ns[0]) <= NEAR_FRAC * min(
            one.predicted_ns[0], other.predicted_ns[0]
        )
        events = one.case.events - other.case.events
        if near and events:
            beyond = [row.case.measured_ns - row.predicted_ns[0] for row in (one, other)]
            found.append((events, float(beyond[0] - beyond[1])))
    return found


def cell(steps: Iterable[list[tuple[int, float]]]) -> str:
    """Return the number of steps and pairs, the share of pairs as expected, and the ns per event.

    The share is the mean of the steps' shares. The ns are the median of the steps' slopes.
    """
    steps = [step for step in steps if step]
    shares = [statistics.fmean(events * ns > 0 for events, ns in step) for step in steps]
    slopes = [sum(events * ns for events, ns in step) / sum(events**2 for events, _ in step) for step in steps]
    above = sum(slope > 0 for slope in slopes)
    count = sum(map(len, steps))
    if not steps:
        return "none"
    return (
        f"{len(steps)} steps, {count} pairs: {statistics.fmean(shares):.0%} of pairs, "
        f"{statistics.median(slopes):+.0f} ns an event, above 0 on {above} steps"
    )


def main() -> None:
    """Print the table."""
    steps = predicted((Path(each) for each in sys.argv[1:]), delays_ns=(0,), least=2)
    families = sorted({row.family for rows in steps.values() for row in rows})
    of_first = set(families[::2])
    groups: dict[str, Callable[[Again], bool]] = {
        "all": lambda row: True,
        "first half": lambda row: row.family in of_first,
        "second half": lambda row: row.family not in of_first,
        "convolutional": lambda row: not row.less_known,
        "other kinds": lambda row: row.less_known,
    }
    for searched in range(3):
        print(f"pairs with at least {searched} searched schedules")
        for name, of in groups.items():
            print(f"  {name}: {cell(pairs(rows, searched) for rows in steps.values() if of(rows[0]))}", flush=True)


if __name__ == "__main__":
    main()
