"""gpusim's own: the least predicted step time within a byte budget, from keep, offload and recompute.

Source: this project. The rules:

1. *Prices.* What recomputing a storage takes is the time of the ops that bring it back from all that stays. A copy is
   free as long as it fits beside the ops: copies out one after the other within the forward pass.
2. *Copies.* Storages move whose recomputation costs most for their bytes, as long as all copies out end within a share
   of the forward pass.
   Or else: whatever rule 3 leaves over moves, the first of it first, as much as the budget asks for.
3. *Recomputation.* Of the rest the cheapest for their bytes are let go, as many as the budget asks for. What is
   computed on the way to another one stays for its own use, and no more than a limit comes back like that at once; or
   each is computed for itself alone. What the step does not save may stay for that where much more is computed from it
   than it takes.
4. *Others.* The plans of all published policies are tried beside these (`gpusim.memplan.policies.published`), and what
   they move and recompute with copies placed as here. So none that keeps the budget is faster.
5. *Choice.* For several shares of rule 2 and limits of rule 3, the fewest storages that keep the budget are found by
   bisection on the allocator's simulation; the engine's simulated step time decides among all plans. Of the winner,
   recomputations are taken back one by one where the budget still holds.
6. *Changes.* Of the fastest of rules 2 and 3, and of rule 4, single storages change as long as an estimate falls, also
   without new copies, and from there on with them (`gpusim.memplan.policies.exchange`).
7. *Between two uses.* Where rules 2 and 3 have few plans, some of theirs for larger budgets are tried, too: what the
   ops that exceed the budget do not use moves out meanwhile (`gpusim.memplan.policies.gaps`). The smallest peak is
   found so, too, by bisection down to what one op alone takes.
8. *Order.* A convolution's gradient of its weights runs before that of its input, which then may take its place; or
   the backward pass has OLLA's order, where that saves memory.

It is a heuristic: another plan may be faster. Its step time is what the engine says, not a sum of prices.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache, partial
from itertools import chain, product
from math import inf

import numpy as np
import numpy.typing as npt

from gpusim.errors import PlanError
from gpusim.memplan.evaluate import MemoryEvaluator
from gpusim.memplan.lower_bound import LowerBound
from gpusim.memplan.memory import MemoryUse, memory_of
from gpusim.memplan.pinned import within_pinned
from gpusim.memplan.plan import MemoryPlan, Offload, Redo
from gpusim.memplan.policies import gaps, published
from gpusim.memplan.policies.base import Setting
from gpusim.memplan.policies.capuchin import by_msps
from gpusim.memplan.policies.exchange import Exchange
from gpusim.memplan.policies.orders import Choice, Orders, lean_order, worth_keeping
from gpusim.memplan.profile import BytesProfile
from gpusim.memplan.program import program_of
from gpusim.memplan.rebuild import GroupedRedos, Uses
from gpusim.memplan.shortfall import shortfall
from gpusim.memplan.times import (
    OpTimes,
    Room,
    first_needs,
    last_forward_places,
    needs_with_redos,
    place_copies,
    with_waits_ns,
)
from gpusim.rules.copies import full_bytes_per_ns

#: Shares of the forward pass that copies out may take; above 1, ops wait for copies.
COPY_SHARES = (0.0, 0.6, 0.95, 2.0, 100.0)
#: Those tried without what may stay for recomputation, where something may.
FEW_COPY_SHARES = (0.0, 0.95)
#: Limit of bytes that come back at once, as a fraction of all saved bytes.
RUN_SHARES = (1.0, 0.3, 0.1, 0.03)
#: Plans of rules 2 and 3 below which those for larger budgets are tried, and these budgets as shares of the budget.
FEW_PLANS = 12
LARGER_BUDGETS = (1.02, 1.05, 1.1, 1.2, 1.4)
#: Room above the least peak where no budget is asked for: there, plans are several times as slow.
ROOM = 0.05
#: Recomputations of the winner that are undone on trial.
TRIALS = 24
#: Plans from which single changes are tried: of rules 2 and 3, and of rule 4.
IMPROVED, IMPROVED_OTHERS = 2, 1
#: Rounds of changes for each, and the share of the budget that a round leaves free.
ROUNDS, LEAST_LEFT = 4, 0.001
#: Most estimates in a round, and most ops in them all: a step of many ops gets fewer estimates.
MOST_ESTIMATES, ESTIMATED_OPS = 1000, 800_000
#: Corrections of the estimate's choice by the allocator's simulation.
CORRECTIONS = 6
#: Choices with the smallest estimates that the allocator compares for the smallest peak.
LEAST_TRIED = 6
#: Share of the budget that the placement of copies leaves free for what the estimate misses.
SLACK = 0.005
#: Choices whose recomputation is cached: a bisection returns to recent ones.
RECENT = 16
#: Halvings of what lies between the least peak without rule 7 and a lower bound, in search of the smallest peak.
HALVINGS = 5
#: Peak of an impossible plan.
NO_PLAN_BYTES = 1 << 62


@dataclass(frozen=True)
class _Planned:
    """A choice with its plan."""

    choice: Choice | None
    """None for a plan of another policy."""
    target_bytes: int
    """Budget that its copies were placed for, in bytes."""
    plan: MemoryPlan
    peak_bytes: int


class LeastTime:
    """Planner of one step; prices and orders are computed once for all budgets."""

    def __init__(self, setting: Setting, evaluator: MemoryEvaluator | None = None) -> None:
        self.setting = setting
        self.storages = setting.storages
        self.evaluator = evaluator or MemoryEvaluator(setting.graph)
        self.order = lean_order(setting)
        self.times = OpTimes.of(setting.graph, self.order)
        self.link = setting.link
        self.uses = Uses.of(self.storages, self.times.place)
        self.profile = BytesProfile(self.storages, self.times)
        self.redos = lru_cache(maxsize=RECENT)(self._redos_of)
        self._grouped: dict[frozenset[int], GroupedRedos] = {}
        self.level = lru_cache(maxsize=RECENT)(self._level_of)
        self._floors: dict[Choice, int] = {}
        self._planned: dict[tuple[Choice, int], _Planned] = {}
        self._times_ns: dict[MemoryPlan, int] = {}
        self.orders = Orders(setting, self.times)
        kept = worth_keeping(self.storages, setting.chains)
        self.all_orders = (self.orders, Orders(setting, self.times, kept)) if kept else (self.orders,)
        self._msps: dict[tuple[int, ...], list[int]] = {}

    def has_room(self, storages: Sequence[int]) -> bool:
        """Return whether all these storages fit pinned memory."""
        return len(self._with_room(storages)) == len(storages)

    def _with_room(self, storages: Sequence[int]) -> list[int]:
        """Return the first of these storages that fit pinned memory."""
        room = float("inf") if self.setting.pinned_bytes is None else self.setting.pinned_bytes
        chosen: list[int] = []
        for storage in storages:
            room -= self.storages.bytes[storage]
            if room < 0:
                break
            chosen.append(storage)
        return chosen

    def most_for_its_time(self, moved: tuple[int, ...]) -> list[int]:
        """Return the storages to recompute, each for itself alone, by Capuchin's MSPS."""
        if moved not in self._msps:
            among = frozenset(self.orders.actionable)
            self._msps[moved] = [s for s in by_msps(self.setting, moved) if s in among]
        return self._msps[moved]

    def _redos_of(self, again: tuple[int, ...], apart: bool, kept: frozenset[int]) -> tuple[Redo, ...] | None:
        """Return the recomputation of a choice; None where impossible."""
        if apart:
            return self.setting.facts.separate_redos.of(again, again)
        if kept not in self._grouped:
            self._grouped[kept] = GroupedRedos(self.storages, self.times.place, self.uses, kept)
        return self._grouped[kept].of(again)

    def plan(self, choice: Choice, budget_bytes: int) -> MemoryPlan | None:
        """Return the plan of a choice; None where its recomputation is impossible. Ops wait for copies as the budget
        requires.
        """
        redos = self.redos(choice.again, choice.apart, choice.kept)
        if redos is None:
            return None
        offloads: tuple[Offload, ...] = ()
        if choice.moved:
            times, needs, room = self._for_copies(choice, redos, budget_bytes)
            offloads = place_copies(self.storages, times, self.link, choice.moved, needs, room)
        return MemoryPlan(offloads=offloads, redos=redos, order=self.order)

    def with_waits_ns(
        self, choice: Choice, redos: Sequence[Redo], budget_bytes: int, cost_ns: float, most_ns: float
    ) -> float:
        """Return `cost_ns` and what ops wait for the copies of a choice within a budget, in ns; infinite from
        `most_ns` on.
        """
        times, needs, room = self._for_copies(choice, redos, budget_bytes)
        last_forward = {storage: self._last_forward[storage] for storage in choice.moved}
        return with_waits_ns(self.storages, times, self.link, last_forward, needs, room, cost_ns, most_ns)

    def _for_copies(
        self, choice: Choice, redos: Sequence[Redo], budget_bytes: int
    ) -> tuple[OpTimes, dict[int, int], Room]:
        times = self.times.with_redos(self.setting.graph, redos)
        needs, level = self.level(choice)
        return times, needs, Room(level, round(budget_bytes * (1 - SLACK)))

    def _level_of(self, choice: Choice) -> tuple[dict[int, int], npt.NDArray[np.int64]]:
        """Return the places at which what a possible choice moves must be back, and the bytes in use at each place
        without copies in transit.
        """
        redos = self.redos(choice.again, choice.apart, choice.kept)
        assert redos is not None
        needs = {storage: self._first_needs[storage] for storage in choice.moved}
        needs = needs_with_redos(self.storages, self.times, needs, redos)
        return needs, self.profile.level_bytes(self._last_forward, needs, redos, choice.kept)

    def floor_bytes(self, choice: Choice) -> int:
        """Estimate the least peak of a choice, where ops wait for copies whenever memory requires it, in bytes."""
        if choice not in self._floors:
            if self.redos(choice.again, choice.apart, choice.kept) is None:
                return NO_PLAN_BYTES
            self._floors[choice] = int(self.level(choice)[1].max(initial=0))
        return self._floors[choice]

    @cached_property
    def _first_needs(self) -> dict[int, int]:
        return first_needs(self.storages, self.times, self.storages.saved)

    @cached_property
    def _last_forward(self) -> dict[int, int]:
        return last_forward_places(self.storages, self.times, self.storages.saved)

    def fewest(
        self, storages: Sequence[int], choose: Callable[[tuple[int, ...]], Choice], budget_bytes: int
    ) -> Iterator[_Planned]:
        """Yield the choice with the fewest of these storages, in order, that keeps the budget, if any.

        The quick estimate finds it, corrected by the allocator's simulation.
        """
        target = budget_bytes
        for _ in range(CORRECTIONS):
            choice = self._first_by_estimate(storages, choose, target)
            if choice is None:
                return
            planned = self.planned(choice, target)
            over = planned.peak_bytes - budget_bytes
            if over <= 0:
                yield planned
                return
            target -= max(2 * over, budget_bytes // 200)

    def planned(self, choice: Choice, budget_bytes: int) -> _Planned:
        """Return the plan of a possible choice, with its peak by the allocator."""
        key = (choice, budget_bytes)
        if key not in self._planned:
            plan = self.plan(choice, budget_bytes)
            assert plan is not None
            self._planned[key] = _Planned(choice, budget_bytes, plan, self.setting.peak_bytes(plan))
        return self._planned[key]

    def _first_by_estimate(
        self, storages: Sequence[int], choose: Callable[[tuple[int, ...]], Choice], target: int
    ) -> Choice | None:
        """Bisect over the number of actions. Peaks fall with it until results that come back at once dominate, so
        several are tried.
        """

        def keeps(count: int) -> bool:
            return self.floor_bytes(choose(tuple(storages[:count]))) <= target

        low, last = 0, len(storages)
        if keeps(0):
            return choose(())
        high = next((n for n in (last, *(round(last * share) for share in (0.9, 0.75, 0.5))) if keeps(n)), None)
        if high is None:
            return None
        while high - low > 1:
            middle = (low + high) // 2
            if keeps(middle):
                high = middle
            else:
                low = middle
        return choose(tuple(storages[:high]))

    def candidates(self, budget_bytes: int) -> Iterator[_Planned]:
        """Yield the plans of rules 2 and 3 that keep the budget."""
        for storages, choose in self._ladders():
            yield from self.fewest(storages, choose, budget_bytes)

    def _ladders(self) -> Iterator[tuple[Sequence[int], Callable[[tuple[int, ...]], Choice]]]:
        """Yield storages in the order in which rules 2 and 3 act on them, and the choice of any number of them."""
        for orders in self.all_orders:
            for copy_share in COPY_SHARES if orders is self.all_orders[-1] else FEW_COPY_SHARES:
                moved = orders.moved(copy_share)
                if copy_share and not moved:
                    continue
                for run_share in RUN_SHARES:
                    again = orders.cheapest_first(moved, run_share * self._saved_bytes)
                    yield again, partial(Choice, moved, kept=orders.kept)
                if not orders.kept:
                    yield self.most_for_its_time(moved), partial(Choice, moved, apart=True)
        for run_share in RUN_SHARES:
            let_go = dict.fromkeys(self.orders.cheapest_first((), run_share * self._saved_bytes))
            rest = [s for s in self.orders.actionable if s not in let_go]
            rest = self._with_room(rest)  # the first have longest to move
            yield rest, partial(Choice, again=tuple(let_go))

    def of_others(self, budget_bytes: int, most_ns: float) -> Iterator[_Planned]:
        """Yield the published policies' plans that keep the budget and may take less than `most_ns`, as they are and
        with copies placed by rule 2.
        """
        setting = replace(self.setting, budget_bytes=budget_bytes)
        plans = [self._pinned(plan) for plan in published.within(setting, most_ns - self.evaluator.keep_all_ns)]
        quick = [
            (plan, peak_bytes)
            for plan, peak_bytes in [*((plan, setting.peak_bytes(plan)) for plan in plans), *self._unchanging]
            if self._least_ns((each.storage for each in plan.offloads), plan.redos) < most_ns
        ]
        for plan, peak_bytes in quick:
            if peak_bytes <= budget_bytes:
                yield _Planned(None, budget_bytes, plan, peak_bytes)
        for choice in dict.fromkeys(self._choice_of(plan) for plan, _ in quick):
            if self.floor_bytes(choice) <= budget_bytes:
                planned = self.planned(choice, budget_bytes)
                if planned.peak_bytes <= budget_bytes:
                    yield planned

    def beyond(self, budget_bytes: int) -> Iterator[_Planned]:
        """Yield plans of rules 2 and 3 for larger budgets, with copies added that keep this one (rule 7)."""
        tried: set[Choice] = set()
        for share in LARGER_BUDGETS:
            larger_bytes = round(share * budget_bytes)
            estimate_ns = Exchange(self, self.orders, larger_bytes, MOST_ESTIMATES).estimate_ns
            choices = {self._first_by_estimate(*ladder, larger_bytes) for ladder in self._ladders()} - tried
            for choice in sorted(filter(None, choices), key=lambda each: (estimate_ns(each), each.again))[:IMPROVED]:
                tried.add(choice)
                plan = self.plan(choice, budget_bytes)
                assert plan is not None
                plan = gaps.within(self.setting, plan, budget_bytes)
                if plan is not None and self.has_room(sorted({offload.storage for offload in plan.offloads})):
                    yield _Planned(None, budget_bytes, plan, self.setting.peak_bytes(plan))

    def _least_ns(self, moved: Iterable[int], redos: Sequence[Redo]) -> float:
        """Return the least step time of a plan, in ns: that of all ops and recomputation, or of all copies one way."""
        moved_bytes = sum(map(self.storages.bytes.__getitem__, moved))
        rate = max(full_bytes_per_ns(self.setting.graph.hardware.copies, to_device) for to_device in (False, True))
        again_ns = sum(self.setting.graph.solo_ns[op] for redo in redos for op in redo.ops)
        return max(self.evaluator.keep_all_ns + again_ns, moved_bytes / rate)

    def _choice_of(self, plan: MemoryPlan) -> Choice:
        """Return what a plan moves and recomputes of the saved storages."""
        among = frozenset(self.orders.actionable)
        moved = among.intersection(each.storage for each in plan.offloads)
        again = among.intersection(s for redo in plan.redos for s in redo.storages) - moved
        return Choice(tuple(sorted(moved)), tuple(sorted(again)))

    def _pinned(self, plan: MemoryPlan) -> MemoryPlan:
        """Return as much of a plan as pinned memory has room for."""
        return within_pinned(self.storages, plan, self.setting.pinned_bytes)[0]

    @cached_property
    def _unchanging(self) -> list[tuple[MemoryPlan, int]]:
        """Plans that are the same for all budgets, with the peak of each."""
        plans = dict.fromkeys(map(self._pinned, published.unchanging(self.setting)))
        return [(plan, self.setting.peak_bytes(plan)) for plan in plans]

    @cached_property
    def _saved_bytes(self) -> int:
        return sum(self.storages.bytes[s] for s in self.storages.saved)

    def plan_for(self, budget_bytes: int | None, *, quick: bool = False) -> MemoryPlan:
        """Return the best plan within a budget, as `best`; without one, half the peak of keeping all, or what the least
        peak leaves `ROOM` beside.
        """
        if budget_bytes is None:
            budget_bytes = max(self.setting.keep_all_bytes // 2, round((1 + ROOM) * self.least_peak.peak_bytes))
        return self.best(budget_bytes, quick=quick)

    def best(self, budget_bytes: int, *, quick: bool = False) -> MemoryPlan:
        """Return the plan of least predicted time within a budget; a `quick` one without rule 6.

        Raises `PlanError` where none keeps it.
        """
        own = list(self.candidates(budget_bytes))
        most_ns = sorted(map(self.time_ns, own))[:IMPROVED][-1] if len(own) >= IMPROVED else inf
        others = list(self.of_others(budget_bytes, most_ns))
        beyond = self.beyond(budget_bytes) if len(own) < FEW_PLANS else ()
        planned = list(dict.fromkeys((*own, *others, *beyond)))
        if not planned:
            least = self.least_peak if self.least_peak.peak_bytes <= budget_bytes else self.smallest
            if least.peak_bytes > budget_bytes:
                raise PlanError(self.shortfall(budget_bytes))
            return least.plan
        fastest = sorted(planned, key=lambda each: (self.time_ns(each), each.choice is None))
        starts = () if quick else dict.fromkeys((*self._starts(own, IMPROVED), *self._starts(others, IMPROVED_OTHERS)))
        better = [self._improved(each, budget_bytes) for each in starts]
        without_copies = sorted((each for each in starts if not each.plan.offloads), key=self.time_ns)
        few = max(1, len(without_copies) * self._estimates // MOST_ESTIMATES)
        staying = [self._improved(each, budget_bytes, moving=False) for each in without_copies[:few]]
        moving = [self._improved(each, budget_bytes) for each in dict.fromkeys(staying) if each not in starts]
        return self._trimmed(min([fastest[0], *better, *staying, *moving], key=self.time_ns), budget_bytes).plan

    def _starts(self, planned: Sequence[_Planned], count: int) -> list[_Planned]:
        """Return the fastest of these plans from which single changes are tried, of different choices."""
        fastest = sorted(planned, key=self.time_ns)
        grouped = {each.choice: each for each in fastest if each.choice is not None and not each.choice.apart}
        return list(grouped.values())[:count]

    def _improved(self, planned: _Planned, budget_bytes: int, *, moving: bool = True) -> _Planned:
        """Return a plan after changes of single storages, or the plan itself where that is faster; without
        `moving`, no copies are added.

        The estimate's budget follows what the allocator's simulation says of the first changes.
        """
        assert planned.choice is not None
        orders = next(each for each in self.all_orders if each.kept == planned.choice.kept)
        best, choice, target = planned, planned.choice, planned.target_bytes
        for _ in range(ROUNDS):
            choice = Exchange(self, orders, target, self._estimates, moving=moving).improved(choice)
            changed = self.planned(choice, target)
            left = budget_bytes - changed.peak_bytes
            if left < 0:
                target += left - round(LEAST_LEFT * budget_bytes)
                continue
            best = min(best, changed, key=self.time_ns)
            if left < 2 * LEAST_LEFT * budget_bytes:
                break
            target += left - round(LEAST_LEFT * budget_bytes)
        return best

    @property
    def _estimates(self) -> int:
        """Most estimates in a round of changes."""
        return min(MOST_ESTIMATES, ESTIMATED_OPS // len(self.order))

    def time_ns(self, planned: _Planned) -> int:
        """Return the simulated step time, in ns."""
        if planned.plan not in self._times_ns:
            program = program_of(self.storages, planned.plan)
            self._times_ns[planned.plan] = self.evaluator.time(program).makespan_ns
        return self._times_ns[planned.plan]

    def _trimmed(self, best: _Planned, budget_bytes: int) -> _Planned:
        """Drop recomputations that the budget does not need, most expensive first."""
        for storage in sorted(best.choice.again if best.choice else (), key=lambda s: -self.orders.price_ns[s])[
            :TRIALS
        ]:
            assert best.choice is not None
            again = tuple(s for s in best.choice.again if s != storage)
            without = replace(best.choice, again=again)
            if self.floor_bytes(without) <= best.target_bytes:
                planned = self.planned(without, best.target_bytes)
                if planned.peak_bytes <= budget_bytes:
                    best = min(best, planned, key=self.time_ns)
        return best

    @cached_property
    def least_peak(self) -> _Planned:
        """The plan of least peak of these choices and of the plans that are the same for all budgets."""
        choices = [Choice((), ())]
        for orders, copy_share, run_share in product(self.all_orders, COPY_SHARES, RUN_SHARES):
            moved = orders.moved(copy_share)
            again = orders.cheapest_first(moved, run_share * self._saved_bytes)
            choices += [
                Choice(moved, tuple(again[: round(len(again) * part)]), kept=orders.kept)
                for part in (0.0, 0.5, 0.75, 0.9, 1.0)
            ]
        tried = sorted(dict.fromkeys(choices), key=self.floor_bytes)[:LEAST_TRIED]
        plans = [self.planned(choice, 0) for choice in tried]
        plans += [_Planned(None, 0, plan, peak_bytes) for plan, peak_bytes in self._unchanging]
        return min(plans, key=lambda each: each.peak_bytes)

    def shortfall(self, budget_bytes: int) -> str:
        """Explain why no plan found here keeps a budget."""
        use, order = self.smallest_use, self.smallest.plan.order
        return shortfall(self.storages, use, order, budget_bytes, pinned_bytes=self.setting.pinned_bytes)

    @cached_property
    def smallest(self) -> _Planned:
        """The plan of smallest peak found by rules 2, 3 and 7; with little pinned memory by published policies, too."""
        # With all that is needed, they reached no smaller peak on three steps, and took longer than the rest together.
        limited = self.setting.pinned_bytes is not None
        smallest, below_bytes = self.least_peak, LowerBound(self.evaluator).least_bytes
        for _ in range(HALVINGS):
            if smallest.peak_bytes <= below_bytes:
                break
            budget_bytes = (below_bytes + smallest.peak_bytes) // 2
            of_others = self.of_others(budget_bytes, inf) if limited else ()
            found = next(chain(self.candidates(budget_bytes), self.beyond(budget_bytes), of_others), None)
            if found is None:
                below_bytes = budget_bytes
            else:
                smallest = found
        return smallest

    @property
    def smallest_use(self) -> MemoryUse:
        """Memory of the plan of smallest peak."""
        return memory_of(self.storages, program_of(self.storages, self.smallest.plan))


def least_time(setting: Setting) -> MemoryPlan:
    """Return the fastest plan within the budget; without one, half the peak of keeping all."""
    return LeastTime(setting).plan_for(setting.budget_bytes)
