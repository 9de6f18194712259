"""Gradients: left for the user, added up over calls, taken over; those that a captured step would get wrong.

On the CPU, in the launch order of the chosen schedule.
"""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable

import pytest
import torch
from torch import nn
from torch.nn import functional as F  # noqa: N812  (torch's own habit)

from gpusim.gpu.optimize.callable import OptimizedStep
from tests.support.optimizing import batches, close, eager_step, fast, modes_of, net, same_states, sgd

X = torch.randn(4, 6, generator=torch.Generator().manual_seed(0))


def accumulating(model: nn.Module) -> Callable[..., torch.Tensor]:
    def step(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        loss = F.cross_entropy(model(x), y) / 2
        loss.backward()
        return loss.detach()

    return step


@pytest.mark.parametrize("to_none", [True, False])
def test_gradients_accumulate_over_calls(to_none: bool) -> None:
    model = net()
    other = copy.deepcopy(model)
    optimizers = [sgd(each.parameters()) for each in (model, other)]
    mine = fast(accumulating(model), batches(1)[0])
    assert isinstance(mine, OptimizedStep)
    theirs = accumulating(other)
    assert modes_of(mine) == {"train"}  # its layouts, kernels and time limits are those of training
    for number, (x, y) in enumerate(batches(8)):
        close(mine(x, y), theirs(x, y))
        for one, two in zip(model.parameters(), other.parameters(), strict=True):
            close(one.grad, two.grad)
        if number % 2:
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad(set_to_none=to_none)
    same_states(model.state_dict(), other.state_dict())


def test_gradients_of_ones_own_are_taken_over() -> None:
    model = net()
    other = copy.deepcopy(model)
    mine, theirs = fast(accumulating(model), batches(1)[0]), accumulating(other)
    for each in (model, other):
        for parameter in each.parameters():
            parameter.grad = torch.ones_like(parameter)
    x, y = batches(1)[0]
    mine(x, y)
    theirs(x, y)
    for one, two in zip(model.parameters(), other.parameters(), strict=True):
        close(one.grad, two.grad)


def test_a_loss_without_an_optimizer_leaves_gradients() -> None:
    model = net()
    other = copy.deepcopy(model)
    step = fast(model, batches(1)[0], loss=F.cross_entropy)
    x, y = batches(2)[1]
    loss = F.cross_entropy(other(x), y)
    loss.backward()
    close(step(x, y), loss)
    for one, two in zip(model.parameters(), other.parameters(), strict=True):
        close(one.grad, two.grad)


@pytest.mark.parametrize("by_hand", [False, True])
def test_parameters_thawed_are_trained_by_a_step_that_leaves_no_gradients(by_hand: bool) -> None:
    model, other = net(), net()

    def made(each: nn.Module) -> Callable[..., torch.Tensor]:
        each.left.requires_grad_(False)
        optimizer = None if by_hand else sgd(each.parameters())

        def step(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
            loss = F.cross_entropy(each(x), y)
            loss.backward()
            if optimizer is not None:
                optimizer.step()
            for parameter in each.parameters():
                if optimizer is None and parameter.grad is not None:
                    parameter.data.sub_(parameter.grad, alpha=0.1)
                parameter.grad = None
            return loss.detach()

        return step

    step, theirs = fast(made(model), batches(1)[0]), made(other)
    assert isinstance(step, OptimizedStep)
    for wanted in (False, True, False):
        for each in (model, other):
            each.left.requires_grad_(wanted)
        for x, y in batches(2):
            close(step(x, y), theirs(x, y))
        same_states(model.state_dict(), other.state_dict())


class Heads(nn.Module):
    """Two heads, of which a step uses the second."""

    def __init__(self) -> None:
        super().__init__()
        self.trunk, self.other, self.head = nn.Linear(6, 8), nn.Linear(8, 5), nn.Linear(8, 5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.trunk(x).tanh())


def for_one_head(model: Heads, clear: str) -> Callable[..., torch.Tensor]:
    def step(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        if clear != "by the user":
            model.zero_grad(set_to_none=clear == "to None")
        loss = F.cross_entropy(model(x), y)
        loss.backward()
        return loss.detach()

    return step


@pytest.mark.parametrize("present", [True, False])
@pytest.mark.parametrize("clear", ["by the user", "to None", "to zeros"])
def test_the_gradient_of_a_head_that_a_step_does_not_use_is_as_eager_leaves_it(clear: str, present: bool) -> None:
    """A gradient of zeros in place of none would make an optimizer with momentum or decay move that head."""
    torch.manual_seed(0)
    model = Heads()
    other = copy.deepcopy(model)
    optimizers = [torch.optim.AdamW(each.parameters(), lr=0.1) for each in (model, other)]
    for each in (model, other):
        if present:
            each.other(X @ torch.ones(6, 8)).sum().backward()
    mine, theirs = fast(for_one_head(model, clear), batches(1)[0]), for_one_head(other, clear)
    assert isinstance(mine, OptimizedStep)
    for number, (x, y) in enumerate(batches(5)):
        if number == 3:
            for each in (model, other):
                each.other(X @ torch.ones(6, 8)).sum().backward()
        close(mine(x, y), theirs(x, y))
        for one, two in zip(model.parameters(), other.parameters(), strict=True):
            assert (one.grad is None) == (two.grad is None)
            assert two.grad is None or torch.allclose(one.grad, two.grad, rtol=1e-4, atol=1e-5)
        for optimizer in optimizers:
            optimizer.step()
            if number % 2:
                optimizer.zero_grad()
    same_states(model.state_dict(), other.state_dict())


def test_a_gradient_that_a_step_only_returns_is_that_of_the_call() -> None:
    model = Heads()
    model.other.weight.grad = torch.ones_like(model.other.weight)

    def step(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | None]:
        with torch.no_grad():
            return model(x), model.other.weight.grad

    mine = fast(step, X)
    assert isinstance(mine, OptimizedStep)
    for gradient in (model.other.weight.grad, torch.full_like(model.other.weight, 2.0), None):
        model.other.weight.grad = gradient
        found = mine(X)[1]
        assert (found is None) == (gradient is None)
        assert gradient is None or torch.equal(found, gradient)


def test_gradients_from_before_a_cast_by_hand_leave_the_step_to_the_user() -> None:
    """Eager clears them first."""
    model, (data, *others) = net(), batches(3)
    step = fast(model, data, loss=F.cross_entropy, optimizer=torch.optim.SGD(model.parameters(), lr=0.1))
    step(*data)
    model.norm.bfloat16()
    for parameter in model.parameters():
        parameter.data = parameter.data.bfloat16()
    other = copy.deepcopy(model)
    eager = eager_step(other, torch.optim.SGD(other.parameters(), lr=0.1))
    text = "gpusim.optimize: the gradient of 'left.weight' has another type or shape than 'left.weight'"
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for x, y in others:
            close(step(x.bfloat16(), y), eager(x.bfloat16(), y))
    assert [str(each.message) for each in caught] == [f"{text}: call zero_grad() first; the step runs as it is"]
    same_states(model.state_dict(), other.state_dict())


@pytest.mark.parametrize("given", [None, torch.ones(4, 6)])
def test_the_gradient_of_a_tensor_of_the_users_comes_back(given: torch.Tensor | None) -> None:
    shift, factors = torch.zeros(4, 6, requires_grad=True), torch.ones(4, 6)
    shift.grad = given

    def step(x: torch.Tensor) -> None:
        ((x + shift) * factors).sum().backward()
        factors.add_(shift.grad)

    with pytest.warns(UserWarning, match="that is no (buffer|parameter) of a module"):
        assert fast(step, X) is step
    assert shift.grad is given
    assert given is None or torch.equal(given, torch.ones(4, 6))
    assert torch.equal(factors, torch.ones(4, 6))


def test_a_gradient_left_in_a_tensor_of_the_users_is_refused() -> None:
    shift = torch.zeros(4, 6, requires_grad=True)

    def step(x: torch.Tensor) -> None:
        shift.grad = None
        (x + shift).square().sum().backward()

    with pytest.warns(UserWarning, match="leaves a gradient in a tensor that is no parameter"):
        assert fast(step, X) is step
    assert shift.grad is None


def test_a_step_that_asks_for_a_gradient_that_it_does_not_touch_is_captured_anew_without_it() -> None:
    torch.manual_seed(0)
    model, other = nn.Linear(6, 6), nn.Linear(6, 6)
    for parameter in other.parameters():
        parameter.grad = torch.ones_like(parameter)

    def step(x: torch.Tensor) -> torch.Tensor:
        scale = 2.0 if other.weight.grad is not None else 1.0
        loss = model(x).square().mean() * scale
        loss.backward()
        return loss.detach()

    x = torch.ones(4, 6)
    mine = fast(step, x)
    before = mine(x)
    other.weight.grad = None
    torch.testing.assert_close(mine(x), before / 2)
    assert other.weight.grad is None
