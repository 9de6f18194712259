"""Compiled checks of dicts find every change that a loop over their values would find."""

from __future__ import annotations

import gc
import sys
from collections import OrderedDict, defaultdict
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from gpusim.gpu.optimize.modes import Modes
from gpusim.gpu.optimize.unchanged import MISSING, Contents, Functions, Items, KeyedValues, Natures
from tests.support.optimizing import batches, fast, net, sgd

Dict = dict[Any, Any]
CHANGES: dict[str, Callable[[Dict], Any]] = {
    "another object": lambda d: d.update(b=object()),
    "an equal object": lambda d: d.update(b=float("2.5")),
    "one that is gone": lambda d: d.pop("b"),
    "a new one": lambda d: d.update(new=None),
    "none": lambda d: d.update(b=None),
}


def _dict(kind: Callable[[], Dict]) -> Dict:
    held = kind()
    held.update(a=object(), b=2.5, c=None)
    return held


KINDS = (dict, OrderedDict, lambda: defaultdict(dict), type("Own", (dict,), {}))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("change", CHANGES)
def test_a_change_of_a_dict_is_found_until_it_is_undone(kind: Callable[[], Dict], change: str) -> None:
    held, others = _dict(kind), [{"b": number} for number in range(3)]
    keyed = KeyedValues([*others, held, held, held], ["b", "b", "b", "b", "new", 5])
    contents = Contents([others[0], held, {}, others[1]])
    before = dict(held)
    assert keyed.hold()
    assert contents.hold()
    CHANGES[change](held)
    assert not keyed.hold()
    assert not contents.hold()
    held.clear()
    held.update(before)
    assert keyed.hold()
    assert contents.hold()


def test_another_order_is_another_content() -> None:
    """A `Sequential` runs its modules in this order."""
    held = {"a": object(), "b": object()}
    contents, keyed = Contents([held]), KeyedValues([held, held], "ab")
    held["a"] = held.pop("a")
    assert not contents.hold()
    assert keyed.hold()


def test_the_same_values_under_other_keys_are_another_content() -> None:
    held = {"a": object(), "b": object()}
    contents = Contents([held])
    first, second = held.values()
    held.clear()
    held.update(b=first, a=second)
    assert not contents.hold()


def test_a_value_that_moves_to_the_next_dict_is_found() -> None:
    """All values together are the same."""
    one, other = {"a": object(), "b": object()}, {"c": object()}
    contents = Contents([one, {}, other])
    moved = {"b": one.pop("b"), **other}
    other.clear()
    other.update(moved)
    assert not contents.hold()


def test_an_object_at_the_address_of_another_cannot_be() -> None:
    """What is compared stays alive, so that its address is not used again."""
    held: Dict = {"a": object()}
    keyed, contents = KeyedValues([held], ["a"]), Contents([held])
    for _ in range(100):
        del held["a"]
        gc.collect()
        held["a"] = object()
        assert not keyed.hold()
        assert not contents.hold()


def test_dicts_that_were_laid_out_anew_hold_the_same() -> None:
    held: Dict = {number: object() for number in range(20)}
    keyed, contents = KeyedValues([held] * 20, range(20)), Contents([held])
    for number in range(20, 5_000):
        held[number] = None
    assert not contents.hold()
    for number in range(20, 5_000):
        del held[number]
    assert keyed.hold()
    assert contents.hold()


def test_changes_are_found_at_new_positions() -> None:
    """Keys move when others before them go."""
    held: Dict = {number: object() for number in range(30)}
    keyed = KeyedValues([held] * 10, range(20, 30))
    for number in range(20):
        del held[number]
    held.update({number: number for number in range(100, 400)})  # lays it out anew
    assert keyed.hold()
    former = held.pop(25)
    held[25] = former  # at the end
    assert keyed.hold()
    held[25] = object()
    assert not keyed.hold()
    keyed.keep(keyed.now())
    assert keyed.hold()
    held[25] = former
    assert not keyed.hold()


def test_an_equal_key_is_the_same_key() -> None:
    held = {"a" * 3: 1, 2.0: 2}
    keyed = KeyedValues([held, held], ["".join("aaa"), 2])
    assert keyed.hold()
    held[2.0] = 3
    assert not keyed.hold()


def test_lists_hold_until_an_item_is_another() -> None:
    one, other, third = [1, 2], [object()], list[Any]()
    items = Items([one, third, other])
    assert items.hold()
    for change in (lambda: one.append(3), lambda: third.append(1), lambda: other.__setitem__(0, 5), other.clear):
        former = list(one), list(other), list(third)
        change()
        assert not items.hold()
        one[:], other[:], third[:] = former
        assert items.hold()
    one.reverse()
    assert not items.hold()
    one[:], other[:] = [1], [2, *other]
    assert not items.hold()


def test_functions_hold_until_they_have_other_code_or_defaults() -> None:
    def one(a: int = 1, *, b: int = 2) -> int:
        return a + b

    def other() -> None:
        pass

    functions = Functions([one, other])
    assert functions.hold()
    for function, name, value in (
        (one, "__code__", other.__code__),
        (one, "__defaults__", None),
        (other, "__defaults__", ()),
        (one, "__kwdefaults__", {"b": 2}),
        (other, "__kwdefaults__", {}),
    ):
        former = getattr(function, name)
        setattr(function, name, value)
        assert not functions.hold()
        setattr(function, name, former)
        assert functions.hold()


