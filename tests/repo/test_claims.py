"""What README and CHANGELOG claim of measurements is what the results files say: one that changes must change both."""

from __future__ import annotations

import json
import math
import re
import statistics

import pytest

from gpusim.formats.results import ResultCase, newest_results, read_results
from gpusim.validation.statistics import fidelity
from tests.repo.test_readme import ROOT

RESULTS = ROOT / "validate" / "results"
#: Memory plans whose traces were not kept.
LOST_TRACES = "memory_untraced_h200_20261126.json"


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
    steps, least, largest = len(measured), min(gains), max(gains)
    between = f"{least:.2f} to {largest:.2f} times as fast"
    assert all(case.frontend == "inductor" for case in measured)
    assert f"on {steps} steps only: {between}, all with kernels of inductor" in prose("README.md")
    assert f"{steps} optimized steps against `torch.compile`: {between}" in prose("CHANGELOG.md")


@pytest.mark.parametrize(
    ("recipe", "claim"),
    [
        ("blind_again", "a median error of {median} over {schedules} schedules of four steps"),
        (
            "blind_intervals",
            "a median error of {median}, {largest} at most, {covered} of {schedules} schedules within the 90 % "
            "interval",
        ),
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


def memory_plans() -> tuple[list[ResultCase], list[ResultCase]]:
    """Return all replayed memory plans, and those replayed since a copied tensor goes with its `free`."""
    files = {file.name: read_results(file).cases for file in sorted(RESULTS.glob("memory_*h200_*[0-9].json"))}
    newest = [case for case in files[LOST_TRACES] if case.trace == "resnet152-train-b64"] + list(cases("memory"))
    return [case for found in files.values() for case in found], newest


def test_memory_plans_are_as_many_and_as_far_off_as_the_results_say() -> None:
    plans, newest = memory_plans()
    assert f"memory plans of six networks, {len(plans)}: " in prose("CHANGELOG.md")
    assert len({case.network for case in plans}) == 6
    off = [(case.policy, case.measured_peak_bytes / case.predicted_peak_bytes - 1) for case in plans]
    published = rounded_up(max(abs(error) for policy, error in off if policy not in ("least_time", "capuchin")))
    assert f"peaks of published policies, capuchin's apart, within {published} %" in prose("CHANGELOG.md")
    most = 100 * max(error for _, error in off)
    assert f"`least_time` and capuchin allocated up to {most:.1f} % more than predicted" in prose("CHANGELOG.md")
    peaks = max(abs(case.measured_peak_bytes / case.predicted_peak_bytes - 1) for case in newest)
    assert f"the {len(newest)} plans since have peaks within {rounded_up(peaks)} %" in prose("CHANGELOG.md")
    times = [abs(case.error) for case in newest]
    within = f"times within {rounded_up(max(times))} % (median {100 * statistics.median(times):.1f} %)"
    assert within in prose("CHANGELOG.md")


def test_steps_on_several_gpus_are_as_many_and_as_far_off_as_the_results_say() -> None:
    file = max(RESULTS.glob("parallel_steps_h200_*.json"))
    steps = json.loads(file.read_text(encoding="utf-8"))["cases"]
    errors = [abs(step["predicted_ns"] / step["measured_ns"] - 1) for step in steps]
    text = f"predicted within {rounded_up(max(errors))} %, {100 * statistics.median(errors):.1f} % in the median"
    assert text in prose("CHANGELOG.md")
    assert f"{len(steps)} steps of plans, and of distributeddataparallel" in prose("CHANGELOG.md")
    assert f"from layers timed alone within {rounded_up(max(errors))} %" in prose("README.md")
    assert all(step["outputs_equal"] for step in steps if step["policy"] != "ddp")
    keys = ("network", "batch", "gpus", "policy", "exchanges")
    found = {tuple(step.get(key) for key in keys): step["baselines"] | {"own": step["measured_ns"]} for step in steps}
    assert len(found) == len(steps)  # no step counts twice
    nccl, shared = (found["alexnet", 32, 4, "parallel_layer", exchanges] for exchanges in (None, "direct"))
    gains = (
        f"{nccl['ddp_graph'] / nccl['own']:.2f} times as fast as distributeddataparallel in a graph, "
        f"{nccl['ddp'] / nccl['own']:.2f} times as fast as without one, "
        f"{shared['ddp_graph'] / shared['own']:.2f} and {shared['ddp'] / shared['own']:.2f} with exchanges by shared"
    )
    assert gains in prose("CHANGELOG.md")
