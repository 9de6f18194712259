"""Code, containers, classes and hidden modules that the user changes have their effect at the next call."""

from __future__ import annotations

import functools
import types
from collections import OrderedDict, deque
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional as F  # noqa: N812  (torch's own habit)

from gpusim.gpu.optimize.callable import OptimizedStep
from gpusim.gpu.optimize.reads import Reads
from tests.support.optimizing import batches, captures, close, fast, net

Change = Callable[[Any], Any]


def _effect(target: Any, change: Callable[[], Any]) -> None:
    """Change what a step reads; the next call must have the effect."""
    x = batches(1)[0][0]
    step = fast(target, x)
    assert isinstance(step, OptimizedStep)
    with torch.no_grad():
        before = target(x)
        close(step(x), before)
        change()
        after = target(x)
        assert not torch.equal(before, after)
        close(step(x), after)


# --- Functions ---


def _scaled(x: torch.Tensor, by: float = 1.0, *, more: float = 1.0) -> torch.Tensor:
    return x.tanh() * by * more


def _shifted(x: torch.Tensor, by: float = 1.0, *, more: float = 1.0) -> torch.Tensor:
    return x.tanh() + by + more


FUNCTIONS: dict[str, Change] = {
    "code": lambda f: setattr(f, "__code__", _shifted.__code__),
    "defaults": lambda f: setattr(f, "__defaults__", (3.0,)),
    "defaults by name": lambda f: setattr(f, "__kwdefaults__", {"more": 3.0}),
    "one default by name": lambda f: f.__kwdefaults__.update(more=3.0),
}


def _copy(function: types.FunctionType) -> Any:
    made = types.FunctionType(function.__code__, function.__globals__, argdefs=function.__defaults__)
    made.__kwdefaults__ = dict(function.__kwdefaults__ or {})
    return made


@pytest.mark.parametrize("change", FUNCTIONS)
@pytest.mark.parametrize("where", ["the step itself", "a helper", "a method", "a loss", "a static method"])
def test_new_code_and_defaults_have_their_effect(change: str, where: str) -> None:
    function = _copy(_scaled)
    if where == "the step itself":
        _effect(function, lambda: FUNCTIONS[change](function))
    elif where == "a helper":
        _effect(lambda x: function(x) + 1, lambda: FUNCTIONS[change](function))
    elif where == "a loss":
        model, (x, y) = net(), batches(1)[0]
        step = fast(model, (x, y), loss=lambda out, y: F.cross_entropy(function(out), y))
        FUNCTIONS[change](function)
        close(step(x, y), F.cross_entropy(function(model(x)), y))
    else:

        def forward(self: Any, x: torch.Tensor) -> torch.Tensor:
            return self.helper(x)

        helper = staticmethod(function) if where == "a static method" else lambda self, x: function(x)
        module = type("Own", (nn.Module,), {"forward": forward, "helper": helper})()
        _effect(module, lambda: FUNCTIONS[change](function))


def test_an_attribute_of_a_function_is_read() -> None:
    def step(x: torch.Tensor) -> torch.Tensor:
        return x * step.factor  # type: ignore[attr-defined]

    step.factor = 1.0  # type: ignore[attr-defined]
    _effect(step, lambda: setattr(step, "factor", 2.0))


def test_keywords_of_a_partial_are_read() -> None:
    step = functools.partial(_scaled, by=1.0)
    _effect(step, lambda: step.keywords.update(by=2.0))


def test_a_global_may_come_to_hide_a_builtin(monkeypatch: pytest.MonkeyPatch) -> None:
    def step(x: torch.Tensor) -> torch.Tensor:
        return x * max(1.0, 2.0)

    _effect(step, lambda: monkeypatch.setitem(globals(), "max", lambda *_: 7.0))


# --- Classes ---


