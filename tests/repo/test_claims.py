"""What README and CHANGELOG claim of measurements is what the results files say: one that changes must change both."""

from __future__ import annotations

import json
import math
import re
import statistics

import pytest

from gpusim.formats.results import ResultCase, newest_results, read_results
from gpusim.validation.memory_tables import peak_error
from gpusim.validation.statistics import fidelity
from tests.repo.test_readme import ROOT

RESULTS = ROOT / "validate" / "results"
#: Code that predicted the newest memory plans, before they ran.
PREDICTED_BEFORE = "0.1.0+ce39db9a"


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


def test_memory_plans_are_as_many_and_as_far_off_as_the_results_say() -> None:
    plans = [case for file in RESULTS.glob("memory_h200_*[0-9].json") for case in read_results(file).cases]
    newest = cases("memory")  # replayed since a copied tensor goes with its `free`
    since = [case for case in newest if case.commit == PREDICTED_BEFORE]
    assert len({case.trace for case in plans}) == 2 * len({case.network for case in plans}) == 12
    off, off_since = (rounded_up(max(abs(peak_error(case)) for case in found)) for found in (plans, newest))
    text = f"{len(plans)} memory plans of six networks at two batch sizes: peaks within {off} %"
    assert f"{text}; the {len(newest)} since" in prose("CHANGELOG.md")
    assert f"copied tensors in time within {off_since} %" in prose("CHANGELOG.md")
    held = read_results(ROOT / "research" / "data" / "memory_held_h200_20261126.json").cases
    assert {case.trace for case in held} < {case.trace for case in newest}
    off_held = rounded_up(max(abs(peak_error(case)) for case in held))
    assert f"left out are {len(held)} older rows of three of these steps" in prose("CHANGELOG.md")
    assert f"their peaks are up to {off_held} % off" in prose("CHANGELOG.md")
    for found, claim in ((newest, "those {} within"), (since, "{} of three steps within")):
        times = [abs(case.error) for case in found]
        within = f"{rounded_up(max(times))} % (median {100 * statistics.median(times):.1f} %)"
        assert f"{claim.format(len(found))} {within}" in prose("CHANGELOG.md")


def test_our_plans_are_faster_than_others_at_their_peaks_on_as_many_steps_as_the_changelog_says() -> None:
    plans = [case for file in sorted(RESULTS.glob("memory_h200_*[0-9].json")) for case in read_results(file).cases]
    ours = {(case.trace, case.memory_budget_bytes): case for case in plans if case.policy == "least_time"}
    pairs = [
        (case, mine)
        for case in plans
        if (mine := ours.get((case.trace, case.predicted_peak_bytes))) is not None
        and case.policy != "least_time"
        and case.measured_peak_bytes < 0.99 * case.sequential_peak_bytes
    ]
    slower = [(case, mine) for case, mine in pairs if mine.measured_ns >= case.measured_ns]
    assert {case.policy for case, _ in slower} == {"torch_budget"}
    lost = " and ".join(sorted((f"{mine.measured_ns / case.measured_ns - 1:.0%}"[:-1] for case, mine in slower))[::-1])
    steps, budgets = len({case.trace for case, _ in pairs}), sum(case.policy == "torch_budget" for case, _ in pairs)
    words = {2: "two", 6: "six", 9: "nine"}
    text = prose("CHANGELOG.md")
    assert f"on {words[steps]} steps `least_time` is faster than each published policy that saves memory" in text
    assert f"{lost} % faster on {words[len(slower)]} of {words[budgets]}" in text
    higher = [mine.measured_peak_bytes / case.measured_peak_bytes - 1 for case, mine in pairs]
    assert f"at a peak at most {rounded_up(max(higher))} % over that policy's" in text


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


def test_alexnet_beside_its_reducer_in_a_graph_is_as_far_off_as_the_changelog_says() -> None:
    """All files have it: on two GPUs other ones than the newest."""
    errors: dict[int, list[float]] = {2: [], 4: []}
    for file in (*RESULTS.glob("parallel_steps_h200_*.json"), *RESULTS.glob("parallel_exchanges_h200_*.json")):
        for step in json.loads(file.read_text(encoding="utf-8"))["cases"]:
            if (step["network"], step["batch"], step["policy"]) == ("alexnet", 32, "ddp"):
                errors[step["gpus"]].append(step["predicted_ns"] / step["measured_ns"] - 1)
    assert all(f"{error:+.0%}" == "+3%" for error in errors[2])
    assert all(f"{error:+.0%}" == "-1%" for error in errors[4])
    claim = "in a graph 3 % too slow on two gpus and 1 % too fast on four"
    assert claim in prose("CHANGELOG.md")
