"""Modes of torch's around a call act on the user's own step; within the step they are captured."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.autograd import forward_ad
from torch.nn.utils import parametrizations, parametrize
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

from gpusim.gpu.optimize.callable import OptimizedStep
from tests.support.optimizing import batches, close, fast, net, same_states


class Counting(TorchDispatchMode):
    count = 0

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += 1
        return function(*args, **kwargs or {})


class CountingFunctions(TorchFunctionMode):
    count = 0

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += 1
        return function(*args, **kwargs or {})


@pytest.mark.parametrize("mode", [Counting, CountingFunctions])
def test_what_listens_to_torchs_calls_hears_those_of_the_users_own_step(mode: Any) -> None:
    model, x = net().eval(), batches(1)[0][0]
    step = fast(model, x)
    with mode() as mine, pytest.warns(UserWarning, match="Mode is on"):
        step(x)
    with mode() as theirs:
        model(x)
    assert mine.count >= theirs.count > 5


TRANSFORMED: dict[str, Callable[[Any, torch.Tensor], Any]] = {
    "vmap": lambda step, x: torch.func.vmap(step)(x[None]),
    "jvp": lambda step, x: torch.func.jvp(step, (x,), (x,))[1],
    "jacfwd": lambda step, x: torch.func.jacfwd(step)(x),
}


@pytest.mark.parametrize("kind", TRANSFORMED)
def test_transformations_of_torch_func_reach_into_the_users_own_step(kind: str) -> None:
    model, x = net().eval(), batches(1)[0][0]
    step, transformed = fast(model, x), TRANSFORMED[kind]
    with pytest.warns(UserWarning, match=r"a transformation of torch\.func is on"):
        close(transformed(step, x), transformed(model, x))


def test_tangents_of_forward_mode_go_through_the_users_own_step() -> None:
    model, x = net().eval(), batches(1)[0][0]
    step = fast(model, x)
    with forward_ad.dual_level():
        dual = forward_ad.make_dual(x, torch.ones_like(x))
        with pytest.warns(UserWarning, match="forward-mode differentiation is on"):
            found = step(dual)
        close(forward_ad.unpack_dual(found).tangent, forward_ad.unpack_dual(model(dual)).tangent)


class Spectral(nn.Module):
    """Has a layer whose weight is computed at each use, with one iteration more."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = parametrizations.spectral_norm(nn.Linear(6, 6))
        nn.init.normal_(self.layer.parametrizations.weight[0]._v)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layer(self.layer(x))


AROUND: dict[str, Callable[[], Any]] = {
    "hooks on saved tensors": lambda: torch.autograd.graph.saved_tensors_hooks(lambda t: t * 2, lambda t: t),
    "anomaly detection": lambda: torch.autograd.set_detect_anomaly(True),
    "the cache of torch.nn.utils.parametrize": parametrize.cached,
}


@pytest.mark.parametrize("kind", AROUND)
def test_what_changes_autograd_or_layers_around_a_call_acts_on_the_users_own_step(kind: str) -> None:
    torch.manual_seed(0)
    model = Spectral()
    other = copy.deepcopy(model)
    x = batches(1)[0][0]
    mine, theirs = accumulating(model), accumulating(other)
    step = fast(mine, x)
    assert isinstance(step, OptimizedStep)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(3):
            with AROUND[kind]():
                found = step(x)
            with AROUND[kind]():  # one of its own: torch's cache takes a copy of a module for the module
                close(found, theirs(x))
    assert [kind in str(each.message) for each in caught if "gpusim" in str(each.message)] == [True]
    close(step(x), theirs(x))
    for one, two in zip(model.parameters(), other.parameters(), strict=True):
        close(one.grad, two.grad)
    same_states(model.state_dict(), other.state_dict())
    with AROUND[kind](), pytest.warns(UserWarning, match=kind):
        assert fast(mine, x) is mine


def accumulating(model: nn.Module) -> Callable[[torch.Tensor], torch.Tensor]:
    def step(x: torch.Tensor) -> torch.Tensor:
        loss = model(x).square().mean()
        loss.backward()
        return loss.detach()

    return step


@pytest.mark.parametrize("reentrant", [True, False])
def test_a_checkpoint_within_a_step_is_captured(reentrant: bool) -> None:
    model, other = net(), net()

    def made(each: Any) -> Callable[..., torch.Tensor]:
        def step(x: torch.Tensor) -> torch.Tensor:
            hidden = each.norm(each.left(x))
            loss = checkpoint(each.head, hidden, use_reentrant=reentrant).square().mean()
            loss.backward()
            return loss.detach()

        return step

    step, theirs = fast(made(model), batches(1)[0][0]), made(other)
    assert isinstance(step, OptimizedStep)
    for data, _ in batches(3):
        close(step(data), theirs(data))
    for one, two in zip(model.head.parameters(), other.head.parameters(), strict=True):
        close(one.grad, two.grad)
