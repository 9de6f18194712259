"""Changes of dicts are found by torch's count of them, or by their values where torch has none."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from gpusim.gpu.optimize import dict_versions
from gpusim.gpu.optimize.dict_versions import MOST_CHANGES, DictVersions, version_of, works
from gpusim.gpu.optimize.reads import Reads
from gpusim.gpu.optimize.slots import lying_at
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


@pytest.mark.parametrize("in_torch", [True, False])
def test_tensors_that_moved_are_found(in_torch: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Builds of torch with CUDA have the loop; here a stand-in has its arguments."""
    name, calls = "_tensors_data_ptrs_at_indices_equal", []

    def equal(tensors: list[torch.Tensor], pointers: list[int], places: list[int]) -> bool:
        calls.append(places)
        return all(tensors[place].data_ptr() == pointers[place] for place in places)

    if in_torch:
        monkeypatch.setattr(torch._C, name, equal, raising=False)
    else:
        monkeypatch.delattr(torch._C, name, raising=False)
    tensors = [torch.zeros(3), torch.zeros(4)]
    hold = lying_at(tensors)
    assert hold()
    tensors[1].data = torch.ones(4)
    assert not hold()
    assert calls == ([[0, 1], [0, 1]] if in_torch else [])
