"""What the search finds behind a step's function, and that it runs no code of the user's."""

from __future__ import annotations

import functools
import types
from collections import UserDict, deque
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from gpusim.errors import CaptureError
from gpusim.gpu.capture.in_memory import function_step, in_hooks
from gpusim.gpu.optimize import front
from gpusim.gpu.optimize.steps import Given
from gpusim.gpu.reach.search import MOST_PARTS, Reach, models_behind, modules_in
from tests.support.optimizing import batches, fast, net, sgd
from tests.support.reachable_steps import CASES, Step, Trainer, case, in_container, in_dict, of_object, refuse

# --- Code of the user's ---


OWN_LOOKUPS = dict.fromkeys(
    ("__len__", "__iter__", "__getitem__", "__contains__", "__bool__", "items", "keys", "values", "get"), refuse
)


def kept_in(kind: type, contents: Any) -> Any:
    """Return a container of a class with lookups of its own."""
    return type(f"Own{kind.__name__}", (kind,), OWN_LOOKUPS)(contents)


@case("MO", "MO")
def list_with_own_lookups(net: Any, optimizer: Any) -> Step:
    return in_container(kept_in(list, [net, optimizer]))


@case("MO", "MO")
def tuple_with_own_lookups(net: Any, optimizer: Any) -> Step:
    return in_container(kept_in(tuple, [net, optimizer]))


@case("MO", "MO")
def deque_with_own_lookups(net: Any, optimizer: Any) -> Step:
    return in_container(kept_in(deque, [net, optimizer]))


@case("MO", "MO")
def set_with_own_lookups(net: Any, optimizer: Any) -> Step:
    return in_container(kept_in(set, [net, optimizer]))


@case("MO", "MO")
def dict_with_own_lookups(net: Any, optimizer: Any) -> Step:
    return in_dict(kept_in(dict, {"net": net, "optimizer": optimizer}))


@case("MO", "MO")
def partial_with_own_attributes(net: Any, optimizer: Any) -> Step:
    own = dict.fromkeys(("func", "args", "keywords"), property(refuse))
    kind: Any = type("Partial", (functools.partial,), own)
    return kind(lambda model, updates, x: (model(x), updates.step()), net, optimizer)


@case("MO", "MO")
def object_with_own_lookups(net: Any, optimizer: Any) -> Step:
    kind: Any = type("Own", (), {"__getattribute__": refuse, "__getattr__": refuse, "__dir__": refuse})
    held = kind()
    object.__getattribute__(held, "__dict__").update(net=net, optimizer=optimizer)
    return of_object(held)


@case("MO", "MO")
def object_with_own_properties(net: Any, optimizer: Any) -> Step:
    class Held(Trainer):
        __class__ = property(refuse)  # type: ignore[assignment]
        more = property(refuse)

    held = Held(net, optimizer)
    return lambda x: (held.net, held.optimizer, held.more)


@case("MO", "MO")
def object_with_own_dict(net: Any, optimizer: Any) -> Step:
    held = Trainer(net, optimizer)
    held.__class__ = type("Held", (Trainer,), {"__dict__": property(refuse)})
    return of_object(held)


@case("MO", "MO")
def empty_slot_with_own_lookup(net: Any, optimizer: Any) -> Step:
    class Held:
        __slots__ = ("empty", "net", "optimizer")
        __getattr__ = refuse

    held: Any = Held()
    held.net, held.optimizer = net, optimizer
    return lambda x: (held.net, held.optimizer, held.empty)


@case("", "MO")
def class_with_own_lookups(net: Any, optimizer: Any) -> Step:
    own = {"__getattribute__": refuse, "__instancecheck__": refuse, "__subclasscheck__": refuse}
    return of_object(type("Meta", (type,), own)("Held", (), {"net": net, "optimizer": optimizer}))


@case("MO", "MO")
def keys_with_own_hash(net: Any, optimizer: Any) -> Step:
    class Key:
        __hash__ = object.__hash__
        __eq__ = object.__eq__

    held = {Key(): net, Key(): optimizer}
    Key.__hash__ = Key.__eq__ = refuse  # type: ignore[assignment, method-assign]
    return lambda x: list(held.items())


