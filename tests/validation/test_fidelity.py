"""Quality of predictions: each statistic worked out by hand on a few cases, and the table of all."""

from __future__ import annotations

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpusim.formats.hardware import Uncertainty
from gpusim.formats.results import ResultCase
from gpusim.quantiles import quantile
from gpusim.validation.statistics import (
    MIN_SCHEDULES,
    NOISE_FRAC,
    by_step,
    counted_replays,
    fidelity,
    fidelity_table,
    kendall_tau,
    regret,
)
from gpusim.validation.tables import results_markdown, summary_lines
from tests.support.helpers import make_hardware
from tests.support.made_results import case, make_results


def step(*errors_percent: int, **fields: object) -> list[ResultCase]:
    """Make a step of one schedule per error, measured 1000, 1100, 1200 ... ns, predicted with these errors."""
    measured = range(1000, 1000 + 100 * len(errors_percent), 100)
    return [
        case(round(ns * (1 + error / 100)), ns, **fields)  # type: ignore[arg-type]
        for ns, error in zip(measured, errors_percent, strict=True)
    ]


# --- Quantiles ---


@pytest.mark.parametrize(
    ("values", "share", "wanted"),
    [
        ([7], 0.9, 7),
        ([1, 2], 0.5, 1),  # one of two is half of them
        ([1, 2], 0.51, 2),
        ([1, 2, 3, 4, 5, 6, 7, 8, 9, 10], 0.9, 9),  # nine of ten do not exceed 9
        ([1, 2, 3, 4, 5, 6, 7, 8, 9, 10], 0.95, 10),
        ([1, 2, 3, 4, 5, 6, 7, 8], 0.9, 8),  # seven of eight are only 87.5 %
        (list(range(1, 21)), 0.95, 19),
        (list(range(1, 101)), 0.9, 90),
        (list(range(1, 101)), 1.0, 100),
    ],
)
def test_quantile_is_the_smallest_value_that_the_share_does_not_exceed(
    values: list[float], share: float, wanted: float
) -> None:
    assert quantile(values, share) == wanted


@given(st.lists(st.integers(0, 50), min_size=1, max_size=60).map(sorted), st.integers(1, 1000))
def test_no_smaller_value_holds_the_share(values: list[float], thousandths: int) -> None:
    """In whole thousandths, so that no rounding of the test's own decides."""
    found = quantile(values, thousandths / 1000)
    assert sum(value <= found for value in values) * 1000 >= thousandths * len(values)
    assert sum(value < found for value in values) * 1000 < thousandths * len(values)


# --- Errors ---


def test_errors_are_shares_of_the_measured_time_over_schedules_on_several_streams() -> None:
    cases = [case(900, 1000), case(1040, 1000), case(1020, 1000), case(990, 1000), case(3000, 1000, streams=1)]
    found = fidelity(cases)
    assert found is not None
    # |errors| 1, 2, 4, 10 %: median 3 %, 90 % of four are all four; bias (-10 + 4 + 2 - 1) / 4 = -1.25 %
    assert found.schedules == 4
    assert (found.median, found.p90, found.p95, found.largest) == pytest.approx((0.03, 0.10, 0.10, 0.10))
    assert found.bias == pytest.approx(-0.0125)


def test_a_replay_with_other_outputs_counts_nowhere() -> None:
    cases = [*step(1, 2, 3, 4, 5, 6, 7, 8), case(9000, 1, outputs_equal=False)]
    found = fidelity(cases)
    assert found is not None
    assert (found.schedules, found.largest, found.regret) == (8, pytest.approx(0.08), (0.0,))
    assert fidelity(cases[-1:]) is None
    assert counted_replays(cases) == cases[:-1]  # what the dashboard draws


def test_twenty_schedules_tell_the_90th_from_the_95th_percentile() -> None:
    found = fidelity([case(1000 + error, 1000) for error in range(1, 21)])
    assert found is not None
    assert (found.p90, found.p95, found.largest) == pytest.approx((0.018, 0.019, 0.020))


