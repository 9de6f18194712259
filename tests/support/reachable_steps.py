"""Steps from which a model and an optimizer are reached in the ways that Python has, by the name of the way."""

from __future__ import annotations

import functools
import types
import weakref
from collections import ChainMap, UserDict, deque
from collections.abc import Callable
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

Step = Callable[..., Any]
Maker = Callable[[nn.Module, torch.optim.Optimizer], Any]
CASES: dict[str, tuple[Maker, str, str]] = {}
"""A function that makes a step, and what the search finds behind it: the model (M), the optimizer (O), both or nothing;
near the step under any name, and wherever code names it.
"""


def case(near: str, named: str) -> Callable[[Maker], Maker]:
    def add(maker: Maker) -> Maker:
        CASES[maker.__name__] = (maker, near, named)
        return maker

    return add


class Called(BaseException):
    """The search has called code of the user's."""


def refuse(*_: Any, **__: Any) -> Any:
    raise Called


class Trainer:
    def __init__(self, net: Any, optimizer: Any) -> None:
        self.net, self.optimizer = net, optimizer

    def step(self, x: Any) -> Any:
        self.optimizer.step()
        return self.net(x)


# --- Functions ---


@case("MO", "MO")
def closure(net: Any, optimizer: Any) -> Step:
    return lambda x: (net(x), optimizer.step())


def with_globals(function: Any, **values: Any) -> Step:
    return types.FunctionType(function.__code__, values)


@case("MO", "MO")
def global_names(net: Any, optimizer: Any) -> Step:
    return with_globals(lambda x: (NET(x), OPTIMIZER.step()), NET=net, OPTIMIZER=optimizer)  # noqa: F821


@case("MO", "MO")
def global_names_of_an_inner_function(net: Any, optimizer: Any) -> Step:
    return with_globals(lambda x: lambda: (NET(x), OPTIMIZER.step()), NET=net, OPTIMIZER=optimizer)  # noqa: F821


@case("MO", "MO")
def defaults(net: Any, optimizer: Any) -> Step:
    return lambda x, model=net, *, updates=optimizer: (model(x), updates.step())


@case("MO", "MO")
def partial(net: Any, optimizer: Any) -> Step:
    return functools.partial(lambda model, x, updates: (model(x), updates.step()), net, updates=optimizer)


@case("MO", "MO")
def bound_method(net: Any, optimizer: Any) -> Step:
    return Trainer(net, optimizer).step


@case("MO", "MO")
def callable_object(net: Any, optimizer: Any) -> Step:
    class Callable(Trainer):
        __call__ = Trainer.step

    return Callable(net, optimizer)


@case("MO", "MO")
def attributes_of_a_function(net: Any, optimizer: Any) -> Step:
    def step(x: Any) -> Any:
        step.optimizer.step()
        return step.net(x)

    vars(step).update(net=net, optimizer=optimizer)
    return step


@case("MO", "MO")
def decorated(net: Any, optimizer: Any) -> Step:
    return torch.no_grad()(closure(net, optimizer))


@case("MO", "")
def function_of_a_library(net: Any, optimizer: Any) -> Step:
    step = closure(net, optimizer)

    def outer(x: Any) -> Any:
        return step(x)

    outer.__module__ = "torch.x"
    return outer


@case("MO", "MO")
def cached_function(net: Any, optimizer: Any) -> Step:
    return functools.lru_cache(closure(net, optimizer))


@case("MO", "MO")
def cached_function_in_a_step(net: Any, optimizer: Any) -> Step:
    @functools.lru_cache(maxsize=1)
    def parts() -> Any:
        return net, optimizer

    return lambda x: (parts()[0](x), parts()[1].step())


def cached_answers(maxsize: int | None, *answers: Any) -> Step:
    made = list(answers)
    parts = functools.lru_cache(maxsize)(lambda number: made.pop(number))
    for number in reversed(range(len(answers))):
        parts(number)
    return lambda x: (parts(0)(x), parts(1).step())