@case("", "MO")
def attribute_of_a_class_with_own_lookups(net: Any, optimizer: Any) -> Step:
    class Holder:
        strange = type("Strange", (), {"__getattribute__": refuse})()

        def step(self, x: Any) -> Any:
            return net(x), optimizer.step()

    holder = Holder()
    return lambda x: holder.step(x)


@case("MO", "MO")
def model_with_own_walk(net: Any, optimizer: Any) -> Step:
    walks = ("modules", "named_modules", "children", "named_children", "parameters", "named_parameters")
    outer: Any = type("Outer", (nn.Module,), dict.fromkeys(walks, refuse))()
    outer.net = net
    return lambda x: (outer(x), optimizer.step())


def parts() -> tuple[nn.Module, torch.optim.Optimizer]:
    net = nn.Linear(2, 2)
    return net, torch.optim.SGD(net.parameters(), lr=0.1)


@pytest.mark.parametrize("near", [True, False], ids=["near", "named"])
@pytest.mark.parametrize("name", CASES)
def test_models_and_optimizers_are_found_and_no_code_of_the_users_is_called(name: str, near: bool) -> None:
    maker, *wanted = CASES[name]
    net, optimizer = parts()
    reach = Reach((maker(net, optimizer),), near=near)
    found = "M" * (reach.hidden.get(id(net)) is net) + "O" * (reach.optimizers.get(id(optimizer)) is optimizer)
    assert found == wanted[not near]


@pytest.mark.parametrize("name", CASES)
def test_behind_a_step_is_what_lies_near_and_what_its_code_names(name: str) -> None:
    maker, near, named = CASES[name]
    net, optimizer = parts()
    step = maker(net, optimizer)
    found = models_behind({"": step})
    modules = [part for top in (*found.near.values(), *found.further) for part in modules_in(top)]
    assert (sum(part is net for part in modules), found.optimizers) == (
        int("M" in near + named or step is net),
        [optimizer] * ("O" in near + named),
    )


# --- Names, and what is whose ---


def test_models_have_the_names_that_the_code_has_for_them_each_its_own() -> None:
    layers = [nn.Linear(2, 2) for _ in range(7)]
    one, two = Trainer(layers[0], None), Trainer(layers[1], None)

    def step(x: Any, last: Any = layers[6]) -> Any:
        return one.net(x), two.net(x), inner(x), listed[0](x), last(x)

    def inner(x: Any) -> Any:
        return (lambda: listed[1](x)), by_key["encoder"](x)

    listed, by_key = [layers[2], layers[3]], {"encoder": layers[4]}
    found = models_behind({"": functools.partial(step, mask=layers[5])})
    names = {name: layers.index(module) for name, module in found.near.items()}  # type: ignore[arg-type]
    assert names == {
        "one.net": 0,
        "two.net": 1,
        "listed.0": 2,
        "listed.1": 3,
        "by_key.encoder": 4,
        "mask": 5,
        "last": 6,
    }


def test_models_are_found_in_the_order_of_the_code() -> None:
    layers = {f"layer{number * 7 % 20}": nn.Linear(1, 1) for number in range(20)}
    code = compile(f"def step(x): return [{', '.join(f'{name}(x)' for name in layers)}]", "step", "exec")
    held: dict[str, Any] = dict(layers)
    exec(code, held)
    assert list(models_behind({"": held["step"]}).near) == list(layers)


def test_models_of_one_name_are_numbered() -> None:
    first, second = nn.Linear(2, 2), nn.Linear(2, 2)
    steps = [(lambda net: lambda x: net(x))(layer) for layer in (first, second)]
    assert models_behind({"": lambda x: [step(x) for step in steps]}).near == {"net": first, "net_2": second}


def test_parts_of_a_model_are_no_models_of_their_own() -> None:
    net = nn.Sequential(nn.Linear(2, 2), nn.ReLU())
    first = net[0]
    found = models_behind({"": lambda x: (first(x), net(x))})
    assert found.near == {"net": net}
    assert found.further == []