class Base(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(6, 6)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.inside(self.layer(x))

    def inside(self, x: torch.Tensor) -> torch.Tensor:
        return x.tanh()


def _derived() -> Any:
    return type("Derived", (Base,), {})()


def _halving(_: Any, x: torch.Tensor) -> torch.Tensor:
    return x / 2


CLASSES: dict[str, Callable[[Any, pytest.MonkeyPatch], Any]] = {
    "a forward of its own": lambda m, _: setattr(type(m), "forward", _halving),
    "a method of its own": lambda m, _: setattr(type(m), "inside", _halving),
    "a method of the base's": lambda _, patch: patch.setattr(Base, "inside", _halving),
    "a call of its own": lambda m, _: setattr(type(m), "__call__", _halving),
    "a method of one object": lambda m, _: setattr(m, "inside", torch.cos),
    "the forward of torch's layer": lambda _, patch: patch.setattr(nn.Linear, "forward", _halving),
    "torch's function that a layer calls": lambda _, patch: patch.setattr(F, "linear", lambda x, *_: x / 2),
    "the call of all modules": lambda _, patch: patch.setattr(nn.Module, "__call__", _halving),
}


@pytest.mark.parametrize("change", CLASSES)
def test_a_class_that_says_something_else_has_its_effect(change: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model = _derived()
    _effect(model, lambda: CLASSES[change](model, monkeypatch))


def test_a_function_of_torchs_that_another_replaces_has_its_effect(monkeypatch: pytest.MonkeyPatch) -> None:
    def step(x: torch.Tensor) -> torch.Tensor:
        return F.relu(x) + torch.cos(x)

    _effect(step, lambda: monkeypatch.setattr(F, "relu", torch.sigmoid))
    _effect(step, lambda: monkeypatch.setattr(torch, "cos", torch.sin))


class Table:
    """Answers by special methods, which no code names."""

    def __init__(self) -> None:
        self.held, self.factor = [1.0, 2.0], 1.0

    def __getitem__(self, place: int) -> float:
        return self.held[place] * self.factor


def test_what_special_methods_read_is_compared() -> None:
    table = Table()
    _effect(lambda x: x * table[0], lambda: setattr(table, "factor", 5.0))


# --- Containers ---


class Settings(dict):  # type: ignore[type-arg]
    shift = 0.0

    def __init__(self, **values: float) -> None:
        super().__init__(**values)
        self.factor = 1.0


class Items(list):  # type: ignore[type-arg]
    factor = 1.0


def _last_first(held: dict[Any, Any]) -> None:
    first = next(iter(held))
    held[first] = held.pop(first)


def _by_values(held: Any, x: torch.Tensor) -> torch.Tensor:
    for value in held.values():
        x = (x + value).tanh()
    return x


def _by_keys(held: Any, x: torch.Tensor) -> torch.Tensor:
    for key in held:
        x = (x + held[key]).tanh()
    return x


def _attributes_of(held: Any, x: torch.Tensor) -> torch.Tensor:
    return x * held.factor + getattr(held, "shift", 0)


CONTAINERS: dict[str, tuple[Any, Callable[[Any, torch.Tensor], torch.Tensor], Change]] = {
    "order of a dict, by values": ({"a": 1.0, "b": 2.0}, _by_values, _last_first),
    "order of a dict, by keys": ({"a": 1.0, "b": 2.0}, _by_keys, _last_first),
    "order of an ordered dict": (OrderedDict(a=1.0, b=2.0), _by_values, lambda d: d.move_to_end("a")),
    "attribute of a dict's subclass": (Settings(a=1.0), _attributes_of, lambda d: setattr(d, "factor", 2.0)),
    "first such attribute": (Settings(a=1.0), _attributes_of, lambda d: setattr(d, "shift", 2.0)),
    "attribute of a list's subclass": (Items(), _attributes_of, lambda d: setattr(d, "factor", 2.0)),
    "long list": ([0.0] * 900, lambda held, x: x + held[800], lambda d: d.__setitem__(800, 1.0)),
    "long dict": (
        dict.fromkeys(range(900), 0.0),
        lambda held, x: x + sum(held.values()),
        lambda d: d.__setitem__(800, 1.0),
    ),
    "set": ({1}, lambda held, x: x + (2 in held), lambda d: d.add(2)),
    "deque": (deque([1.0, 2.0]), lambda held, x: x * held[0], lambda d: d.rotate()),
    "small array": (np.ones(3), lambda held, x: x * float(held[1]), lambda d: d.fill(2.0)),
    "list in a deque": (deque([[1.0]]), lambda held, x: x * held[0][0], lambda d: d[0].__setitem__(0, 2.0)),
}


@pytest.mark.parametrize("kind", CONTAINERS)
def test_a_changed_container_has_its_effect(kind: str) -> None:
    held, read, change = CONTAINERS[kind]

    def step(x: torch.Tensor) -> torch.Tensor:
        return read(held, x)

    _effect(step, lambda: change(held))


class Asks(nn.Linear):
    """Asks itself and its settings for what may not be there."""

    def __init__(self, settings: Any) -> None:
        super().__init__(6, 6)
        self.settings = settings

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = super().forward(x) * getattr(self, "factor", 1.0)
        if hasattr(self.settings, "shift"):
            y = y + self.settings.shift
        try:
            return y * self.settings.scale
        except AttributeError:
            return y


class Plain:
    pass


def test_attributes_of_torchs_own_layers_have_their_effect() -> None:
    """Those that are there, and those that come."""

    class Scaled(nn.Linear):
        def __init__(self) -> None:
            super().__init__(6, 6)
            self.inner = nn.Linear(6, 6)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.inner(x) * getattr(self.inner, "gain", 1.0)

    model = Scaled().eval()
    for gain in (2.0, 3.0):
        _effect(model, lambda gain=gain: setattr(model.inner, "gain", gain))


def test_a_note_that_no_code_asks_for_is_no_change() -> None:
    """A dict of attributes has grown, by none of the names asked for."""
    model = Asks(Plain()).eval()
    x = batches(1)[0][0]
    step = fast(model, x)
    made = captures(step)
    model.settings.note = 1
    step(x)
    model.settings.shift = 2.0
    step(x)
    assert made == [1]


@pytest.mark.parametrize("settings", [types.SimpleNamespace, Plain])
@pytest.mark.parametrize("name", ["factor", "shift", "scale", "of the class"])
def test_an_attribute_that_was_not_there_has_its_effect(
    settings: Any, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = Asks(settings()).eval()
    if name == "of the class":
        _effect(model, lambda: monkeypatch.setattr(Asks, "factor", 3.0, raising=False))
    else:
        _effect(model, lambda: setattr(model if name == "factor" else model.settings, name, 3.0))


def test_equal_values_in_the_same_order_are_no_change() -> None:
    held: Any = {"a": 1.5, "b": 2.5}
    items: Any = [1.5, (2.5, "a")]
    step = fast(lambda x: _by_values(held, x[:, :1]) * items[0] + items[1][0], batches(1)[0][0])
    made = captures(step)
    held["a"], held["b"] = float("1.5"), float("2.5")
    items[:] = [float("1.5"), (float("2.5"), "a")]
    step(batches(1)[0][0])
    assert made == []


@pytest.mark.parametrize("zero", [0.0, 0j])
def test_the_sign_of_a_zero_is_a_change_and_nan_is_none(zero: Any) -> None:
    held: Any = {"by": zero, "limit": float("nan")}
    reads = Reads((lambda x: (1 / (x * 0 + held["by"])).clamp(max=held["limit"]),), ())
    held["limit"] = float("nan")
    assert reads.changed() is None
    held["by"] = -zero
    assert reads.changed() is not None


def test_a_config_seven_attributes_deep_is_read() -> None:
    config = inner = types.SimpleNamespace()
    for _ in range(4):
        inner.next = inner = types.SimpleNamespace()
    inner.factor = 1.0
    model = _derived()
    model.config = config
    model.inside = lambda x: x * model.config.next.next.next.next.factor
    _effect(model, lambda: setattr(inner, "factor", 2.0))


# --- Modules that are no children ---


class Hiding(nn.Module):
    """Keeps modules where `parameters()` does not find them, as a teacher is kept."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.hidden = nn.Linear(6, 6), [nn.Sequential(nn.Linear(6, 6), nn.LeakyReLU(0.1), nn.Dropout(0))]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layer(x) + self.hidden[0](x)


HIDDEN: dict[str, Change] = {
    "a parameter": lambda m: setattr(m[0], "weight", nn.Parameter(torch.randn(6, 6))),
    "its memory": lambda m: setattr(m[0].weight, "data", m[0].weight.data.t()),
    "an option": lambda m: setattr(m[1], "negative_slope", 0.9),
    "a hook": lambda m: m[0].register_forward_hook(lambda *given: given[2] * 2),
    "a layer": lambda m: m.__setitem__(1, nn.Tanh()),
    "a mode": lambda m: m[2].train(),
}


@pytest.mark.filterwarnings("ignore:gpusim.optimize. hooks have changed")
@pytest.mark.parametrize("change", HIDDEN)
def test_hidden_modules_are_watched_as_others_are(change: str) -> None:
    model = Hiding().eval()
    model.hidden[0].eval()
    x = batches(1)[0][0]
    step = fast(model, x)
    model.hidden[0][2].p = 1.0
    with torch.no_grad():
        before = step(x)
        HIDDEN[change](model.hidden[0])
        close(step(x), model(x))
        assert not torch.equal(step(x), before)


# --- Questions to torch ---


def test_a_function_that_asks_whether_gradients_are_recorded_gets_its_answer() -> None:
    def step(x: torch.Tensor) -> torch.Tensor:
        return x * (2.0 if torch.is_grad_enabled() else 1.0)

    x = batches(1)[0][0]
    captured = fast(step, x)
    close(captured(x), step(x))
    with torch.no_grad():
        close(captured(x), step(x))


def test_a_model_that_asks_is_not_captured_twice() -> None:
    """Its captured step records no gradients in any case."""
    model = _derived()
    model.inside = lambda x: x * (2.0 if torch.is_grad_enabled() else 1.0)
    x = batches(1)[0][0]
    step = fast(model, x)
    made = captures(step)
    with torch.no_grad():
        close(step(x), model(x))
    step(x)
    assert made == []


class Weighted(nn.Module):
    """Reads a dict by the keys of a loop, one of which its text names, and another dict by a constant."""

    def __init__(self) -> None:
        super().__init__()
        self.weights: dict[str, Any] = {"cls": 1.0, "box": [1.0]}
        self.state = {"scale": 1.0, "step": 0}

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for name in ("cls", "mask"):
            if name in self.weights:
                x = x * self.weights[name]
        return x * self.state["scale"]


class Constant(nn.Module):
    """Reads only constant keys."""

    def __init__(self) -> None:
        super().__init__()
        self.weights, self.state = {"cls": 1.0}, {"scale": 1.0, "step": 0}

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x[:, 0] * self.weights["cls"] * self.state["scale"]


def test_a_dict_read_by_computed_keys_is_compared_whole() -> None:
    for change in (
        lambda model: model.weights.__setitem__("other", 3.0),
        lambda model: model.weights["box"].__setitem__(0, 3.0),
    ):
        model = Weighted()
        reads = Reads((model,), model.modules())
        assert reads.changed() is None
        change(model)
        assert reads.changed() is not None


def test_a_count_beside_a_constant_key_is_no_change() -> None:
    model = Constant()
    reads = Reads((model,), model.modules())
    model.state["step"] += 1
    assert reads.changed() is None
    model.state["scale"] = 2.0
    assert reads.changed() is not None


def test_a_large_number_is_compared_as_a_number() -> None:
    """Python refuses to print integers of over 4,300 digits."""
    held = {"mask": 1 << 20_000}
    reads = Reads((lambda x: x * bool(held["mask"]),), ())
    held["mask"] = 1 << 20_001
    assert reads.changed() is not None
