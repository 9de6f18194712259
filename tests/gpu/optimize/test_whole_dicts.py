"""Dicts of which a step's code takes all: compared whole, and no other dict for it."""

from __future__ import annotations

import copy
import types
from collections import OrderedDict
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.nn import functional as F  # noqa: N812  (torch's own habit)

from gpusim.gpu.optimize.reads import Reads

WHOLE: dict[str, Callable[[Any], Any]] = {
    "arguments by name": lambda held: F.interpolate(**held),
    "another dict": lambda held: {"factor": 1.0, **held},
    "a union": lambda held: held | {"factor": 1.0},
    "dict": lambda held: dict(held, factor=1.0),
    "copy": lambda held: held.copy(),
    "deepcopy": lambda held: copy.deepcopy(held),
    "update": lambda held: {"factor": 1.0}.update(held),
    "pop": lambda held, key="sh" + "ift": held.pop(key),
    "popitem": lambda held: held.popitem(),
    "setdefault": lambda held, key="sh" + "ift": held.setdefault(key, 1.0),
    "a pattern": lambda held: _others_of(held),
}


def _others_of(held: Any) -> Any:
    match held:
        case {"factor": 1.0, **others}:
            return others


@pytest.mark.parametrize("kind", WHOLE)
def test_a_dict_that_code_takes_as_a_whole_is_compared_whole(kind: str) -> None:
    """Also where a key of it occurs in the code."""
    held, take = {"factor": 1.0, "shift": 2.0}, WHOLE[kind]
    reads = Reads((lambda x: (take(held), held["factor"]),), ())
    assert reads.changed() is None
    held["shift"] = 3.0
    assert reads.changed() is not None


@pytest.mark.parametrize(
    "change",
    [
        lambda held: held.update(factor=held.pop("factor")),
        lambda held: held.update(other=held.pop("shift")),
    ],
    ids=["order", "key"],
)
@pytest.mark.parametrize("kind", [dict, OrderedDict])
def test_of_a_dict_that_code_reads_by_name_the_keys_are_compared(kind: Any, change: Callable[[Any], Any]) -> None:
    held = kind(factor=1.0, shift=2.0)

    def step(x: torch.Tensor) -> Any:
        return held["factor"], list(held)

    reads = Reads((step,), ())
    held["shift"] = 3.0
    assert reads.changed() is None
    change(held)
    assert reads.changed() is not None


ELSEWHERE: dict[str, Callable[[torch.Tensor, dict[str, Any]], Any]] = {
    "keywords that a function hands on": lambda x, options: (lambda y, **given: F.relu(y, **given))(x, inplace=True),
    "arguments of another dict": lambda x, options: F.gelu(x, **options),
    "a union of masks": lambda x, options: (x < 2) | (x > 3),
    "a new dict": lambda x, options: dict(loss=x),  # noqa: C408  (the case)
    "an update of another": lambda x, options: options.update(approximate="none"),
}


@pytest.mark.parametrize("kind", ELSEWHERE)
def test_a_dict_that_code_reads_by_name_is_not_compared_whole_as_another_is(kind: str) -> None:
    """A loop may count in it, or move its keys."""
    state, options, take = OrderedDict(scale=2.0, batches=0), {"approximate": "tanh"}, ELSEWHERE[kind]
    reads = Reads((lambda x: (take(x, options), state["scale"]),), ())
    state["batches"] += 1
    state.move_to_end("scale")
    assert reads.changed() is None
    state["scale"] = 3.0
    assert reads.changed() is not None


def test_a_dict_by_another_name_is_compared_whole() -> None:
    trainer = types.SimpleNamespace(options={"factor": 1.0, "shift": 2.0})

    def scaled(x: torch.Tensor) -> torch.Tensor:
        here = trainer.options
        return F.relu(x * trainer.options["factor"], **here)

    reads = Reads((scaled,), ())
    trainer.options["shift"] = 3.0
    assert reads.changed() is not None


class Arguments:
    """Attributes by any name, as configurations of many projects have them."""

    def __init__(self, **given: float) -> None:
        self.__dict__.update(given)

    def __getattr__(self, name: str) -> float:
        return self.__dict__[name]

    def __contains__(self, name: str) -> bool:
        return name in self.__dict__


class Trainer:
    def __init__(self) -> None:
        self.given, self.count = Arguments(scale=2.0, shift=1.0), 0

    def step(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.given.scale


def test_methods_that_take_all_attributes_of_their_own_object_take_no_others() -> None:
    trainer = Trainer()
    reads = Reads((trainer.step,), ())
    trainer.count += 1
    assert reads.changed() is None
    trainer.given.shift = 3.0
    assert reads.changed() is not None
