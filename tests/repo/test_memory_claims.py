"""What README and CHANGELOG claim of memory plans is what the results files say."""

from __future__ import annotations

import dataclasses
import json
import math
import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from gpusim.formats.results import ResultCase, newest_results, read_results
from gpusim.validation.again import predict_again
from gpusim.validation.memory_tables import order_right, peak_error
from tests.repo.test_readme import ROOT
from tests.support.claims import RESULTS, cases, prose, rounded_up


def memory_plans() -> tuple[list[ResultCase], list[ResultCase]]:
    """Plans replayed since a copied tensor goes with its `free`: of that day, and captured again since."""
    return list(cases("memory")), list(cases("memory_again"))


def test_memory_plans_are_as_many_and_as_far_off_as_the_results_say() -> None:
    plans = [case for file in RESULTS.glob("memory_*[0-9].json") for case in read_results(file).cases]
    before, again = memory_plans()
    joins = list(cases("memory_superneurons"))
    newest = [*before, *again, *cases("memory_algorithms"), *joins, *cases("memory_rest"), *cases("memory_release")]
    assert len({case.trace for case in plans}) == 2 * len({case.network for case in plans}) == 12
    assert len({case.trace for case in again}) == 8
    off, off_since = (rounded_up(max(abs(peak_error(case)) for case in some)) for some in (plans, newest))
    text = f"{len(plans)} memory plans on one stream, six networks at two batch sizes: peaks within {off} %"
    assert f"{text}; the {len(newest)} since" in prose("CHANGELOG.md")
    assert f"copied tensors in time within {off_since} %" in prose("CHANGELOG.md")
    held = read_results(ROOT / "research" / "data" / "memory_held_h200_20261126.json").cases
    assert {case.trace for case in held} < {case.trace for case in newest}
    off_held = rounded_up(max(abs(peak_error(case)) for case in held))
    assert f"left out are {len(held)} older rows of three of these steps" in prose("CHANGELOG.md")
    assert f"their peaks are up to {off_held} % off" in prose("CHANGELOG.md")
    claims = (
        (newest, "those {} within"),
        (again, "of these {} of eight steps captured again within"),
        (joins, f"{{}} of the {len(newest)}, measured for that on four steps of resnets, are within"),
    )
    moved = [abs(case.error) for case in newest if case.predicted_ns != case.predicted_sequential_ns]
    differ = f"of the {len(moved)} that differ from keeping all {100 * statistics.median(moved):.1f} %"
    for some, claim in claims:
        times = [abs(case.error) for case in some]
        median = f"median {100 * statistics.median(times):.1f} %" + (f"; {differ}" if some is newest else "")
        assert f"{claim.format(len(some))} {rounded_up(max(times))} % ({median})" in prose("CHANGELOG.md")
    different = list({(case.trace, case.predicted_ns, case.predicted_peak_bytes): case for case in again}.values())
    right, pairs = order_right(different)
    assert right == pairs
    of_plans = f"of their {len(different)} different plans all {pairs} pairs that differ by over 2 % are in order"
    assert of_plans in prose("CHANGELOG.md")


def test_memory_optimal_algorithms_save_and_cost_what_the_changelog_says() -> None:
    rows = cases("memory_algorithms")
    peak = math.ceil(1e4 * max(abs(peak_error(case)) for case in rows)) / 100
    text = prose("CHANGELOG.md")
    assert f"times within {rounded_up(max(abs(case.error) for case in rows))} %" in text
    plans = list({(case.trace, case.predicted_ns, case.predicted_peak_bytes): case for case in rows}.values())
    many = f"{len(rows)} rows, {len(plans)} plans of {len({case.trace for case in rows})} steps"
    assert f"{many}, peaks within {peak} %" in text
    right, pairs = order_right(plans)
    assert right == pairs
    assert f"all {pairs} pairs of plans that differ by over 2 % in order" in text
    by_plan = {(case.trace, case.policy): case for case in rows}
    for step, shares in (("vgg16-train-b64", (90, 77)), ("resnet50-train-b16", (68, 66))):
        pair = [by_plan[step, policy] for policy in ("vdnn_conv", "vdnn_conv_m")]
        share = [round(100 * case.measured_peak_bytes / case.sequential_peak_bytes) for case in pair]
        assert tuple(share) == shares
        longer = pair[1].measured_ns / pair[0].measured_ns
        assert f"from {share[0]} to {share[1]} % of its peak for {longer:.2f} times the time" in text
    optimal = [100 * case.worst_error for case in rows if case.policy.endswith("_m")]
    assert len(optimal) == 6
    assert f"by {min(optimal):.0f} to {max(optimal):.0f} % of their norm" in text
    less = [1 - mine.measured_ns / case.measured_ns for case, mine in with_ours(rows)]
    takes = f"`least_time` takes {100 * min(less):.0f} to {100 * max(less):.0f} % less time"
    assert f"at the peaks of these {len(less)}, {takes}" in text


