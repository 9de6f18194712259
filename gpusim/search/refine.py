"""Anytime local search over schedules themselves: launch order and stream of every op, each tried on the fast engine.

The list schedulers decide by rules; this search starts from the best schedules that they and the policies made, and
changes them a little at a time: an op to another stream, a stretch of a stream to another, an op to another place in
the launch order, two streams exchanged from some place on, other kernels for an op that has variants. The order is kept
as a key for each op (the next op is the one of smallest key whose predecessors are launched), so that every change
gives a legal schedule. A change for the worse is accepted at first, less and less as the budget is spent (threshold
accepting, Dueck and Scheuer 1990).
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
from gpusim.plan.graph import OpGraph
from gpusim.plan.partitions import Partition, lay_out
from gpusim.policies.base import Assignment, spread_views, work_order

#: Neighbours of one schedule that are tried at once. Not the number of cores: that must not change what is found.
BATCH = 64
#: Schedules that the search starts from and goes on with, each in its turn.
KEPT = 4
#: Makespan that a step may lose at the start of the search, as a share.
FIRST_THRESHOLD = 0.004
#: Batches without a better best after which a schedule that the search goes on with falls back to the best.
PATIENCE = 60
#: Batches without a better best after which a search ends that has neither a time nor a number of evaluations.
LAST_BATCHES = 40
#: Kinds of moves, and how often each is drawn.
RESTREAM, RESTREAM_STRETCH, REORDER, EXCHANGE, VARY = range(5)
MOVE_SHARES = (0.3, 0.2, 0.4, 0.1, 0.0)
MOVE_SHARES_WITH_VARIANTS = (0.2, 0.15, 0.25, 0.05, 0.35)
#: How many ops get another variant in one move.
VARIED = (1, 1, 2, 6)
#: The makespan of a schedule that needs too much memory; far enough from the largest number for a threshold above it.
REFUSED_NS = 1 << 60
#: How far an op moves in the launch order (places), and how many ops of a stream move together.
SHIFTS = (2.0, 8.0, 40.0)
STRETCHES = (2, 3, 5, 9)


@dataclass(frozen=True)
class Refined:
    """The best schedules found, best first with their makespans, and how many were tried."""

    assignments: tuple[Assignment, ...]
    makespans_ns: tuple[int, ...]
    evaluations: int
    interrupted: bool


def refine(
    graph: OpGraph,
    seeds: Sequence[Assignment],
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
    """Improve `seeds` until time or evaluations are spent or the bound is met; Ctrl-C keeps the best found.

    The same seed and number of evaluations give the same result on any number of cores. Schedules that need more than
    `memory_limit_bytes` are refused, and none is found where all are. With `variants`, ops may run other kernels than
    the captured ones; else those of the seeds stay. With `partitions`, all `max_streams` streams are as these say; the
    seeds' own are not looked at. `progress` gets the share of the budget used and the best makespan so far, 0
    while there is none.
    """
    search = _Search(graph, max_streams, seed, memory_limit_bytes, threads, variants, tuple(partitions))
    interrupted = False
    try:
        search.start(seeds)
        deadline = time.monotonic() + budget_s
        endless = evaluations is None and not math.isfinite(budget_s)
        while search.best_ns > lower_bound_ns + 0.5 and not (endless and search.stale > LAST_BATCHES):
            tried = search.evaluations / evaluations if evaluations else 0.0
            passed = 0.0
            if math.isfinite(budget_s):
                passed = 1.0 - (deadline - time.monotonic()) / budget_s if budget_s > 0 else 1.0
            if max(tried, passed) >= 1.0:
                break
            progress(max(tried, passed), search.best_ns if search.found else 0.0)
            # Where there is a number of evaluations, what is accepted depends on no clock.
            search.step(FIRST_THRESHOLD * (1.0 - (tried if evaluations else passed)) ** 2)
    except KeyboardInterrupt:
        interrupted = True
        if not search.found:
            raise
    return search.result(interrupted)


@dataclass
class _Current:
    """A schedule that the search goes on with."""

    keys: npt.NDArray[np.float64]
    streams: npt.NDArray[np.int32]
    variants: npt.NDArray[np.int32]
    makespan_ns: int
    stale: int = 0


@dataclass
class _Candidates:
    """Schedules to evaluate, one in each row."""

    keys: npt.NDArray[np.float64]
    streams: npt.NDArray[np.int32]
    variants: npt.NDArray[np.int32]

    def row(self, number: int, makespan_ns: int, stale: int = 0) -> _Current:
        """One of them, copied."""
        keys, streams, variants = self.keys[number].copy(), self.streams[number].copy(), self.variants[number].copy()
        return _Current(keys, streams, variants, makespan_ns, stale)


class _Search:
    """The schedules that the search goes on with, and the best of all it tried."""

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
        self.variable = [op for op, others in enumerate(graph.variants) if others] if variants else []
        """Ops whose kernels the search may choose."""
        self.move_shares = MOVE_SHARES_WITH_VARIANTS if self.variable else MOVE_SHARES
        self.max_streams = max_streams
        self.random = np.random.Generator(np.random.PCG64(seed))
        self.memory_limit_bytes = memory_limit_bytes
        self.threads = threads
        self.work = np.array(work_order(graph), np.int64)
        self.current: list[_Current] = []
        self.found: list[_Current] = []
        self.turn = 0
        self.stale = 0
        """Batches since the last one that gave a better best."""
        self.evaluations = 0

    @property
    def best_ns(self) -> float:
        return self.found[0].makespan_ns if self.found else math.inf

    def start(self, seeds: Sequence[Assignment]) -> None:
        """Evaluate the seeds and go on with the best of those that differ."""
        shape = (len(seeds), len(self.graph))
        made = _Candidates(np.zeros(shape), np.zeros(shape, np.int32), np.zeros(shape, np.int32))
        for number, assignment in enumerate(seeds):
            made.keys[number, list(assignment.order)] = np.arange(len(self.graph))
            made.streams[number] = assignment.streams
            if self.partitions:
                made.streams[number] %= self.max_streams
            made.variants[number] = assignment.variants or 0
        makespans = self._evaluate(made)
        order = np.argsort(makespans, kind="stable")
        for number in order:
            if len(self.current) < KEPT and all(abs(makespans[number] - c.makespan_ns) > 1 for c in self.current):
                self.current.append(made.row(number, int(makespans[number])))
        for current in self.current:
            self._note(current)

    def step(self, threshold: float) -> None:
        """Try a batch of neighbours of one schedule and move on to the best of them, if that loses little enough."""
        number = self.turn % len(self.current)
        self.turn += 1
        current = self.current[number]
        near = self._neighbours(current)
        makespans = self._evaluate(near)
        best = int(np.argmin(makespans))
        current.stale += 1
        self.stale = 0 if makespans[best] < self.best_ns else self.stale + 1
        if makespans[best] <= current.makespan_ns * (1.0 + threshold * float(self.random.random())):
            stale = 0 if makespans[best] < current.makespan_ns else current.stale
            current = near.row(best, int(makespans[best]), stale)
            self._note(current)
        if current.stale > PATIENCE and self.found:
            current = replace(self.found[0], stale=0)
        self.current[number] = current

    def _note(self, candidate: _Current) -> None:
        if candidate.makespan_ns < REFUSED_NS and all(
            abs(candidate.makespan_ns - other.makespan_ns) > 0 for other in self.found
        ):
            self.found = sorted([*self.found, candidate], key=lambda c: c.makespan_ns)[:KEPT]

    def _neighbours(self, current: _Current) -> _Candidates:
        """A batch of changed copies."""
        keys = np.repeat(current.keys[None, :], BATCH, axis=0)
        streams = np.repeat(current.streams[None, :], BATCH, axis=0)
        variants = np.repeat(current.variants[None, :], BATCH, axis=0)
        moves = np.searchsorted(np.cumsum(self.move_shares[:-1]), self.random.random(BATCH))
        by_key = self.work[np.argsort(current.keys[self.work], kind="stable")]
        for row in range(BATCH):
            place = self._below(len(by_key))
            move = moves[row]
            if move == RESTREAM:
                streams[row, by_key[place]] = self._below(self.max_streams)
            elif move == RESTREAM_STRETCH:
                ahead = by_key[place:]
                stretch = ahead[current.streams[ahead] == current.streams[by_key[place]]]
                streams[row, stretch[: STRETCHES[self._below(len(STRETCHES))]]] = self._below(self.max_streams)
            elif move == REORDER:
                spread = SHIFTS[self._below(len(SHIFTS))]
                keys[row, by_key[place]] += spread * (2.0 * float(self.random.random()) - 1.0)
            elif move == VARY and self.variable:
                for _ in range(VARIED[self._below(len(VARIED))]):
                    op = self.variable[self._below(len(self.variable))]
                    variants[row, op] = self._below(1 + len(self.graph.variants[op]))
                    if self._below(2):  # a smaller kernel pays only beside another
                        streams[row, op] = self._below(self.max_streams)
            else:
                one, other = self._below(self.max_streams), self._below(self.max_streams)
                ahead = by_key[place:]
                streams[row, ahead[current.streams[ahead] == one]] = other
                streams[row, ahead[current.streams[ahead] == other]] = one
        return _Candidates(keys, streams, variants)

    def _below(self, limit: int) -> int:
        return int(float(self.random.random()) * limit)

    def _evaluate(self, made: _Candidates) -> npt.NDArray[np.int64]:
        """Makespans in ns; what needs too much memory never ends."""
        orders = self._orders(made.keys)
        limited = self.memory_limit_bytes is not None
        variants = made.variants if made.variants.any() else None
        found = self.engine.evaluate(orders, made.streams, variants, peak=limited, threads=self.threads)
        self.evaluations += len(made.keys)
        makespans = found.makespan_ns.copy()
        if found.peak_bytes is not None and self.memory_limit_bytes is not None:
            makespans[found.peak_bytes > self.memory_limit_bytes] = REFUSED_NS
        return makespans

    def _orders(self, keys: npt.NDArray[np.float64]) -> npt.NDArray[np.int32]:
        orders = np.zeros(keys.shape, np.int32)
        ops = keys.shape[1]

        def one_range(first: int, last: int) -> None:
            ready, waiting = np.zeros(ops, ENTRY), np.zeros(ops, np.int32)
            orders_by_keys(self.engine.record, self.engine.arrays, keys, ready, waiting, orders, first, last)

        in_ranges(len(keys), self.threads, one_range)
        return orders

    def result(self, interrupted: bool) -> Refined:
        """The best as assignments; streams are numbered in order of first use, but where partitions name them."""
        orders = self._orders(np.array([each.keys for each in self.found]).reshape(-1, len(self.graph)))
        works = set(self.work.tolist())
        assignments = []
        for order, each in zip(orders.tolist(), self.found, strict=True):
            ops = [op for op in order if op in works]
            numbers = {stream: number for number, stream in enumerate(dict.fromkeys(each.streams[ops].tolist()))}
            if self.partitions:
                numbers = {stream: stream for stream in numbers}
            made = spread_views(self.graph, ops, {op: numbers[int(each.streams[op])] for op in ops})
            variants = tuple(each.variants.tolist()) if each.variants.any() else ()
            assignments.append(replace(made, variants=variants, partitions=self.partitions))
        return Refined(
            tuple(assignments), tuple(each.makespan_ns for each in self.found), self.evaluations, interrupted
        )
