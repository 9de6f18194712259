"""Values, models and optimizers are found wherever the code of a step has them."""

from __future__ import annotations

import argparse
import array
import copy
import ctypes
import dataclasses
import functools
import sys
import types
import weakref
from collections import ChainMap, OrderedDict, UserDict
from collections.abc import Callable
from contextvars import ContextVar
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F  # noqa: N812  (torch's own habit)

from gpusim.gpu.optimize.callable import OptimizedStep
from gpusim.gpu.optimize.reads import Reads
from gpusim.gpu.optimize.steps import Given
from gpusim.gpu.reach.search import Reach
from tests.support.optimizing import batches, close, eager_step, fast, net, same_states, sgd

Step = Callable[..., Any]
Held = tuple[Callable[[], float], Callable[[], object]]
"""A reader of 2.0, and a change of what it reads."""
X = batches(1)[0][0]


class Holder:
    value = 2.0


def user_dict() -> Held:
    values = UserDict(value=2.0)
    return lambda: values["value"], lambda: values.update(value=3.0)


def chain_map() -> Held:
    values = ChainMap({}, {"value": 2.0})
    return lambda: values["value"], lambda: values.update(value=3.0)


def view_of_dict() -> Held:
    values = {"value": 2.0}
    view = types.MappingProxyType(values)
    return lambda: view["value"], lambda: values.update(value=3.0)


def context() -> Held:
    variable = ContextVar("variable", default=2.0)
    return lambda: variable.get(), lambda: variable.set(3.0)


def weak_reference() -> Held:
    holder = Holder()
    refers = weakref.ref(holder)
    return lambda: refers().value, lambda: setattr(holder, "value", 3.0)


def weak_key() -> Held:
    holder = Holder()
    values = weakref.WeakKeyDictionary({holder: 2.0})
    return lambda: values[holder], lambda: values.update({holder: 3.0})


def weak_value() -> Held:
    holder = Holder()
    values = weakref.WeakValueDictionary({"holder": holder})
    return lambda: values["holder"].value, lambda: setattr(holder, "value", 3.0)


class Focal:
    __match_args__ = ("gamma",)

    def __init__(self, gamma: float) -> None:
        self.gamma = gamma


def power_of(kind: object) -> float:
    match kind:
        case Focal(power):
            return power
    return 0.0


def pattern_by_place() -> Held:
    kind = Focal(2.0)
    return lambda: power_of(kind), lambda: setattr(kind, "gamma", 3.0)


@dataclasses.dataclass(eq=False)
class Options:
    value: float = 2.0
    more: float = 0.0


def by_vars() -> Held:
    options = Options()
    return lambda: max(vars(options).values()), lambda: setattr(options, "value", 3.0)


def by_own_dict() -> Held:
    trainer = types.SimpleNamespace(options=Options())
    return lambda: max(trainer.options.__dict__.values()), lambda: setattr(trainer.options, "value", 3.0)


def by_fields() -> Held:
    options = Options()
    return lambda: max(dataclasses.astuple(options)), lambda: setattr(options, "value", 3.0)


def by_another_name() -> Held:
    trainer = types.SimpleNamespace(options=Options())

    def most() -> float:
        here = trainer.options
        return max(vars(here).values())

    return most, lambda: setattr(trainer.options, "value", 3.0)


def by_a_parameter() -> Held:
    options = [Options()]
    return lambda: max(map(_most, options)), lambda: setattr(options[0], "value", 3.0)


def _most(held: Any) -> float:
    return max(vars(held).values())


class Settings:
    def __init__(self) -> None:
        self.value = 2.0

    def most(self) -> float:
        return max(self.__dict__.values())


def by_self() -> Held:
    settings = Settings()
    return settings.most, lambda: setattr(settings, "value", 3.0)


def of_a_namespace() -> Held:
    options = argparse.Namespace(value=2.0)
    return lambda: max(vars(options).values()), lambda: setattr(options, "value", 3.0)


@dataclasses.dataclass(slots=True, eq=False)
class Slots:
    value: float = 2.0


