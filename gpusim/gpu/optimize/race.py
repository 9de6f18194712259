"""The race check: a schedule run in orders that streams and events allow, with freed bytes poisoned.

A schedule is right where the results are the same at any pace of its streams. On a CPU each order is run op by op; ops
that no event orders may be swapped. `hurried` swaps exactly the ops that a missing event would let swap, so that
detection does not depend on chance.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from random import Random

import torch

from gpusim.defaults import DEFAULT_SEED
from gpusim.errors import ReplayError
from gpusim.formats.trace import Trace
from gpusim.gpu.optimize.arena_runner import ArenaRunner
from gpusim.gpu.replay.execute import InitialState, Runner, results_of
from gpusim.plan.arena import pack
from gpusim.plan.graph import OpGraph
from gpusim.plan.happens_before import HappensBefore
from gpusim.plan.schedule import Schedule
from gpusim.plan.sync import plan_sync
from gpusim.trace.fusion import covered_by, place_fused

Results = dict[int, torch.Tensor]


@dataclass(frozen=True)
class Racing:
    """A schedule's launch order with its events, some of which may have been removed."""

    trace: Trace
    order: Sequence[int]
    streams: Sequence[int]
    waits: Sequence[Sequence[int]]
    variants: Sequence[int]
    covered: Mapping[int, int]

    @classmethod
    def of(cls, graph: OpGraph, schedule: Schedule) -> Racing:
        """Return the schedule with all necessary events."""
        covered = covered_by(graph.trace, schedule.variants)
        order, streams = place_fused(schedule.order, schedule.streams, covered)
        sync = plan_sync(graph.trace, graph.preds, order, streams, covered)
        return cls(graph.trace, order, streams, sync.waits, schedule.variants, covered)

    @property
    def events(self) -> int:
        """Number of waits in the schedule."""
        return sum(map(len, self.waits))

    def without(self, number: int) -> Racing:
        """Return the schedule without one of its waits, by number."""
        waits: list[tuple[int, ...]] = []
        for events in self.waits:
            kept = events if not 0 <= number < len(events) else (*events[:number], *events[number + 1 :])
            number -= len(events)
            waits.append(tuple(kept))
        return Racing(self.trace, self.order, self.streams, waits, self.variants, self.covered)

    @property
    def happens_before(self) -> HappensBefore:
        """Order given by the remaining events."""
        return HappensBefore.of(self.trace, self.order, self.streams, self.waits)

    def results(
        self, state: InitialState, device: torch.device, order: Sequence[int], seed: int, planned: HappensBefore
    ) -> Results:
        """Return the results of the ops one by one in `order`, in an arena packed for `planned`, with freed bytes
        poisoned.

        `state` is restored afterwards.
        """
        runner = ArenaRunner(
            self.trace, device, state.tensors, pack(self.trace, planned, self.covered, kept=True), poison=True
        )
        runner.choose(self.variants)
        state.restore()
        torch.manual_seed(seed)
        try:
            for op in range(len(self.trace.ops)):
                if op not in planned.before:
                    runner.run(op)
            for op in order:
                runner.run(op)
            return results_of(self.trace, runner.tensors)
        finally:
            state.restore()


def in_recorded_order(trace: Trace, state: InitialState, device: torch.device, seed: int) -> Results:
    """Return the results of the step as recorded, each tensor in memory of its own. `state` is restored afterwards."""
    runner = Runner(trace, device, own=True)
    runner.bind(state.tensors)
    state.restore()
    torch.manual_seed(seed)
    runner.run_in_order()
    results = results_of(trace, runner.tensors)
    state.restore()
    return results


def hurried(order: HappensBefore, op: int) -> list[int]:
    """Return an order in which `op` runs as early as streams and events allow."""
    first = [each for each in order.before if order.ends_before(each, op)]
    return [*first, op, *(each for each in order.before if each != op and not order.ends_before(each, op))]


def wrong_orders(
    racing: Racing,
    state: InitialState,
    device: torch.device,
    planned: HappensBefore,
    *,
    orders: int,
    seed: int = DEFAULT_SEED,
) -> int:
    """Return how many of `orders` random orders do not give the recorded results, bit for bit.

    `planned` is the order that the arena was packed for: the one with all events.
    """
    rng = Random(seed)
    actual = racing.happens_before
    wanted = in_recorded_order(racing.trace, state, device, seed)
    results = (racing.results(state, device, actual.any_order(rng), seed, planned) for _ in range(orders))
    return sum(not same(each, wanted) for each in results)


def caught(
    racing: Racing, state: InitialState, device: torch.device, planned: HappensBefore, seed: int = DEFAULT_SEED
) -> bool:
    """Whether the check detects a schedule without some events: hurrying some op changes results."""
    actual = racing.happens_before
    wanted = in_recorded_order(racing.trace, state, device, seed)
    behind = [op for op in actual.before if actual.before[op] != planned.before[op]]
    for op in behind:
        try:
            if not same(racing.results(state, device, hurried(actual, op), seed, planned), wanted):
                return True
        except ReplayError:  # an op received a result that does not exist yet
            return True
    return False


def same(one: Results, other: Results) -> bool:
    """Whether two sets of results are equal bit for bit; NaN is equal to nothing."""
    return one.keys() == other.keys() and all(torch.equal(one[index], tensor) for index, tensor in other.items())