def test_cases_on_one_stream_are_no_evidence() -> None:
    """The sequential time is anchored, and does not count even if right."""
    assert fidelity([]) is None
    assert fidelity([case(1000, 1000, streams=1)]) is None


def test_coverage_is_the_share_of_measured_times_within_the_predicted_interval_ends_included() -> None:
    held = [case(1000, ns, interval_ns=(950, 1050)) for ns in (950, 1000, 1050)]
    missed = [case(1000, ns, interval_ns=(950, 1050)) for ns in (949, 1051)]
    found = fidelity(held + missed)
    assert found is not None
    assert found.covered == pytest.approx(3 / 5)


def test_results_without_intervals_do_not_count_as_missed() -> None:
    """Files from before prediction intervals have (0, 0) there."""
    old, new = case(1000, 1000), case(1000, 1000, interval_ns=(990, 1010))
    mixed, only_old = fidelity([old, new]), fidelity([old])
    assert mixed is not None
    assert only_old is not None
    assert (mixed.covered, only_old.covered) == (1.0, None)


@pytest.mark.parametrize(("streams", "wanted"), [(1, (980, 1020)), (2, (750, 1250)), (8, (750, 1250))])
def test_interval_is_the_uncertainty_as_a_share_of_the_predicted_time(streams: int, wanted: tuple[int, int]) -> None:
    uncertainty = Uncertainty(sequential_frac=0.02, schedule_frac=0.25)
    model = msgspec.structs.replace(make_hardware(), uncertainty=uncertainty)
    assert model.interval_ns(1000, 1000, streams) == wanted


# --- Order and regret ---


def test_tau_is_right_pairs_less_wrong_ones_over_both() -> None:
    # measured 1000 1100 1200; predicted in the order 1st, 3rd, 2nd: two pairs right, one wrong
    cases = [case(1, 1000), case(3, 1100), case(2, 1200)]
    assert kendall_tau(cases) == pytest.approx(1 / 3)
    assert kendall_tau(step(0, 0, 0)) == 1.0
    assert kendall_tau([case(3, 1000), case(2, 1100), case(1, 1200)]) == -1.0


def test_pairs_within_the_noise_do_not_count() -> None:
    """1000 and 1009 count as equal; 1020 differs from both, and is predicted last: right twice."""
    cases = [case(2, 1000), case(1, 1009), case(3, 1020)]
    assert kendall_tau(cases) == 1.0
    assert kendall_tau(cases[:2]) is None


def test_pair_at_the_edge_of_the_noise_counts() -> None:
    edge = round(1000 * (1 + NOISE_FRAC))
    assert kendall_tau([case(1, 1000), case(2, edge)]) == 1.0
    assert kendall_tau([case(1, 1000), case(2, edge - 1)]) is None


def test_tau_does_not_depend_on_the_order_of_the_cases() -> None:
    cases = [case(1, 1000), case(3, 1100), case(2, 1200), case(5, 1300), case(4, 1400)]
    assert kendall_tau(cases) == kendall_tau(cases[::-1])


def test_schedules_that_differ_but_are_predicted_alike_count_as_wrong() -> None:
    """A model that predicts one time for everything has not ordered anything."""
    assert kendall_tau([case(7, 1000), case(7, 1200)]) == -1.0


def test_regret_is_what_choosing_by_prediction_costs() -> None:
    # predicted best: the one that took 1100; the best took 1000
    assert regret([case(900, 1100), case(950, 1000), case(2000, 1500)]) == pytest.approx(0.1)
    assert regret([case(900, 1000), case(950, 1100)]) == 0.0


def test_order_and_regret_are_of_each_step_that_has_enough_schedules() -> None:
    many = step(*[0] * MIN_SCHEDULES)
    few = step(*[0] * (MIN_SCHEDULES - 1), trace="b-infer-b1")
    wrong_way = [case(2000 - ns, ns, trace="c-infer-b1") for ns in range(1000, 1000 + 100 * MIN_SCHEDULES, 100)]
    found = fidelity([*many, *few, *wrong_way])
    assert found is not None
    assert found.schedules == 3 * MIN_SCHEDULES - 1
    assert found.tau == (1.0, -1.0)
    # the last of the third step is predicted fastest: 1700 against 1000
    assert found.regret == pytest.approx((0.0, 0.7))