def test_nothing_holds() -> None:
    assert KeyedValues([], []).hold()
    assert Contents([]).hold()
    assert Items([]).hold()
    assert Functions([]).hold()
    assert Contents([{}, {}]).hold()


def test_values_kept_later_are_those_to_find() -> None:
    held: Dict = {"a": 1}
    keyed = KeyedValues([held, held], ["a", "b"])
    assert keyed.values == [1, MISSING]
    held["a"] = 300
    held["b"] = 2
    keyed.keep(keyed.now())
    assert keyed.hold()
    del held["b"]
    assert not keyed.hold()


# --- Modes ---


class Always(nn.Module):
    """Its class says what its mode is."""

    on = True

    @property
    def training(self) -> bool:
        return self.on

    @training.setter
    def training(self, _: bool) -> None:
        pass


def test_a_combination_of_modes_has_one_number() -> None:
    model = net()
    modes = Modes([model])
    training = modes.number()
    model.eval()
    assert modes.number() != training
    model.train()
    assert modes.number() == training
    vars(model.drop)["training"] = False
    partly = modes.number()
    assert partly not in (training, 1)
    model.drop = nn.Dropout()
    modes.watch([model])
    assert modes.number() == training
    model.drop.training = 0  # type: ignore[assignment]  # as False is
    assert modes.number() == partly


def test_a_mode_that_a_class_decides_is_found() -> None:
    module = Always()
    modes = Modes([nn.Sequential(module)])
    before = modes.number()
    module.on = False
    assert modes.number() != before


# --- A captured step ---


def _swap(model: nn.Sequential) -> None:
    model._modules["0"] = model._modules.pop("0")


MODULES: dict[str, Callable[[nn.Sequential], Any]] = {
    "another order": _swap,
    "a module in an empty one": lambda model: model[1].add_module("child", nn.Linear(6, 6)),
    "a buffer in one without": lambda model: model[1].register_buffer("shift", torch.ones(6)),
    "a parameter that is none": lambda model: setattr(model[0], "bias", None),
    "one module less": lambda model: model.pop(1),
    "another dict of parameters": lambda model: model[0].__setstate__({"_parameters": nn.Linear(6, 6)._parameters}),
    "another dict of modules": lambda model: setattr(model, "_modules", {"0": nn.Linear(6, 6)}),
    "another class of layer": lambda model: setattr(model[0], "__class__", Halved),
    "a layer's own forward": lambda model: setattr(model[0], "forward", torch.cos),
    "another dict of attributes": lambda model: setattr(model[0], "__dict__", vars(nn.Linear(6, 6))),
}


class Halved(nn.Linear):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x) / 2


class Children(nn.Module):
    """Uses whatever it has."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for part in (*self.children(), *self.buffers(recurse=False)):
            x = part(x) if isinstance(part, nn.Module) else x + part
        return x.tanh()


@pytest.mark.parametrize("change", MODULES)
def test_changes_of_modules_have_their_effect_at_the_next_call(change: str) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 6), Children()).eval()
    x = batches(1)[0][0]
    step = fast(model, x)
    with torch.no_grad():
        before = step(x)
        torch.testing.assert_close(before, model(x))
        MODULES[change](model)
        torch.testing.assert_close(step(x), model.eval()(x))
        assert not torch.equal(step(x), before)


def test_parameters_that_exchange_names_do_so_at_the_next_call() -> None:
    """Both values keep their places."""
    layer, x = nn.LayerNorm(6), batches(1)[0][0]
    nn.init.normal_(layer.weight)
    step = fast(layer, x)
    weight, bias = layer._parameters.values()
    layer._parameters.clear()
    layer._parameters.update(bias=weight, weight=bias)
    with torch.no_grad():
        torch.testing.assert_close(step(x), layer(x))


class Options:
    scale = 2.0

    def __init__(self, scale: float) -> None:
        self.scale = scale


class Scaled(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer, self.options = nn.Linear(6, 6), Options(3.0)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layer(x) * self.options.scale


def test_another_dict_of_an_objects_attributes_is_found() -> None:
    model, x = Scaled().eval(), batches(1)[0][0]
    step = fast(model, x)
    for others in ({"scale": 5.0}, {}):
        model.options.__dict__ = others
        with torch.no_grad():
            torch.testing.assert_close(step(x), model(x))


def test_natures_hold_until_another_is_assigned() -> None:
    one, other = Options(1.0), Options(1.0)
    natures = Natures([one, 5, other])
    former = vars(other)
    assert natures.hold()
    other.__dict__ = dict(former)
    assert not natures.hold()
    other.__dict__ = former
    assert natures.hold()
    one.__class__ = type("Others", (Options,), {})
    assert not natures.hold()
    one.__class__ = Options
    assert natures.hold()
    references = sys.getrefcount(former)
    for _ in range(100):
        natures.hold()
    assert sys.getrefcount(former) == references


def test_new_dicts_of_an_optimizers_states_are_adopted() -> None:
    """The old ones stay alive and as they were."""
    model = net()
    optimizer = sgd(model.parameters())
    step = fast(model, batches(1)[0], loss=nn.functional.cross_entropy, optimizer=optimizer)
    for batch in batches(2):
        step(*batch)
    old = optimizer.state
    optimizer.state = defaultdict(dict, {p: {"momentum_buffer": torch.zeros_like(p)} for p in old})
    step(*batches(1)[0])
    for parameter, state in optimizer.state.items():
        assert state is not old[parameter]
        torch.testing.assert_close(state["momentum_buffer"], parameter.grad)