def test_a_model_on_another_device_is_refused_where_it_lies_near_and_left_where_code_names_it_further_off() -> None:
    net, other = nn.Linear(2, 2), nn.Linear(2, 2, device="meta")

    class Holder:
        elsewhere = other

        def step(self, x: Any) -> Any:
            return net(x) if self.elsewhere is None else self.elsewhere

    step = function_step(Holder().step, (), torch.device("cpu"))
    assert step.modules == {"": net}
    with pytest.raises(CaptureError, match="'weight' is on meta"):
        function_step(lambda x: (net(x), other), (), torch.device("cpu"))


def test_optimizers_in_more_hooks_than_a_list_is_searched_for_are_found() -> None:
    layers = nn.ModuleList(nn.Linear(1, 1, bias=False) for _ in range(MOST_PARTS + 1))
    optimizers = []
    for parameter in layers.parameters():
        optimizers.append(torch.optim.SGD([parameter], lr=0.1))
        parameter.register_post_accumulate_grad_hook(lambda _, own=optimizers[-1]: own.step())
    assert in_hooks([layers]) == optimizers


def unoptimized(*given: Any) -> Any:
    model, _, loss, optimizer = given
    return front._as_it_is(Given(model, loss, optimizer), torch.device("cpu"), "", lambda _: None)


def optimized(*given: Any) -> Any:
    return fast(*given[:2], loss=given[2], optimizer=given[3])


@pytest.mark.parametrize("made", [optimized, unoptimized])
def test_of_gpusims_own_callables_only_what_they_run_of_the_users_is_followed(made: Callable[..., Any]) -> None:
    model, loss = net(), nn.CrossEntropyLoss()
    optimizer = sgd(model.parameters())
    inner = made(model, batches(1)[0], loss, optimizer)

    def step(x: Any, y: Any) -> Any:
        return inner(x, y)

    found = models_behind({"": step})
    assert list(found.near.values()) == [model, loss]
    assert (found.further, found.optimizers) == ([], [optimizer])
    for near in (True, False):
        kinds = {type(value) for value, _ in Reach((step,), near=near) if not isinstance(value, nn.Module)}
        assert kinds <= {types.FunctionType, type}


def test_functions_of_gpusims_are_not_searched() -> None:
    reach = Reach((lambda x: fast(x, x),), ())
    modules = {value.__module__ for value, _ in reach if isinstance(value, type | types.FunctionType)}
    assert modules == {__name__, fast.__module__}


class Late:
    __slots__ = ("late",)


LATE: dict[str, Callable[[nn.Module], Any]] = {
    "attribute": lambda net: types.SimpleNamespace(late=net),
    "slot": lambda net: with_attribute(Late(), net),
    "key": lambda net: {"late": net, "one": 1},
    "attribute of a list": lambda net: with_attribute(type("Own", (list,), {})(), net),
    "attribute of a class": lambda net: type("Own", (), {"late": net}),
    "attribute of a Python module": lambda net: with_attribute(types.ModuleType("mine"), net),
    "attribute of a library's object": lambda net: UserDict(late=net, one=1),
    "method of a library's object": lambda net: scheduler_with(net),
    "method": lambda net: type("Own", (), {"late": lambda self, x: net(x)})(),
}


def with_attribute(held: Any, net: nn.Module) -> Any:
    held.late = net
    return held


def scheduler_with(net: nn.Module) -> Any:
    scheduler = object.__new__(torch.optim.lr_scheduler.LRScheduler)
    scheduler._last_lr = [net]  # type: ignore[list-item]
    return scheduler


@pytest.mark.parametrize("kind", LATE)
def test_what_was_passed_is_followed_once_code_that_is_found_later_names_it(kind: str) -> None:
    net = nn.Linear(2, 2)
    held = LATE[kind](net)

    def last(given: Any) -> Any:
        return given.late, given["late"], given.get_last_lr()

    later = [[last]]
    reach = Reach((lambda x: (held, "one", later[0][0](x)),), ())
    assert reach.hidden.get(id(net)) is net
    assert not Reach((lambda x: (held, "one"),), ()).hidden
