"""Which schedule a step runs: search in a budget, then a trial of the best few on the user's own tensors."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import msgspec

from gpusim.defaults import DEFAULT_BUDGET_S, DEFAULT_POLICY, DEFAULT_SEED
from gpusim.engine.compiled.warm import warm_up
from gpusim.engine.evaluate import Evaluator
from gpusim.errors import GpusimError, MemoryLimitError, OptionError, PlanError
from gpusim.formats.trace import Frontend, Trace, Variant
from gpusim.gpu.optimize.captured import Captured
from gpusim.gpu.optimize.executors import Executor, Ready
from gpusim.gpu.optimize.memory import within_limit
from gpusim.gpu.replay.fusion import NORMS
from gpusim.memplan.plan import MemoryPlan
from gpusim.plan.graph import OpGraph
from gpusim.plan.schedule import Schedule
from gpusim.policies.registry import POLICIES, stream_counts
from gpusim.search.explore import Explored, explore
from gpusim.search.trial import contenders
from gpusim.units import format_bytes

Say = Callable[[str], None]

#: Schedules that are tried, the sequential one beside them.
TRIED = 8
#: How many of them, the fastest, are recorded again: where tensors come to lie changes a graph's time by some percent.
RECORDED_AGAIN = 2
#: More than any GPU has.
MAX_BYTES = 1 << 62
#: From this search on other kernels are tried, too: measuring or compiling them takes some 20 s by itself.
KERNELS_FROM_S = 5.0
#: Whose kernels are tried.
FRONTENDS: tuple[Frontend, ...] = ("aten", "inductor")


@dataclass(frozen=True)
class Candidate:
    """A schedule made ready, with what it took and what was predicted."""

    captured: Captured
    schedule: Schedule
    ready: Ready
    time_ns: int
    predicted_ns: int
    plan: MemoryPlan | None = None
    """The memory plan that `ready` runs in place of the schedule, where no schedule keeps the limit."""

    @property
    def policy(self) -> str:
        """Who made what it runs."""
        return self.schedule.policy if self.plan is None else f"memory plan, {self.plan.policy}"

    @property
    def streams(self) -> int:
        """Streams that it runs on, those of copies included."""
        return self.schedule.stream_count if self.plan is None else self.plan.streams


@dataclass(frozen=True)
class Wanted:
    """What the user asked for."""

    streams: int
    budget_s: float | None
    memory_limit_bytes: int | None
    seed: int = DEFAULT_SEED
    frontends: tuple[Frontend, ...] = FRONTENDS

    @property
    def kernels(self) -> bool:
        """Whether other kernels are tried: those of each op in processes of their own, and Inductor's."""
        return self.budget_s is None or self.budget_s >= KERNELS_FROM_S

    @property
    def inductor(self) -> bool:
        """Whether Inductor's kernels are tried."""
        return "inductor" in self.frontends and (self.kernels or "aten" not in self.frontends)

    @property
    def search_s(self) -> float:
        """What all searches may take."""
        return self.budget_s or DEFAULT_BUDGET_S


def candidates(
    captured: Captured, trace: Trace, executor: Executor, wanted: Wanted, budget_s: float, say: Say
) -> tuple[list[Candidate], Candidate]:
    """Schedules that were tried, fastest first, and the sequential one. `trace` has times.

    The search takes `budget_s`. Raises `OptionError` where neither a schedule nor a memory plan keeps the memory limit.
    """
    hardware, _ = executor.hardware()
    graph = OpGraph.build(trace, hardware)
    say("searching")
    try:
        explored = explore(
            graph,
            streams=wanted.streams,
            budget_s=budget_s,
            seed=wanted.seed,
            memory_limit_bytes=wanted.memory_limit_bytes,
        )
        schedules = list(_schedules(explored))
    except MemoryLimitError:  # a memory plan may keep it
        alone = Schedule.in_recorded_order(len(trace.ops))
        schedules = [alone.made("sequential", "gpusim.optimize", Evaluator(graph).makespan_ns(alone))]
    return tried(captured, trace, executor, schedules, wanted.memory_limit_bytes, say)


def quick_ns(trace: Trace, executor: Executor, wanted: Wanted) -> int:
    """What a step is predicted to take by one policy, on the best number of streams. `trace` has times."""
    hardware, _ = executor.hardware()
    graph = OpGraph.build(trace, hardware)
    warm_up(graph.hardware)
    policy, evaluator = POLICIES[DEFAULT_POLICY], Evaluator(graph)
    counts = policy.stream_counts(stream_counts(wanted.streams))
    return min(evaluator.makespan_ns(policy(graph, count)) for count in counts)


def _schedules(explored: Explored) -> Iterator[Schedule]:
    """The recommended schedule and the best of each kind, the sequential one first."""
    yield explored.best_of("sequential").schedule
    yield from (row.schedule for row in contenders(explored, TRIED))


