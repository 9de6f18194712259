"""What the user changes around a captured step has the effect that it has in eager, or the step runs as it is."""

from __future__ import annotations

import copy
import types
from collections import OrderedDict
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F  # noqa: N812  (torch's own habit)
from torch.optim import optimizer as optimizers_of_torch

from gpusim.gpu.optimize import callable as calls
from gpusim.gpu.optimize.callable import OptimizedStep
from gpusim.gpu.optimize.reads import Reads
from tests.support.optimizing import Net, Twins, batches, captures, close, fast, net, same_states, sgd

Change = Callable[[Any], Any]


# --- Hooks ---


def _no_result(change: Callable[[torch.Tensor], Any]) -> Callable[[torch.Tensor], None]:
    def changed(tensor: torch.Tensor) -> None:
        change(tensor)

    return changed


def _halving(model: Net) -> Callable[..., None]:
    def halve(*_: Any) -> None:
        with torch.no_grad():
            model.left.weight.mul_(0.5)

    return halve


HOOKS: dict[str, Callable[[Net, torch.optim.Optimizer], Any]] = {
    "optimizer": lambda model, optimizer: optimizer.register_step_post_hook(_halving(model)),
    "forward": lambda model, _: model.left.register_forward_hook(lambda *given: given[2] * 2),
    "before forward": lambda model, _: model.left.register_forward_pre_hook(lambda _, given: (given[0] * 2,)),
    "backward": lambda model, _: model.head.register_full_backward_hook(lambda *given: (given[1][0] * 2,)),
    "gradient": lambda model, _: model.left.weight.register_hook(lambda gradient: gradient * 3),
    "accumulated": lambda model, _: model.left.weight.register_post_accumulate_grad_hook(
        _no_result(lambda parameter: parameter.grad.mul_(3))
    ),
}


@pytest.mark.parametrize("kind", HOOKS)
def test_hooks_that_come_later_run_and_the_captured_step_goes_on_without_them(kind: str) -> None:
    twins = Twins(sgd)
    twins.train(batches(2))
    made = captures(twins.fast)
    pairs = ((twins.model, twins.optimizer), (twins.other, twins.other_optimizer))
    handles = [HOOKS[kind](model, optimizer) for model, optimizer in pairs]
    with pytest.warns(UserWarning, match="hooks have changed"):
        twins.train(batches(2, seed=2))
    twins.check()
    for handle in handles:
        handle.remove()
    variant = next(iter(twins.fast._variants.values()))
    before = variant.calls
    twins.train(batches(2, seed=3))
    twins.check()
    assert (variant.calls, made) == (before + 2, [])


DICTS: dict[str, tuple[str, Callable[..., Any]]] = {
    "forward": ("_forward_hooks", lambda *given: given[2] * 2),
    "before forward": ("_forward_pre_hooks", lambda _, given: (given[0] * 2,)),
    "backward": ("_backward_hooks", lambda *given: (given[1][0] * 2,)),
    "before backward": ("_backward_pre_hooks", lambda _, given: (given[0] * 2,)),
}


@pytest.mark.parametrize("replaced", [True, False])
@pytest.mark.parametrize("kind", DICTS)
def test_hooks_in_a_dict_of_another_module_run(kind: str, replaced: bool) -> None:
    """Nobody registers these."""
    twins = Twins(sgd)
    twins.train(batches(2))
    made, (name, hook) = captures(twins.fast), DICTS[kind]
    before = {model: getattr(model.head, name) for model in (twins.model, twins.other)}
    for model in before:
        if replaced:
            setattr(model.head, name, OrderedDict({10**6: hook}))
        else:
            getattr(model.head, name)[10**6] = hook
    with pytest.warns(UserWarning, match="hooks have changed"):
        twins.train(batches(2, seed=2))
    twins.check()
    for model, hooks in before.items():
        hooks.pop(10**6, None)
        setattr(model.head, name, type(hooks)(hooks))  # an equal dict is no other
    variant = next(iter(twins.fast._variants.values()))
    calls_before = variant.calls
    twins.train(batches(2, seed=3))
    twins.check()
    assert (variant.calls, made) == (calls_before + 2, [])


def test_a_hook_on_all_modules_runs() -> None:
    model = net().eval()
    step, x = fast(model, batches(1)[0][0]), batches(1)[0][0]
    seen: list[str] = []
    handle = nn.modules.module.register_module_forward_hook(lambda m, *_: seen.append(type(m).__name__))
    try:
        with pytest.warns(UserWarning, match="hooks have changed"):
            step(x)
    finally:
        handle.remove()
    assert "Net" in seen


