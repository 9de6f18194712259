"""Anytime local search over schedules: launch order and stream of every op, evaluated by the fast engine.

List schedulers decide by rules. This search starts from the best schedules of list schedulers and policies and changes
them in small moves. An op or a stretch of a stream goes to another stream, an op past others of its stream, two streams
are exchanged from a position on, or an op gets another variant. The order is stored as a key per op (the next op is the
one with the smallest key whose predecessors are launched). So every change gives a legal schedule. Changes without
effect on waits are not tried, and several improving changes are also tried together. No change for the worse is
accepted, since nearly every batch has one that costs nothing.

The criterion is the mean makespan over perturbed copies of the step (`gpusim.search.robust`) with a time for each event
(`gpusim.search.events`). The mean is evaluated only for the few schedules of each batch that are best as predicted.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from gpusim.engine.batch import BatchEngine
from gpusim.engine.compiled.heap import ENTRY
from gpusim.engine.compiled.orders import orders_by_keys
from gpusim.engine.threads import in_ranges
from gpusim.formats.schedule import Partition
from gpusim.plan.graph import OpGraph
from gpusim.plan.partitions import lay_out
from gpusim.plan.schedule import Schedule
from gpusim.policies.shared.base import spread_views, work_order
from gpusim.search.events import compared_ns
from gpusim.search.interrupt import STOPS
from gpusim.search.moves import Candidates, Current, Fingerprints, Moves, joined
from gpusim.search.robust import RobustEngine
from gpusim.trace.fusion import canonical_variants, covered_by

#: Neighbours of a schedule tried at once; not the number of cores, which must not affect results.
BATCH = 32
#: Number of schedules with joined changes tried if several neighbours are better.
JOINED = 6
#: Maximum number of batches drawn to fill one with untried neighbours.
DRAWN = 3
#: Numbers of the best neighbours in a batch, and of the best seeds, judged by the mean.
JUDGED, JUDGED_SEEDS = 4, 16
#: Number of schedules that the search returns, and from which it continues in turn.
KEPT = 4
#: Reduced numbers of them by share of the budget: many are a waste while the best one improves every time.
NARROWED = ((0.05, 2), (0.2, 1))
#: Batches without improvement after which a current schedule is replaced by the best.
PATIENCE = 30
#: Batches without improvement after which a search without time or evaluation limit ends.
LAST_BATCHES = 80
#: Makespan assigned to a schedule above the memory limit.
REFUSED_NS = 1 << 60


@dataclass(frozen=True)
class Refined:
    """Best schedules found, ordered by `robust_ns` and `events` as compared, with their makespans."""

    schedules: tuple[Schedule, ...]
    makespans_ns: tuple[int, ...]
    robust_ns: tuple[int, ...]
    """Mean makespans over perturbed steps (`gpusim.search.robust`)."""
    events: tuple[int, ...]
    evaluations: int
    """Number of simulations, including those of perturbed steps."""
    interrupted: bool


def refine(
    graph: OpGraph,
    seeds: Sequence[Schedule],
    max_streams: int,
    *,
    budget_s: float,
    seed: int,
    evaluations: int | None = None,
    lower_bound_ns: float = 0.0,
    memory_limit_bytes: int | None = None,
    variants: bool = False,
    partitions: Sequence[Partition] = (),
    threads: int | None = None,
    progress: Callable[[float, float], None] = lambda share, best_ns: None,
) -> Refined:
    """Improve `seeds` until time or evaluations are spent or the bound is met; Ctrl-C keeps the best so far.

    The same seed and number of evaluations give the same result on any number of cores. Schedules above
    `memory_limit_bytes` are refused, so the result may be empty. With `variants`, ops may run other kernels; otherwise
    those of the seeds stay. `partitions` apply to all `max_streams` streams and replace those of the seeds. `progress`
    gets the used share of the budget and the best mean makespan so far, 0 if there is none.
    """
    search = _Search(graph, max_streams, seed, memory_limit_bytes, threads, variants, tuple(partitions))
    interrupted = False
    try:
        search.start(seeds, lower_bound_ns)
        deadline = time.monotonic() + budget_s
        endless = evaluations is None and not math.isfinite(budget_s)
        while search.least_ns > lower_bound_ns + 0.5 and not (endless and search.stale > LAST_BATCHES):
            tried = search.evaluations / evaluations if evaluations else 0.0
            passed = 0.0
            if math.isfinite(budget_s):
                passed = 1.0 - (deadline - time.monotonic()) / budget_s if budget_s > 0 else 1.0
            if max(tried, passed) >= 1.0:
                break
            progress(max(tried, passed), search.kept[0].makespan_ns if search.kept else 0.0)
            # With an evaluation limit, the choice must not depend on time.
            search.step(tried if evaluations else passed)
    except STOPS:
        interrupted = True
        if not search.kept:
            raise
    return search.result(interrupted)


class _Judged(NamedTuple):
    """What candidates are judged by, one entry per schedule; refused ones are alike, whatever their events."""

    makespan_ns: npt.NDArray[np.int64]
    events: npt.NDArray[np.int64]

    @classmethod
    def by(cls, makespan_ns: npt.NDArray[np.int64], events: npt.NDArray[np.int64]) -> _Judged:
        return cls(makespan_ns, np.where(makespan_ns < REFUSED_NS, events, 0))

    @property
    def compared_ns(self) -> npt.NDArray[np.int64]:
        return compared_ns(self.makespan_ns, self.events)

    def of(self, number: int) -> tuple[int, int]:
        return int(self.makespan_ns[number]), int(self.events[number])

    def with_more(self, more: _Judged) -> _Judged:
        return _Judged(*(np.append(mine, others) for mine, others in zip(self, more, strict=True)))


class _Search:
    """State of the search: the schedules from which it continues, and the best ones."""

    def __init__(
        self,
        graph: OpGraph,
        max_streams: int,
        seed: int,
        memory_limit_bytes: int | None,
        threads: int | None,
        variants: bool = False,
        partitions: tuple[Partition, ...] = (),
    ) -> None:
        self.graph = graph
        self.partitions = partitions
        layout = lay_out(partitions, max_streams, graph.hardware.limits.sms) if partitions else None
        self.engine = BatchEngine(graph, layout)
        self.robust = RobustEngine(self.engine)
        self.max_streams = max_streams
        self.random = np.random.Generator(np.random.PCG64(seed))
        self.moves = Moves(graph, max_streams, self.random, variants)
        self.fingerprints = Fingerprints(graph, self.random, layout)
        self.memory_limit_bytes = memory_limit_bytes
        self.threads = threads
        self.current: list[Current] = []
        self.kept: list[Current] = []
        self.turn = 0
        self.stale = 0
        """Number of batches since the last improvement."""
        self.evaluations = 0
        self.least_ns = math.inf
        """Least predicted makespan of all schedules tried."""

    @property
    def best_ns(self) -> float:
        return self.kept[0].compared_ns if self.kept else math.inf

    def start(self, seeds: Sequence[Schedule], lower_bound_ns: float = 0.0) -> None:
        """Evaluate the seeds and continue with the best distinct ones; if one meets the bound, keep only that."""
        shape = (len(seeds), len(self.graph))
        candidates = Candidates(np.zeros(shape), np.zeros(shape, np.int32), np.zeros(shape, np.int32))
        for number, schedule in enumerate(seeds):
            candidates.keys[number, list(schedule.order)] = np.arange(len(self.graph))
            candidates.streams[number] = schedule.streams
            if self.partitions:
                candidates.streams[number] %= self.max_streams
            candidates.variants[number] = schedule.variants or 0
        orders = self._orders(candidates.keys)
        judged = self._evaluate(candidates, orders, self._events(orders, candidates), JUDGED_SEEDS, lower_bound_ns)
        compared = judged.compared_ns
        for number in np.argsort(compared, kind="stable"):
            if len(self.current) < KEPT and all(abs(compared[number] - c.compared_ns) > 1 for c in self.current):
                self.current.append(candidates.row(number, *judged.of(number)))
        for current in self.current:
            self._note(current)

    def step(self, share: float) -> None:
        """Try a batch of neighbours of one schedule and move on to the best of them, unless that is worse.

        If several are better than the schedule, their joined changes are tried as well. `share` is the used share of
        the budget.
        """
        for begin, count in NARROWED:
            if share >= begin and len(self.current) > count:
                self.current = sorted(self.current, key=_compared)[:count]
        number = self.turn % len(self.current)
        self.turn += 1
        current = self.current[number]
        near, orders, events = self._untried(current)
        judged = self._evaluate(near, orders, events)
        compared = judged.compared_ns
        better = [row for row in np.argsort(compared, kind="stable") if compared[row] < current.compared_ns]
        more = joined(current, near, better, JOINED)
        if len(more.keys):
            near = near.with_more(more)
            launched = self._orders(more.keys)
            orders = np.concatenate([orders, launched])
            judged = judged.with_more(self._evaluate(more, launched, self._events(launched, more)))
            compared = judged.compared_ns
        best = int(np.argmin(compared))
        current.stale += 1
        self.stale = 0 if compared[best] < self.best_ns else self.stale + 1
        if compared[best] <= current.compared_ns:
            stale = 0 if compared[best] < current.compared_ns else current.stale
            current = near.row(best, *judged.of(best), stale)
            current.keys[orders[best]] = np.arange(len(current.keys))  # moves refer to positions
            self._note(current)
        if current.stale > PATIENCE and self.kept:
            current = replace(self.kept[0], stale=0)  # keeps its tried neighbours
        self.current[number] = current

    def _note(self, candidate: Current) -> None:
        if candidate.makespan_ns < REFUSED_NS and all(
            candidate.compared_ns != other.compared_ns for other in self.kept
        ):
            self.kept = sorted([*self.kept, candidate], key=_compared)[:KEPT]

    def _untried(self, current: Current) -> tuple[Candidates, npt.NDArray[np.int32], npt.NDArray[np.int64]]:
        """Return a batch of untried changed copies, with their launch orders and numbers of events.

        One that is like an evaluated one counts as untried if it has fewer events. If too few are found, others fill
        the batch up: its size is constant, so that evaluations come to an end.
        """
        if not current.tried:
            same = Candidates.copies(current, 1)
            orders = self._orders(same.keys)
            (fingerprint,), (events,) = self.fingerprints.of(orders, same), self._events(orders, same).tolist()
            current.tried[fingerprint] = events
        drawn = self.moves.draw(current, DRAWN * BATCH)
        orders = self._orders(drawn.keys)
        counted = self._events(orders, drawn)
        new: list[int] = []
        others: list[int] = []
        for row, (fingerprint, events) in enumerate(
            zip(self.fingerprints.of(orders, drawn), counted.tolist(), strict=True)
        ):
            if len(new) == BATCH:
                break
            if events < current.tried.get(fingerprint, events + 1):
                current.tried[fingerprint] = events
                new.append(row)
            else:
                others.append(row)
        rows = [*new, *others][:BATCH]
        return drawn.rows(rows), orders[rows], counted[rows]

    def _evaluate(
        self,
        candidates: Candidates,
        orders: npt.NDArray[np.int32],
        events: npt.NDArray[np.int64],
        judged: int = JUDGED,
        lower_bound_ns: float = 0.0,
    ) -> _Judged:
        """Return mean makespans of the best candidates, in ns; others, and those above the limit, get `REFUSED_NS`.

        If one meets the bound, makespans are those predicted, since none is faster.
        """
        limited = self.memory_limit_bytes is not None
        variants = candidates.chosen
        results = self.engine.evaluate(orders, candidates.streams, variants, peak=limited, threads=self.threads)
        self.evaluations += len(candidates.keys)
        makespans = results.makespan_ns.copy()
        if results.peak_bytes is not None and self.memory_limit_bytes is not None:
            makespans[results.peak_bytes > self.memory_limit_bytes] = REFUSED_NS
        self.least_ns = min(self.least_ns, float(makespans.min(initial=REFUSED_NS)))
        if self.least_ns <= lower_bound_ns + 0.5:
            return _Judged.by(makespans, events)
        first = np.argsort(compared_ns(makespans, events), kind="stable")[:judged]
        best = [row for row in first if makespans[row] < REFUSED_NS]
        chosen = None if variants is None else variants[best]
        means = np.full(len(makespans), REFUSED_NS, np.int64)
        if best:
            means[best] = self.robust.mean_ns(orders[best], candidates.streams[best], chosen, self.threads)
            self.evaluations += len(best) * len(self.robust.engines)
        return _Judged.by(means, events)

    def _events(self, orders: npt.NDArray[np.int32], candidates: Candidates) -> npt.NDArray[np.int64]:
        return self.engine.events(orders, candidates.streams, candidates.chosen, threads=self.threads)

    def _orders(self, keys: npt.NDArray[np.float64]) -> npt.NDArray[np.int32]:
        return orders_of(self.engine, keys, self.threads)

    def result(self, interrupted: bool) -> Refined:
        """Return the best schedules."""
        orders = self._orders(np.array([current.keys for current in self.kept]).reshape(-1, len(self.graph)))
        schedules = [
            schedule_of(self.graph, order, each, self.partitions)
            for order, each in zip(orders.tolist(), self.kept, strict=True)
        ]
        makespans: list[int] = []
        if schedules:
            streams, chosen = (np.array([getattr(c, name) for c in self.kept]) for name in ("streams", "variants"))
            makespans = self.engine.evaluate(orders, streams, chosen, threads=self.threads).makespan_ns.tolist()
        robust, events = (tuple(getattr(c, name) for c in self.kept) for name in ("makespan_ns", "events"))
        return Refined(tuple(schedules), tuple(makespans), robust, events, self.evaluations, interrupted)


def _compared(current: Current) -> int:
    return current.compared_ns


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
