"""Comparison of a step's results with eager's, and its limits."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from gpusim.errors import ReplayError
from gpusim.formats.trace import Dtype
from gpusim.gpu.capture.user_step import UserStep
from gpusim.gpu.optimize.verify import apart, verify

NAN, INF = math.nan, math.inf


def distance(found: list[float], wanted: list[float], noise: float = 0.0) -> float:
    share, kind = apart({"output 0": torch.tensor(found)}, {"output 0": torch.tensor(wanted)}, {}, {"output 0": noise})
    assert kind == "output"
    return share


def test_the_share_of_the_norm_that_noise_does_not_explain() -> None:
    assert distance([3.0, 4.0], [3.0, 4.0]) == 0.0
    assert distance([3.0, 5.0], [3.0, 4.0]) == pytest.approx(0.2)
    assert distance([3.0, 5.0], [3.0, 4.0], noise=0.5) == pytest.approx(0.1)
    assert distance([3.0, 5.0], [3.0, 4.0], noise=2.0) == 0.0


@pytest.mark.parametrize("wrong", [[NAN, 4.0], [INF, 4.0], [NAN, NAN]])
def test_what_is_not_finite_is_infinitely_far_away(wrong: list[float]) -> None:
    assert distance(wrong, [3.0, 4.0]) == INF
    assert distance(wrong, [3.0, 4.0], noise=1.0) == INF
    assert distance([3.0, 4.0], wrong) == INF


@pytest.mark.parametrize("same", [[NAN, 4.0], [INF, 4.0], [-INF, NAN]])
def test_the_same_infinities_and_nans_are_no_difference(same: list[float]) -> None:
    assert distance(same, same) == 0.0


def verified(dtype: Dtype, found: float) -> float:
    """Verify a step that computes 1.2 with rounded products, and 1.0 with exact ones."""

    def result(number: float) -> Any:
        return lambda: torch.tensor([number])

    step = UserStep("step", [(None, lambda _: None)], torch.device("cpu"))
    checked = verify(step, result(1.2), result(found), lambda: None, dtype, dict, result(1.0))
    return checked.worst


@pytest.mark.parametrize(("found", "equal"), [(1.2, True), (1.2 * (1 + 1e-7), False), (1.0, False)])
def test_results_are_bit_equal_only_if_no_bit_differs(found: float, equal: bool) -> None:
    """A difference that rounding explains counts as none, but is one."""
    step = UserStep("step", [(None, lambda _: None)], torch.device("cpu"))
    run, other = (lambda: torch.tensor([1.2], dtype=torch.float64), lambda: torch.tensor([found], dtype=torch.float64))
    checked = verify(step, run, other, lambda: None, "fp32", lambda: {"output 0": 1.0}, run)
    assert checked.bit_equal is equal
    assert checked.worst == 0.0 or not equal


def test_with_tf32_a_step_may_be_twice_as_far_from_fp32_as_eager_is() -> None:
    assert verified("tf32", 0.7) == pytest.approx(0.5 / 1.2)
    assert verified("tf32", 1.21) == pytest.approx(0.01 / 1.2)
    with pytest.raises(ReplayError, match=r"the outputs are 0\.67 away"):
        verified("tf32", 0.4)
    with pytest.raises(ReplayError, match=r"the outputs are 0\.42 away"):
        verified("fp32", 0.7)