def tried(
    captured: Captured,
    trace: Trace,
    executor: Executor,
    schedules: list[Schedule],
    memory_limit_bytes: int | None,
    say: Say,
) -> tuple[list[Candidate], Candidate]:
    """Schedules made ready and timed in turns, fastest first; and the first of them, which is the sequential one.

    Those that take more memory than the limit are left out; where all do, a memory plan takes their place. Raises
    `OptionError` where none keeps the limit either.
    """
    unique = list(dict.fromkeys(schedules))
    say(f"trying {len(unique)} schedules")
    ready: dict[str, Ready] = {}
    for number, schedule in enumerate(unique):
        try:
            ready[str(number)] = executor.prepare(captured, trace, schedule)
        except GpusimError as cause:
            if not number:
                raise
            say(f"left out {schedule.policy} on {schedule.stream_count} streams: {cause}")
    timed = _timed(captured, unique, ready, executor)
    sequential = timed["0"]
    kept = [c for c in timed.values() if memory_limit_bytes is None or c.ready.peak_bytes <= memory_limit_bytes]
    if not kept:
        assert memory_limit_bytes is not None
        return [_planned(captured, trace, executor, timed, memory_limit_bytes, say)], sequential
    ranked = sorted(kept, key=lambda candidate: candidate.time_ns)
    best = [_best_recording(captured, trace, executor, each, memory_limit_bytes) for each in ranked[:RECORDED_AGAIN]]
    return sorted([*best, *ranked[RECORDED_AGAIN:]], key=lambda candidate: candidate.time_ns), sequential


def _planned(
    captured: Captured,
    trace: Trace,
    executor: Executor,
    timed: Mapping[str, Candidate],
    limit_bytes: int,
    say: Say,
) -> Candidate:
    """A memory plan that keeps a limit which no schedule of `timed` does. Raises `OptionError` where none does."""
    say("planning its memory")
    graph = OpGraph.build(trace, executor.hardware()[0])
    try:
        planned, problem = within_limit(captured, graph, limit_bytes, executor.device, say)
    except PlanError as cause:  # a step without tensors that a plan could move
        planned, problem = None, str(cause)
    if planned is None:
        least = min(each.ready.peak_bytes for each in timed.values())
        first = f"memory limit {format_bytes(limit_bytes)}: the least that any schedule takes is {format_bytes(least)}"
        raise OptionError("; ".join(filter(None, (first, problem))))
    predicted_ns = planned.outcome.step_ns
    time_ns = executor.times_ns({"": planned.ready}, {"": predicted_ns})[""]
    return Candidate(captured, timed["0"].schedule, planned.ready, time_ns, predicted_ns, planned.outcome.plan)


def _best_recording(
    captured: Captured, trace: Trace, executor: Executor, first: Candidate, memory_limit_bytes: int | None
) -> Candidate:
    """The fastest of several recordings of a schedule: its tensors come to lie elsewhere in each."""
    recordings = [
        first.ready,
        *(executor.prepare(captured, trace, first.schedule) for _ in range(executor.recordings - 1)),
    ]
    if len(recordings) == 1:
        return first
    ready = {
        str(n): each
        for n, each in enumerate(recordings)
        if not n or each.peak_bytes <= (memory_limit_bytes or MAX_BYTES)
    }
    times = executor.times_ns(ready, dict.fromkeys(ready, first.predicted_ns))
    fastest = min(ready, key=lambda name: times[name])
    return replace(first, ready=ready[fastest], time_ns=times[fastest])


def _timed(
    captured: Captured, schedules: Sequence[Schedule], ready: Mapping[str, Ready], executor: Executor
) -> dict[str, Candidate]:
    predicted = {name: schedules[int(name)].predicted_ns for name in ready}
    times = executor.times_ns(ready, predicted)
    return {
        name: Candidate(captured, schedules[int(name)], each, times[name], predicted[name])
        for name, each in ready.items()
    }


def in_turns(groups: Sequence[Sequence[Candidate]], executor: Executor) -> list[Candidate]:
    """Candidates of several groups, each fastest first, as one such list: the best of each are timed in turns again."""
    if len(groups) == 1:
        return list(groups[0])
    best = {str(number): group[0] for number, group in enumerate(groups)}
    ready = {name: each.ready for name, each in best.items()}
    times = executor.times_ns(ready, {name: each.predicted_ns for name, each in best.items()})
    timed = [replace(each, time_ns=times[name]) for name, each in best.items()]
    return sorted([*timed, *(each for group in groups for each in group[1:])], key=lambda each: each.time_ns)


def without_kept_factors(trace: Trace) -> Trace:
    """The trace without variants that keep what they make of weights: the user's weights may change between calls.

    Those are batch norm folded into a convolution or into factors, and weights in another layout.
    """

    def holds(index: int, variant: Variant) -> bool:
        chain = [trace.ops[op] for op in (index, *variant.covers)]
        folded = any(op.target in NORMS and not op.args[5] for op in chain)
        return bool(variant.covers) and (folded or variant.settings.memory_format is not None)

    ops = (
        msgspec.structs.replace(op, variants=tuple(v for v in op.variants if not holds(index, v)))
        for index, op in enumerate(trace.ops)
    )
    return msgspec.structs.replace(trace, ops=tuple(ops))
