"""Values are found wherever the code of a step has them."""

from __future__ import annotations

import array
import ctypes
import functools
import types
import weakref
from collections import ChainMap, UserDict
from collections.abc import Callable
from contextvars import ContextVar

import pytest
import torch
from torch import nn

from gpusim.gpu.optimize.callable import OptimizedStep
from gpusim.gpu.optimize.reads import Reads
from tests.support.optimizing import batches, close, fast

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
        *(user_dict, chain_map, view_of_dict, context, weak_reference, array_of_python, number_of_c, cached_answer),
        *(rate_of_scheduler, own_option_of_optimizer),
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


def test_a_scheduler_that_the_step_asks_for_the_rate_is_asked_again() -> None:
    read, change = rate_of_scheduler()

    def step(x: torch.Tensor) -> torch.Tensor:
        return x.sin() * read()

    captured = fast(step, X)
    assert isinstance(captured, OptimizedStep)
    change()
    close(captured(X), step(X))
