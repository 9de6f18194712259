"""Prediction intervals from measured schedules: steps and kinds weigh the same, and a new one counts as outside."""

from __future__ import annotations

import pytest

from gpusim.formats.hardware import Uncertainty
from tests.repo.test_readme import script

BASE = Uncertainty(sequential_frac=0.0, schedule_frac=0.0)


def cases_of(step: str, late: list[float], kind: str = "convolutional", less_known: bool = False) -> list[object]:
    """Return schedules predicted at 1,000,000 ns of 1,500,000 in sequence, late by these shares."""
    make = script("set_uncertainty").Case
    return [make(step, kind, round(1e6 * (1 + each)), 1_000_000, 1.5e6, False, less_known) for each in late]


def test_steps_weigh_the_same_however_many_schedules_they_have() -> None:
    """Twenty steps: one has 200 schedules late by 20 %, the others one each, late by 1 to 19 %.

    Of 20 steps, 0.9 * 21 / 20 = 18.9 must be within: those up to 19 %, but not the twentieth.
    """
    found = script("set_uncertainty")
    cases = [case for number in range(1, 20) for case in cases_of(f"step{number}", [number / 100])]
    cases += cases_of("step20", [0.2] * 200)
    assert found.fitted(cases, BASE).schedule_frac == pytest.approx(0.19)
    assert found.fitted(cases, BASE).saving_frac == 0.0


def test_too_few_kinds_must_all_be_within() -> None:
    """Half of the predicted time is saved; late by 10 % of the time is 20 % of the saving. Early counts as well."""
    found = script("set_uncertainty")
    cases = cases_of("a", [0.05], "one", True) + cases_of("b", [-0.1], "other", True)
    assert found.fitted(cases, BASE).saving_frac == pytest.approx(0.2)


def test_step_left_out_does_not_widen_its_own_interval() -> None:
    """Late by 1 and 5 %: each is tried with the width of the other, so that only the first is within."""
    found = script("set_uncertainty")
    cases = cases_of("a", [0.01]) + cases_of("b", [0.05])
    within = found.left_out(cases, BASE, lambda case: case.step)
    assert [within[case] for case in cases] == [True, False]


@pytest.mark.parametrize(
    ("network", "kind"),
    [("experts_small", "experts"), ("swin_t", "vision transformer"), ("resnet50", "convolutional")],
)
def test_kind_is_that_of_the_file_of_the_network(network: str, kind: str) -> None:
    assert script("set_uncertainty").kind_of(network) == kind
