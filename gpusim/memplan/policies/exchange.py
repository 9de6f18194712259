"""Improvement of a choice of our own planner: storages change one by one, as long as the estimate falls.

The estimate of a choice is what recomputation takes, what kernels lose to concurrent copies, and the time that ops wait
for copies within the budget. Five kinds of changes are tried in turn, each from the largest gain on, and the first that
lowers the estimate within the budget stays:

1. where the budget is exceeded, one more storage is recomputed;
2. a recomputed storage stays on the GPU, or moves to the host;
3. it stays, and a cheaper one is recomputed for it;
4. a moved storage stays, or is recomputed;
5. a kept one moves, and a recomputed one stays for it.

Changes that add no copies are also tried alone. What a plan loses to its copies is estimated less well than what it
recomputes, memsets that wait for them not at all.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import chain, islice
from math import inf
from typing import TYPE_CHECKING

from gpusim.memplan.policies.orders import Choice, Orders
from gpusim.rules import copies

if TYPE_CHECKING:
    from gpusim.memplan.policies.least_time import LeastTime

#: Storages that are tried in place of one.
PARTNERS = 4
#: Least gain of a change, as a share of the estimate.
LEAST_GAIN = 1e-3


@dataclass(frozen=True)
class _Change:
    """A storage that stays, and another one, or the same, that is recomputed or moved; either may be None."""

    stay: int | None = None
    again: int | None = None
    move: int | None = None

    def of(self, choice: Choice) -> Choice | None:
        """Return the changed choice; None where an earlier change has taken its place."""
        again, moved = set(choice.again), set(choice.moved)
        if self.stay is not None:
            if self.stay not in again | moved:
                return None
            again.discard(self.stay)
            moved.discard(self.stay)
        if self.again in again | moved or self.move in again | moved:
            return None
        again.update(() if self.again is None else (self.again,))
        moved.update(() if self.move is None else (self.move,))
        return replace(choice, again=tuple(sorted(again)), moved=tuple(sorted(moved)))


class Exchange:
    """Changes of choices within one budget, with a limited number of estimates; copies are added only if `moving`."""

    def __init__(
        self, planner: LeastTime, orders: Orders, budget_bytes: int, estimates: int, *, moving: bool = True
    ) -> None:
        self.planner, self.orders = planner, orders
        self.budget_bytes = budget_bytes
        self.moving = moving
        self.left = estimates
        lost, link = 1 / copies.sm_rate(planner.setting.graph.hardware.copies, 1) - 1, planner.link
        self._lost_ns_per_byte = lost * (1 / link.out_bytes_per_ns + 1 / link.back_bytes_per_ns)
        """What kernels lose for each byte that moves."""

    def improved(self, choice: Choice) -> Choice:
        """Return the choice after all changes that lower its estimate."""
        kinds = [self._more, self._stays, self._for_a_cheaper_one, self._instead_of_moving]
        if self.moving:
            kinds.append(self._moves)
        now_ns = self.estimate_ns(choice)
        before = None
        while choice != before:
            before = choice
            for changes in kinds:
                if changes == self._more and now_ns < inf:
                    continue
                for change in list(changes(choice)):
                    if self.left <= 0:
                        return choice
                    other = change.of(choice)
                    if other is not None and self.planner.has_room(other.moved):
                        other_ns = self.estimate_ns(other, now_ns * (1 - LEAST_GAIN))
                        if other_ns < now_ns * (1 - LEAST_GAIN):
                            choice, now_ns = other, other_ns
        return choice

    def estimate_ns(self, choice: Choice, most_ns: float = inf) -> float:
        """Return the estimated cost of a choice, in ns; infinite where it exceeds the budget, is impossible, or costs
        at least `most_ns`.
        """
        self.left -= 1
        planner = self.planner
        redos = planner.redos(choice.again, choice.apart, choice.kept)
        if redos is None:
            return inf
        solo_ns, size = planner.setting.graph.solo_ns, planner.storages.bytes
        cost_ns = sum(map(solo_ns.__getitem__, chain.from_iterable(redo.ops for redo in redos)))
        cost_ns += self._lost_ns_per_byte * sum(map(size.__getitem__, choice.moved))
        cost_ns += planner.link.wait_ns * len(choice.moved)
        if cost_ns >= most_ns or planner.floor_bytes(choice) > self.budget_bytes:
            return inf
        if not choice.moved:
            return cost_ns
        return planner.with_waits_ns(choice, redos, self.budget_bytes, cost_ns, most_ns)

    def _dearest(self, choice: Choice) -> list[int]:
        return sorted(choice.again, key=lambda s: (-self.orders.price_ns[s], s))

    def _more(self, choice: Choice) -> Iterator[_Change]:
        acted = {*choice.again, *choice.moved}
        for storage in self.orders.cheapest:
            if storage not in acted:
                yield _Change(again=storage)

    def _stays(self, choice: Choice) -> Iterator[_Change]:
        for storage in self._dearest(choice):
            yield _Change(storage)
            if self.moving:
                yield _Change(storage, move=storage)

    def _for_a_cheaper_one(self, choice: Choice) -> Iterator[_Change]:
        acted = {*choice.again, *choice.moved}
        rest = [s for s in self.orders.cheapest if s not in acted]
        price_ns = self.orders.price_ns
        for storage in self._dearest(choice):
            for other in islice((s for s in rest if price_ns[s] < price_ns[storage]), PARTNERS):
                yield _Change(storage, again=other)

    def _instead_of_moving(self, choice: Choice) -> Iterator[_Change]:
        for storage in sorted(choice.moved, key=lambda s: (self.orders.density(s), s)):
            yield _Change(storage)
            if storage in self.orders.sources:
                yield _Change(storage, again=storage)

    def _moves(self, choice: Choice) -> Iterator[_Change]:
        acted = {*choice.again, *choice.moved}
        size = self.planner.storages.bytes
        rest = sorted((s for s in self.orders.actionable if s not in acted), key=lambda s: (-size[s], s))
        for storage in self._dearest(choice):
            for other in islice((s for s in rest if size[s] >= size[storage]), PARTNERS):
                yield _Change(storage, move=other)
