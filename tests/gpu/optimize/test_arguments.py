"""Arguments of a captured step are told apart as eager tells them, or are refused."""

from __future__ import annotations

import contextlib
import enum
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from gpusim.gpu.optimize.callable import OptimizedStep
from tests.support.optimizing import (
    batches,
    captures,
    close,
    fast,
    net,
)

Change = Callable[[Any], Any]


@pytest.mark.parametrize(
    ("other", "named"),
    [(np.ones(3, np.float32), "ndarray"), (object(), "object"), (torch.ones(3).to_sparse(), "sparse_coo")],
)
def test_arguments_that_cannot_be_told_apart_are_not_captured(other: Any, named: str) -> None:
    """Two arrays may be printed alike, and an object may hold anything."""
    model = net().eval()

    def step(x: torch.Tensor, _: Any) -> torch.Tensor:
        with torch.no_grad():
            return model(x)

    x = batches(1)[0][0]
    with pytest.warns(UserWarning, match=f"an argument is .*{named}"):
        assert fast(step, (x, other)) is step
    captured = fast(step, (x, 1))
    with pytest.warns(UserWarning, match=f"an argument is .*{named}"):
        close(captured(x, other), model(x))


class Attends(nn.Module):
    """Attends to its own input, or to another one, each by weights of their own."""

    def __init__(self) -> None:
        super().__init__()
        self.own, self.other = nn.Linear(6, 6), nn.Linear(6, 6)

    def forward(self, x: torch.Tensor, memory: torch.Tensor) -> torch.Tensor:
        return self.own(x) if memory is x else self.other(memory)


@pytest.mark.parametrize("first", ["one object", "two"])
def test_arguments_that_are_one_object_have_a_step_of_their_own(first: str) -> None:
    model = Attends().eval()
    (x, _), (y, _) = batches(2)
    step = fast(model, (x, x) if first == "one object" else (x, y))
    made = captures(step)
    with torch.no_grad():
        for pair in ((x, x), (x, y), (y, y), (y, x)):
            close(step(*pair), model(*pair))
    assert len(made) == 1


def test_an_attribute_of_an_argument_is_not_captured() -> None:
    class Masked(nn.Linear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            mask = getattr(x, "mask", None)
            return super().forward(x) if mask is None else super().forward(x) * mask

    model, x = Masked(6, 6).eval(), batches(1)[0][0]
    step = fast(model, x)
    masked = x.clone()
    vars(masked)["mask"] = torch.zeros(4, 1)
    with pytest.warns(UserWarning, match="an attribute of its own, 'mask'"):
        close(step(masked), model(masked))
    with pytest.warns(UserWarning, match="an attribute of its own, 'mask'"):
        assert fast(model, masked) is model
    torch._dynamo.mark_dynamic(x, 0)
    vars(x)["tag"] = "train"
    assert isinstance(fast(model, x), OptimizedStep), "nothing reads these"


def test_values_that_are_printed_alike_have_steps_of_their_own() -> None:
    class Mode(enum.StrEnum):
        ONCE, TWICE = "once", "twice"

        def __repr__(self) -> str:
            return "Mode"

    def step(x: torch.Tensor, mode: Mode) -> torch.Tensor:
        return x * (1 if mode == "once" else 2)

    x = batches(1)[0][0]
    captured = fast(step, (x, Mode.ONCE))
    for mode in Mode:
        close(captured(x, mode), step(x, mode))


class Doubled(torch.Tensor):
    """A tensor whose sums are doubled."""

    @classmethod
    def __torch_function__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = super().__torch_function__(function, types, args, kwargs or {})
        return result * 2 if function is torch.Tensor.sum else result


def test_a_positional_tensor_of_another_type_runs_by_the_users_own_step() -> None:
    def step(x: torch.Tensor) -> torch.Tensor:
        return (x * x).sum()

    captured, x = fast(step, torch.ones(3)), torch.ones(3)
    assert isinstance(captured, OptimizedStep)
    with pytest.warns(UserWarning, match="an argument is a tensor of type Doubled") as warned:
        results = [captured(x.as_subclass(Doubled)) for _ in range(2)]
    assert [float(result) for result in results] == [6.0, 6.0]
    assert len(warned) == 1
    close(captured(x), torch.tensor(3.0))


@pytest.mark.parametrize("second", ["same", "overlapping", "apart"])
def test_arguments_in_the_same_memory_change_together(second: str) -> None:
    def step(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        a.add_(1)
        return b * 2

    def given() -> tuple[torch.Tensor, torch.Tensor]:
        memory = torch.arange(12.0).view(6, 2)
        return memory[:3], {"same": memory[:3], "overlapping": memory[1:4], "apart": memory[3:]}[second]

    captured = fast(step, (torch.ones(3, 2), torch.ones(3, 2)))
    assert isinstance(captured, OptimizedStep)
    mine, theirs = given(), given()
    with contextlib.nullcontext() if second == "apart" else pytest.warns(UserWarning, match="arguments share memory"):
        close(captured(*mine), step(*theirs))
    close(mine[0], theirs[0])
    close(mine[1], theirs[1])


@pytest.mark.parametrize("changed", ["buffer", "argument"])
@pytest.mark.parametrize("view", [lambda kept: kept, lambda kept: kept[1:]], ids=["whole", "part"])
def test_arguments_in_the_models_memory_change_with_it(changed: str, view: Change) -> None:
    """Eager reads the argument, or the buffer, once it is changed."""

    class Keeps(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("kept", torch.arange(8.0).view(4, 2))

        def forward(self, given: torch.Tensor) -> torch.Tensor:
            (given if changed == "argument" else self.kept).add_(1)
            return given.sum() * self.kept.sum()

    model, other = Keeps(), Keeps()
    captured = fast(model, view(torch.ones(4, 2)))
    assert isinstance(captured, OptimizedStep)
    with torch.no_grad():
        close(captured(view(torch.ones(4, 2))), other(view(torch.ones(4, 2))))
        with pytest.warns(UserWarning, match="arguments share memory, or lie in the model's"):
            close(captured(view(model.kept)), other(view(other.kept)))
    close(model.kept, other.kept)