@case("MO", "MO")
def answers_of_a_small_cache(net: Any, optimizer: Any) -> Step:
    return cached_answers(2, net, optimizer)


@case("MO", "MO")
def answers_of_a_cache_without_limit(net: Any, optimizer: Any) -> Step:
    return cached_answers(None, net, optimizer)


@case("MO", "MO")
def answer_in_a_dict(net: Any, optimizer: Any) -> Step:
    return cached_answers(8, {"net": net}, [optimizer])


@case("", "")
def answers_of_a_large_cache(net: Any, optimizer: Any) -> Step:
    return cached_answers(None, net, optimizer, *range(2_000))


@case("", "MO")
def cached_method(net: Any, optimizer: Any) -> Step:
    class Holder:
        @functools.cache  # noqa: B019
        def parts(self) -> Any:
            return net, optimizer

    holder = Holder()
    return lambda x: holder.parts()


@case("", "MO")
def closure_of_a_method(net: Any, optimizer: Any) -> Step:
    class Holder:
        def step(self, x: Any) -> Any:
            return net(x), optimizer.step()

    holder = Holder()
    return lambda x: holder.step(x)


@case("", "MO")
def closure_of_a_property(net: Any, optimizer: Any) -> Step:
    class Holder:
        @property
        def parts(self) -> Any:
            return net, optimizer

    holder = Holder()
    return lambda x: holder.parts


@case("", "MO")
def partial_method(net: Any, optimizer: Any) -> Step:
    class Holder:
        def step(self, model: Any, x: Any) -> Any:
            return model(x), optimizer.step()

        of_net = functools.partialmethod(step, net)

    holder = Holder()
    return lambda x: holder.of_net(x)


# --- Containers ---


def in_container(held: Any) -> Step:
    return lambda x: [part for part in held]  # noqa: C416


def in_dict(held: Any) -> Step:
    return lambda x: (held["net"](x), held["optimizer"].step())


@case("MO", "MO")
def in_list(net: Any, optimizer: Any) -> Step:
    return in_container([net, optimizer])


@case("MO", "MO")
def in_tuple(net: Any, optimizer: Any) -> Step:
    return in_container((net, optimizer))


@case("MO", "MO")
def in_deque(net: Any, optimizer: Any) -> Step:
    return in_container(deque((net, optimizer)))


@case("MO", "MO")
def in_set(net: Any, optimizer: Any) -> Step:
    return in_container({net, optimizer})


@case("MO", "MO")
def in_frozenset(net: Any, optimizer: Any) -> Step:
    return in_container(frozenset((net, optimizer)))


@case("MO", "MO")
def in_values(net: Any, optimizer: Any) -> Step:
    return in_dict({"net": net, "optimizer": optimizer})


@case("MO", "MO")
def in_keys(net: Any, optimizer: Any) -> Step:
    held = {net: 1, optimizer: 2}
    return lambda x: list(held.items())


@case("MO", "MO")
def under_computed_keys(net: Any, optimizer: Any) -> Step:
    held = {"net.0": net, "optimizer.0": optimizer}
    return lambda x: [held[f"{key}.0"] for key in ("net", "optimizer")]


@case("MO", "MO")
def in_user_dict(net: Any, optimizer: Any) -> Step:
    return in_dict(UserDict(net=net, optimizer=optimizer))


@case("MO", "MO")
def in_chain_map(net: Any, optimizer: Any) -> Step:
    return in_dict(ChainMap({}, {"net": net, "optimizer": optimizer}))


@case("MO", "MO")
def in_view_of_dict(net: Any, optimizer: Any) -> Step:
    return in_dict(types.MappingProxyType({"net": net, "optimizer": optimizer}))


@case("", "")
def in_long_list(net: Any, optimizer: Any) -> Step:
    """Such a list is data."""
    return in_container([net, optimizer, *range(1_000)])


