"""What the search judges schedules by: the mean makespan over perturbed copies of the step, and events.

The mean (`gpusim.search.robust`) is evaluated only for the few schedules of each batch that are best as predicted. Each
event counts as a time (`gpusim.search.events`). If schedules of a step lose time to L2 cache misses, these few, and all
seeds, are simulated again with their losses (`gpusim.search.misses`).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from gpusim.engine.batch import BatchEngine, TaskTimes
from gpusim.engine.compiled.heap import ENTRY
from gpusim.engine.compiled.orders import orders_by_keys
from gpusim.engine.threads import in_ranges
from gpusim.formats.schedule import Partition
from gpusim.plan.graph import OpGraph
from gpusim.plan.partitions import Layout
from gpusim.plan.schedule import Schedule
from gpusim.policies.shared.base import spread_views, work_order
from gpusim.search.events import compared_ns
from gpusim.search.misses import MissTimes
from gpusim.search.moves import Candidates, Current
from gpusim.search.robust import RobustEngine
from gpusim.trace.fusion import canonical_variants, covered_by

#: Number of the best neighbours in a batch that are judged by the mean.
JUDGED = 4
#: Makespan assigned to a schedule above the memory limit, and to one that was not simulated with its misses.
REFUSED_NS = 1 << 60


class Judged(NamedTuple):
    """What candidates are judged by, one entry per schedule; refused ones are alike, whatever their events."""

    makespan_ns: npt.NDArray[np.int64]
    events: npt.NDArray[np.int64]

    @classmethod
    def by(cls, makespan_ns: npt.NDArray[np.int64], events: npt.NDArray[np.int64]) -> Judged:
        return cls(makespan_ns, np.where(makespan_ns < REFUSED_NS, events, 0))

    @property
    def compared_ns(self) -> npt.NDArray[np.int64]:
        return compared_ns(self.makespan_ns, self.events)

    def of(self, number: int) -> tuple[int, int]:
        return int(self.makespan_ns[number]), int(self.events[number])

    def with_more(self, more: Judged) -> Judged:
        return Judged(*(np.append(mine, others) for mine, others in zip(self, more, strict=True)))


class Predicted(NamedTuple):
    """Predictions of schedules: makespans, and task times of those that lose time to L2 cache misses, by number."""

    makespan_ns: npt.NDArray[np.int64]
    times: dict[int, TaskTimes]


class Judge:
    """Evaluation of the candidates of a search on one step."""

    def __init__(
        self,
        graph: OpGraph,
        partitions: tuple[Partition, ...],
        layout: Layout | None,
        memory_limit_bytes: int | None,
        threads: int | None,
    ) -> None:
        self.graph = graph
        self.partitions = partitions
        self.engine = BatchEngine(graph, layout)
        self.robust = RobustEngine(self.engine)
        self.misses = MissTimes(graph, self.engine) if graph.predicts_misses else None
        self.memory_limit_bytes = memory_limit_bytes
        self.threads = threads
        self.evaluations = 0
        """Number of simulations, including those with misses and of perturbed steps."""
        self.least_ns = math.inf
        """Least predicted makespan of all schedules tried."""

    def neighbours(
        self, candidates: Candidates, orders: npt.NDArray[np.int32], events: npt.NDArray[np.int64]
    ) -> Judged:
        """Return mean makespans of the best candidates in ns; others, and those above the limit, are refused."""
        predicted = self.predict(candidates, orders, events, JUDGED)
        return self.judged(candidates, orders, events, predicted, JUDGED)

    def predict(
        self, candidates: Candidates, orders: npt.NDArray[np.int32], events: npt.NDArray[np.int64], most: int
    ) -> Predicted:
        """Return predicted makespans in ns; candidates above the memory limit are refused.

        If schedules may lose the L2 cache, misses are simulated for the best `most` without them, and others are
        refused.
        """
        limited = self.memory_limit_bytes is not None
        variants = candidates.chosen
        results = self.engine.evaluate(orders, candidates.streams, variants, peak=limited, threads=self.threads)
        self.evaluations += len(candidates.keys)
        makespans = results.makespan_ns.copy()
        if results.peak_bytes is not None and self.memory_limit_bytes is not None:
            makespans[results.peak_bytes > self.memory_limit_bytes] = REFUSED_NS
        if self.misses is None:
            return Predicted(makespans, {})
        own: dict[int, TaskTimes] = {}
        ranked = np.argsort(compared_ns(makespans, events), kind="stable")
        makespans[ranked[most:]] = REFUSED_NS
        for number in ranked[:most].tolist():
            if makespans[number] < REFUSED_NS:
                found = schedule_of(self.graph, orders[number].tolist(), candidates.row(number, 0), self.partitions)
                times = self.misses.times_of(found)
                if times is not None:
                    own[number] = times
                    rows = [number]
                    chosen = None if variants is None else variants[rows]
                    engine = self.engine.with_durations(times)
                    again = engine.evaluate(orders[rows], candidates.streams[rows], chosen, threads=1)
                    makespans[number] = again.makespan_ns[0]
                    self.evaluations += 1
        return Predicted(makespans, own)

    def judged(
        self,
        candidates: Candidates,
        orders: npt.NDArray[np.int32],
        events: npt.NDArray[np.int64],
        predicted: Predicted,
        most: int,
        lower_bound_ns: float = 0.0,
    ) -> Judged:
        """Return mean makespans of the `most` best candidates in ns; others, and refused ones, are refused.

        If one meets the bound, makespans are those predicted, since none is faster.
        """
        makespans = predicted.makespan_ns
        self.least_ns = min(self.least_ns, float(makespans.min(initial=REFUSED_NS)))
        if self.least_ns <= lower_bound_ns + 0.5:
            return Judged.by(makespans, events)
        first = np.argsort(compared_ns(makespans, events), kind="stable")[:most]
        best = [int(row) for row in first if makespans[row] < REFUSED_NS]
        means = np.full(len(makespans), REFUSED_NS, np.int64)
        if best:
            means[best] = self.means_ns(candidates, orders, predicted, best)
        return Judged.by(means, events)

    def means_ns(
        self, candidates: Candidates, orders: npt.NDArray[np.int32], predicted: Predicted, rows: list[int]
    ) -> npt.NDArray[np.int64]:
        """Return the mean makespans of some candidates over perturbed steps, in ns."""
        streams, variants = candidates.streams, candidates.chosen
        means = np.zeros(len(orders), np.int64)
        together = [row for row in rows if row not in predicted.times]
        apart = [[row] for row in rows if row in predicted.times]
        for same in filter(None, [together, *apart]):
            chosen = None if variants is None else variants[same]
            times = predicted.times.get(same[0])
            means[same] = self.robust.mean_ns(orders[same], streams[same], chosen, self.threads, times)
        self.evaluations += len(rows) * len(self.robust.engines)
        return means[rows]

    def events(self, orders: npt.NDArray[np.int32], candidates: Candidates) -> npt.NDArray[np.int64]:
        """Return the number of events of each candidate."""
        return self.engine.events(orders, candidates.streams, candidates.chosen, threads=self.threads)

    def orders(self, keys: npt.NDArray[np.float64]) -> npt.NDArray[np.int32]:
        """Return the launch order of each row of keys."""
        return orders_of(self.engine, keys, self.threads)


def orders_of(engine: BatchEngine, keys: npt.NDArray[np.float64], threads: int | None = None) -> npt.NDArray[np.int32]:
    """Return the launch order of each row of keys: the next op has the smallest key among those that may start."""
    orders = np.zeros(keys.shape, np.int32)
    ops = keys.shape[1]

    def one_range(first: int, last: int) -> None:
        ready, waiting = np.zeros(ops, ENTRY), np.zeros(ops, np.int32)
        orders_by_keys(engine.record, engine.arrays, keys, ready, waiting, orders, first, last)

    in_ranges(len(keys), threads, one_range)
    return orders


def schedule_of(
    graph: OpGraph, order: Sequence[int], kept: Current, partitions: tuple[Partition, ...] = ()
) -> Schedule:
    """Return the schedule of a found one with its launch order; streams are numbered in order of first use, unless
    partitions name them.
    """
    works = set(work_order(graph))
    ops = [op for op in order if op in works]
    variants = canonical_variants(graph.trace, kept.variants.tolist()) if kept.variants.any() else ()
    covered = covered_by(graph.trace, variants)
    placed = {op: int(kept.streams[covered.get(op, op)]) for op in ops}
    numbers = {stream: number for number, stream in enumerate(dict.fromkeys(placed.values()))}
    if partitions:
        numbers = {stream: stream for stream in numbers}
    schedule = spread_views(graph, ops, {op: numbers[stream] for op, stream in placed.items()})
    return replace(schedule, variants=variants, partitions=partitions)
