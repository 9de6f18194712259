"""Further slowdown of searched schedules: what each would have recommended.

    PYTHONPATH=. python research/prototypes/search_margin.py

Of each step, the schedule is taken that `gpusim explore` would recommend: among the best policy's, the searched one and
the sequential graph that whose interval ends first, with a time for each event. The interval of a searched one ends
later by a fraction, one row each; *lead* is the rule before: the searched one is taken if it is predicted faster by
more than 6 %. Prints on how many steps the one taken is within 1 % of the fastest measured one, how much slower it is,
in the mean and at most, and its prediction error, in the median and at most, and its bias; on how many it lies within
its 90 % interval, and how many are sequential. Once by today's predictions, once by those of the runs, which the
searches of that day followed. Run it in the repository's root.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from gpusim.defaults import RECOMMENDED, SEARCH
from gpusim.formats.hardware import read_hardware
from gpusim.formats.results import ResultCase, newest_results
from gpusim.search.events import compared_ns
from gpusim.validation.again import predict_again
from gpusim.validation.recipe import FASTEST_KERNELS
from gpusim.validation.statistics import NOISE_FRAC, by_step

OTHER_KINDS = (
    *("kinds", "blind_kinds", "blind_intervals", "blind_last"),
    *("blind_next", "blind_products", "blind_turnover"),
)
FRACTIONS = (0.0, 0.005, 0.01, 0.014, 0.02, 0.03, 0.04, 0.06)
#: Lead of the rule before, which left the intervals as they are.
LEAD = 0.06
NAMES: dict[float | None, str] = {**{fraction: f"{fraction:.1%}" for fraction in FRACTIONS}, None: "lead of 6 %"}


@dataclass(frozen=True)
class Taken:
    """What is recommended for a step."""

    measured_ns: int
    predicted_ns: int
    interval_ns: tuple[float, float]
    fastest_ns: int
    policy: str

    @property
    def held(self) -> bool:
        """Whether the measured time lies within the interval."""
        return self.interval_ns[0] <= self.measured_ns <= self.interval_ns[1]


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


def taken(rows: list[ResultCase], fraction: float | None, known_frac: float) -> Taken:
    """Return what is recommended; the intervals of searched rows have `known_frac`, those with variants none of it."""
    added = known_frac if rows[0].kernels != "chosen" else 0.0

    def interval(case: ResultCase) -> tuple[float, float]:
        first, last = case.predicted_interval_ns
        if case.policy != SEARCH:
            return first, last
        return first, last / (1 + added) * (1 + (fraction or 0.0))

    def latest(case: ResultCase) -> float:
        return compared(case) * interval(case)[1] / case.predicted_ns

    best = min(planned(rows), key=compared)
    searched = min((case for case in rows if case.policy == SEARCH), key=compared)
    if fraction is None:
        found = searched if compared(searched) < compared(best) * (1 - LEAD) else best
        end_ns = interval(found)[1]
    else:
        found = min((best, searched), key=latest)
        end_ns = latest(found)
    fastest_ns = min(rows[0].sequential_ns, *(case.measured_ns for case in rows))
    if end_ns > found.predicted_sequential_ns:
        exact_ns = rows[0].sequential_ns
        return Taken(exact_ns, exact_ns, (exact_ns, exact_ns), fastest_ns, "sequential")
    return Taken(found.measured_ns, found.predicted_ns, interval(found), fastest_ns, found.policy)


def main() -> None:
    """Print a row for each fraction, for each group of steps, by both predictions."""
    known_frac = read_hardware(Path("hwmodels/h200.json")).uncertainty.searched_frac
    print(
        "| predicted | steps | ends later | within 1 % | slower: mean, most | error: median, most, bias | in interval |"
    )
    print("|---|---|--:|--:|--:|--:|--:|")
    for when, today in {"today": True, "then": False}.items():
        other_kinds = [rows for recipe in OTHER_KINDS for rows in steps_of(recipe, today, lambda _: True)]
        convolutional = steps_of("blind_convolutional", today, lambda _: True)
        known = steps_of("fair", today, lambda case: case.kernels == "captured")
        last = steps_of(OTHER_KINDS[-1], today, lambda _: True)
        groups = {
            "other kinds": other_kinds,
            "convolutional, blind": convolutional,
            "known, captured kernels": known,
            "all of these": [*other_kinds, *convolutional, *known],
            "known, captured kernels, and last set": [*known, *last],  # the fraction was set on none of these rows
            "known, chosen kernels": steps_of("fair", today, lambda case: case.kernels == "chosen"),
        }
        if today:  # these were predicted by the rule
            groups["measured after the rule"] = steps_of("blind_recommended", today, lambda _: True)
        for name, steps in groups.items():
            for fraction, label in NAMES.items():
                each = [taken(rows, fraction, known_frac if today else 0.0) for rows in steps]
                print(f"| {when} | {name} | {label} | {in_short(each)} |")


def in_short(found: list[Taken]) -> str:
    """Return the cells of what is recommended."""
    slower = [each.measured_ns / each.fastest_ns - 1 for each in found]
    planned_ones = [each for each in found if each.policy != "sequential"]
    errors = [each.predicted_ns / each.measured_ns - 1 for each in planned_ones]
    searched = [each for each in found if each.policy == SEARCH]
    near = sum(each <= NOISE_FRAC for each in slower)
    return (
        f"{near} of {len(found)} | {statistics.fmean(slower):.2%}, {max(slower):.1%} "
        f"| {statistics.median(map(abs, errors)):.1%}, {max(map(abs, errors)):.1%}, {statistics.fmean(errors):+.1%} "
        f"| {sum(each.held for each in planned_ones)} of {len(planned_ones)}; "
        f"of searched {sum(each.held for each in searched)} of {len(searched)}"
    )


if __name__ == "__main__":
    main()
