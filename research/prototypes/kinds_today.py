"""Errors of the three blind sets of other kinds, as predicted then and by today's rules: python kinds_today.py.

Today's predictions are those of tests/data/predicted_ns.json. Run it in the repository's root.
"""

from __future__ import annotations

import json
import statistics
from pathlib import Path

import msgspec

from gpusim.defaults import RECOMMENDED
from gpusim.formats.results import ResultCase, newest_results, read_results
from gpusim.quantiles import quantile
from gpusim.search.budget import SEARCH
from gpusim.validation.statistics import NOISE_FRAC, by_step

SETS = ("kinds", "blind_kinds", "blind_intervals")


def in_short(cases: list[ResultCase]) -> str:
    """Return number, median, 95 %, largest error and bias."""
    errors = sorted(abs(case.error) for case in cases)
    return (
        f"{len(errors)}: {statistics.median(errors):.1%}, {quantile(errors, 0.95):.1%}, {errors[-1]:.1%}, "
        f"{statistics.fmean(case.error for case in cases):+.1%}"
    )


def main() -> None:
    """Print how often the recommended schedule is near the best, and a line per policy and kind."""
    known = json.loads(Path("tests/data/predicted_ns.json").read_text(encoding="utf-8"))
    pairs: list[tuple[ResultCase, ResultCase]] = []
    near = steps = 0
    for name in SETS:
        file = newest_results(Path("validate/results"), name)
        for case, now_ns in zip(read_results(file).cases, known[file.stem], strict=True):
            if case.outputs_equal:
                pairs.append((case, msgspec.structs.replace(case, predicted_ns=now_ns)))
    for of_step in by_step(then for then, _ in pairs).values():
        best_ns = min(of_step[0].sequential_ns, *(case.measured_ns for case in of_step))
        (taken,) = (case for case in of_step if case.policy == RECOMMENDED)
        near, steps = near + (taken.measured_ns <= (1 + NOISE_FRAC) * best_ns), steps + 1
    print(f"recommended schedule within {NOISE_FRAC:.0%} of the fastest measured one: {near} of {steps} steps")
    several = [pair for pair in pairs if pair[0].streams > 1]
    groups = {"all": several}
    groups |= {name: [pair for pair in several if pair[0].policy == name] for name in (RECOMMENDED, SEARCH)}
    for kind in sorted({case.network.partition("_")[0] for case, _ in several}):
        groups[kind] = [pair for pair in several if pair[0].network.partition("_")[0] == kind]
    for name, group in groups.items():
        print(f"{name}: then {in_short([then for then, _ in group])}; today {in_short([now for _, now in group])}")


if __name__ == "__main__":
    main()
