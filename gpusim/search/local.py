"""Anytime local search over list schedules: priorities, stream count and how much room an op waits for.

A candidate is a vector of priorities; the list scheduler (`gpusim.policies.critical_path`) turns it into a legal
schedule and sees its makespan while it does. The search starts from bottom levels for every stream count, then
perturbs the priorities of the best, a few ops at a time. The same seed gives the same candidates in the same order.
"""

from __future__ import annotations

import math
import random
import time
from collections.abc import Callable
from dataclasses import dataclass

from gpusim.plan.graph import OpGraph
from gpusim.policies.base import Assignment, work_order
from gpusim.policies.list_scheduling import MIN_SHARE, list_schedule

#: Shares of its blocks that an op waits for, tried for every stream count.
SHARES = (0.0, MIN_SHARE, 0.25, 0.5)
#: The search stops after this many candidates in a row that improve nothing.
PATIENCE = 150
#: Share of ops whose priorities a move changes: few or many, drawn anew for each.
MOVE_SHARES = (0.005, 0.02, 0.1, 0.3)
#: How far a move shifts a priority, as a share of the longest chain.
MOVE_SCALE = 0.15


@dataclass(frozen=True)
class Candidate:
    """A schedule the search looked at, with the makespan that the list scheduler saw."""

    assignment: Assignment
    streams: int
    makespan_ns: float


@dataclass(frozen=True)
class Found:
    """The best candidates, best first, and how the search went."""

    candidates: tuple[Candidate, ...]
    evaluations: int
    interrupted: bool


def local_search(
    graph: OpGraph,
    max_streams: int,
    *,
    budget_s: float,
    seed: int,
    lower_bound_ns: float = 0.0,
    keep: int = 8,
    progress: Callable[[float, float], None] = lambda share, best_ns: None,
) -> Found:
    """Search until the budget is spent, patience is out, or the lower bound is met; Ctrl-C keeps the best found.

    `progress` gets the share of the budget used and the best makespan so far.
    """
    search = _Search(graph, keep)
    deadline = time.monotonic() + budget_s
    interrupted = False
    try:
        for streams in range(1, max_streams + 1):
            for share in SHARES:
                if time.monotonic() > deadline and search.best:
                    break
                search.evaluate(streams, share, list(graph.bottom_ns))
            progress(0.0, search.best[0].makespan_ns)
        _improve(search, max_streams, deadline, budget_s, seed, lower_bound_ns, progress)
    except KeyboardInterrupt:
        interrupted = True
        if not search.best:
            raise
    return Found(tuple(search.best), search.evaluations, interrupted)


class _Search:
    """The best candidates so far, with the settings that made the very best."""

    def __init__(self, graph: OpGraph, keep: int) -> None:
        self.graph = graph
        self.keep = keep
        self.best: list[Candidate] = []
        self.evaluations = 0
        self.settings: tuple[int, float, list[float]] = (1, 0.0, [])

    def evaluate(self, streams: int, share: float, priority: list[float]) -> bool:
        """Schedule and keep; True where this is the new best."""
        made = list_schedule(self.graph, streams, priority, share)
        self.evaluations += 1
        candidate = Candidate(made.assignment, streams, made.makespan_ns)
        better = not self.best or candidate.makespan_ns < self.best[0].makespan_ns - 0.5
        if all(abs(candidate.makespan_ns - other.makespan_ns) > 0.5 for other in self.best):
            self.best = sorted([*self.best, candidate], key=lambda c: c.makespan_ns)[: self.keep]
        if better:
            self.settings = (streams, share, priority)
        return better


def _improve(
    search: _Search,
    max_streams: int,
    deadline: float,
    budget_s: float,
    seed: int,
    lower_bound_ns: float,
    progress: Callable[[float, float], None],
) -> None:
    """Perturb the best until nothing helps."""
    draw = random.Random(seed)
    work = work_order(search.graph)
    scale = MOVE_SCALE * max(search.graph.bottom_ns, default=0.0)
    stale = 0
    while stale < PATIENCE and search.best[0].makespan_ns > lower_bound_ns + 0.5:
        left = deadline - time.monotonic()
        if left <= 0:
            return
        progress(1.0 - left / budget_s if math.isfinite(budget_s) else 0.0, search.best[0].makespan_ns)
        streams, share, priority = search.settings
        priority = list(priority)
        for op in draw.sample(work, max(1, round(draw.choice(MOVE_SHARES) * len(work)))):
            priority[op] += draw.gauss(0.0, scale)
        if draw.random() < 0.1:
            streams = min(max_streams, max(1, streams + draw.choice((-1, 1))))
        if draw.random() < 0.1:
            share = draw.choice(SHARES)
        stale = 0 if search.evaluate(streams, share, priority) else stale + 1