def test_the_last_policies_save_and_cost_what_the_changelog_says() -> None:
    rows, text = cases("memory_rest"), prose("CHANGELOG.md")
    peak = math.ceil(1e4 * max(abs(peak_error(case)) for case in rows)) / 100
    plans = list({(case.trace, case.predicted_ns, case.predicted_peak_bytes): case for case in rows}.values())
    right, pairs = order_right(plans)
    assert right == pairs
    times = rounded_up(max(abs(case.error) for case in rows))
    many = f"{len(rows)} rows, {len(plans)} plans, peaks within {peak} %, times within {times} %, all {pairs} pairs"
    assert many in text
    errors = [100 * case.error for case in rows if case.policy == "superneurons_release"]
    assert f"released code was predicted {min(errors):.1f} to {max(errors):.1f} % too slow" in text
    at_peaks = [
        (case, mine)
        for case in rows
        for mine in rows
        if (mine.trace, mine.policy, mine.memory_budget_bytes) == (case.trace, "least_time", case.predicted_peak_bytes)
    ]
    moving = [(case, mine) for case, mine in at_peaks if case.policy not in ("olla", "least_time")]
    less = [100 * (1 - mine.measured_ns / case.measured_ns) for case, mine in moving]
    said = f"at the peaks of the {len(less)} plans that move tensors `least_time` takes {min(less):.0f} to"
    assert f"{said} {max(less):.0f} % less time" in text
    assert max(mine.measured_peak_bytes / case.measured_peak_bytes for case, mine in moving) < 1.003
    as_long = [mine.measured_ns / case.measured_ns - 1 for case, mine in at_peaks if case.policy == "olla"]
    assert len(as_long) == 4
    assert max(map(abs, as_long)) < 0.002


@dataclasses.dataclass(frozen=True)
class HalfPeaks:
    """Replayed plans on several streams, searched to halve the peak."""

    runs: tuple[dict[str, Any], ...]
    shares: tuple[float, ...]
    """Peaks over that of the sequential graph that keeps all."""
    less: tuple[float, ...]
    """Time that they take less than it, in percent."""
    over: tuple[float, ...]
    """Peaks over their predictions, in percent."""

    @classmethod
    def of(cls, *folders: str) -> HalfPeaks:
        """Read the measurements and plans of some folders."""
        data = ROOT / "research" / "data"
        files = [file for folder in folders for file in sorted((data / folder).glob("*.measured.json"))]
        runs = tuple(json.loads(file.read_text(encoding="utf-8")) for file in files)
        plans = [json.loads(Path(str(file).replace(".measured", "")).read_text(encoding="utf-8")) for file in files]
        assert all(run["outputs"]["equal"] and run["streams"] >= 8 for run in runs)
        return cls(
            runs,
            tuple(run["peak_bytes"] / run["sequential_peak_bytes"] for run in runs),
            tuple(100 * (1 - run["schedule"]["median_ns"] / run["sequential"]["median_ns"]) for run in runs),
            tuple(
                100 * (run["peak_bytes"] / plan["predicted_peak_bytes"] - 1)
                for run, plan in zip(runs, plans, strict=True)
            ),
        )

    @property
    def in_words(self) -> str:
        """Peaks and times as the changelog says them."""
        return f"{100 * min(self.shares):.0f} to {100 * max(self.shares):.0f} % of the peak"

    @property
    def faster(self) -> str:
        """Times as the changelog says them."""
        return f"for {min(self.less):.1f} to {max(self.less):.1f} % less time"


