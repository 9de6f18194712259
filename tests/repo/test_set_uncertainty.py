"""Prediction intervals from measured schedules: steps weigh the same, and a new one counts as outside."""

from __future__ import annotations

import dataclasses
from typing import Any

import msgspec
import pytest

from gpusim.formats.hardware import Uncertainty
from tests.repo.test_readme import script

BASE = Uncertainty(sequential_frac=0.0, schedule_frac=0.0)


def cases_of(step: str, late: list[float], less_known: bool = False, saved: float = 0.5) -> list[Any]:
    """Return schedules predicted at 1,000,000 ns, late by these shares; the saving is a share of that time, too."""
    make = script("set_uncertainty").Case
    measured_ns = [round(1e6 * (1 + each)) for each in late]
    return [make(step, step, "a kind", ns, 1_000_000, 1e6 * (1 + saved), less_known) for ns in measured_ns]


def test_steps_weigh_the_same_however_many_schedules_they_have() -> None:
    """Twenty steps: one has 200 schedules late by 20 %, the others one each, late by 1 to 19 %.

    Of 20 steps, 0.9 * 21 / 20 = 18.9 must be within: those up to 19 %, but not the twentieth.
    """
    found = script("set_uncertainty")
    cases = [case for number in range(1, 20) for case in cases_of(f"step{number}", [number / 100])]
    cases += cases_of("step20", [0.2] * 200)
    assert found.fitted(cases, BASE).schedule_frac == pytest.approx(0.19)
    assert found.fitted(cases, BASE).saving_frac == 0.0


def test_too_few_steps_must_all_be_within_and_early_counts_as_late() -> None:
    """Of two steps, 0.9 * 3 / 2 must be within, so both. Without a saving, the line is the mean error."""
    found = script("set_uncertainty")
    cases = cases_of("a", [0.05], True, saved=0.0) + cases_of("b", [-0.1], True, saved=0.0)
    assert found.error_line(cases) == pytest.approx((0.075, 0.0))
    uncertainty = found.fitted(cases, BASE)
    assert (uncertainty.less_known_frac, uncertainty.saving_frac) == (pytest.approx(0.1), 0.0)


def test_mean_error_is_a_line_of_the_saving_in_which_steps_weigh_the_same() -> None:
    """Errors of 2 % without a saving, and of 4 and 8 %, 6 % in the mean, with half of the time saved."""
    found = script("set_uncertainty")
    cases = cases_of("a", [0.02] * 7, True, saved=0.0) + cases_of("b", [0.04, -0.08], True)
    assert found.error_line(cases) == pytest.approx((0.02, 0.08))
    assert found.error_line(cases_of("a", [0.04], True, saved=0.0) + cases_of("b", [0.02], True))[1] == 0.0
    through_none = cases_of("a", [0.0], True, saved=0.1) + cases_of("b", [0.1], True)
    assert found.error_line(through_none) == pytest.approx((0.0, 0.05 / 0.26))


def test_interval_of_other_steps_is_that_line_as_often_as_all_are_within() -> None:
    """A line of 2 % and 8 % of the saving; both must be within, which takes about 4/3 of it for the one late by 8 %.

    1.026 * (1 + 0.106 / 2) is 1.0804; a thousandth less of either is less than 1.08.
    """
    found = script("set_uncertainty")
    cases = cases_of("a", [0.02] * 7, True, saved=0.0) + cases_of("b", [0.04, 0.08], True)
    uncertainty = found.fitted(cases, BASE)
    assert (uncertainty.less_known_frac, uncertainty.saving_frac) == (pytest.approx(0.026), pytest.approx(0.106))
    assert all(case.within(uncertainty) for case in cases)


def test_searched_schedules_end_later_by_as_much_as_they_need_beyond_the_width_of_all() -> None:
    """Twenty steps, each with 19 schedules late by 5 % and a searched one by 8.15 %: 1.05 * 1.03 is enough."""
    found = script("set_uncertainty")
    cases = [case for number in range(20) for case in cases_of(f"step{number}", [0.05] * 19)]
    former = msgspec.structs.replace(BASE, searched_frac=0.014)
    assert found.fitted(cases, former).searched_frac == 0.014, "without a searched case it stays"
    for number in range(20):
        (late,) = cases_of(f"step{number}", [0.0815])
        cases.append(dataclasses.replace(late, searched=True))
    uncertainty = found.fitted(cases, BASE)
    assert (uncertainty.schedule_frac, uncertainty.searched_frac) == (pytest.approx(0.05), pytest.approx(0.03))
    assert all(case.within(uncertainty) for case in cases)
    wide = msgspec.structs.replace(BASE, searched_frac=0.5)
    assert found.fitted(cases, wide) == uncertainty, "a former width of searched ones must not narrow that of all"


def test_network_left_out_does_not_widen_its_own_interval() -> None:
    """Late by 1 and 5 %: each is tried with the width of the other, so that only the first is within."""
    found = script("set_uncertainty")
    cases = cases_of("a", [0.01]) + cases_of("b", [0.05])
    within = found.left_out(cases, BASE, lambda case: case.network)
    assert [within[case] for case in cases] == [True, False]


@pytest.mark.parametrize(
    ("network", "kind"),
    [("experts_small", "experts"), ("swin_t", "vision transformer"), ("resnet50", "convolutional")],
)
def test_kind_is_that_of_the_file_of_the_network(network: str, kind: str) -> None:
    assert script("set_uncertainty").kind_of(network) == kind
