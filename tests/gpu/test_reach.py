"""What the search finds behind a step's function, and that it runs no code of the user's."""

from __future__ import annotations

import functools
import types
import weakref
from collections import ChainMap, UserDict, deque
from collections.abc import Callable
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import nn

from gpusim.gpu.reach.search import Reach, reachable

Step = Callable[..., Any]
Maker = Callable[[nn.Module, torch.optim.Optimizer], Any]
CASES: dict[str, tuple[Maker, str, str]] = {}
"""A function that makes a step, and what each search finds behind it: the model (M), the optimizer (O), both, nothing,
or an error, as it calls code of the user's.
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


@case("", "MO")
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


@case("", "MO")
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


@case("", "")
def cached_answer(net: Any, optimizer: Any) -> Step:
    """Python does not show what such a cache holds."""
    made = [(net, optimizer)]
    parts = functools.lru_cache(lambda: made.pop())
    parts()
    return lambda x: (parts()[0](x), parts()[1].step())


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


@case("", "O")
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


@case("MO", "")
def in_set(net: Any, optimizer: Any) -> Step:
    return in_container({net, optimizer})


@case("", "")
def in_frozenset(net: Any, optimizer: Any) -> Step:
    return in_container(frozenset((net, optimizer)))


@case("MO", "MO")
def in_values(net: Any, optimizer: Any) -> Step:
    return in_dict({"net": net, "optimizer": optimizer})


@case("MO", "")
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


@case("", "MO")
def in_chain_map(net: Any, optimizer: Any) -> Step:
    return in_dict(ChainMap({}, {"net": net, "optimizer": optimizer}))


@case("", "MO")
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


@case("O", "MO")
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


@case("", "MO")
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


# --- Code of the user's ---


OWN_LOOKUPS = dict.fromkeys(
    ("__len__", "__iter__", "__getitem__", "__contains__", "__bool__", "items", "keys", "values", "get"), refuse
)


def kept_in(kind: type, contents: Any) -> Any:
    """Return a container of a class with lookups of its own."""
    return type(f"Own{kind.__name__}", (kind,), OWN_LOOKUPS)(contents)


@case("error", "error")
def list_with_own_lookups(net: Any, optimizer: Any) -> Step:
    return in_container(kept_in(list, [net, optimizer]))


@case("error", "error")
def tuple_with_own_lookups(net: Any, optimizer: Any) -> Step:
    return in_container(kept_in(tuple, [net, optimizer]))


@case("error", "error")
def deque_with_own_lookups(net: Any, optimizer: Any) -> Step:
    return in_container(kept_in(deque, [net, optimizer]))


@case("error", "error")
def set_with_own_lookups(net: Any, optimizer: Any) -> Step:
    return in_container(kept_in(set, [net, optimizer]))


@case("error", "error")
def dict_with_own_lookups(net: Any, optimizer: Any) -> Step:
    return in_dict(kept_in(dict, {"net": net, "optimizer": optimizer}))


@case("error", "error")
def partial_with_own_attributes(net: Any, optimizer: Any) -> Step:
    own = dict.fromkeys(("func", "args", "keywords"), property(refuse))
    kind: Any = type("Partial", (functools.partial,), own)
    return kind(lambda model, updates, x: (model(x), updates.step()), net, optimizer)


@case("error", "error")
def object_with_own_lookups(net: Any, optimizer: Any) -> Step:
    kind: Any = type("Own", (), {"__getattribute__": refuse, "__getattr__": refuse, "__dir__": refuse})
    held = kind()
    object.__getattribute__(held, "__dict__").update(net=net, optimizer=optimizer)
    return of_object(held)


@case("error", "error")
def object_with_own_properties(net: Any, optimizer: Any) -> Step:
    class Held(Trainer):
        __class__ = property(refuse)  # type: ignore[assignment]
        more = property(refuse)

    held = Held(net, optimizer)
    return lambda x: (held.net, held.optimizer, held.more)


@case("error", "error")
def object_with_own_dict(net: Any, optimizer: Any) -> Step:
    held = Trainer(net, optimizer)
    held.__class__ = type("Held", (Trainer,), {"__dict__": property(refuse)})
    return of_object(held)


@case("error", "error")
def empty_slot_with_own_lookup(net: Any, optimizer: Any) -> Step:
    class Held:
        __slots__ = ("empty", "net", "optimizer")
        __getattr__ = refuse

    held: Any = Held()
    held.net, held.optimizer = net, optimizer
    return lambda x: (held.net, held.optimizer, held.empty)


@case("error", "error")
def class_with_own_lookups(net: Any, optimizer: Any) -> Step:
    own = {"__getattribute__": refuse, "__instancecheck__": refuse, "__subclasscheck__": refuse}
    return of_object(type("Meta", (type,), own)("Held", (), {"net": net, "optimizer": optimizer}))


@case("MO", "error")
def keys_with_own_hash(net: Any, optimizer: Any) -> Step:
    class Key:
        __hash__ = object.__hash__
        __eq__ = object.__eq__

    held = {Key(): net, Key(): optimizer}
    Key.__hash__ = Key.__eq__ = refuse  # type: ignore[assignment, method-assign]
    return lambda x: list(held.items())


@case("", "error")
def attribute_of_a_class_with_own_lookups(net: Any, optimizer: Any) -> Step:
    class Holder:
        strange = type("Strange", (), {"__getattribute__": refuse})()

        def step(self, x: Any) -> Any:
            return net(x), optimizer.step()

    holder = Holder()
    return lambda x: holder.step(x)


@case("error", "error")
def model_with_own_walk(net: Any, optimizer: Any) -> Step:
    walks = ("modules", "named_modules", "children", "named_children", "parameters", "named_parameters")
    outer: Any = type("Outer", (nn.Module,), dict.fromkeys(walks, refuse))()
    outer.net = net
    return lambda x: (outer(x), optimizer.step())


def found(named: bool, step: Step, net: nn.Module, optimizer: torch.optim.Optimizer) -> str:
    try:
        if named:
            reach = Reach((step,), ())
            modules, optimizers = list(reach.hidden.values()), list(reach.optimizers.values())
        else:
            near, optimizers = reachable((step,))
            modules = [part for module in near.values() for part in module.modules()]
    except Called:
        return "error"
    return "M" * any(each is net for each in modules) + "O" * any(each is optimizer for each in optimizers)


@pytest.mark.parametrize("named", [False, True], ids=["near", "named"])
@pytest.mark.parametrize("name", CASES)
def test_models_and_optimizers_are_found(name: str, named: bool) -> None:
    maker, *wanted = CASES[name]
    net = nn.Linear(2, 2)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    assert found(named, maker(net, optimizer), net, optimizer) == wanted[named]
