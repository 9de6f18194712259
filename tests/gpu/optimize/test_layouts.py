"""A tensor that begins at the same address with another shape, or other strides, is found."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import nn

from gpusim.gpu.optimize import layouts
from gpusim.gpu.optimize.layouts import Layouts
from tests.support.optimizing import batches, close, fast

Change = Callable[[torch.Tensor], torch.Tensor]
CHANGES: dict[str, Change] = {
    "transposed": lambda t: t.t(),
    "shorter": lambda t: t[:2],
    "later": lambda t: t[1:],
    "flat": lambda t: t.flatten(),
    "one more dimension": lambda t: t[None],
    "every second": lambda t: t[:, ::2],
    "elsewhere": lambda t: t.clone(),
}


@pytest.fixture(params=[True, False], ids=["torch's table", "without it"])
def _table(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    if not request.param:
        monkeypatch.setattr(layouts, "_function", lambda: None)


@pytest.mark.usefixtures("_table")
@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("place", [0, 2, 4])
def test_a_change_of_one_tensor_is_found_until_it_is_undone(change: str, place: int) -> None:
    tensors = [torch.ones(()), torch.zeros(0, 3), nn.Parameter(torch.randn(4, 4)), torch.arange(3), torch.randn(4, 4)]
    tensors[0] = torch.randn(4, 4, dtype=torch.bfloat16)
    held = Layouts(tensors)
    assert held.hold()
    former = tensors[place].data
    tensors[place].data = CHANGES[change](former)
    assert not held.hold()
    tensors[place].data = former
    assert held.hold()


def test_types_that_dlpack_lacks_are_compared_too() -> None:
    odd, plain = torch.empty(2, 2, dtype=torch.bits8), torch.ones(2, 2)
    held = Layouts([plain, odd])
    assert held.hold()
    odd.data = odd.data[:1]
    assert not held.hold()


def test_no_tensors_hold() -> None:
    assert Layouts([]).hold()


@pytest.mark.parametrize("mode", [torch.inference_mode, torch.no_grad, torch.enable_grad])
def test_modes_of_gradients_make_no_difference(mode: Callable[[], object]) -> None:
    held = Layouts([nn.Linear(2, 2).weight])
    with mode():  # type: ignore[attr-defined]
        assert held.hold()


# --- A captured step ---


def test_a_transposed_weight_has_its_effect_at_the_next_call() -> None:
    model, x = nn.Linear(6, 6), batches(1)[0][0]
    step = fast(model, x)
    model.weight.data = model.weight.data.t()
    with torch.no_grad():
        close(step(x), model(x))


def test_a_shorter_weight_has_its_effect_at_the_next_call() -> None:
    """Pruned channels."""
    model, x = nn.Linear(6, 6), batches(1)[0][0]
    step = fast(model, x)
    model.weight.data, model.bias.data = model.weight.data[:4], model.bias.data[:4]
    with torch.no_grad():
        close(step(x), model(x))


@pytest.mark.parametrize("new", [lambda w: w.t(), torch.randn_like], ids=["transposed", "elsewhere"])
def test_new_memory_of_a_closures_tensor_has_its_effect(new: Change) -> None:
    weight, x = torch.randn(6, 6), batches(1)[0][0]

    def step(x: torch.Tensor) -> torch.Tensor:
        return (x @ weight).tanh()

    captured = fast(step, x)
    weight.data = new(weight.data)
    close(captured(x), step(x))