def by_fields_in_slots() -> Held:
    options = Slots()
    return lambda: max(dataclasses.astuple(options)), lambda: setattr(options, "value", 3.0)


def new_attribute() -> Held:
    options = Options()
    return lambda: max(vars(options).values()), lambda: setattr(options, "other", 3.0)


def array_of_python() -> Held:
    values = array.array("d", [2.0])
    return lambda: values[0], lambda: values.__setitem__(0, 3.0)


def number_of_c() -> Held:
    number = ctypes.c_double(2.0)
    return lambda: number.value, lambda: setattr(number, "value", 3.0)


def cached_answer() -> Held:
    values = {"value": 2.0}

    @functools.lru_cache
    def answer() -> float:
        return values["value"]

    return lambda: answer(), lambda: (values.update(value=3.0), answer.cache_clear())


def rate_of_scheduler() -> Held:
    optimizer = torch.optim.SGD([torch.zeros(1)], lr=2.0)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda epoch: 1.0 + epoch)
    optimizer.step()
    return lambda: scheduler.get_last_lr()[0], scheduler.step


def own_option_of_optimizer() -> Held:
    optimizer = torch.optim.SGD([{"params": [nn.Parameter(torch.zeros(1))], "factor": 2.0}], lr=2.0)
    return lambda: optimizer.param_groups[0]["factor"], lambda: optimizer.param_groups[0].update(factor=3.0)


@pytest.mark.parametrize(
    "held",
    [
        *(user_dict, chain_map, view_of_dict, context, weak_reference, weak_key, weak_value, array_of_python),
        *(number_of_c, cached_answer, rate_of_scheduler, own_option_of_optimizer, pattern_by_place),
        *(by_vars, by_own_dict, by_fields, by_another_name, by_a_parameter, by_self, of_a_namespace),
        *(by_fields_in_slots, new_attribute),
    ],
)
def test_a_value_that_the_step_reads_is_compared_wherever_it_lies(held: Callable[[], Held]) -> None:
    read, change = held()

    def step(x: torch.Tensor) -> torch.Tensor:
        return x.sin() * read()

    reads = Reads((step,), ())
    assert reads.changed() is None
    assert read() == 2.0
    change()
    assert read() != 2.0
    assert reads.changed() is not None


#: Import within a function, and what it then has the settings by.
IMPORTS = {
    "import own_package.settings": "own_package.settings.held",
    "import own_package.settings as here": "here.held",
    "from own_package.settings import held": "held",
    "from own_package import settings as here": "here.held",
    "from . import settings": "settings.held",
    "from .settings import held": "held",
    "from ..own_package.settings import held": "held",
}


