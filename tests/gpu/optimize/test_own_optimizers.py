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


def optimized(form: str, model: nn.Module, optimizer: torch.optim.Optimizer) -> Any:
    """Return the step as a function of the user's, or of model, loss and optimizer."""
    first = batches(1)[0]
    if form == "function":
        return fast(eager_step(model, optimizer), first)
    return fast(model, first, loss=F.cross_entropy, optimizer=optimizer)


@pytest.fixture(autouse=True)
def _as_before(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Clipped, "most", 10.0)
    monkeypatch.setitem(SCALE, "all", 1.0)


@pytest.mark.parametrize("change", [set_clip, set_class, set_helper, set_global, set_option, set_state])
@pytest.mark.parametrize("form", ["function", "model"])
def test_what_an_own_optimizer_reads_may_change(form: str, change: Callable[[Any], None]) -> None:
    models = [net(), net()]
    optimizers = [Clipped(model.parameters()) for model in models]
    step = optimized(form, models[0], optimizers[0])
    assert isinstance(step, OptimizedStep)
    eager = eager_step(models[1], optimizers[1])
    for number, batch in enumerate(batches(6)):
        if number == 3:
            for optimizer in optimizers[:1] if change in (set_class, set_global) else optimizers:
                change(optimizer)
        close(step(*batch), eager(*batch))
    same_states(models[0].state_dict(), models[1].state_dict())


class Calls:
    """Calls of a schedule, counted in its class and in each object."""

    __slots__ = ("of_object",)
    of_class = 0

    def __init__(self) -> None:
        self.of_object = 0


class Schedule:
    """A schedule of its own that counts its calls."""

    def __init__(self) -> None:
        self.calls, self.counted, self.hooked = 0, Calls(), []  # type: ignore[var-annotated]

    def now(self) -> float:
        return 0.5


class Scheduled(torch.optim.SGD):
    """Counts its steps by `count`."""

    def __init__(self, parameters: Iterable[nn.Parameter], count: Callable[[Schedule], None]) -> None:
        super().__init__(parameters, lr=0.5)
        self.schedule, self.count = Schedule(), count

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        self.count(self.schedule)
        torch._foreach_mul_(gradients(self), self.schedule.now())
        return super().step(closure)


def count_in_attribute(schedule: Schedule) -> None:
    schedule.calls += 1


def count_in_class(_: Schedule) -> None:
    Calls.of_class += 1


def count_in_slot(schedule: Schedule) -> None:
    schedule.counted.of_object += 1


def count_in_global(_: Schedule) -> None:
    global STEPS
    STEPS += 1


def count_in_list(schedule: Schedule) -> None:
    schedule.hooked.append(1)


STEPS = 0


@pytest.mark.parametrize("form", ["function", "model"])
@pytest.mark.parametrize(
    ("count", "name"),
    [
        (count_in_attribute, "Scheduled.schedule.calls"),
        (count_in_class, "Calls.of_class"),
        (count_in_slot, "of_object"),
        (count_in_global, "STEPS"),
        (count_in_list, "Scheduled.schedule.hooked"),
    ],
)
def test_what_an_optimizer_counts_is_named_and_put_back(
    form: str, count: Callable[[Schedule], None], name: str
) -> None:
    model = net()
    optimizer = Scheduled(model.parameters(), count)

    def counts() -> list[int]:
        schedule = optimizer.schedule
        return [schedule.calls, Calls.of_class, schedule.counted.of_object, STEPS, len(schedule.hooked)]

    before = counts()
    with pytest.warns(UserWarning, match=rf"the step changes .*{name}'"):
        step = optimized(form, model, optimizer)
    assert counts() == before
    step(*batches(1)[0])
    assert sum(counts()) == sum(before) + 1


class Master(torch.optim.SGD):
    """Updates copies of its parameters in its states, whose gradients it makes at each step."""

    def __init__(self, parameters: Iterable[nn.Parameter]) -> None:
        super().__init__(parameters, lr=0.5)
        for p in self.param_groups[0]["params"]:
            self.state[p]["master"] = p.detach().clone()

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        for p in self.param_groups[0]["params"]:
            master = self.state[p]["master"]
            master.grad = p.grad * 0.5
            master.sub_(master.grad)
            p.copy_(master)


def test_gradients_of_copies_in_the_states_are_the_optimizers_own() -> None:
    models = [net(), net()]
    optimizers = [Master(model.parameters()) for model in models]
    step = fast(eager_step(models[0], optimizers[0]), batches(1)[0])
    assert isinstance(step, OptimizedStep)
    eager = eager_step(models[1], optimizers[1])
    for batch in batches(4):
        close(step(*batch), eager(*batch))
    same_states(models[0].state_dict(), models[1].state_dict())


def test_an_option_that_no_code_reads_may_change_at_each_step() -> None:
    model = net()
    optimizer = Clipped(model.parameters())
    made: list[str] = []
    step = fast(eager_step(model, optimizer), batches(1)[0], say=made.append)
    for number, batch in enumerate(batches(5)):
        step(*batch)
        optimizer.param_groups[0]["logged"] = number
    assert made.count("recording its operators") == 1


def test_a_state_of_no_parameter_is_named() -> None:
    model = net()
    optimizer = Clipped(model.parameters())
    optimizer.state["scale"] = 1.0  # type: ignore[index]
    with pytest.warns(UserWarning, match=r"Clipped has 'scale' in its state, which is no dict of a parameter's values"):
        fast(eager_step(model, optimizer), batches(1)[0])


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
    before = copy.deepcopy(optimizers[0].base.state_dict())
    step = optimized(form, models[0], optimizers[0])
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
