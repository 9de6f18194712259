"""Orders in which our own planner moves saved storages or computes them again, by price and bytes."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property

from gpusim.memplan.policies.base import Setting
from gpusim.memplan.policies.runs import Runs
from gpusim.memplan.times import CopiesOut, OpTimes, last_forward_places

#: Smallest storage worth an action, as a fraction of all saved bytes.
SMALLEST_SHARE = 1e-4


class Orders:
    """Orders for one step, computed once for all budgets."""

    def __init__(self, setting: Setting, times: OpTimes) -> None:
        self.setting = setting
        self.storages = setting.storages
        self.times = times
        self._orders: dict[tuple[tuple[int, ...], float], list[int]] = {}
        self._moved: dict[float, tuple[int, ...]] = {}

    @cached_property
    def actionable(self) -> tuple[int, ...]:
        """Saved storages worth an action, in the order of the forward pass."""
        size = self.storages.bytes
        least = SMALLEST_SHARE * sum(size[s] for s in self.storages.saved)
        return tuple(s for s in self.storages.saved if size[s] >= least)

    @cached_property
    def price_ns(self) -> dict[int, float]:
        """Time to recompute each of them from all others, in ns."""
        return {storage: self.setting.recompute_ns(storage) for storage in self.actionable}

    def density(self, storage: int) -> float:
        """Return the price per byte."""
        return self.price_ns[storage] / self.storages.bytes[storage]

    def moved(self, share: float) -> tuple[int, ...]:
        """Return the storages that move where copies out may take this share of the forward pass (rule 2)."""
        if share not in self._moved:
            self._moved[share] = self._moved_at(share)
        return self._moved[share]

    def _moved_at(self, share: float) -> tuple[int, ...]:
        if not share:
            return ()
        size, limit = self.storages.bytes, self.setting.pinned_bytes
        turn_ns = self.times.start_ns[self.times.place[min(self.storages.first_backward, len(self.times.order) - 1)]]
        last = last_forward_places(self.storages, self.times, self.actionable)
        copies = CopiesOut(self.times, self.setting.link)
        chosen: list[int] = []
        pinned = 0
        for storage in sorted(self.actionable, key=lambda s: (-self.density(s), last[s])):
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
            for s, each in self.setting.chains.items()
            if s in among
        }

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
        rest = [s for s in self.actionable if s in self.sources and s not in gone]
        runs = Runs(self.sources, self.storages.bytes, run_bytes)
        return [s for s in sorted(rest, key=lambda s: (self.density(s), s)) if runs.add(s)]
