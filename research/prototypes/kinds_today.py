"""Errors of the blind sets of other kinds, as predicted then and by today's rules, by kind of network.

    PYTHONPATH=.:scripts python research/prototypes/kinds_today.py

Prints how often the recommended schedule is near the best, then Markdown: a row for all schedules on several streams,
for those of two policies, and for each kind. Run it in the repository's root.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from make_accuracy_page import OTHER_KINDS
from set_uncertainty import kind_of

from gpusim.defaults import RECOMMENDED, SEARCH
from gpusim.formats.results import ResultCase, newest_results
from gpusim.validation.again import predict_again
from gpusim.validation.statistics import NOISE_FRAC, by_step, counted_replays, fidelity

SETS = tuple(OTHER_KINDS.values())


def near_best(cases: Sequence[ResultCase]) -> str:
    """Return on how many of the steps the recommended schedule is within the noise of the fastest measured one."""
    near, steps = 0, by_step(case for case in cases if case.outputs_equal)
    for of_step in steps.values():
        best_ns = min(of_step[0].sequential_ns, *(case.measured_ns for case in of_step))
        (taken,) = (case for case in of_step if case.policy == RECOMMENDED)
        near += taken.measured_ns <= (1 + NOISE_FRAC) * best_ns
    return f"{near} of {len(steps)}"


def in_short(cases: Sequence[ResultCase]) -> str:
    """Return median, 95 %, largest error, bias and coverage; tau, its mean over steps; regret, its mean and largest."""
    found = fidelity(cases)
    assert found is not None
    assert found.covered is not None
    errors = f"{found.median:.1%}, {found.p95:.1%}, {found.largest:.1%}, {found.bias:+.1%}"
    tau = f"{statistics.fmean(found.tau):.2f}" if found.tau else ""
    lost = f"{statistics.fmean(found.regret):.1%}, {max(found.regret):.1%}" if found.regret else ""
    return f"{errors} | {found.covered:.0%} | {tau} | {lost}"


def main() -> None:
    """Print the sentence and the table."""
    then: list[ResultCase] = []
    today: list[ResultCase] = []
    for name in SETS:
        stored, again = predict_again(newest_results(Path("validate/results"), name))
        then += stored.cases
        today += again.cases
    print(f"recommended schedule within {NOISE_FRAC:.0%} of the fastest measured one: {near_best(then)} steps\n")
    wanted: Mapping[str, Callable[[ResultCase], bool]] = {
        "all": lambda case: True,
        RECOMMENDED: lambda case: case.policy == RECOMMENDED,
        SEARCH: lambda case: case.policy == SEARCH,
        **{
            kind: lambda case, kind=kind: kind_of(case.network) == kind
            for kind in sorted({kind_of(c.network) for c in then})
        },
    }
    print("| | schedules | near the best | then | within | tau | regret | today | within | tau | regret |")
    print("|---|--:|--:|--:|--:|--:|--:|--:|--:|--:|--:|")
    for name, counts in wanted.items():
        of_then, of_today = ([case for case in cases if counts(case)] for cases in (then, today))
        near = "" if name in (RECOMMENDED, SEARCH) else near_best(of_then)
        print(f"| {name} | {len(counted_replays(of_then))} | {near} | {in_short(of_then)} | {in_short(of_today)} |")


if __name__ == "__main__":
    main()
