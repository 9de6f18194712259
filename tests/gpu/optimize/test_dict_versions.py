"""Changes of dicts are found by torch's count of them, or by their values where torch has none."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from gpusim.gpu.optimize import dict_versions
from gpusim.gpu.optimize.dict_versions import MOST_CHANGES, DictVersions, version_of, works
from gpusim.gpu.optimize.reads import Reads
from tests.support.optimizing import batches, fast


def test_torch_counts_changes_on_this_python() -> None:
    """Otherwise each call would compare all values: right, but slow."""
    assert version_of() is not None


@pytest.mark.parametrize("version", [lambda _: 0, len, lambda held: held["no such key"]], ids=["same", "size", "error"])
def test_a_count_that_misses_a_change_is_not_used(version: Any) -> None:
    assert not works(version)


def test_a_changed_dict_is_found_until_it_is_marked() -> None:
    one, other = {"a": 1}, {"b": 2}
    versions = DictVersions([one, other, one])
    assert versions.unchanged()
    other["b"] = 3
    assert not versions.unchanged()
    assert not versions.unchanged()
    versions.mark()
    assert versions.unchanged()


def test_dicts_that_change_at_every_call_are_not_counted_any_more() -> None:
    held = {"a": 1}
    versions = DictVersions([held])
    for number in range(MOST_CHANGES):
        held["a"] = number + 2
        assert not versions.unchanged()
        versions.mark()
    assert not versions.unchanged()


def test_without_counts_nothing_is_taken_as_unchanged(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dict_versions, "version_of", lambda: None)
    assert not DictVersions([{}]).unchanged()


class Scaled(nn.Module):
    """A factor that is an attribute."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.factor = nn.Linear(6, 5), 2

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layer(x) * self.factor


@pytest.mark.parametrize("counted", [True, False])
def test_a_new_factor_is_found_and_an_equal_one_is_none(counted: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    if not counted:
        monkeypatch.setattr(dict_versions, "version_of", lambda: None)
    model = Scaled()
    reads = Reads((model,), model.modules())
    assert reads.changed() is None
    model.factor = int("2")
    model.training = False  # no attribute that the code reads: a mode has a captured step of its own
    assert reads.changed() is None
    for factor in (3, 2.0, True):
        model.factor = factor
        assert reads.changed() == "Scaled.factor"
        assert reads.changed() == "Scaled.factor"
    model.factor = 2
    assert reads.changed() is None


def _assigned(layer: nn.Linear) -> None:
    layer.bias = nn.Parameter(torch.full((5,), 3.0))


def _in_the_dict(layer: nn.Linear) -> None:
    layer._parameters["bias"] = nn.Parameter(torch.full((5,), 4.0))


def _other_memory(layer: nn.Linear) -> None:
    layer.bias.data = torch.full((5,), 5.0)


@pytest.mark.parametrize("counted", [True, False])
@pytest.mark.parametrize("replace", [_assigned, _in_the_dict, _other_memory])
def test_a_replaced_parameter_is_used_at_the_next_call(
    replace: Callable[[nn.Linear], None], counted: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not counted:
        monkeypatch.setattr(dict_versions, "version_of", lambda: None)
    model = Scaled().eval()
    (x, _), *_ = batches(1)
    step = fast(model, x)
    with torch.no_grad():
        torch.testing.assert_close(step(x), model(x))
        replace(model.layer)
        torch.testing.assert_close(step(x), model(x))


def test_gradients_of_other_steps_need_no_new_capture_of_inference() -> None:
    """A model that trains in between has gradients; inference does not use them."""
    model = Scaled().eval()
    (x, _), *_ = batches(1)
    step = fast(model, x)
    captured = next(iter(step._variants.values()))
    model(x).sum().backward()
    with torch.no_grad():
        torch.testing.assert_close(step(x), model(x))
    assert next(iter(step._variants.values())) is captured


def test_free_threads_have_no_count(monkeypatch: pytest.MonkeyPatch) -> None:
    """torch's count is not safe where several threads change dicts at once."""
    monkeypatch.setattr(sys, "_is_gil_enabled", lambda: False, raising=False)
    version_of.cache_clear()
    assert version_of() is None
    monkeypatch.undo()
    version_of.cache_clear()
    assert version_of() is not None
