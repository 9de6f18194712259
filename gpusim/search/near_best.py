"""Schedules near the best: many that are predicted to take little longer, to test how a model orders them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final, TypeVar

import numpy as np

from gpusim.engine.batch import BatchEngine
from gpusim.plan.graph import OpGraph
from gpusim.plan.schedule import Schedule
from gpusim.search.judging import orders_of, schedule_of
from gpusim.search.moves import Current, Moves
from gpusim.search.neighbourhood import BATCH

Item = TypeVar("Item")

#: How much longer than the best a schedule near it may take.
NEAR_FRAC: Final = 0.05
#: Random walks from the seeds, and batches of changed schedules of each: up to 10,000 schedules to choose from.
WALKS, BATCHES = 24, 12


def near_best(graph: OpGraph, seeds: Sequence[Schedule], max_streams: int, count: int, seed: int) -> list[Schedule]:
    """Return up to `count` schedules predicted within `NEAR_FRAC` of the best one, evenly over that range of times.

    They are found by random changes of `seeds` on captured kernels, and of each predicted time there is one. Times are
    those without L2 cache misses. The same seed gives the same schedules.
    """
    random = np.random.Generator(np.random.PCG64(seed))
    moves, engine = Moves(graph, max_streams, random, False), BatchEngine(graph)
    starts = [_start(graph, each) for each in seeds]
    keys, streams = (np.array([getattr(each, name) for each in starts]) for name in ("keys", "streams"))
    orders = orders_of(engine, keys)
    times_ns = engine.evaluate(orders, streams).makespan_ns
    by_time = {int(time_ns): (order, each) for time_ns, order, each in zip(times_ns, orders, starts, strict=True)}
    limit_ns = (1 + NEAR_FRAC) * min(by_time)
    good = [each for time_ns, each in zip(times_ns, starts, strict=True) if time_ns <= limit_ns]
    for walk in range(WALKS):
        current = good[walk % len(good)]
        for _ in range(BATCHES):
            drawn = moves.draw(current, BATCH)
            orders = orders_of(engine, drawn.keys)
            times_ns = engine.evaluate(orders, drawn.streams).makespan_ns
            near = [row for row, time_ns in enumerate(times_ns) if time_ns <= limit_ns]
            for row in near:
                by_time.setdefault(int(times_ns[row]), (orders[row], drawn.row(row, int(times_ns[row]))))
            if near:
                row = near[int(random.random() * len(near))]
                current = drawn.row(row, int(times_ns[row]))
                current.keys[orders[row]] = np.arange(len(current.keys))  # moves refer to positions
    return [schedule_of(graph, order.tolist(), each) for order, each in _evenly(by_time, count)]


def _start(graph: OpGraph, schedule: Schedule) -> Current:
    keys = np.zeros(len(graph))
    keys[list(schedule.order)] = np.arange(len(graph))
    return Current(keys, np.array(schedule.streams, np.int32), np.zeros(len(graph), np.int32), 0)


def _evenly(by_time: dict[int, Item], count: int) -> list[Item]:
    """Return `count` items with times near the best, each the one nearest to a time of an even scale."""
    best_ns = min(by_time)
    left = sorted(time_ns for time_ns in by_time if time_ns <= (1 + NEAR_FRAC) * best_ns)
    chosen: list[Item] = []
    for wanted_ns in np.linspace(best_ns, (1 + NEAR_FRAC) * best_ns, count):
        if left:
            nearest = min(left, key=lambda time_ns: abs(time_ns - wanted_ns))
            left.remove(nearest)
            chosen.append(by_time[nearest])
    return chosen