def test_memory_plans_on_several_streams_are_as_good_as_the_changelog_says() -> None:
    text = prose("CHANGELOG.md")
    now, before = (
        HalfPeaks.of("memory_half_20261129"),
        HalfPeaks.of("memory_half_20261124", "memory_half_again_20261124"),
    )
    assert len({run["trace"].split("-")[0] for run in now.runs}) == len(now.runs) == 3
    assert max(now.shares) < 0.5
    assert f"they take {now.in_words} of the sequential graph that keeps all, {now.faster} than it takes" in text
    times = rounded_up(max(abs(run["predicted_ns"] / run["schedule"]["median_ns"] - 1) for run in now.runs))
    under = [abs(each) for each in now.over if each <= 0]
    assert len(under) == 3
    assert f"peaks are {min(under):.1f} to {max(under):.1f} % under the prediction, times within {times} %" in text
    assert len(before.runs) == 6
    earlier = f"six earlier ones took {before.in_words}, {before.faster}, with peaks"
    assert f"{earlier} up to {max(before.over):.1f} % over the prediction" in text


def test_copies_of_a_chain_are_predicted_as_well_as_the_changelog_says() -> None:
    release = [case for case in cases("memory_release") if case.policy == "superneurons_release"]
    assert len({case.trace for case in release}) == 4
    again = predict_again(newest_results(ROOT / "validate" / "results", "memory_rest"))[1]
    rest = [case for case in again.cases if case.policy == "superneurons_release"]
    assert len(rest) == 4
    known, blind = (rounded_up(max(abs(case.error) for case in each)) for each in (rest, release))
    text = "by this rule those four plans are predicted again within"
    assert f"{text} {known} %, and four more steps, predicted before, within {blind} %" in prose("CHANGELOG.md")


def with_ours(plans: Sequence[ResultCase]) -> list[tuple[ResultCase, ResultCase]]:
    """Pair each plan that saves memory with the fastest of `least_time` that has at most 0.3 % more peak."""
    pairs = []
    for case in plans:
        if case.policy != "least_time" and case.measured_peak_bytes < 0.99 * case.sequential_peak_bytes:
            ours = [mine for mine in plans if (mine.trace, mine.policy) == (case.trace, "least_time")]
            fit = [mine for mine in ours if mine.measured_peak_bytes <= 1.003 * case.measured_peak_bytes]
            pairs.append((case, min(fit, key=lambda mine: mine.measured_ns)))
    return pairs


def test_our_plans_are_faster_than_others_at_their_peaks_as_the_changelog_says() -> None:
    """On each of the twelve steps by its newest plans, at most 0.3 % over the peak of the policy."""
    before, again = memory_plans()
    planned_again = {case.trace for case in again}
    plans = [*again, *(case for case in before if case.trace not in planned_again)]
    of_rest = with_ours(cases("memory_rest"))
    ordered = [(case, mine) for case, mine in of_rest if case.policy == "olla"]
    of_rest = [pair for pair in of_rest if pair not in ordered]
    pairs = [
        *with_ours(plans),
        *with_ours(cases("memory_superneurons")),
        *with_ours(cases("memory_algorithms")),
        *of_rest,
    ]
    assert len({case.trace for case, _ in pairs}) == 12
    assert all(mine.measured_ns < case.measured_ns for case, mine in pairs)
    over = [1 - mine.measured_ns / case.measured_ns for case, mine in pairs if case.policy == "torch_budget"]
    assert len(over) == 12
    text = prose("CHANGELOG.md")
    faster = "on all twelve steps, `least_time` is faster than each measured policy that saves memory, but for olla"
    assert faster in text
    ((olla, mine),) = ordered
    assert (mine.predicted_ns, mine.predicted_peak_bytes) == (olla.predicted_ns, olla.predicted_peak_bytes)
    saved = 100 * (1 - olla.measured_peak_bytes / olla.sequential_peak_bytes)
    assert olla.trace == "vgg16-train-b16"
    assert f"olla saves {saved:.0f} % of the peak of vgg-16 at 16 images by order alone" in text
    assert "at a peak at most 0.3 % over that policy's" in text
    assert f"activation budget by {100 * min(over):.1f} to {100 * max(over):.1f} %" in text
    near = {case.trace for case, mine in pairs if mine.interval_ns[1] >= case.interval_ns[0]}
    assert near == {"encoder_12-train-b32"}
    assert "on encoder_12 at 32 images the intervals of these two times overlap" in text
