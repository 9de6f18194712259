"""What README and CHANGELOG claim of measurements is what the results files say: one that changes must change both."""

from __future__ import annotations

import json
import math
import re

import pytest

from gpusim.formats.results import ResultCase, newest_results, read_results
from gpusim.validation.statistics import fidelity
from tests.repo.test_readme import ROOT

RESULTS = ROOT / "validate" / "results"
NUMBERS = {8: "eight", 9: "nine", 10: "ten", 11: "eleven", 12: "twelve", 13: "thirteen", 14: "fourteen", 15: "fifteen"}


def prose(name: str) -> str:
    """Return a page in lower case, with single spaces."""
    return re.sub(r"\s+", " ", (ROOT / name).read_text(encoding="utf-8")).lower()


def rounded_up(error: float) -> float:
    """Return an error in percent, rounded up to a tenth."""
    return math.ceil(error * 1000) / 10


def cases(recipe: str) -> tuple[ResultCase, ...]:
    return read_results(newest_results(RESULTS, recipe)).cases


def test_gain_over_torch_compile_is_that_of_all_measured_steps() -> None:
    """The number of steps, the least and largest gain over the fastest mode, and how many have Inductor's kernels."""
    measured = cases("compile")
    gains = [min(case.over(name) for name in case.baselines if name.startswith("torch_compile")) for case in measured]
    steps, least, largest = NUMBERS[len(measured)], min(gains), max(gains)
    compiled = NUMBERS[sum(case.frontend == "inductor" for case in measured)]
    between = f"{least:.2f} to {largest:.2f} times as fast"
    assert f"on {steps} steps only: {between}, {compiled} with inductor's kernels" in prose("README.md")
    assert f"{steps} optimized steps against `torch.compile`: {between}" in prose("CHANGELOG.md")


@pytest.mark.parametrize(
    ("recipe", "claim"),
    [
        ("blind_again", "a median error of {median} over {schedules} schedules of four steps"),
        (
            "blind_kinds",
            "a median error of {median}, {largest} at most, {covered} of {schedules} schedules within the 90 % "
            "interval",
        ),
    ],
)
def test_blind_errors_are_those_of_the_results(recipe: str, claim: str) -> None:
    found = fidelity(case for case in cases(recipe) if not case.fitted)
    assert found is not None
    assert found.covered is not None
    text = claim.format(
        median=f"{100 * found.median:.1f} %",
        largest=f"{100 * found.largest:.1f} %",
        covered=f"{100 * found.covered:.0f} %",
        schedules=found.schedules,
    )
    assert text in prose("CHANGELOG.md")


def test_ranks_are_as_many_and_as_far_off_as_the_results_say() -> None:
    file = max(RESULTS.glob("parallel_h200_*.json"))
    ranks = json.loads(file.read_text(encoding="utf-8"))["cases"]
    error = max(abs(case["predicted_ns"] / case["measured_ns"] - 1) for case in ranks)
    claim = (
        f"{len(ranks)} plans for several gpus, run one at a time without communication: predicted within {error:.1%}"
    )
    assert claim.replace("%", " %") in prose("CHANGELOG.md")


def test_memory_plans_are_as_many_and_as_far_off_as_the_results_say() -> None:
    plans = [case for file in sorted(RESULTS.glob("memory_h200_*[0-9].json")) for case in read_results(file).cases]
    off = max(abs(case.predicted_peak_bytes / case.measured_peak_bytes - 1) for case in plans)
    assert f"of five networks, {len(plans)}: peaks within {rounded_up(off)} %" in prose("CHANGELOG.md")
    assert len({case.network for case in plans}) == 5
    assert f"up to {-100 * min(case.error for case in plans):.0f} % too fast" in prose("CHANGELOG.md")
