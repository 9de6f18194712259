"""Anytime local search over schedules: launch order and stream of every op, evaluated by the fast engine.

List schedulers decide by rules. This search starts from the best schedules of list schedulers and policies and changes
them in small moves. An op or a stretch of a stream goes to another stream, an op past others of its stream, two streams
are exchanged from a position on, or an op gets another variant. The order is stored as a key per op (the next op is the
one with the smallest key whose predecessors are launched). So every change gives a legal schedule. Changes without
effect on waits are not tried, and several improving changes are also tried together. No change for the worse is
accepted, since nearly every batch has one that costs nothing.

`gpusim.search.judging` has the criterion.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from gpusim.formats.schedule import Partition
from gpusim.plan.graph import OpGraph
from gpusim.plan.partitions import lay_out
from gpusim.plan.schedule import Schedule
from gpusim.search.events import compared_ns
from gpusim.search.interrupt import STOPS
from gpusim.search.judging import REFUSED_NS, Judge, schedule_of
from gpusim.search.moves import Candidates, Current, Fingerprints, Moves, joined

#: Neighbours of a schedule tried at once; not the number of cores, which must not affect results.
BATCH = 32
#: Number of schedules with joined changes tried if several neighbours are better.
JOINED = 6
#: Maximum number of batches drawn to fill one with untried neighbours.
DRAWN = 3
#: Number of the best seeds judged by the mean.
JUDGED_SEEDS = 16
#: Number of schedules that the search returns, and from which it continues in turn.
KEPT = 4
#: Reduced numbers of them by share of the budget: many are a waste while the best one improves every time.
NARROWED = ((0.05, 2), (0.2, 1))
#: Batches without improvement after which a current schedule is replaced by the best.
PATIENCE = 30
#: Batches without improvement after which a search without time or evaluation limit ends.
LAST_BATCHES = 80


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

    If schedules may lose the L2 cache, the result has the seeds predicted best if nothing better was found.
    """
    search = _Search(graph, max_streams, seed, memory_limit_bytes, threads, variants, tuple(partitions))
    interrupted = False
    begin = time.monotonic()
    try:
        search.start(seeds, lower_bound_ns)
        # Seeds come on top of the budget, except where the cache is simulated for each of them.
        deadline = budget_s + (time.monotonic() if search.judge.misses is None else begin)
        endless = evaluations is None and not math.isfinite(budget_s)
        while search.judge.least_ns > lower_bound_ns + 0.5 and not (endless and search.stale > LAST_BATCHES):
            tried = search.judge.evaluations / evaluations if evaluations else 0.0
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
        self.judge = Judge(graph, partitions, layout, memory_limit_bytes, threads)
        self.max_streams = max_streams
        self.random = np.random.Generator(np.random.PCG64(seed))
        self.moves = Moves(graph, max_streams, self.random, variants)
        self.fingerprints = Fingerprints(graph, self.random, layout)
        self.current: list[Current] = []
        self.kept: list[Current] = []
        self.best_seeds: list[Current] = []
        """Seeds predicted best with misses, by makespan and as compared; empty for a step without misses."""
        self.turn = 0
        self.stale = 0
        """Number of batches since the last improvement."""

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
        orders = self.judge.orders(candidates.keys)
        events = self.judge.events(orders, candidates)
        predicted = self.judge.predict(candidates, orders, events, len(seeds))
        judged = self.judge.judged(candidates, orders, events, predicted, JUDGED_SEEDS, lower_bound_ns)
        compared = judged.compared_ns
        for number in np.argsort(compared, kind="stable"):
            if len(self.current) < KEPT and all(abs(compared[number] - c.compared_ns) > 1 for c in self.current):
                self.current.append(candidates.row(number, *judged.of(number)))
        for current in self.current:
            self._note(current)
        if self.judge.misses is not None:
            compared = compared_ns(predicted.makespan_ns, events)
            best = {int(np.lexsort(keys)[0]) for keys in ((compared, predicted.makespan_ns), (compared,))}
            for number in sorted(number for number in best if predicted.makespan_ns[number] < REFUSED_NS):
                mean_ns = int(judged.makespan_ns[number])
                if mean_ns == REFUSED_NS:
                    mean_ns = int(self.judge.means_ns(candidates, orders, predicted, [number])[0])
                self.best_seeds.append(candidates.row(number, mean_ns, int(events[number])))

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
        judged = self.judge.neighbours(near, orders, events)
        compared = judged.compared_ns
        better = [row for row in np.argsort(compared, kind="stable") if compared[row] < current.compared_ns]
        more = joined(current, near, better, JOINED)
        if len(more.keys):
            near = near.with_more(more)
            launched = self.judge.orders(more.keys)
            orders = np.concatenate([orders, launched])
            judged = judged.with_more(self.judge.neighbours(more, launched, self.judge.events(launched, more)))
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
            orders = self.judge.orders(same.keys)
            (fingerprint,), (events,) = self.fingerprints.of(orders, same), self.judge.events(orders, same).tolist()
            current.tried[fingerprint] = events
        drawn = self.moves.draw(current, DRAWN * BATCH)
        orders = self.judge.orders(drawn.keys)
        counted = self.judge.events(orders, drawn)
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

    def result(self, interrupted: bool) -> Refined:
        """Return the best schedules."""
        found = self._with_best_seeds()
        orders = self.judge.orders(self._candidates(found).keys)
        schedules = [
            schedule_of(self.graph, order, each, self.partitions)
            for order, each in zip(orders.tolist(), found, strict=True)
        ]
        robust, events = (tuple(getattr(c, name) for c in found) for name in ("makespan_ns", "events"))
        makespans = tuple(self._predicted_ns(found))
        return Refined(tuple(schedules), makespans, robust, events, self.judge.evaluations, interrupted)

    def _with_best_seeds(self) -> list[Current]:
        """Return the schedules kept, with the best seeds as far as none of them is predicted as good."""
        found_ns = self._predicted_ns(self.kept)
        least_ns = min(found_ns, default=REFUSED_NS)
        compared = min((compared_ns(ns, each.events) for ns, each in zip(found_ns, self.kept, strict=True)), default=0)
        better = [
            seed
            for seed_ns, seed in zip(self._predicted_ns(self.best_seeds), self.best_seeds, strict=True)
            if seed_ns < least_ns or compared_ns(seed_ns, seed.events) < compared
        ]
        return sorted([*self.kept, *better], key=_compared)

    def _predicted_ns(self, found: list[Current]) -> list[int]:
        """Return the predicted makespans of schedules found, in ns."""
        if not found:
            return []
        spent, candidates = self.judge.evaluations, self._candidates(found)
        events = np.array([each.events for each in found], np.int64)
        predicted = self.judge.predict(candidates, self.judge.orders(candidates.keys), events, len(found))
        self.judge.evaluations = spent  # not part of the search
        return [int(makespan_ns) for makespan_ns in predicted.makespan_ns]

    def _candidates(self, found: list[Current]) -> Candidates:
        if not found:
            none = np.zeros((0, len(self.graph)))
            return Candidates(none, none.astype(np.int32), none.astype(np.int32))
        return Candidates(
            np.array([each.keys for each in found]),
            np.array([each.streams for each in found]),
            np.array([each.variants for each in found]),
        )


def _compared(current: Current) -> int:
    return current.compared_ns
