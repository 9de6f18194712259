"""Predicted lead that a searched schedule needs to be recommended: what each margin would have recommended.

    PYTHONPATH=. python research/prototypes/search_margin.py

Of each step, the policy's schedule predicted fastest is taken, or the searched one if it is predicted faster by more
than the margin, as `gpusim explore` compares them: with a time for each event. Prints, for each margin: on how many
steps the one taken is within 1 % of the fastest measured one, how much slower it is, in the mean and at most, and its
prediction error, in the median and at most, and its bias. On how many it lies within its 90 % interval. Once by
today's predictions, once by those of the runs, which the searches of that day followed. Run it in the repository's
root.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable
from pathlib import Path

from gpusim.defaults import RECOMMENDED, SEARCH
from gpusim.formats.results import ResultCase, newest_results
from gpusim.search.events import compared_ns
from gpusim.validation.again import predict_again
from gpusim.validation.recipe import FASTEST_KERNELS
from gpusim.validation.statistics import NOISE_FRAC, by_step

OTHER_KINDS = (
    *("kinds", "blind_kinds", "blind_intervals", "blind_last"),
    *("blind_next", "blind_products", "blind_turnover"),
)
MARGINS = (0.0, 0.005, 0.01, 0.015, 0.02, 0.03, 0.04, 0.06, 0.08)


def steps_of(recipe: str, today: bool, counts: Callable[[ResultCase], bool]) -> list[list[ResultCase]]:
    """Return the rows of each step with a searched schedule and one of a policy."""
    then, again = predict_again(newest_results(Path("validate/results"), recipe))
    cases = (again if today else then).cases
    steps = by_step(case for case in cases if case.outputs_equal and counts(case)).values()
    return [rows for rows in steps if planned(rows) and any(case.policy == SEARCH for case in rows)]


def planned(rows: list[ResultCase]) -> list[ResultCase]:
    """Return the rows of policies; a recommended schedule is one unless it is the searched one."""
    searched = {case.predicted_ns for case in rows if case.policy == SEARCH}
    return [
        case
        for case in rows
        if case.policy not in (SEARCH, "random", FASTEST_KERNELS)
        and not (case.policy == RECOMMENDED and case.predicted_ns in searched)
    ]


def compared(case: ResultCase) -> int:
    """Return what schedules are compared by."""
    return compared_ns(case.predicted_ns, case.events or 0)


def taken(rows: list[ResultCase], margin: float) -> ResultCase:
    """Return the row that is recommended with a margin."""
    best = min(planned(rows), key=compared)
    searched = min((case for case in rows if case.policy == SEARCH), key=compared)
    return searched if compared(searched) < compared(best) * (1 - margin) else best


def main() -> None:
    """Print a row for each margin, for each group of steps, by both predictions."""
    print("| predicted | steps | margin | within 1 % | slower: mean, most | error: median, most, bias | in interval |")
    print("|---|---|--:|--:|--:|--:|--:|")
    for when, today in {"today": True, "then": False}.items():
        other_kinds = [rows for recipe in OTHER_KINDS for rows in steps_of(recipe, today, lambda _: True)]
        convolutional = steps_of("blind_convolutional", today, lambda _: True)
        known = steps_of("fair", today, lambda case: case.kernels == "captured")
        groups = {
            "other kinds": other_kinds,
            "convolutional, blind": convolutional,
            "known, captured kernels": known,
            "all of these": [*other_kinds, *convolutional, *known],
            "known, chosen kernels": steps_of("fair", today, lambda case: case.kernels == "chosen"),
        }
        for name, steps in groups.items():
            for margin in MARGINS:
                cells = in_short([(taken(of_step, margin), of_step) for of_step in steps])
                print(f"| {when} | {name} | {margin:.1%} | {cells} |")


def in_short(found: list[tuple[ResultCase, list[ResultCase]]]) -> str:
    """Return the cells of schedules taken, each with the rows of its step."""
    slower = [case.measured_ns / fastest_ns(rows) - 1 for case, rows in found]
    errors = [case.predicted_ns / case.measured_ns - 1 for case, _ in found]
    near = sum(each <= NOISE_FRAC for each in slower)
    held = sum(case.predicted_interval_ns[0] <= case.measured_ns <= case.predicted_interval_ns[1] for case, _ in found)
    searched = [case for case, _ in found if case.policy == SEARCH]
    held_searched = sum(
        case.predicted_interval_ns[0] <= case.measured_ns <= case.predicted_interval_ns[1] for case in searched
    )
    return (
        f"{near} of {len(found)} | {statistics.fmean(slower):.2%}, {max(slower):.1%} "
        f"| {statistics.median(map(abs, errors)):.1%}, {max(map(abs, errors)):.1%}, {statistics.fmean(errors):+.1%} "
        f"| {held}; of searched {held_searched} of {len(searched)}"
    )


def fastest_ns(rows: list[ResultCase]) -> int:
    """Return the measured time of the fastest schedule of a step, or of its sequential graph."""
    return min(rows[0].sequential_ns, *(case.measured_ns for case in rows))


if __name__ == "__main__":
    main()