def test_steps_are_told_apart_by_their_trace_and_stay_in_order() -> None:
    one, other, again = case(1, 1), case(2, 1, trace="b-infer-b1"), case(3, 1)
    assert by_step([one, other, again]) == {"a-infer-b1": [one, again], "b-infer-b1": [other]}


# --- The table ---


def cells(line: str) -> list[str]:
    return [cell.strip() for cell in line.strip("|").split("|")]


def test_table_has_fitted_and_other_networks_apart_and_then_each_step() -> None:
    interval = {"interval_ns": (900, 1750)}
    fitted = step(1, 1, 1, 1, 1, 1, 1, 1, fitted=True, **interval)
    other = step(-2, -2, -2, -2, -2, -2, -2, -6, trace="b-infer-b1")
    header, rule, *rows = fidelity_table([*fitted, *other, case(9, 1, streams=1)])
    assert len(cells(header)) == len(cells(rule)) == len(cells(rows[0])) == 10
    assert [cells(row) for row in rows] == [
        [
            "networks that constants were fitted on",
            *("8", "1.0%", "1.0%", "1.0%", "1.0%", "+1.0%", "100%", "1.00 (1.00)", "0.0% (0.0%)"),
        ],
        ["all other networks", "8", "2.0%", "6.0%", "6.0%", "6.0%", "-2.5%", "", "1.00 (1.00)", "0.0% (0.0%)"],
        ["a-infer-b1", "8", "1.0%", "1.0%", "1.0%", "1.0%", "+1.0%", "100%", "1.00 (1.00)", "0.0% (0.0%)"],
        ["b-infer-b1", "8", "2.0%", "6.0%", "6.0%", "6.0%", "-2.5%", "", "1.00 (1.00)", "0.0% (0.0%)"],
    ]


def test_table_gives_mean_and_worst_of_tau_and_regret() -> None:
    wrong_way = [case(2000 - ns, ns, trace="b-infer-b1") for ns in range(1000, 1800, 100)]
    row = fidelity_table([*step(*[0] * 8), *wrong_way])[2]
    assert cells(row)[0] == "all other networks"
    assert cells(row)[-2:] == ["0.00 (-1.00)", "35.0% (70.0%)"]


def test_table_leaves_out_a_group_that_has_no_schedules_and_the_order_of_a_short_step() -> None:
    rows = fidelity_table([*step(*[0] * 8), *step(0, 0, trace="b-infer-b1")])[2:]
    assert [cells(row)[0] for row in rows] == ["all other networks", "a-infer-b1", "b-infer-b1"]
    assert cells(rows[-1])[-2:] == ["", ""]


def test_no_table_where_no_step_has_enough_schedules() -> None:
    """Four policies per step are a table of rows, not a statistic; sequential runs do not count towards the number."""
    assert fidelity_table([]) == []
    assert fidelity_table(step(*[0] * (MIN_SCHEDULES - 1))) == []
    assert fidelity_table(step(*[0] * MIN_SCHEDULES, streams=1)) == []


def test_results_page_has_the_table_only_where_there_is_one() -> None:
    head = fidelity_table(step(*[0] * 8))[0]
    assert head in results_markdown(make_results(step(*[0] * 8)), "r.json").splitlines()
    short = results_markdown(make_results(step(0, 0)), "r.json")
    assert head not in short
    assert "\n\n\n" not in short


def test_summary_and_table_mean_the_same_by_90_percent() -> None:
    cases = step(1, 2, 3, 4, 5, 6, 7, 20)  # 90 % of eight are all eight
    (line,) = [line for line in summary_lines(cases) if "multi-stream" in line]
    assert "90 % of cases within 20.0%" in line
    assert cells(fidelity_table(cases)[2])[3] == "20.0%"
