"""What a step reads of its user's objects at each call: replaced parameters, new values, and gradients of others."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from gpusim.gpu.optimize.reads import Reads
from tests.support.optimizing import batches, fast


class Scaled(nn.Module):
    """A factor that is an attribute."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.factor = nn.Linear(6, 5), 2

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layer(x) * self.factor


class Clipped(Scaled):
    """A layer that asks torch for the norm of its gradients."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x) + torch.nn.utils.clip_grad_norm_(self.parameters(), 1.0)


def test_a_new_factor_is_found_and_an_equal_one_is_none() -> None:
    """Of another type it is another value: it may change that of the result."""
    model = Scaled()
    reads = Reads((model,), model.modules())
    assert reads.changed() is None
    model.factor = int("2")
    assert reads.changed() is None
    for factor in (3, 2.0, True):
        model.factor = factor
        assert reads.changed() == "Scaled.factor"
    model.factor = 2
    assert reads.changed() is None


def _assigned(layer: nn.Linear) -> None:
    layer.bias = nn.Parameter(torch.full((5,), 3.0))


def _in_the_dict(layer: nn.Linear) -> None:
    layer._parameters["bias"] = nn.Parameter(torch.full((5,), 4.0))


def _other_memory(layer: nn.Linear) -> None:
    layer.bias.data = torch.full((5,), 5.0)


@pytest.mark.parametrize("replace", [_assigned, _in_the_dict, _other_memory])
def test_a_replaced_parameter_is_used_at_the_next_call(replace: Callable[[nn.Linear], None]) -> None:
    model = Scaled().eval()
    (x, _), *_ = batches(1)
    step = fast(model, x)
    with torch.no_grad():
        torch.testing.assert_close(step(x), model(x))
        replace(model.layer)
        torch.testing.assert_close(step(x), model(x))


def test_a_shape_that_is_returned_stays_one() -> None:
    x = batches(1)[0][0]
    step = fast(lambda x: (x * 2, x.shape), x)
    _, shape = step(x)
    assert type(shape) is torch.Size
    assert shape == x.shape


class Returning(nn.Linear):
    """Returns a tensor that it does nothing with."""

    scale = torch.ones(2)

    def forward(self, x: torch.Tensor) -> Any:
        return super().forward(x), self.scale


def test_new_memory_of_a_tensor_that_is_only_returned_is_found() -> None:
    model, x = Returning(6, 6).eval(), batches(1)[0][0]
    model.scale = torch.ones(2)
    step = fast(model, x)
    for value in (9.0, 5.0):
        model.scale.data = torch.full((2,), value)
        assert step(x)[1].tolist() == [value, value]


@pytest.mark.parametrize(("kind", "uses"), [(Scaled, False), (Clipped, True)])
def test_gradients_matter_to_code_that_names_them(kind: type[Scaled], uses: bool) -> None:
    model = kind()
    assert Reads((model,), model.modules()).gradients is uses


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
