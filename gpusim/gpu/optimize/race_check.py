"""The race check of one step: many random schedules, and schedules with one event removed.

On a GPU each schedule is a CUDA graph on streams, and a spin kernel holds streams back; without one, ops run one by one
on the CPU in orders that the events allow. Either way the paces follow from the seed, and so does what is detected.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property, partial
from random import Random
from typing import Final, Protocol

import torch

from gpusim.errors import ReplayError
from gpusim.formats.trace import Trace
from gpusim.gpu.optimize.arena_runner import ArenaRunner
from gpusim.gpu.optimize.race import Functions, Racing, Results, delayed, disorders, hurried
from gpusim.gpu.replay.compare import NO_NOISE, TOLERANCE, compare
from gpusim.gpu.replay.cudagraph import GraphRecorder, RecordedGraph
from gpusim.gpu.replay.execute import InitialState, Runner, results_of
from gpusim.gpu.replay.rounding import rounding_noise
from gpusim.gpu.replay.timing import SPIN_CYCLES_PER_NS
from gpusim.plan.arena import Arena, pack
from gpusim.plan.graph import OpGraph
from gpusim.plan.happens_before import HappensBefore
from gpusim.plan.schedule import Schedule
from gpusim.plan.sync import program_order_releases
from gpusim.policies.random_schedules import random_schedule
from gpusim.trace.atomic_additions import behind_atomic_additions
from gpusim.units import ms_to_ns

#: Time for which a stream without an event is held back: so many times that of the step, and at least so many ms.
DELAY_STEPS: Final = 10.0
LEAST_DELAY_MS: Final = 2.0
#: Random schedules that are looked at for a necessary event, at most.
MOST_SCHEDULES: Final = 1_000

Delays = Mapping[int, float]
"""Op -> time in ns for which its stream is held back before it."""


class _SlowRunner(ArenaRunner):
    """Runner with poison that holds the stream of some ops back, by a kernel that spins, before it runs them."""

    delays: Delays = {}

    def run(self, op: int) -> None:
        if op in self.delays:
            torch.cuda._sleep(round(self.delays[op] * SPIN_CYCLES_PER_NS))
        super().run(op)


class Device(Protocol):
    """How schedules run: as graphs on a GPU, or op by op on the CPU."""

    functions: Functions

    def recorded(self) -> Results:
        """Return the results in recorded order, each tensor in memory of its own."""

    def at_some_pace(self, racing: Racing, planned: HappensBefore, rng: Random) -> Results:
        """Return the results of a schedule at a random pace of its streams."""

    def without_haste(self, racing: Racing, op: int, arena: Arena) -> Results:
        """Return the results of a schedule in which one op is late, with all that waits for it."""


class OnCpu:
    """Schedules op by op on the CPU. `state` is restored after each."""

    def __init__(self, graph: OpGraph, state: InitialState, device: torch.device, seed: int) -> None:
        self.state, self.device, self.seed = state, device, seed
        self._runner = Runner(graph.trace, device, own=True)
        self.functions = self._runner.functions

    def recorded(self) -> Results:
        """Return the results in recorded order."""
        runner = self._runner
        runner.drop_temporaries()
        runner.bind(self.state.tensors)
        self.state.restore()
        torch.manual_seed(self.seed)
        runner.run_in_order()
        results = results_of(runner.trace, runner.tensors)
        runner.drop_temporaries()
        self.state.restore()
        return results

    def at_some_pace(self, racing: Racing, planned: HappensBefore, rng: Random) -> Results:
        """Return the results in a random order that streams and events allow."""
        arena = pack(racing.trace, planned, racing.covered, kept=True)
        order = racing.happens_before.any_order(rng)
        return racing.results(self.state, self.device, order, self.seed, arena, self.functions)

    def without_haste(self, racing: Racing, op: int, arena: Arena) -> Results:
        """Return the results in the order in which one op is as late as possible."""
        order = delayed(racing.happens_before, op)
        return racing.results(self.state, self.device, order, self.seed, arena, self.functions)


class OnGpu:
    """Schedules as CUDA graphs on streams. `state` is restored after each."""

    def __init__(self, graph: OpGraph, state: InitialState, device: torch.device, seed: int) -> None:
        self.graph, self.state, self.device, self.seed = graph, state, device, seed
        runner = Runner(graph.trace, device, own=True)
        runner.bind(state.tensors)
        self.functions = runner.functions
        state.restore()
        recorder = GraphRecorder(runner, graph.preds, own_workspaces=True)
        self._sequential = recorder.record(Schedule.in_recorded_order(len(graph)), warm=True)
        self.recorded()
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begin.record()
        self._sequential.replay()
        end.record()
        end.synchronize()
        self.step_ns = ms_to_ns(begin.elapsed_time(end))
        state.restore()

    def recorded(self) -> Results:
        """Return the results of the sequential graph."""
        return self._replayed(self.graph.trace, self._sequential)

    def at_some_pace(self, racing: Racing, planned: HappensBefore, rng: Random) -> Results:
        """Return the results at the pace of the GPU or, at random, with an op of each stream held back for up to the
        time of the step.
        """
        arena = pack(racing.trace, planned, racing.covered, kept=True)
        ops: dict[int, list[int]] = {}
        for op in planned.before:
            ops.setdefault(racing.streams[op], []).append(op)
        delays = {rng.choice(each): rng.random() * self.step_ns for each in ops.values()} if rng.random() < 0.5 else {}
        return self._results(racing, arena, delays)

    def without_haste(self, racing: Racing, op: int, arena: Arena) -> Results:
        """Return the results with the stream of one op held back before it, for much longer than the step takes."""
        return self._results(racing, arena, {op: max(ms_to_ns(LEAST_DELAY_MS), DELAY_STEPS * self.step_ns)})

    def _results(self, racing: Racing, arena: Arena, delays: Delays) -> Results:
        runner = _SlowRunner(racing.trace, self.device, self.state.tensors, arena, True, self.functions)
        runner.delays = delays
        recorder = GraphRecorder(runner, self.graph.preds, own_workspaces=True)
        schedule = Schedule(tuple(racing.order), tuple(racing.streams), variants=tuple(racing.variants))
        self.state.restore()
        recorded = recorder.record(schedule, warm=True, sync=racing.sync)
        runner.spoil()
        return self._replayed(racing.trace, recorded)

    def _replayed(self, trace: Trace, recorded: RecordedGraph) -> Results:
        self.state.restore()
        torch.manual_seed(self.seed)
        torch.cuda.synchronize()
        recorded.replay()
        torch.cuda.synchronize()
        results = results_of(trace, recorded.tensors)
        self.state.restore()
        return results


@dataclass(frozen=True)
class Removed:
    """A necessary event that was removed from a random schedule, and how that was detected."""

    schedule: int
    """Number of the random schedule."""
    op: int
    waited_for: int
    late: int
    """Op that was held back: the first of two that use the same bytes, and that nothing orders without the event."""
    caught_by: str
    """`delay`: wrong results with `late` held back. `haste`: only with an op run one by one, as early as the other
    events allow. Empty: not at all."""
    right_with_it: bool
    """Whether the results are right with the event, at the same pace."""
    unneeded: int
    """Events that were drawn first, without which all uses of the same bytes are still ordered."""


class Reference:
    """Results in recorded order, of two runs, to compare others with.

    They must agree bit for bit. Those behind atomic additions (`gpusim.trace.atomic_additions`) must agree within the
    limit that a replay's outputs have: kernels that run side by side add in another order than one alone, so that two
    runs in recorded order may agree by luck. Where the two differ elsewhere, another kernel is not deterministic, and
    that limit holds for all results. Raises `ReplayError` where the two differ by more than that.
    """

    def __init__(self, trace: Trace, run: Callable[[], Results], noise: Callable[[], Mapping[int, float]]) -> None:
        self.trace, self.wanted, again = trace, run(), run()
        self.noise: Mapping[int, float] = NO_NOISE
        self.repeated = compare(trace, again, self.wanted)
        self.behind = behind_atomic_additions(trace) & self.wanted.keys()
        self.rounded = self.behind if self._all_equal(again, self.behind) else frozenset(self.wanted)
        """Results that must agree within the limit; all others bit for bit."""
        if self.bit_for_bit:
            return
        self.noise = noise()
        self.repeated = compare(trace, again, self.wanted, self.noise)
        if self.repeated.worst_error > TOLERANCE[trace.model.dtype]:
            problem = f"differ by {self.repeated.worst_error:.2g}; there is nothing to compare schedules with"
            raise ReplayError(f"two runs of '{trace.name}' in recorded order {problem}")

    @property
    def bit_for_bit(self) -> bool:
        """Whether all results must agree bit for bit."""
        return not self.rounded

    @property
    def tolerance(self) -> float:
        """Largest error of a right result; 0 where all must agree bit for bit."""
        return 0.0 if self.bit_for_bit else max(TOLERANCE[self.trace.model.dtype], 3 * self.repeated.worst_error)

    def error(self, results: Results) -> float:
        """Return the largest error of the results, over its scale; infinity where one that must does not agree bit for
        bit. NaN is equal to nothing.
        """
        if results.keys() != self.wanted.keys() or not self._all_equal(results, self.rounded):
            return math.inf
        if self.bit_for_bit:
            return 0.0
        return compare(self.trace, results, self.wanted, self.noise).worst_error

    def agrees(self, results: Results) -> bool:
        """Whether results are those of the recorded order."""
        return self.error(results) <= self.tolerance

    def _all_equal(self, results: Results, but: frozenset[int]) -> bool:
        return all(torch.equal(results[index], tensor) for index, tensor in self.wanted.items() if index not in but)


class StepCheck:
    """Race check of one step. `seed` gives schedules, paces and random numbers. Raises as `Reference`."""

    def __init__(self, graph: OpGraph, state: InitialState, device: torch.device, seed: int) -> None:
        self.graph, self.state, self.device, self.seed = graph, state, device, seed
        self.on: Device = (OnGpu if device.type == "cuda" else OnCpu)(graph, state, device, seed)
        self.reference = Reference(graph.trace, self.on.recorded, self._noise)
        self.largest_error = 0.0
        """Largest error of a right result so far, of schedules with all events; 0 where all agree bit for bit."""

    @cached_property
    def one_by_one(self) -> Reference:
        """Results of the ops one by one in the arena: a GPU's library may choose another kernel for a graph."""
        racing = Racing.of(self.graph, Schedule.in_recorded_order(len(self.graph)))
        order = racing.happens_before
        run = partial(
            racing.results, self.state, self.device, [*order.before], self.seed, racing.arena(order), self.on.functions
        )
        return Reference(self.graph.trace, run, self._noise)

    def _noise(self) -> Mapping[int, float]:
        trace = self.graph.trace
        runner = Runner(trace, self.device, own=True, functions=self.on.functions)
        runner.bind(self.state.tensors)
        noise = rounding_noise(runner, self.state, program_order_releases(trace), self.seed)
        self.state.restore()
        return noise

    def schedule(self, number: int) -> Racing:
        """Return the random schedule of a number."""
        return Racing.of(self.graph, random_schedule(self.graph, number, self.seed))

    def schedule_is_right(self, number: int) -> bool:
        """Whether a random schedule gives the results of the recorded order, at a random pace."""
        racing = self.schedule(number)
        pace = Random(f"{self.seed}:pace:{number}")
        return self._is_right(self.on.at_some_pace(racing, racing.happens_before, pace))

    def without_events(self, first: int = 0) -> Iterator[Removed]:
        """Remove one random necessary event of each random schedule that has one, from schedule `first` on."""
        for number in range(first, MOST_SCHEDULES):
            racing = self.schedule(number)
            places = list(range(len(racing.events)))
            Random(f"{self.seed}:event:{number}").shuffle(places)
            for unneeded, place in enumerate(places):
                firsts = {each.first for each in disorders(racing, place)}
                if firsts:
                    _, waited_for = racing.events[place]
                    late = waited_for if waited_for in firsts else min(firsts)
                    yield self._without(number, racing, place, late, unneeded)
                    break

    def _without(self, number: int, racing: Racing, place: int, late: int, unneeded: int) -> Removed:
        planned, less = racing.happens_before, racing.without(place)
        arena = racing.arena(planned)
        op, waited_for = racing.events[place]
        right = self._is_right(self.on.without_haste(racing, late, arena))
        if not self._agrees(self.reference, partial(self.on.without_haste, less, late, arena)):
            caught_by = "delay"
        elif not all(
            self._agrees(self.one_by_one, partial(self._hurried, less, each, arena)) for each in _behind(less, planned)
        ):
            caught_by = "haste"
        else:
            caught_by = ""
        return Removed(number, op, waited_for, late, caught_by, right, unneeded)

    def _is_right(self, results: Results) -> bool:
        error = self.reference.error(results)
        right = error <= self.reference.tolerance
        if right:
            self.largest_error = max(self.largest_error, error)
        return right

    def _agrees(self, reference: Reference, run: Callable[[], Results]) -> bool:
        try:
            return reference.agrees(run())
        except ReplayError:  # an op received a result that does not exist yet
            return False

    def _hurried(self, racing: Racing, op: int, arena: Arena) -> Results:
        order = hurried(racing.happens_before, op)
        return racing.results(self.state, self.device, order, self.seed, arena, self.on.functions)


def _behind(racing: Racing, planned: HappensBefore) -> list[int]:
    """Return the ops that wait for less than planned."""
    actual = racing.happens_before.before
    return [op for op in actual if actual[op] != planned.before[op]]
