"""Anytime local search over list schedules: priorities, stream count and minimum share of blocks.

A candidate is a vector of priorities; the list scheduler (`gpusim.policies.shared.list_scheduling`) turns it into a
legal schedule and computes its makespan. Candidates are compared by makespan and events (`gpusim.search.events`). The
search starts from bottom levels for every stream count, then perturbs the priorities of the best candidates, a few ops
at a time, in batches shared by all cores. The same seed gives the same candidates in the same order on any number of
cores, so a search limited by evaluations is reproducible everywhere.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from gpusim.engine.batch import BatchEngine
from gpusim.plan.graph import OpGraph
from gpusim.plan.schedule import Schedule
from gpusim.policies.shared.base import work_order
from gpusim.policies.shared.list_scheduling import MIN_SHARE, FastLists
from gpusim.search.events import compared_ns
from gpusim.search.interrupt import STOPS

#: Minimum shares of its blocks that an op waits for, tried for every stream count.
SHARES = (0.0, MIN_SHARE, 0.25, 0.5)
#: Candidates made from one best candidate; not the number of cores, which must not affect results.
BATCH = 64
#: The search stops after this many consecutive candidates without improvement.
PATIENCE = 32 * BATCH
#: Shares of ops with changed priorities in a move, drawn for each move.
MOVE_SHARES = (0.005, 0.02, 0.1, 0.3)
#: Standard deviation of a change of priority, as a share of the longest chain.
MOVE_SCALE = 0.15
#: Probability that a move changes the stream count, and that it changes the share.
SWITCH_SHARE = 0.1


@dataclass(frozen=True)
class Candidate:
    """A candidate schedule with the makespan computed by the list scheduler, and its events."""

    schedule: Schedule
    streams: int
    makespan_ns: float
    events: int

    @property
    def compared_ns(self) -> float:
        """What candidates are compared by."""
        return compared_ns(self.makespan_ns, self.events)


@dataclass(frozen=True)
class Found:
    """The best candidates, best first, and statistics of the search."""

    candidates: tuple[Candidate, ...]
    evaluations: int
    interrupted: bool


def local_search(
    graph: OpGraph,
    max_streams: int,
    *,
    budget_s: float,
    seed: int,
    evaluations: int | None = None,
    lower_bound_ns: float = 0.0,
    keep: int = 8,
    threads: int | None = None,
    progress: Callable[[float, float], None] = lambda share, best_ns: None,
) -> Found:
    """Search until time, evaluations or patience are spent, or the bound is met; Ctrl-C keeps the best so far.

    The first batch is always evaluated, and time counts from its end, since compilation is not search. `progress` gets
    the used share of the budget and the best makespan so far. `threads` defaults to one per core.
    """
    search = _Search(graph, keep, threads, evaluations)
    deadline = math.inf
    interrupted = False
    try:
        for batch in _starts(graph, max_streams):
            search.evaluate(batch)
            deadline = min(deadline, time.monotonic() + budget_s)
            progress(0.0, search.best[0].makespan_ns)
            if search.spent or time.monotonic() > deadline:
                break
        moves = _Moves(graph, max_streams, seed)
        while search.stale < PATIENCE and not search.spent and search.best[0].makespan_ns > lower_bound_ns + 0.5:
            left_s = deadline - time.monotonic()
            if left_s <= 0:
                break
            used = max(search.share_spent, 1.0 - left_s / budget_s if math.isfinite(budget_s) else 0.0)
            progress(used, search.best[0].makespan_ns)
            search.evaluate(moves.draw(search.best[0].settings))
    except STOPS:
        interrupted = True
        if not search.best:
            raise
    return Found(search.candidates(), search.evaluations, interrupted)


@dataclass(frozen=True)
class _Settings:
    """Settings of the list scheduler for one candidate."""

    streams: int
    share: float
    priority: npt.NDArray[np.float64]


@dataclass(frozen=True)
class _Scored:
    makespan_ns: float
    events: int
    settings: _Settings

    @property
    def compared_ns(self) -> float:
        return compared_ns(self.makespan_ns, self.events)


class _Search:
    """State of the search: the best candidates so far, best first, and the number of evaluations."""

    def __init__(self, graph: OpGraph, keep: int, threads: int | None, limit: int | None) -> None:
        self.lists, self.engine = FastLists(graph), BatchEngine(graph)
        self.keep = keep
        self.threads = threads
        self.limit = limit
        self.best: list[_Scored] = []
        self.evaluations = 0
        self.stale = 0
        """Number of candidates since the last improvement."""

    @property
    def spent(self) -> bool:
        """True if the requested number of evaluations is reached."""
        return self.limit is not None and self.evaluations >= self.limit

    @property
    def share_spent(self) -> float:
        """Used share of the requested evaluations."""
        return self.evaluations / self.limit if self.limit else 0.0

    def evaluate(self, batch: Sequence[_Settings]) -> None:
        """Schedule all candidates, or as many as are left, and keep the best distinct ones."""
        if self.limit is not None:
            batch = batch[: max(1, self.limit - self.evaluations)]
        found = self.lists.schedules(
            np.array([settings.priority for settings in batch]),
            [settings.streams for settings in batch],
            [settings.share for settings in batch],
            threads=self.threads,
        )
        events = self.engine.events(found.orders, found.streams, threads=self.threads)
        for scored in map(_Scored, found.makespan_ns.tolist(), events.tolist(), batch):
            self.evaluations += 1
            self.stale += 1
            if not self.best or scored.compared_ns < self.best[0].compared_ns - 0.5:
                self.stale = 0
            if all(abs(scored.compared_ns - other.compared_ns) > 0.5 for other in self.best):
                self.best = sorted([*self.best, scored], key=_compared)[: self.keep]

    def candidates(self) -> tuple[Candidate, ...]:
        """Return the best candidates as schedules."""
        best = []
        for scored in self.best:
            settings = scored.settings
            evaluated = self.lists.schedule(settings.streams, settings.priority, settings.share)
            best.append(Candidate(evaluated.schedule, settings.streams, evaluated.makespan_ns, scored.events))
        return tuple(best)


def _compared(scored: _Scored) -> float:
    return scored.compared_ns


def _starts(graph: OpGraph, max_streams: int) -> Iterator[list[_Settings]]:
    """Yield bottom levels for every stream count and share, in batches."""
    bottom = np.array(graph.bottom_ns)
    settings = [_Settings(streams, share, bottom) for streams in range(1, max_streams + 1) for share in SHARES]
    for first in range(0, len(settings), BATCH):
        yield settings[first : first + BATCH]


class _Moves:
    """Generator of neighbours; uses only uniform random numbers, which are the same in all versions of numpy."""

    def __init__(self, graph: OpGraph, max_streams: int, seed: int) -> None:
        self.random = np.random.Generator(np.random.PCG64(seed))
        self.work = np.array(work_order(graph), np.int64)
        self.max_streams = max_streams
        self.scale = MOVE_SCALE * max(graph.bottom_ns, default=0.0)

    def draw(self, near: _Settings) -> list[_Settings]:
        """Return a batch of neighbours, independent of how many of them are evaluated."""
        shape = (BATCH, len(self.work))
        how_many = np.array(MOVE_SHARES)[self._integers(BATCH, len(MOVE_SHARES))]
        chosen = self.random.random(shape) < how_many[:, None]
        chosen[np.arange(BATCH), self._integers(BATCH, len(self.work))] = True
        # The difference of two uniform numbers has a triangular distribution with variance 1/6.
        shift = (self.random.random(shape) - self.random.random(shape)) * (math.sqrt(6.0) * self.scale)
        priorities = np.repeat(near.priority[None, :], BATCH, axis=0)
        priorities[:, self.work] += np.where(chosen, shift, 0.0)
        steps = np.where(self.random.random(BATCH) < SWITCH_SHARE, 2 * self._integers(BATCH, 2) - 1, 0)
        streams = np.clip(near.streams + steps, 1, self.max_streams)
        switches = self.random.random(BATCH) < SWITCH_SHARE
        shares = np.where(switches, np.array(SHARES)[self._integers(BATCH, len(SHARES))], near.share)
        return [_Settings(int(streams[index]), float(shares[index]), priorities[index]) for index in range(BATCH)]

    def _integers(self, count: int, below: int) -> npt.NDArray[np.int64]:
        return (self.random.random(count) * below).astype(np.int64)
