"""Whether a step's results are eager's: what counts as how far apart."""

from __future__ import annotations

import math

import pytest
import torch

from gpusim.gpu.optimize.verify import apart

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
