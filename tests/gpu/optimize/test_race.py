"""The race check: results are the same at any pace of the streams, and a missing event is detected."""

from __future__ import annotations

import functools
from random import Random

import pytest

from gpusim.formats.hardware import load_hardware
from gpusim.formats.trace import Mode
from gpusim.gpu.optimize.race import Racing, caught, wrong_orders
from gpusim.gpu.replay.execute import InitialState
from gpusim.plan.graph import OpGraph
from gpusim.plan.happens_before import data_races
from gpusim.policies.random_schedules import random_schedule
from tests.support.helpers import with_kernels
from tests.support.networks import CPU, on_cpu

#: Steps with branches, views, changes in place, random numbers, shared weights, recurrence.
STEPS: tuple[tuple[str, Mode], ...] = (
    ("branches", "train"),
    ("branches", "infer"),
    ("views", "train"),
    ("in_place", "train"),
    ("dropouts", "train"),
    ("shared", "train"),
    ("grouped", "train"),
    ("attention", "train"),
    ("recurrent", "train"),
    ("heads", "infer"),
)
SCHEDULES = 30
EVENTS = 10


@functools.cache
def step(name: str, mode: Mode) -> tuple[OpGraph, InitialState]:
    found = on_cpu(name, mode)
    graph = OpGraph.build(with_kernels(found.trace), load_hardware("h200"))
    return graph, InitialState.copy_of(found.recorded.initial)


@pytest.mark.parametrize(("name", "mode"), STEPS)
def test_random_schedules_of_ten_steps_have_no_wrong_output(name: str, mode: Mode) -> None:
    graph, state = step(name, mode)
    wrong = []
    for number in range(SCHEDULES):
        racing = Racing.of(graph, random_schedule(graph, number, seed=1))
        planned = racing.happens_before
        assert list(data_races(graph.trace, planned)) == []
        if wrong_orders(racing, state, CPU, planned, orders=1, seed=number):
            wrong.append(number)
    assert wrong == []


@pytest.mark.parametrize(("name", "mode"), STEPS)
def test_a_schedule_without_one_event_is_caught(name: str, mode: Mode) -> None:
    """Of each step ten events are removed, one at a time: each is a race, and at least nine in ten change results.

    Where a result is the same all the same, what was read too early does not count: a ReLU of what is negative, an
    addend that comes later anyway.
    """
    graph, state = step(name, mode)
    racing = Racing.of(graph, random_schedule(graph, 3, seed=2))
    planned = racing.happens_before
    numbers = Random(0).sample(range(racing.events), min(EVENTS, racing.events))
    found = [racing.without(number) for number in numbers]
    assert all(list(data_races(graph.trace, each.happens_before)) for each in found)
    assert sum(caught(each, state, CPU, planned) for each in found) >= len(found) * 0.9