@pytest.mark.parametrize("when", ["pre", "post"])
def test_a_hook_on_all_optimizers_runs(when: str) -> None:
    twins = Twins(sgd)
    twins.train(batches(1))
    seen: list[Any] = []
    register = getattr(optimizers_of_torch, f"register_optimizer_step_{when}_hook")
    handle = register(lambda optimizer, *_: seen.append(optimizer))
    try:
        with pytest.warns(UserWarning, match="hooks have changed"):
            twins.train(batches(1, seed=2))
    finally:
        handle.remove()
    assert seen == [twins.optimizer, twins.other_optimizer]
    twins.check()


def test_a_hook_that_keeps_what_it_sees_leaves_the_step_as_it_is() -> None:
    """A captured step would show it nothing."""
    model, seen = net().eval(), {}
    model.left.register_forward_hook(lambda *given: seen.update(left=given[2].detach()))
    with pytest.warns(UserWarning, match=r"changes the Python value 'seen"):
        step = fast(model, batches(1)[0][0])
    for x, _ in batches(2):
        step(x)
        close(seen["left"], model.left(x))


# --- Python values ---


class Trainer:
    """A step that reads its own attributes, and a count that it does not read."""

    def __init__(self, model: nn.Module) -> None:
        self.model, self.optimizer = model, sgd(model.parameters())
        self.options = {"weight": 1.0, "note": 0}
        self.scales = [1.0, 1.0]
        self.epoch = 0

    def step(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        self.optimizer.zero_grad()
        loss = self.options["weight"] * self.scales[0] * F.cross_entropy(self.model(x), y)
        loss.backward()
        self.optimizer.step()
        return loss.detach()


def _other_optimizer(trainer: Trainer) -> None:
    trainer.optimizer = torch.optim.Adam(trainer.model.parameters(), lr=0.01)


CHANGES: dict[str, Change] = {
    "a rate of dropout": lambda t: setattr(t.model.drop, "p", 0.9),
    "a norm's momentum": lambda t: setattr(t.model.norm, "momentum", 0.5),
    "a dict": lambda t: t.options.update(weight=2.0),
    "a list": lambda t: t.scales.__setitem__(0, 3.0),
    "an optimizer": _other_optimizer,
    "a method": lambda t: setattr(t.model, "forward", lambda x: t.model.head(t.model.left(x))),
}


@pytest.mark.parametrize("kind", CHANGES)
def test_what_the_code_reads_may_change_between_steps(kind: str) -> None:
    mine = Trainer(net())
    theirs = Trainer(copy.deepcopy(mine.model))
    step, data = fast(mine.step, batches(1)[0]), batches(6)
    for number, (x, y) in enumerate(data):
        if number == 3:
            CHANGES[kind](mine)
            CHANGES[kind](theirs)
        torch.manual_seed(number)
        loss = step(x, y)
        torch.manual_seed(number)
        close(loss, theirs.step(x, y))
    same_states(mine.model.state_dict(), theirs.model.state_dict())


class Slotted:
    __slots__ = ("rate", "unread")

    def __init__(self) -> None:
        self.rate, self.unread = 1.0, 0


class Inner(nn.Module):
    """Reads values from everywhere in `forward`."""

    shift = 0.0
    turns = 1

    def __init__(self, config: types.ModuleType) -> None:
        super().__init__()
        self.conv, self.drop, self.own = nn.Conv2d(1, 1, 3, bias=False), nn.Dropout(0), _OwnPool(2)
        self.slotted, self.config, self.shared = Slotted(), config, Shared()
        self.pairs = [(1.0, 0.0), (2.0, 0.0)]
        self.nested = {"weights": [[1.0]]}
        self.extra: dict[str, float] = {}

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = (
            self.own(self.drop(self.conv(x))) * self.config.SCALE * self.slotted.rate
            + self.shift
            + Shared.bias
            + self.shared.start
        )
        y = y * self.pairs[0][0] * self.nested["weights"][0][0] * FACTOR
        for value in self.extra.values():
            y = y + value
        return y


class Shared:
    bias, start = 0.0, 0.0
    unread = 0


FACTOR = 1.0


class _OwnPool(nn.MaxPool2d):
    """A layer that inherits torch's `forward`."""


def inner() -> Inner:
    torch.manual_seed(0)
    config = types.ModuleType("config_of_a_user")
    config.SCALE, config.UNREAD = 1.0, 0
    return Inner(config)


READ: dict[str, Callable[[Inner, pytest.MonkeyPatch], Any]] = {
    "an attribute of a Python module": lambda m, _: setattr(m.config, "SCALE", 2.0),
    "a class's attribute": lambda _, patch: patch.setattr(Inner, "shift", 1.0),
    "another class's attribute": lambda _, patch: patch.setattr(Shared, "bias", 1.0),
    "an attribute that hides the class's": lambda m, _: setattr(m, "shift", 1.0),
    "the first attribute of an object": lambda m, _: setattr(m.shared, "start", 1.0),
    "a slot": lambda m, _: setattr(m.slotted, "rate", 2.0),
    "a tuple in a list": lambda m, _: m.pairs.__setitem__(0, (3.0, 0.0)),
    "a list in a list in a dict": lambda m, _: m.nested["weights"][0].__setitem__(0, 3.0),
    "a new key": lambda m, _: m.extra.update(new=1.0),
    "a method's global": lambda _, patch: patch.setitem(globals(), "FACTOR", 2.0),
    "an integer rate of dropout": lambda m, _: setattr(m.drop, "p", 0.5),
    "a tuple of a layer": lambda m, _: setattr(m.conv, "stride", (2, 2)),
    "an integer of a layer's own subclass": lambda m, _: setattr(m.own, "stride", 1),
}


@pytest.mark.parametrize("kind", READ)
def test_what_a_module_reads_is_captured_anew(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model, x = inner(), torch.randn(2, 1, 9, 9, generator=torch.Generator().manual_seed(3))
    reads = Reads((model,), model.modules())
    assert reads.changed() is None
    before = _forward(model, x)
    READ[kind](model, monkeypatch)
    assert reads.changed() is not None
    after = _forward(model, x)
    assert before.shape != after.shape or not torch.equal(before, after)


def _forward(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    torch.manual_seed(0)
    with torch.no_grad():
        return model(x)


def test_a_changed_attribute_of_a_python_module_has_its_effect() -> None:
    """The whole way, from the change to the results of the next call."""
    model, x = inner().eval(), torch.randn(2, 1, 9, 9)
    step = fast(model, x)
    assert isinstance(step, OptimizedStep)
    made = captures(step)
    for scale in (1.0, 3.0):
        model.config.SCALE = scale
        close(step(x), model(x))
    assert made == [1]


def test_what_a_module_does_not_read_is_not_watched(monkeypatch: pytest.MonkeyPatch) -> None:
    model = inner()
    reads = Reads((model,), model.modules())
    model.config.UNREAD = model.slotted.unread = model.turns = 7
    monkeypatch.setattr(Shared, "unread", 7)
    model.pairs[1] = (2.0, 0.0)  # another tuple with the same values
    assert reads.changed() is None


def test_a_global_of_an_attributes_name_is_not_watched(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(globals(), "slotted", 1)
    model = inner()
    reads = Reads((model,), model.modules())
    monkeypatch.setitem(globals(), "slotted", 2)
    assert reads.changed() is None


def test_what_the_code_does_not_read_changes_nothing() -> None:
    trainer = Trainer(net())
    step = fast(trainer.step, batches(1)[0])
    made = captures(step)
    for x, y in batches(3):
        trainer.epoch += 1
        trainer.options["note"] += 1
        step(x, y)
    assert made == []


def test_options_that_change_at_each_step_are_not_captured_for_ever() -> None:
    """A schedule of momenta, as of OneCycleLR: each capture would take longer than it saves."""
    twins = Twins(sgd)
    made = captures(twins.fast)
    cycles = [
        torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=0.1, total_steps=20)
        for optimizer in (twins.optimizer, twins.other_optimizer)
    ]

    def cycled() -> None:
        for batch in batches(10):
            twins.train([batch])
            for cycle in cycles:
                cycle.step()

    with pytest.warns(UserWarning, match="change too often"):
        cycled()
    twins.check()
    assert len(made) == calls.MOST_SHORT


def test_a_module_that_comes_later_has_a_mode_of_its_own() -> None:
    model = net()
    step, x = fast(model, batches(1)[0][0]), batches(1)[0][0]
    model.drop = nn.Dropout(0.9)
    step(x)
    model.drop.eval()
    twin = copy.deepcopy(model)
    torch.manual_seed(0)
    close(step(x), twin(x))
