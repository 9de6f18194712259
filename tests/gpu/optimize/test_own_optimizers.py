"""Optimizers of the user's own classes: what their code reads, changes and wraps."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F  # noqa: N812  (torch's own habit)

from gpusim.gpu.optimize.callable import OptimizedStep
from tests.support.optimizing import batches, close, eager_step, fast, net, same_states

pytestmark = pytest.mark.filterwarnings("ignore:gpusim.optimize")
SCALE = {"all": 1.0}


def gradients(optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    return [p.grad for group in optimizer.param_groups for p in group["params"] if p.grad is not None]


class Clipped(torch.optim.SGD):
    """Reads an attribute of its own, one of its class, a global, an option of its groups and a value of its states."""

    most = 10.0

    def __init__(self, parameters: Iterable[nn.Parameter]) -> None:
        super().__init__(parameters, lr=0.5)
        self.clip = 10.0
        for p in self.param_groups[0]["params"]:
            self.state[p]["factor"] = 1.0

    def scale(self) -> float:
        return 1.0

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        for group in self.param_groups:
            torch.nn.utils.clip_grad_value_(group["params"], min(self.clip, self.most))
            for p in group["params"]:
                factor = self.state[p]["factor"]
                if p.grad is not None:
                    p.grad.mul_(SCALE["all"] * self.scale() * group.get("lr_scale", 1.0) * factor)
        return super().step(closure)


def set_clip(optimizer: Any) -> None:
    optimizer.clip = 0.001


def set_class(optimizer: Any) -> None:
    Clipped.most = 0.001


def set_helper(optimizer: Any) -> None:
    optimizer.scale = lambda: 0.01


def set_global(optimizer: Any) -> None:
    SCALE["all"] = 0.01


def set_option(optimizer: Any) -> None:
    optimizer.param_groups[0]["lr_scale"] = 0.01


def set_state(optimizer: Any) -> None:
    for state in optimizer.state.values():
        state["factor"] = 0.01


@pytest.fixture(autouse=True)
def _as_before(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Clipped, "most", 10.0)
    monkeypatch.setitem(SCALE, "all", 1.0)


@pytest.mark.parametrize("change", [set_clip, set_class, set_helper, set_global, set_option, set_state])
@pytest.mark.parametrize("form", ["function", "model"])
def test_what_an_own_optimizer_reads_may_change(form: str, change: Callable[[Any], None]) -> None:
    models = [net(), net()]
    optimizers = [Clipped(model.parameters()) for model in models]
    first = batches(1)[0]
    if form == "function":
        step = fast(eager_step(models[0], optimizers[0]), first)
    else:
        step = fast(models[0], first, loss=F.cross_entropy, optimizer=optimizers[0])
    assert isinstance(step, OptimizedStep)
    eager = eager_step(models[1], optimizers[1])
    for number, batch in enumerate(batches(6)):
        if number == 3:
            for optimizer in optimizers[:1] if change in (set_class, set_global) else optimizers:
                change(optimizer)
        close(step(*batch), eager(*batch))
    same_states(models[0].state_dict(), models[1].state_dict())


class Counts:
    """A schedule of its own that counts its calls."""

    def __init__(self) -> None:
        self.calls = 0

    def now(self) -> float:
        self.calls += 1
        return 0.5


class Scheduled(torch.optim.SGD):
    def __init__(self, parameters: Iterable[nn.Parameter]) -> None:
        super().__init__(parameters, lr=0.5)
        self.schedule = Counts()

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        torch._foreach_mul_(gradients(self), self.schedule.now())
        return super().step(closure)


def test_an_object_that_an_optimizer_changes_is_named_and_restored() -> None:
    model = net()
    optimizer = Scheduled(model.parameters())
    with pytest.warns(UserWarning, match=r"changes the Python value 'Scheduled.schedule.calls'"):
        step = fast(eager_step(model, optimizer), batches(1)[0])
    assert optimizer.schedule.calls == 0
    step(*batches(1)[0])
    assert optimizer.schedule.calls == 1


class Wrapped(torch.optim.Optimizer):
    """Takes the steps of another optimizer, as SAM and Lookahead do."""

    def __init__(self, base: torch.optim.Optimizer) -> None:
        super().__init__(base.param_groups, base.defaults)
        self.base, self.param_groups = base, base.param_groups

    def step(self, closure: Any = None) -> Any:
        return self.base.step(closure)


@pytest.mark.parametrize("form", ["function", "model"])
@pytest.mark.parametrize(
    "make",
    [
        lambda p: Wrapped(torch.optim.SGD(p, lr=0.1, momentum=0.9)),
        lambda p: Wrapped(torch.optim.Adam(p, lr=0.01)),
    ],
    ids=["sgd", "adam"],
)
def test_an_optimizer_within_another_keeps_its_state(form: str, make: Callable[[Any], Wrapped]) -> None:
    models = [net(), net()]
    optimizers = [make(model.parameters()) for model in models]
    first = batches(1)[0]
    before = copy.deepcopy(optimizers[0].base.state_dict())
    if form == "function":
        step = fast(eager_step(models[0], optimizers[0]), first)
    else:
        step = fast(models[0], first, loss=F.cross_entropy, optimizer=optimizers[0])
    assert optimizers[0].base.state_dict() == before  # trials leave nothing behind
    eager = eager_step(models[1], optimizers[1])
    for batch in batches(5):
        close(step(*batch), eager(*batch))
    same_states(models[0].state_dict(), models[1].state_dict())


class Averaging(torch.optim.SGD):
    """Keeps averages of its parameters in a list."""

    def __init__(self, parameters: Iterable[nn.Parameter]) -> None:
        super().__init__(parameters, lr=0.5)
        self.average = [p.detach().clone() for group in self.param_groups for p in group["params"]]

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        result = super().step(closure)
        parameters = [p for group in self.param_groups for p in group["params"]]
        torch._foreach_lerp_(self.average, parameters, 0.1)
        return result


def test_tensors_in_an_optimizers_list_are_put_back() -> None:
    models = [net(), net()]
    optimizers = [Averaging(model.parameters()) for model in models]
    before = [tensor.clone() for tensor in optimizers[0].average]
    step = fast(eager_step(models[0], optimizers[0]), batches(1)[0])
    assert all(map(torch.equal, optimizers[0].average, before))
    eager = eager_step(models[1], optimizers[1])
    for batch in batches(3):
        close(step(*batch), eager(*batch))
    for mine, other in zip(*(optimizer.average for optimizer in optimizers), strict=True):
        close(mine, other)
