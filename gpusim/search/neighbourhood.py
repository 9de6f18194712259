"""Anytime local search over schedules: launch order and stream of every op, evaluated by the fast engine.

List schedulers decide by rules. This search starts from the best schedules of list schedulers and policies and changes
them in small moves. An op or a stretch of a stream goes to another stream, an op past others of its stream, two streams
are exchanged from a position on, or an op gets another variant. The order is stored as a key per op (the next op is the
one with the smallest key whose predecessors are launched). So every change gives a legal schedule. Changes without
effect on waits are not tried, and several improving changes are also tried together. No change for the worse is
accepted, since nearly every batch has one that costs nothing.

The criterion is the mean makespan over perturbed copies of the step (`gpusim.search.robust`), evaluated only for the
few schedules of each batch that are predicted fastest.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

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
#: Numbers of the fastest neighbours in a batch, and of the fastest seeds, judged by the mean.
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
    """Best schedules found, ordered by `robust_ns`, with their makespans."""

    schedules: tuple[Schedule, ...]
    makespans_ns: tuple[int, ...]
    robust_ns: tuple[int, ...]
    """Mean makespans over perturbed steps (`gpusim.search.robust`)."""
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
            progress(max(tried, passed), search.best_ns if search.kept else 0.0)
            # With an evaluation limit, the choice must not depend on time.
            search.step(tried if evaluations else passed)
    except STOPS:
        interrupted = True
        if not search.kept:
            raise
    return search.result(interrupted)


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
        return self.kept[0].makespan_ns if self.kept else math.inf

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
        makespans = self._evaluate(candidates, self._orders(candidates.keys), JUDGED_SEEDS, lower_bound_ns)
        order = np.argsort(makespans, kind="stable")
        for number in order:
            if len(self.current) < KEPT and all(abs(makespans[number] - c.makespan_ns) > 1 for c in self.current):
                self.current.append(candidates.row(number, int(makespans[number])))
        for current in self.current:
            self._note(current)

    def step(self, share: float) -> None:
        """Try a batch of neighbours of one schedule and move on to the best of them, unless that is worse.

        If several are better than the schedule, their joined changes are tried as well. `share` is the used share of
        the budget.
        """
        for begin, count in NARROWED:
            if share >= begin and len(self.current) > count:
                self.current = sorted(self.current, key=lambda c: c.makespan_ns)[:count]
        number = self.turn % len(self.current)
        self.turn += 1
        current = self.current[number]
        near, orders = self._untried(current)
        makespans = self._evaluate(near, orders)
        better = [row for row in np.argsort(makespans, kind="stable") if makespans[row] < current.makespan_ns]
        more = joined(current, near, better, JOINED)
        if len(more.keys):
            near = near.with_more(more)
            orders = np.concatenate([orders, self._orders(more.keys)])
            makespans = np.append(makespans, self._evaluate(more, orders[len(makespans) :]))
        best = int(np.argmin(makespans))
        current.stale += 1
        self.stale = 0 if makespans[best] < self.best_ns else self.stale + 1
        if makespans[best] <= current.makespan_ns:
            stale = 0 if makespans[best] < current.makespan_ns else current.stale
            current = near.row(best, int(makespans[best]), stale)
            current.keys[orders[best]] = np.arange(len(current.keys))  # moves refer to positions
            self._note(current)
        if current.stale > PATIENCE and self.kept:
            current = replace(self.kept[0], stale=0)  # keeps its tried neighbours
        self.current[number] = current

    def _note(self, candidate: Current) -> None:
        if candidate.makespan_ns < REFUSED_NS and all(
            abs(candidate.makespan_ns - other.makespan_ns) > 0 for other in self.kept
        ):
            self.kept = sorted([*self.kept, candidate], key=lambda c: c.makespan_ns)[:KEPT]

    def _untried(self, current: Current) -> tuple[Candidates, npt.NDArray[np.int32]]:
        """Return a batch of untried changed copies, with their launch orders.

        If too few are found, others fill it up: the size of a batch is constant, so that evaluations come to an end.
        """
        if not current.tried:
            same = Candidates.copies(current, 1)
            current.tried.update(self.fingerprints.of(self._orders(same.keys), same))
        drawn = self.moves.draw(current, DRAWN * BATCH)
        orders = self._orders(drawn.keys)
        new: list[int] = []
        others: list[int] = []
        for row, fingerprint in enumerate(self.fingerprints.of(orders, drawn)):
            if len(new) == BATCH:
                break
            if fingerprint in current.tried:
                others.append(row)
            else:
                current.tried.add(fingerprint)
                new.append(row)
        rows = [*new, *others][:BATCH]
        return drawn.rows(rows), orders[rows]

    def _evaluate(
        self,
        candidates: Candidates,
        orders: npt.NDArray[np.int32],
        judged: int = JUDGED,
        lower_bound_ns: float = 0.0,
    ) -> npt.NDArray[np.int64]:
        """Return mean makespans of the fastest candidates, in ns; others, and those above the limit, get `REFUSED_NS`.

        If one meets the bound, makespans are those predicted, since no better choice exists.
        """
        limited = self.memory_limit_bytes is not None
        variants = candidates.variants if candidates.variants.any() else None
        results = self.engine.evaluate(orders, candidates.streams, variants, peak=limited, threads=self.threads)
        self.evaluations += len(candidates.keys)
        makespans = results.makespan_ns.copy()
        if results.peak_bytes is not None and self.memory_limit_bytes is not None:
            makespans[results.peak_bytes > self.memory_limit_bytes] = REFUSED_NS
        self.least_ns = min(self.least_ns, float(makespans.min(initial=REFUSED_NS)))
        if self.least_ns <= lower_bound_ns + 0.5:
            return makespans
        fastest = [row for row in np.argsort(makespans, kind="stable")[:judged] if makespans[row] < REFUSED_NS]
        chosen = None if variants is None else variants[fastest]
        means = np.full(len(makespans), REFUSED_NS, np.int64)
        if fastest:
            means[fastest] = self.robust.mean_ns(orders[fastest], candidates.streams[fastest], chosen, self.threads)
            self.evaluations += len(fastest) * len(self.robust.engines)
        return means

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
        robust = tuple(current.makespan_ns for current in self.kept)
        return Refined(tuple(schedules), tuple(makespans), robust, self.evaluations, interrupted)


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
