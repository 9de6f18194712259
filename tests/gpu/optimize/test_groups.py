"""Optimizers whose parameters, groups or methods the user changes between steps."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from gpusim.gpu.optimize.optimizers import Groups
from gpusim.gpu.optimize.slots import Places
from tests.support.optimizing import Net, Twins, batches, captures, close, same_states

Change = Callable[[Net, torch.optim.Optimizer], Any]


def _of_left(parameters: Any) -> torch.optim.Optimizer:
    """Train the first two parameters, those of `left`."""
    return torch.optim.SGD(list(parameters)[:2], lr=0.1)


def _others(model: Net, optimizer: torch.optim.Optimizer) -> None:
    """Train as many others, of the same shapes."""
    optimizer.zero_grad()
    optimizer.param_groups[0]["params"] = list(model.right.parameters())


def _others_in_place(model: Net, optimizer: torch.optim.Optimizer) -> None:
    optimizer.zero_grad()
    optimizer.param_groups[0]["params"][:] = list(model.right.parameters())


def _damped(model: Net, optimizer: torch.optim.Optimizer) -> None:
    step = optimizer.step

    def damped(*args: Any) -> None:
        for parameter in model.parameters():
            if parameter.grad is not None:
                parameter.grad.mul_(0.1)
        step(*args)

    optimizer.step = damped  # type: ignore[method-assign]


CHANGES: dict[str, Change] = {
    "other parameters": _others,
    "other parameters in the same list": _others_in_place,
    "one parameter less": lambda _, optimizer: optimizer.param_groups[0]["params"].pop(),
    "one group more": lambda model, optimizer: optimizer.add_param_group({"params": [model.head.bias], "lr": 0.5}),
    "a step of its own": _damped,
}


@pytest.mark.parametrize("change", CHANGES)
def test_changed_groups_and_methods_have_their_effect(change: str) -> None:
    twins = Twins(_of_left)
    twins.train(batches(2))
    for model, optimizer in ((twins.model, twins.optimizer), (twins.other, twins.other_optimizer)):
        CHANGES[change](model, optimizer)
    twins.train(batches(3, seed=2))
    same_states(twins.model.state_dict(), twins.other.state_dict())
    for one, other in zip(twins.model.parameters(), twins.other.parameters(), strict=True):
        assert (one.grad is None) == (other.grad is None)
        if one.grad is not None:
            close(one.grad, other.grad)


def test_a_schedulers_wrapper_around_step_is_no_change() -> None:
    twins = Twins(_of_left)
    twins.train(batches(1))
    made = captures(twins.fast)
    schedulers = [
        torch.optim.lr_scheduler.StepLR(optimizer, 1) for optimizer in (twins.optimizer, twins.other_optimizer)
    ]
    for batch in batches(3):
        twins.train([batch])
        for scheduler in schedulers:
            scheduler.step()
    assert made == []


def test_equal_lists_of_a_loaded_state_are_no_change() -> None:
    model = nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    groups = Groups([optimizer])
    optimizer.load_state_dict(optimizer.state_dict())
    assert groups.hold()
    optimizer.param_groups[0]["params"] = list(model.parameters())
    assert groups.hold()
    optimizer.param_groups[0]["params"].reverse()
    assert not groups.hold()


def test_a_step_of_an_optimizers_class_is_watched(monkeypatch: pytest.MonkeyPatch) -> None:
    groups = Groups([torch.optim.SGD(nn.Linear(2, 2).parameters(), lr=0.1)])
    assert groups.hold()
    monkeypatch.setattr(torch.optim.SGD, "step", lambda *_: None)
    assert not groups.hold()


def test_a_tensor_of_the_hosts_that_a_step_has_copied_is_watched() -> None:
    """On a GPU it is a number of the capture."""
    factor = torch.tensor(2.0)
    places = Places([], {}, False, [factor], [factor])
    assert places.hold()
    factor.fill_(3.0)
    assert not places.hold()
    with torch.inference_mode():
        assert Places([], {}, False, [], [torch.ones(2)]).hold()
