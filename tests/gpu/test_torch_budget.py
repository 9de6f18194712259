"""Our policy `torch_budget` saves what PyTorch's own partitioner saves, where nothing is a matter of times."""

from __future__ import annotations

import pytest

from scripts.compare_torch_budget import convolution, linear, saved_by_ours, saved_by_torch


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(("make", "kept"), [(linear, "addmm"), (convolution, "convolution")])
def test_half_the_budget_saves_the_products_and_computes_the_rest_again(make: object, kept: str) -> None:
    """Both keep what is dear, and drop what is cheap; torch also keeps one layer less where that is free for it."""
    torchs, ours = saved_by_torch(make, 0.5), saved_by_ours(make, 0.5)  # type: ignore[arg-type]
    assert set(torchs) == set(ours) == {kept}
    assert torchs.total() <= ours.total() <= 1.25 * torchs.total()


@pytest.mark.filterwarnings("ignore")
def test_no_budget_saves_nothing() -> None:
    assert not saved_by_torch(convolution, 0.0)
    assert not saved_by_ours(convolution, 0.0)