@case("MO", "MO")
def beside_much_data(net: Any, optimizer: Any) -> Step:
    return in_container([net, optimizer, *([number, [number]] for number in range(900))])


@case("MO", "MO")
def in_circle(net: Any, optimizer: Any) -> Step:
    around: list[Any] = []
    held = {"net": net, "optimizer": optimizer, "around": around}
    around += [around, held]
    return lambda x: (held["net"], held["optimizer"], held["around"])


# --- Objects ---


def of_object(held: Any) -> Step:
    return lambda x: (held.net(x), held.optimizer.step())


@case("MO", "MO")
def attributes(net: Any, optimizer: Any) -> Step:
    return of_object(Trainer(net, optimizer))


@case("MO", "")
def attributes_by_computed_names(net: Any, optimizer: Any) -> Step:
    held = types.SimpleNamespace(net_0=net, optimizer_0=optimizer)
    return lambda x: [getattr(held, f"{key}_0") for key in ("net", "optimizer")]


@dataclass
class Parts:
    net: Any
    optimizer: Any


@dataclass(slots=True)
class Slots:
    net: Any
    optimizer: Any
    empty: Any = None


@case("MO", "MO")
def data_class(net: Any, optimizer: Any) -> Step:
    return of_object(Parts(net, optimizer))


@case("MO", "MO")
def slots(net: Any, optimizer: Any) -> Step:
    return of_object(Slots(net, optimizer))


@case("", "MO")
def python_module(net: Any, optimizer: Any) -> Step:
    module = types.ModuleType("mine")
    vars(module).update(net=net, optimizer=optimizer)
    return of_object(module)


@case("", "MO")
def class_attributes(net: Any, optimizer: Any) -> Step:
    return of_object(type("Holder", (), {"net": net, "optimizer": optimizer}))


@case("", "MO")
def in_list_of_a_module(net: Any, optimizer: Any) -> Step:
    class Outer(nn.Module):
        def forward(self, x: Any) -> Any:
            self.optimizer.step()
            return self.parts[0](x)

    outer = Outer()
    outer.parts, outer.optimizer = [net], optimizer
    return outer


@case("MO", "MO")
def scheduler(net: Any, optimizer: Any) -> Step:
    rates = torch.optim.lr_scheduler.StepLR(optimizer, 1)
    return with_globals(lambda x: (lambda: NET(x), RATES.step()), NET=net, RATES=rates)  # noqa: F821


@case("MO", "MO")
def weak_reference(net: Any, optimizer: Any) -> Step:
    net.holder = (Trainer(net, optimizer),)
    refers = weakref.ref(net.holder[0])
    return lambda x: (refers().net, refers().optimizer)


@case("MO", "")
def weak_method(net: Any, optimizer: Any) -> Step:
    net.holder = (Trainer(net, optimizer),)
    refers = weakref.WeakMethod(net.holder[0].step)
    return lambda x: refers()(x)


@case("MO", "MO")
def weak_proxy(net: Any, optimizer: Any) -> Step:
    net.holder = (Trainer(net, optimizer),)
    return of_object(weakref.proxy(net.holder[0]))


@case("MO", "MO")
def context_variable(net: Any, optimizer: Any) -> Step:
    variable: ContextVar[Any] = ContextVar("variable")
    variable.set((net, optimizer))
    return lambda x: variable.get()


def nested(levels: int, net: Any, optimizer: Any) -> Step:
    held = Trainer(net, optimizer)
    for _ in range(levels):
        held = types.SimpleNamespace(inner=held)  # type: ignore[assignment]
    return lambda x: (held.inner, held.net, held.optimizer)


@case("", "MO")
def five_deep(net: Any, optimizer: Any) -> Step:
    return nested(5, net, optimizer)


@case("", "")
def nine_deep(net: Any, optimizer: Any) -> Step:
    return nested(9, net, optimizer)
