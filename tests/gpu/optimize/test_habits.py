"""Habits of training loops: a flag for updates, and modes that a step sets itself."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F  # noqa: N812  (torch's own habit)

from gpusim.gpu.optimize.callable import OptimizedStep
from tests.support.optimizing import batches, close, fast, net, same_states

Step = Callable[..., Any]


def test_an_update_adds_to_gradients_of_earlier_calls_and_removes_them() -> None:
    """Each recorded run begins with gradients, as the user's call does."""

    def made(model: nn.Module) -> Step:
        optimizer = torch.optim.Adam(model.parameters(), lr=0.01)

        def step(x: torch.Tensor, y: torch.Tensor, update: bool) -> torch.Tensor:
            loss = F.cross_entropy(model(x), y) / 2
            loss.backward()
            if update:
                optimizer.step()
                optimizer.zero_grad()
            return loss.detach()

        return step

    model = net()
    other = copy.deepcopy(model)
    mine, theirs = fast(made(model), (*batches(1)[0], False)), made(other)
    for number, (x, y) in enumerate(batches(4)):
        close(mine(x, y, number % 2 == 1), theirs(x, y, number % 2 == 1))
    assert all(mine._variants.values())
    same_states(model.state_dict(), other.state_dict())


def test_an_update_alone_does_nothing_without_gradients() -> None:
    """Weights would decay by an update with zeros in their place."""

    def made(model: nn.Module) -> Step:
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, weight_decay=0.5)

        def update() -> None:
            torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1)
            optimizer.step()
            optimizer.zero_grad()

        return update

    def add(model: nn.Module) -> None:
        F.cross_entropy(model(x), y).backward()

    model, (x, y) = net(), batches(1)[0]
    add(model)
    other = copy.deepcopy(model)
    mine, theirs = fast(made(model), ()), made(other)
    assert isinstance(mine, OptimizedStep)
    model.zero_grad()
    other.zero_grad()
    for _ in range(2):
        for one, update in ((model, mine), (other, theirs)):
            add(one)
            update()
    with pytest.warns(UserWarning, match="computes nothing"):
        mine()
    theirs()
    same_states(model.state_dict(), other.state_dict())


@pytest.mark.parametrize("trains", [True, False])
def test_a_mode_that_the_step_sets_is_set_at_each_call(trains: bool) -> None:
    """Optimizing itself leaves the user's."""

    def made(model: nn.Module) -> Step:
        return lambda x: model.train(trains)(x).detach()

    model, x = net().train(not trains), batches(1)[0][0]
    other = copy.deepcopy(model)
    step, theirs = fast(made(model), x), made(other)
    assert isinstance(step, OptimizedStep)
    assert model.training is not trains
    for mode in (not trains, trains, not trains):
        model.train(mode)
        other.train(mode)
        close(step(x), theirs(x))
        assert {module.training for module in model.modules()} == {trains}


class Counting(torch.optim.SGD):
    """Slows down at its fifth step, which trial runs do not reach."""

    calls = 0

    def step(self, closure: Any = None) -> None:
        self.calls += 1
        for parameter in self.param_groups[0]["params"]:
            state = self.state[parameter]
            state["count"] = state.get("count", 0) + 1
            parameter.data.sub_(parameter.grad * (0.1 if state["count"] < 5 else 0.01))


def test_an_optimizer_that_counts_in_python_is_refused_and_left_as_it_was() -> None:
    model = net()
    optimizer = Counting(model.parameters(), lr=0.1)
    with pytest.warns(UserWarning, match="changes the Python value '(calls|count)' of Counting"):
        assert not isinstance(fast(model, batches(1)[0], loss=F.cross_entropy, optimizer=optimizer), OptimizedStep)
    assert not optimizer.state
    assert "calls" not in vars(optimizer)