@pytest.mark.parametrize("kind", IMPORTS)
@pytest.mark.parametrize("change", ["a value", "another module"])
def test_a_python_module_that_code_imports_itself_is_watched(
    kind: str, change: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = nn.Linear(6, 6)
    package, settings = types.ModuleType("outer.own_package"), types.ModuleType("outer.own_package.settings")
    settings.held = {"value": 2.0, "model": model}  # type: ignore[attr-defined]
    package.settings = package.own_package = settings  # type: ignore[attr-defined]
    for name, module in (("", package), (".settings", settings)):
        monkeypatch.setitem(sys.modules, f"outer.own_package{name}", module)
        monkeypatch.setitem(sys.modules, f"own_package{name}", module)
    read = IMPORTS[kind]
    code = f"def step(x):\n def inner():\n  {kind}\n  return {read}['value'], {read}['model']"
    here: Any = {"__name__": "outer.own_package.steps", "__package__": "outer.own_package"}
    exec(code, here)
    reads = Reads((here["step"],), ())
    assert reads.hidden == [model]
    assert reads.changed() is None
    if change == "a value":
        settings.held["value"] = 3.0  # type: ignore[attr-defined]
    else:
        for name in ("outer.own_package", "own_package", "outer.own_package.settings", "own_package.settings"):
            monkeypatch.setitem(sys.modules, name, types.ModuleType(name))
    assert reads.changed() is not None


def test_a_scheduler_that_the_step_asks_for_the_rate_is_asked_again() -> None:
    read, change = rate_of_scheduler()

    def step(x: torch.Tensor) -> torch.Tensor:
        return x.sin() * read()

    captured = fast(step, X)
    assert isinstance(captured, OptimizedStep)
    change()
    close(captured(X), step(X))


def by_slots(model: nn.Module) -> Step:
    class Trainer:
        __slots__ = ("step",)

        def __call__(self, x: torch.Tensor, y: torch.Tensor) -> Any:
            return self.step(x, y)

    trainer = Trainer()
    trainer.step = eager_step(model, sgd(model.parameters()))
    return trainer


def by_method(model: nn.Module) -> Step:
    optimizer = sgd(model.parameters())

    class Trainer:
        def update(self, loss: torch.Tensor) -> torch.Tensor:
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            return loss.detach()

        def step(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
            return self.update(F.cross_entropy(model(x), y))

    return Trainer().step


def by_class(model: nn.Module) -> Step:
    class Parts:
        net, optimizer = model, sgd(model.parameters())

    return lambda x, y: eager_step(Parts.net, Parts.optimizer)(x, y)


def by_set(model: nn.Module) -> Step:
    parts = {model: sgd(model.parameters())}
    return lambda x, y: next(eager_step(*pair)(x, y) for pair in parts.items())


def by_cache(model: nn.Module) -> Step:
    optimizer = sgd(model.parameters())
    made = [(model, optimizer)]
    parts = functools.lru_cache(maxsize=1)(lambda: made.pop())
    parts()
    return lambda x, y: eager_step(*parts())(x, y)


def by_hooks(model: nn.Module) -> Step:
    optimizers = {parameter: sgd([parameter]) for parameter in model.parameters()}

    def update(parameter: torch.Tensor) -> None:
        optimizers[parameter].step()
        optimizers[parameter].zero_grad()

    for parameter in model.parameters():
        parameter.register_post_accumulate_grad_hook(update)

    def step(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        loss = F.cross_entropy(model(x), y)
        loss.backward()
        return loss.detach()

    return step


@pytest.mark.parametrize("made", [by_slots, by_method, by_class, by_set, by_cache, by_hooks])
def test_models_and_optimizers_are_found_wherever_the_code_has_them(made: Callable[[nn.Module], Step]) -> None:
    """Otherwise trial runs would train the user's model, and rates would stay those of the capture."""
    model = net()
    step = Given(made(model), None, None).step(batches(1)[0], {}, torch.device("cpu"))
    found = {id(module) for top in step.modules.values() for module in top.modules()}
    assert found == set(map(id, model.modules()))
    updated = [id(p) for optimizer in step.optimizers for group in optimizer.param_groups for p in group["params"]]
    assert sorted(updated) == sorted(map(id, model.parameters()))


@pytest.mark.parametrize("made", [by_method, by_cache, by_hooks])
def test_optimizers_in_methods_and_hooks_train_as_eager_does(made: Callable[[nn.Module], Step]) -> None:
    model = net()
    other = copy.deepcopy(model)
    mine, theirs = made(model), made(other)
    before = copy.deepcopy(model.state_dict())
    step = fast(mine, batches(1)[0])
    assert isinstance(step, OptimizedStep)
    same_states(model.state_dict(), before)
    for x, y in batches(3):
        close(step(x, y), theirs(x, y))
    same_states(model.state_dict(), other.state_dict())


class Makers(OrderedDict[str, Callable[[], nn.Module]]):
    def __getitem__(self, key: str) -> Any:
        raise AssertionError("makes another module at each lookup")


class Made(list[Callable[[], nn.Module]]):
    def __iter__(self) -> Any:
        raise AssertionError("makes other modules at each iteration")


@pytest.mark.parametrize("held", [Makers(relu=nn.ReLU), Made([nn.ReLU])])
def test_containers_are_searched_past_their_own_lookups(held: Any) -> None:
    """One that makes other objects at each lookup, as transformers' table of activations, would never end it."""
    reach = Reach([lambda x: [held.items(), held]], [])
    assert any(value is held for value, _ in reach)
    assert not reach.hidden
