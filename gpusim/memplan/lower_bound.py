"""A lower bound on the step time of any memory plan within a budget, from copies and recomputation.

While op t of the forward pass runs, or the first op after it, each storage that later ops need and op t does not is on
the GPU, on the host, or gone and to be computed again. What is over the budget then, D bytes, is one of the last two.
Storages that only the forward pass needs count as free of charge:

1. *Copies.* What is on the host was copied out before op t starts, and comes back after it. So m bytes take at least
   m / bandwidth each way, out `1 + copy_slowdown` times as long, and as far as that is longer than the ops before t,
   op t starts later. Kernels beside a copy take `1 + kernel_slowdown` times as long. Of the copies out either
   the delay counts or the slower kernels.
2. *Recomputation.* What is gone is written again by every op of the forward pass that wrote it. What these ops read
   and the step does not save is computed again, too, unless it stays; where it is no smaller than all that is computed
   from it, keeping it frees nothing. An op that serves several such storages runs once for all: each is charged the
   share of its bytes.

The bound takes storages by parts, the cheapest for their bytes first, and for each op t chooses the best m:

    step >= keep_all + min over m of (cheapest recomputation of D - m bytes) + f * m / bandwidth back - f * idle time
                                     + max((1 + copy_slowdown) * (m - free bytes), f * m) / bandwidth out

with f = `kernel_slowdown / (1 + 2 kernel_slowdown) * (1 + copy_slowdown)`, and as free bytes what is copied before t.
In a plan whose ops and copies all wait for each other, copies out take no longer than alone, but m bytes then cost
m / bandwidth out + m / bandwidth back, which is more. The bound leaves out latencies, waits for copies, what
recomputation needs of storages that are gone, too, and the time at which a storage is made. It holds for plans of the
captured kernels on one stream that keep the forward pass in recorded order. On any stream and in any order, no such
plan keeps less than one op alone takes: what it reads and makes, its workspace, and all that was there before the step.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from functools import cached_property
from math import inf

import numpy as np
import numpy.typing as npt

from gpusim.engine.base import Timeline
from gpusim.formats.hardware import Copies
from gpusim.memplan.evaluate import MemoryEvaluator
from gpusim.memplan.lowering import LoweredProgram, lower_program
from gpusim.memplan.plan import MemoryPlan
from gpusim.memplan.profile import BytesProfile
from gpusim.memplan.program import program_of
from gpusim.memplan.rebuild import chain
from gpusim.memplan.storages import Storages
from gpusim.memplan.times import OpTimes
from gpusim.rules import copies

#: Ops that are tried for the bound of a large step, those furthest over the budget; any of them gives a bound.
MOST_OPS = 256


class LowerBound:
    """Bounds of one step on one GPU, for any budget."""

    def __init__(self, evaluator: MemoryEvaluator) -> None:
        self._storages = evaluator.storages
        self._copies = evaluator.graph.hardware.copies
        self._profile = BytesProfile(self._storages, OpTimes.of(evaluator.graph))
        lowered = lower_program(evaluator.graph, self._storages, program_of(self._storages, MemoryPlan()))
        timeline = evaluator.engine.run(lowered.plan, evaluator.graph.hardware)
        self.keep_all_ns = timeline.makespan_ns
        self._idle_ns = self.keep_all_ns - sum(
            end - start for start, end in zip(timeline.start_ns, timeline.end_ns, strict=True)
        )
        self._start_ns = _starts(len(self._storages.trace.ops), lowered, timeline)
        self._passing = _passing(self._storages)
        self._by_price = sorted(prices(self._storages, evaluator.graph.solo_ns).items(), key=lambda each: each[1])
        """Saved storages with ns a byte of recomputation, infinite where nothing computes them again."""

    def holds_for(self, plan: MemoryPlan) -> bool:
        """Return whether a plan runs the captured kernels on one stream, with the forward pass in recorded order."""
        turn = self._storages.first_backward
        if plan.has_variants:
            return False
        return not any(plan.op_streams) and (not plan.order or tuple(plan.order[:turn]) == tuple(range(turn)))

    def step_ns(self, budget_bytes: int) -> int | None:
        """Return what a step takes at least within this budget, in ns; None where no plan can keep it."""
        if budget_bytes < self.least_bytes:
            return None
        latest = min(self._storages.first_backward, len(self._start_ns) - 1)
        over_bytes = {op: int(self._profile.level[op]) - budget_bytes for op in range(latest + 1)}
        most = 0.0
        for op in heapq.nlargest(MOST_OPS, over_bytes, key=over_bytes.__getitem__):
            if over_bytes[op] > 0:
                extra_ns = self._extra_ns(op, over_bytes[op])
                if extra_ns is None:
                    return None
                most = max(most, extra_ns)
        return self.keep_all_ns + int(most)

    @cached_property
    def least_bytes(self) -> int:
        """Bytes that one op alone takes, as captured, with what was there before the step."""
        profile, initial = self._profile, self._storages.initial
        alone = (
            sum(profile.size[s] for s in touched - initial) + workspace
            for touched, workspace in zip(self._storages.touched, profile.workspace, strict=True)
        )
        return profile.initial_bytes + max(alone, default=0)

    def _extra_ns(self, op: int, over_bytes: int) -> float | None:
        """Return the least cost of freeing this many bytes while an op runs; None if fewer could be freed."""
        storages, size = self._storages, self._profile.size
        there = [
            (size[storage], price)
            for storage, price in self._by_price
            if storages.users[storage][0] < op and storage not in storages.touched[op]
        ]
        first, last = self._passing
        passing = np.flatnonzero((first < op) & (last > op)).tolist()
        there.append((sum(size[storage] for storage in passing if storage not in storages.touched[op]), 0.0))
        if sum(each for each, _ in there) < over_bytes:
            return None
        cost_ns = cheapest_ns(there, over_bytes, self._copies, self._start_ns[op])
        return cost_ns - copies.least_loss(self._copies) * self._idle_ns


def cheapest_ns(there: Sequence[tuple[int, float]], over_bytes: float, link: Copies, before_ns: float) -> float:
    """Return the least time that `over_bytes` cost.

    `there` are bytes and ns a byte of recomputation. Copies out may run for the first `before_ns` of the step without
    delay.
    """
    out, back = (copies.full_bytes_per_ns(link, to_device) for to_device in (False, True))
    in_step = copies.bytes_per_ns(link, to_device=False, both=False, kernels=True)
    slower = copies.least_loss(link)
    free_bytes = in_step * before_ns
    concurrent = (free_bytes / (1 - slower) if slower < 1 else inf, slower / out + slower / back)
    left, cost_ns = over_bytes, 0.0
    for size, price in sorted([*there, concurrent, (inf, 1.0 / in_step + slower / back)], key=lambda each: each[1]):
        if left <= 0:
            break
        part = min(size, left)
        cost_ns += part * price
        left -= part
    return cost_ns


def prices(storages: Storages, solo_ns: Sequence[float]) -> dict[int, float]:
    """Return for each saved storage what recomputing a byte of it takes at least, in ns; see rule 2."""
    needed = _needed_ops(storages)
    served_bytes: dict[int, int] = {}
    for storage, ops in needed.items():
        for op in ops:
            served_bytes[op] = served_bytes.get(op, 0) + storages.bytes[storage]
    return {
        storage: sum(solo_ns[op] / served_bytes[op] for op in needed[storage]) if storage in needed else inf
        for storage in storages.saved
    }


def _needed_ops(storages: Storages) -> dict[int, frozenset[int]]:
    """Return the ops that run again wherever a saved storage is recomputed, without those that nothing recomputes."""
    saved = frozenset(storages.saved)
    own = {s: frozenset(op for op in storages.writers[s] if op < storages.first_backward) for s in saved}
    own = {s: ops for s, ops in own.items() if ops and all(storages.may_run_again[op] for op in ops)}
    chains = {s: each for s in own if (each := chain(storages, (s,), saved.__contains__)) is not None}
    between = {s: each.storages - saved for s, each in chains.items()}
    built_bytes: dict[int, int] = {}
    for storage, sources in between.items():
        for source in sources:
            built_bytes[source] = built_bytes.get(source, 0) + storages.bytes[storage]

    def never_stays(source: int) -> bool:
        return storages.bytes[source] >= built_bytes[source]

    return {
        s: frozenset(chains[s].ops) if s in chains and all(map(never_stays, between[s])) else ops
        for s, ops in own.items()
    }


def _passing(storages: Storages) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
    """Return the first and last user of each storage that a step makes, neither saves nor returns; else -1 and -1."""
    first, last = (np.full(len(storages.users), -1, dtype=np.int64) for _ in range(2))
    kept = {*storages.saved, *storages.results, *storages.initial}
    for storage, users in enumerate(storages.users):
        if users and storage not in kept:
            first[storage], last[storage] = users[0], users[-1]
    return first, last


def _starts(ops: int, lowered: LoweredProgram, timeline: Timeline) -> list[float]:
    """Return when each op of the step that keeps all starts, in ns; one without kernels when the next one does."""
    starts = [0.0] * ops
    upcoming = float(timeline.makespan_ns)
    for instruction, tasks in zip(reversed(lowered.program), reversed(lowered.tasks_of), strict=True):
        if tasks:
            upcoming = float(min(timeline.start_ns[task] for task in tasks))
        if instruction.kind == "run":
            starts[instruction.op] = upcoming
    return starts
