"""Capuchin: swap what can be hidden, then recompute what saves most memory for its time.

Source: Peng et al., "Capuchin: Tensor-based GPU Memory Management for Deep Learning" (ASPLOS, 2020), by a review and
two reimplementations (none by the authors is public). The rules:

1. *Candidates.* Tensors with an access in the forward pass (the last is the evicted access) and one later (the back
   access), while memory is over the budget.
2. *Swap.* The swap out ends a copy's time after the evicted access, the swap in starts a copy's time before the back
   access; what lies between is the tensor's free time. Candidates with free time are taken, the longest first, where
   the link is unused when they need it, until enough memory is freed.
3. *Recompute.* Of the rest, the tensor with most bytes for its recomputation time (MSPS) is taken, again and again.
   Where a tensor's source was taken before, its own time grows by that of the source, and so does that of tensors whose
   source it is.

Filled in: a swap in starts at its in-trigger by the times of the ops; Capuchin moves it earlier from step to step. Both
directions have an engine of their own. Without a budget: half of what keeping all takes. Where no
number of tensors reaches it, the plan of least peak on the way.
"""

from __future__ import annotations

import bisect
import heapq
import math
from collections.abc import Sequence

from gpusim.memplan.plan import MemoryPlan
from gpusim.memplan.policies.base import Setting, layer_ends
from gpusim.memplan.times import OpTimes, first_needs, last_forward_places, place_copies


def capuchin(setting: Setting, most_again_ns: float = math.inf) -> MemoryPlan:
    """Swap first, then recompute, as much as the budget requires; no further once that takes `most_again_ns`."""
    storages, budget = setting.storages, setting.budget_or_half
    swapped = swaps(setting, setting.keep_all_bytes - budget)
    order = by_msps(setting, swapped)
    best = plan = _plan(setting, swapped, ())
    least = peak = setting.peak_bytes(plan)
    taken = 0
    while least > budget and taken < len(order):
        wanted = max(peak - budget, 1)
        while taken < len(order) and wanted > 0:
            wanted -= storages.bytes[order[taken]]
            taken += 1
        plan = _plan(setting, swapped, order[:taken])
        peak = setting.peak_bytes(plan)
        if peak < least:
            best, least = plan, peak
        if sum(setting.graph.solo_ns[op] for redo in plan.redos for op in redo.ops) >= most_again_ns:
            break
    return best


def _plan(setting: Setting, swapped: list[int], again: tuple[int, ...] | list[int]) -> MemoryPlan:
    storages = setting.storages
    redos = setting.facts.separate_redos.of(again, again)
    times = OpTimes.of(setting.graph, redos=redos)
    needs = first_needs(storages, times, swapped, redos)
    offloads = place_copies(storages, times, setting.link, swapped, needs)
    return MemoryPlan(offloads=offloads, redos=redos, barriers=layer_ends(setting) if setting.synchronous else ())


def swaps(setting: Setting, excess_bytes: int) -> list[int]:
    """Return the tensors that rule 2 swaps to free this much."""
    storages, times, link = setting.storages, setting.times, setting.link
    last = last_forward_places(storages, times, storages.saved)
    need = first_needs(storages, times, storages.saved)
    out: dict[int, tuple[float, float]] = {}
    back: dict[int, tuple[float, float]] = {}
    for storage in storages.saved:
        begin, end = times.end_ns[last[storage]], times.start_ns[need[storage]]
        out[storage] = (begin, begin + link.out_ns(storages.bytes[storage]))
        back[storage] = (end - link.back_ns(storages.bytes[storage]), end)
    free_ns = {s: back[s][0] - out[s][1] for s in storages.saved}
    lanes: tuple[list[tuple[float, float]], list[tuple[float, float]]] = ([], [])
    chosen: list[int] = []
    freed = 0
    for storage in sorted(storages.saved, key=lambda s: (-free_ns[s], s)):
        if freed >= excess_bytes or free_ns[storage] <= 0:
            break
        if _unused(lanes[0], out[storage]) and _unused(lanes[1], back[storage]):
            bisect.insort(lanes[0], out[storage])
            bisect.insort(lanes[1], back[storage])
            chosen.append(storage)
            freed += storages.bytes[storage]
    return chosen


def _unused(lane: list[tuple[float, float]], asked: tuple[float, float]) -> bool:
    place = bisect.bisect_left(lane, asked)
    before_ok = place == 0 or lane[place - 1][1] <= asked[0]
    return before_ok and (place == len(lane) or asked[1] <= lane[place][0])


def by_msps(setting: Setting, swapped: Sequence[int]) -> list[int]:
    """Return the order in which rule 3 takes tensors."""
    storages = setting.storages
    gone = frozenset(swapped)
    left = {s: setting.recompute_ns(s) for s in setting.chains if s not in gone}
    sources = {s: setting.facts.sources[s] for s in left}
    built_on: dict[int, list[int]] = {}
    for storage, read in sources.items():
        for source in read:
            built_on.setdefault(source, []).append(storage)

    def rank(storage: int) -> tuple[float, int]:
        """Rank a tensor: smallest for the most bytes per time."""
        return -(storages.bytes[storage] / max(left[storage], 1.0)), storage

    own = dict(left)
    order: list[int] = []
    users = dict.fromkeys(left, 0)
    """Number of taken tensors with this one as a source."""
    waiting = [rank(storage) for storage in left]
    heapq.heapify(waiting)
    while left:
        ranked = heapq.heappop(waiting)
        best = ranked[1]
        if ranked != rank(best):  # its time has grown since, so it comes later
            heapq.heappush(waiting, rank(best))
            continue
        cost = left.pop(best)
        order.append(best)
        for other in built_on.get(best, ()):
            if other in left:  # it must be brought back first
                left[other] += cost
        for other in sources[best]:
            if other in left:  # everything built on it is built again
                users[other] += 1
                left[other] = max(left[other], own[other] * users[other])
    return order
