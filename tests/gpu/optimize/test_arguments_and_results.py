"""Which argument is which, what a step keeps or marks of its arguments, and what its results are."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F  # noqa: N812  (torch's own habit)

from gpusim.gpu.optimize.callable import OptimizedStep
from gpusim.gpu.optimize.executors import CpuExecutor
from tests.support.copying import Copying
from tests.support.optimizing import close, fast, same_states

X = torch.randn(2, 4, generator=torch.Generator().manual_seed(0))


class Modulated(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor, scale: Any = None, shift: Any = None) -> torch.Tensor:
        if scale is not None:
            x = x * scale
        if shift is not None:
            x = x + shift
        out: torch.Tensor = self.layer(x)
        return out


@pytest.mark.parametrize("executor", [CpuExecutor, Copying])
def test_a_tensor_in_another_arguments_place_is_another_step(executor: type[CpuExecutor]) -> None:
    model = Modulated()
    other = copy.deepcopy(model)
    sgd = torch.optim.SGD(model.parameters(), lr=0.1)
    other_sgd = torch.optim.SGD(other.parameters(), lr=0.1)
    loss = lambda scores, target: F.mse_loss(scores, target)  # noqa: E731
    step = fast(model, (X, X), loss=loss, optimizer=sgd, executor=executor())
    inference = fast(copy.deepcopy(model).eval(), (X,), executor=executor())
    for scale, shift in ((X, None), (None, X), (X, None)):
        close(inference(X, scale=scale, shift=shift), inference.__wrapped__(X, scale=scale, shift=shift))
        close(inference(X, scale, shift), inference.__wrapped__(X, scale, shift))
    assert isinstance(step, OptimizedStep)
    for _ in range(2):
        other_sgd.zero_grad()
        expected = loss(other(X), X)
        expected.backward()
        other_sgd.step()
        close(step(X, X), expected)
    same_states(model.state_dict(), other.state_dict())


def test_a_number_in_a_tensors_place_is_another_step() -> None:
    step = fast(lambda a, b: a / b, (X, 2.0))
    close(step(X, 2.0), X / 2.0)
    close(step(2.0, X), 2.0 / X)


class Keeps(nn.Module):
    """Keeps its argument by `keep`."""

    def __init__(self, keep: Callable[[Any, torch.Tensor], None]) -> None:
        super().__init__()
        self.layer, self.seen, self.kept = nn.Linear(4, 4), None, {}  # type: ignore[var-annotated]
        self.register_buffer("last", None)
        self.keep = keep

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.keep(self, x)
        out: torch.Tensor = self.layer(x)
        return out


def keep_in_attribute(model: Any, x: torch.Tensor) -> None:
    model.seen = x


def keep_in_dict(model: Any, x: torch.Tensor) -> None:
    model.kept["x"] = x


def keep_in_buffer(model: Any, x: torch.Tensor) -> None:
    model.last = x


@pytest.mark.parametrize(
    ("keep", "name"), [(keep_in_attribute, "seen"), (keep_in_dict, "kept"), (keep_in_buffer, "last")]
)
def test_a_module_that_keeps_its_argument_is_named(keep: Callable[[Any, torch.Tensor], None], name: str) -> None:
    model = Keeps(keep)
    with pytest.warns(UserWarning, match=rf"Keeps keeps an argument of the step in '{name}'"):
        step = fast(model, X)
    assert step is model
    assert (model.seen, model.kept, model.last) == (None, {}, None)


def test_a_gradient_given_and_changed_is_not_the_new_one() -> None:
    models = [nn.Linear(4, 4)]
    models.append(copy.deepcopy(models[0]))

    def step_of(model: nn.Module) -> Callable[[torch.Tensor, torch.Tensor], torch.Tensor]:
        def step(x: torch.Tensor, gradient: torch.Tensor) -> torch.Tensor:
            gradient.mul_(0.5)
            model.zero_grad()
            loss: torch.Tensor = model(x).square().sum()
            loss.backward()
            return loss.detach()

        return step

    steps = [fast(step_of(models[0]), (X, torch.zeros(4, 4))), step_of(models[1])]
    for step in steps:
        step(X, torch.zeros(4, 4))
    with pytest.warns(UserWarning, match="arguments share memory, or lie in the model's"):
        steps[0](X, models[0].weight.grad)
    steps[1](X, models[1].weight.grad)
    close(models[0].weight.grad, models[1].weight.grad)


@pytest.mark.filterwarnings("ignore:gpusim.optimize")
def test_a_step_that_asks_for_inference_mode_gets_its_answer() -> None:
    def step(x: torch.Tensor) -> torch.Tensor:
        return x.cos() if torch.is_inference_mode_enabled() else x.sin()

    optimized = fast(step, X)
    for _ in range(2):
        close(optimized(X), X.sin())
        with torch.inference_mode():
            close(optimized(X), X.cos())


class Tagged(torch.Tensor):
    pass


def mark_argument(x: torch.Tensor) -> torch.Tensor:
    x.feature = x.sin()  # type: ignore[attr-defined]
    return x.feature * 2  # type: ignore[attr-defined,no-any-return]


def mark_result(x: torch.Tensor) -> torch.Tensor:
    y = x.sin()
    y.feature = x.cos()  # type: ignore[attr-defined]
    return y


@pytest.mark.parametrize(
    ("step", "why"),
    [
        (mark_argument, "gives an argument an attribute, 'feature'"),
        (mark_result, "returns a tensor with an attribute of its own, 'feature'"),
        (lambda x: (x * 2).as_subclass(Tagged), "returns a tensor of type Tagged"),
        (lambda x: x.set_(x.abs()).sin(), "changes the shape or strides|other memory|KeyError"),
    ],
    ids=["argument", "result", "subclass", "memory"],
)
def test_what_a_captured_step_would_not_leave_is_named(step: Callable[[torch.Tensor], Any], why: str) -> None:
    with pytest.warns(UserWarning, match=why):
        assert fast(step, X.clone()) is step
