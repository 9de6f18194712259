"""Orders in which our own planner moves saved storages or computes them again, by price and bytes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from math import inf

from gpusim.memplan.memory import needs_at_once
from gpusim.memplan.plan import MemoryPlan
from gpusim.memplan.policies.base import Setting
from gpusim.memplan.policies.layrub import weights_first
from gpusim.memplan.policies.olla import greedy_order
from gpusim.memplan.policies.runs import Runs
from gpusim.memplan.rebuild import Chain, chain
from gpusim.memplan.storages import Storages
from gpusim.memplan.times import CopiesOut, OpTimes, last_forward_places, turn_place

#: Smallest storage worth an action, as a fraction of all saved bytes.
SMALLEST_SHARE = 1e-4
#: Share of memory that another order must save.
LEAST_SAVED = 0.02
#: Bytes of saved storages that are computed from another one, over its own, from which on it is worth keeping.
WORTH_KEEPING = 2.0


@dataclass(frozen=True)
class Choice:
    """Storages to move and storages to recompute."""

    moved: tuple[int, ...]
    again: tuple[int, ...]
    apart: bool = False
    """Whether each is recomputed for itself alone, so that nothing comes back before it is needed."""
    kept: frozenset[int] = frozenset()
    """Other storages that stay where recomputation reads them."""


def worth_keeping(storages: Storages, chains: Mapping[int, Chain]) -> frozenset[int]:
    """Return the storages that the step does not save, and from which much more is computed than they take.

    In DenseNet, what a convolution adds is a small part of the many concatenations that it goes into.
    """
    saved = frozenset(storages.saved)
    from_bytes: dict[int, int] = {}
    for storage, each in chains.items():
        recipe = storages.recipes[storage]
        for source, unchanged in recipe.sources if recipe is not None else ():
            if source in each.storages and source not in saved and unchanged:
                from_bytes[source] = from_bytes.get(source, 0) + storages.bytes[storage]
    return frozenset(s for s, size in from_bytes.items() if size >= WORTH_KEEPING * storages.bytes[s])


def lean_order(setting: Setting) -> tuple[int, ...]:
    """Return a launch order of little memory: the forward pass as recorded, and the rest in one of two orders.

    OLLA's greedy order counts where it takes `LEAST_SAVED` off the peak of keeping all, or off what one op needs at
    least: gradients of large weights, as in VGG-16, come late then. Otherwise only the gradients of a convolution
    change places, as in Layrub.
    """
    storages = setting.storages
    plain = weights_first(storages)
    turn = storages.first_backward
    greedy = (*range(turn), *(op for op in greedy_order(storages) if op >= turn))
    peaks = [setting.peak_bytes(MemoryPlan(order=order)) for order in (plain, greedy)]
    needs = [max(needs_at_once(storages, order), default=0) for order in (plain, greedy)]
    leaner = any(other <= (1 - LEAST_SAVED) * first for first, other in (peaks, needs))
    return greedy if leaner else plain


class Orders:
    """Orders for one step, computed once for all budgets.

    `kept` are storages that the step does not save, and that may stay for recomputation.
    """

    def __init__(self, setting: Setting, times: OpTimes, kept: frozenset[int] = frozenset()) -> None:
        self.setting = setting
        self.storages = setting.storages
        self.times = times
        self.kept = kept
        self._orders: dict[tuple[tuple[int, ...], float], list[int]] = {}
        self._moved: dict[float, tuple[int, ...]] = {}

    @cached_property
    def actionable(self) -> tuple[int, ...]:
        """Saved storages worth an action, in the order of the forward pass."""
        size = self.storages.bytes
        least = SMALLEST_SHARE * sum(size[s] for s in self.storages.saved)
        return tuple(s for s in self.storages.saved if size[s] >= least)

    @cached_property
    def chains(self) -> Mapping[int, Chain]:
        """Recomputation of each saved storage that has one, from all others and from what is kept."""
        if not self.kept:
            return self.setting.chains
        there = self.kept.union(self.storages.saved)
        chains = {s: chain(self.storages, (s,), there.__contains__) for s in self.setting.chains}
        return {s: each for s, each in chains.items() if each is not None}

    @cached_property
    def price_ns(self) -> dict[int, float]:
        """Time to recompute each of them from all others, in ns; infinite where impossible."""
        solo_ns = self.setting.graph.solo_ns
        return {s: sum(solo_ns[op] for op in self.chains[s].ops) if s in self.chains else inf for s in self.actionable}

    def density(self, storage: int) -> float:
        """Return the price per byte."""
        return self.price_ns[storage] / self.storages.bytes[storage]

    def moved(self, share: float) -> tuple[int, ...]:
        """Return the storages that move where copies out may take this share of the forward pass (rule 2)."""
        if share not in self._moved:
            self._moved[share] = self._moved_at(share)
        return self._moved[share]

    def _saving(self, storage: int) -> float:
        """Return what a byte saves that moves instead of being recomputed, in ns."""
        return (self.price_ns[storage] - self.setting.link.wait_ns) / self.storages.bytes[storage]

    def _moved_at(self, share: float) -> tuple[int, ...]:
        if not share:
            return ()
        size, limit = self.storages.bytes, self.setting.pinned_bytes
        turn_ns = self.times.start_ns[turn_place(self.storages, self.times)]
        last = last_forward_places(self.storages, self.times, self.actionable)
        copies = CopiesOut(self.times, self.setting.link)
        chosen: list[int] = []
        pinned = 0
        for storage in sorted(self.actionable, key=lambda s: (-self._saving(s), last[s])):
            if self._saving(storage) <= 0:
                break
            if limit is not None and pinned + size[storage] > limit:
                continue
            if copies.add((last[storage], storage), size[storage], share * turn_ns):
                chosen.append(storage)
                pinned += size[storage]
        return tuple(sorted(chosen))

    @cached_property
    def sources(self) -> dict[int, tuple[int, ...]]:
        """Sources among them of each that can be recomputed."""
        among = frozenset(self.actionable)
        return {
            s: tuple(sorted(frozenset().union(*(self.storages.touched[op] for op in each.ops)) & among - each.storages))
            for s, each in self.chains.items()
            if s in among
        }

    @cached_property
    def cheapest(self) -> tuple[int, ...]:
        """Those that can be recomputed, the cheapest per byte first."""
        return tuple(sorted(self.sources, key=lambda s: (self.density(s), s)))

    def cheapest_first(self, moved: Sequence[int], run_bytes: float) -> list[int]:
        """Return the storages to recompute, cheapest per byte first (rule 3).

        The sources that one of them brings back take no more than `run_bytes`.
        """
        key = (tuple(moved), run_bytes)
        if key not in self._orders:
            self._orders[key] = self._cheapest_first(moved, run_bytes)
        return self._orders[key]

    def _cheapest_first(self, moved: Sequence[int], run_bytes: float) -> list[int]:
        gone = frozenset(moved)
        runs = Runs(self.sources, self.storages.bytes, run_bytes)
        return [s for s in self.cheapest if s not in gone and runs.add(s)]
