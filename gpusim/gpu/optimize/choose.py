"""Choice of a step's schedule: search within a budget, then a trial of the best few on the user's own tensors."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from time import perf_counter
from typing import Any, Final

import msgspec

from gpusim.defaults import DEFAULT_BUDGET_S, DEFAULT_POLICY, DEFAULT_SEED
from gpusim.engine.evaluate import Evaluator
from gpusim.errors import GpusimError, MemoryLimitError, OptionError, PlanError, ReplayError
from gpusim.formats.results import Ablation
from gpusim.formats.trace import Frontend, Trace, Variant
from gpusim.gpu.optimize.captured import Captured
from gpusim.gpu.optimize.executors import Executor, Ready
from gpusim.gpu.optimize.fronts import CANNOT, CANNOT_RUN
from gpusim.gpu.optimize.memory import within_limit
from gpusim.gpu.optimize.progress import Progress
from gpusim.gpu.replay.execute import initial_bytes
from gpusim.gpu.replay.fusion import NORMS
from gpusim.memplan.plan import MemoryPlan
from gpusim.plan.graph import OpGraph
from gpusim.plan.schedule import Schedule
from gpusim.policies.registry import POLICIES, stream_counts
from gpusim.search.explore import explore
from gpusim.search.explored import Explored
from gpusim.search.trial import contenders
from gpusim.text import first_line
from gpusim.trace.merging import is_merge
from gpusim.units import counted, format_bytes

Say = Callable[[str], None]

#: Schedules in the trial, in addition to the sequential one.
TRIED = 8
#: Number of the fastest ones that are recorded again: recordings of one schedule differ by some percent.
RECORDED_AGAIN = 2
#: Recordings of the schedule that is chosen in the end, for each of another's, and the time to make and compare
#: them, in s. Of twelve recordings the fastest takes up to 2 % less than of three (research/2026-11-30-recordings.md).
MORE_RECORDINGS: Final = 4
RECORDING_S: Final = 5.0
#: Memory that must be free for a further recording, in recordings: itself, and the user's own step, to compare with.
ROOM = 2
#: More than the memory of any GPU.
MAX_BYTES = 1 << 62
#: Least search budget for trying other kernels: measuring or compiling them takes some 20 s by itself.
KERNELS_FROM_S = 5.0
#: Front ends to try.
FRONTENDS: tuple[Frontend, ...] = ("aten", "inductor")
#: Options that take a freedom away.
_WITHOUT: Final[dict[Ablation, dict[str, Any]]] = {
    "aten": {"frontends": ("aten",)},
    "inductor": {"frontends": ("inductor",)},
    "one_stream": {"streams": 1},
    "no_variants": {"variants": False},
    "no_regions": {"regions": False},
}


@dataclass(frozen=True)
class Candidate:
    """A prepared schedule with its measured and predicted time."""

    captured: Captured
    schedule: Schedule
    ready: Ready
    time_ns: int
    predicted_ns: int
    interval_ns: tuple[int, int] = (0, 0)
    """Interval of the prediction."""
    plan: MemoryPlan | None = None
    """Memory plan that `ready` runs instead of the schedule, where no schedule keeps the limit."""

    @property
    def policy(self) -> str:
        """Name of the policy or memory plan."""
        return self.schedule.policy if self.plan is None else f"memory plan, {self.plan.policy}"

    @property
    def streams(self) -> int:
        """Number of streams, including those of copies."""
        return self.schedule.stream_count if self.plan is None else self.plan.streams


@dataclass(frozen=True)
class Wanted:
    """Options of the user."""

    streams: int
    budget_s: float | None
    memory_limit_bytes: int | None
    seed: int = DEFAULT_SEED
    frontends: tuple[Frontend, ...] = FRONTENDS
    variants: bool = True
    """Whether ops may run other algorithms than the recorded ones."""
    regions: bool = True
    """Whether kernels may be chosen by region."""
    limit_s: float | None = None
    """Time to make a step ready, in s; None for that of its mode."""

    def without(self, ablation: Ablation) -> Wanted:
        """Return the options without one freedom."""
        return replace(self, **_WITHOUT[ablation])

    @property
    def kernels(self) -> bool:
        """Whether to try other kernels: those of each op in processes of their own, and Inductor's."""
        return self.budget_s is None or self.budget_s >= KERNELS_FROM_S

    @property
    def inductor(self) -> bool:
        """Whether to try Inductor's kernels."""
        return "inductor" in self.frontends and (self.kernels or "aten" not in self.frontends)

    @property
    def search_s(self) -> float:
        """Time of all searches, in s."""
        return self.budget_s or DEFAULT_BUDGET_S


def candidates(
    captured: Captured, trace: Trace, executor: Executor, wanted: Wanted, budget_s: float, say: Progress
) -> tuple[list[Candidate], Candidate]:
    """Return the tried schedules, fastest first, and the sequential one. `trace` has times.

    The search takes `budget_s`. Raises `OptionError` where neither a schedule nor a memory plan keeps the memory limit.
    """
    hardware, _ = executor.hardware()
    graph = OpGraph.build(trace, hardware)
    plan: MemoryPlan | None = None
    say("searching")
    try:
        with say.stage("search"):
            explored = explore(
                graph,
                streams=wanted.streams,
                budget_s=budget_s,
                seed=wanted.seed,
                memory_limit_bytes=wanted.memory_limit_bytes,
            )
            schedules, plan = list(_schedules(explored)), explored.memory_plan
    except MemoryLimitError:  # a memory plan may keep it
        alone = Schedule.in_recorded_order(len(trace.ops))
        schedules = [alone.made("sequential", "gpusim.optimize", Evaluator(graph).makespan_ns(alone))]
    with say.stage("trial"):
        return tried(captured, graph, executor, schedules, wanted.memory_limit_bytes, say, plan)


def quick_ns(trace: Trace, executor: Executor, wanted: Wanted) -> int:
    """Predict a step's time with one policy, on the best number of streams, in ns. `trace` has times."""
    hardware, _ = executor.hardware()
    graph = OpGraph.build(trace, hardware)
    policy, evaluator = POLICIES[DEFAULT_POLICY], Evaluator(graph)
    counts = policy.stream_counts(stream_counts(wanted.streams))
    return min(evaluator.makespan_ns(policy(graph, count)) for count in counts)


def _schedules(explored: Explored) -> Iterator[Schedule]:
    """Yield the recommended schedule and the best of each kind, the sequential one first."""
    yield explored.best_of("sequential").schedule
    yield from (row.schedule for row in contenders(explored, TRIED))


def tried(
    captured: Captured,
    graph: OpGraph,
    executor: Executor,
    schedules: list[Schedule],
    memory_limit_bytes: int | None,
    say: Say,
    plan: MemoryPlan | None = None,
) -> tuple[list[Candidate], Candidate]:
    """Return schedules, prepared and timed in turns, fastest first; and the first given one, which is sequential.

    Schedules over the memory limit are left out; where all are, a memory plan replaces them: `plan`, if given. Raises
    `OptionError` where none keeps the limit either.
    """
    unique = list(dict.fromkeys(schedules))
    say(f"trying {len(unique)} schedules")
    ready: dict[str, Ready] = {}
    for number, schedule in enumerate(unique):
        if not _has_room(graph.trace, ready.values(), executor):
            say(f"left out {counted(len(unique) - number, 'schedule')}: too little memory is free to try them, too")
            break
        try:
            ready[str(number)] = executor.prepare(captured, graph.trace, schedule)
        except GpusimError as cause:
            if not number:
                raise
            say(f"left out {schedule.policy} on {schedule.stream_count} streams: {cause}")
    timed = _timed(captured, graph, unique, ready, executor)
    sequential = timed["0"]
    kept = [c for c in timed.values() if memory_limit_bytes is None or c.ready.peak_bytes <= memory_limit_bytes]
    if not kept:
        assert memory_limit_bytes is not None
        return [_planned(captured, graph, executor, timed, memory_limit_bytes, say, plan)], sequential
    ranked = sorted(kept, key=lambda candidate: candidate.time_ns)
    best = [
        _best_recording(
            each,
            [each.ready],
            graph.trace,
            executor,
            memory_limit_bytes,
            partial(executor.prepare, captured, graph.trace, each.schedule),
            executor.recordings,
        )
        for each in ranked[:RECORDED_AGAIN]
    ]
    return sorted([*best, *ranked[RECORDED_AGAIN:]], key=lambda candidate: candidate.time_ns), sequential


def _has_room(trace: Trace, ready: Collection[Ready], executor: Executor) -> bool:
    """Whether there is memory for another recording like these, which all stay for the trial; for the first, always."""
    if not ready:
        return True
    most_bytes = max(each.peak_bytes for each in ready) - initial_bytes(trace)
    return executor.free_bytes() >= ROOM * most_bytes


def _planned(
    captured: Captured,
    graph: OpGraph,
    executor: Executor,
    timed: Mapping[str, Candidate],
    limit_bytes: int,
    say: Say,
    plan: MemoryPlan | None,
) -> Candidate:
    """Return a memory plan that keeps a limit which no schedule of `timed` does. Raises `OptionError` where none
    does.
    """
    say("planning its memory")
    try:
        planned, problem = within_limit(captured, graph, limit_bytes, executor.device, say, plan)
    except PlanError as cause:  # a step without tensors that a plan could move
        planned, problem = None, str(cause)
    if planned is None:
        least = min(each.ready.peak_bytes for each in timed.values())
        first = f"memory limit {format_bytes(limit_bytes)}: the least that any schedule takes is {format_bytes(least)}"
        raise OptionError("; ".join(filter(None, (first, problem))))
    predicted_ns = planned.outcome.step_ns
    time_ns = executor.times_ns({"": planned.ready}, {"": predicted_ns})[""]
    plan = planned.outcome.plan
    interval_ns = plan.interval_ns(graph, predicted_ns)
    return Candidate(captured, timed["0"].schedule, planned.ready, time_ns, predicted_ns, interval_ns, plan)


def as_called(
    candidate: Candidate,
    trace: Trace,
    executor: Executor,
    memory_limit_bytes: int | None,
    kept: frozenset[int],
    say: Say,
) -> Candidate:
    """Return the candidate as it is called: the fastest of many recordings with the copies of a call, where the device
    can make them. `kept` are results, by position, that are not copied. May change the user's tensors.

    Memory plans stay as they are, and so does everything on a device with one recording per schedule.
    """
    if executor.recordings == 1 or candidate.plan is not None:
        return candidate
    captured, schedule = candidate.captured, candidate.schedule
    prepare: Callable[[], Ready | None] = partial(executor.prepare, captured, trace, schedule)
    prepare_call = partial(executor.prepare_call, captured, trace, schedule, captured.returned.copied(kept))
    recordings = [candidate.ready]
    if _has_room(trace, recordings, executor):
        try:
            called = prepare_call()
            if called is not None and called.peak_bytes > (memory_limit_bytes or MAX_BYTES):
                raise ReplayError(f"with them in the graph, the step takes {format_bytes(called.peak_bytes)}")
        except CANNOT as cause:
            executor.synchronize()  # raises where the GPU itself has failed, not only the recording
            say(f"torch makes the copies of a call: {first_line(cause)}")
            called = None
        if called is not None:
            recordings, prepare = [called], prepare_call
    most = executor.recordings * MORE_RECORDINGS
    if candidate.streams == 1:
        most = 1 if prepare is not prepare_call else executor.recordings
    return _best_recording(candidate, recordings, trace, executor, memory_limit_bytes, prepare, most, RECORDING_S)


def _best_recording(
    first: Candidate,
    recordings: list[Ready],
    trace: Trace,
    executor: Executor,
    memory_limit_bytes: int | None,
    prepare: Callable[[], Ready | None],
    most: int,
    limit_s: float = math.inf,
) -> Candidate:
    """Return the fastest of these and further recordings of a schedule, each in a state and with addresses of its own.

    There are `most` at most, as many as can be made and timed in `limit_s`, and no more once one fails.
    """
    begin, timing_s = perf_counter(), executor.timing_ns(first.time_ns) / 1e9
    while len(recordings) < most and _has_room(trace, recordings, executor):
        if perf_counter() - begin + timing_s * (len(recordings) + 1) > limit_s:
            break
        try:
            another = prepare()
        except CANNOT_RUN:  # how much memory it takes is an estimate, and there is one already
            break
        assert another is not None  # as the first one could be prepared
        recordings.append(another)
    if recordings == [first.ready]:
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
    captured: Captured, graph: OpGraph, schedules: Sequence[Schedule], ready: Mapping[str, Ready], executor: Executor
) -> dict[str, Candidate]:
    predicted = {name: schedules[int(name)].predicted_ns for name in ready}
    times = executor.times_ns(ready, predicted)
    timed: dict[str, Candidate] = {}
    for name, each in ready.items():
        schedule, ns = schedules[int(name)], predicted[name]
        interval_ns = schedule.interval_ns(graph, ns)
        timed[name] = Candidate(captured, schedule, each, times[name], ns, interval_ns)
    return timed


def in_turns(groups: Sequence[Sequence[Candidate]], executor: Executor) -> list[Candidate]:
    """Merge groups of candidates, each fastest first, into one such list; the best of each are timed in turns again."""
    if len(groups) == 1:
        return list(groups[0])
    best = {str(number): group[0] for number, group in enumerate(groups)}
    ready = {name: each.ready for name, each in best.items()}
    times = executor.times_ns(ready, {name: each.predicted_ns for name, each in best.items()})
    timed = [replace(each, time_ns=times[name]) for name, each in best.items()]
    return sorted([*timed, *(each for group in groups for each in group[1:])], key=lambda each: each.time_ns)


def without_kept_factors(trace: Trace) -> Trace:
    """Drop variants that keep values derived from weights: the user's weights may change between calls.

    Those are batch norm folded into a convolution or into factors, weights in another layout, and merged ones.
    """

    def holds(index: int, variant: Variant) -> bool:
        chain = [trace.ops[op] for op in (index, *variant.covers)]
        folded = any(op.target in NORMS and not op.args[5] for op in chain)
        changed = folded or variant.settings.memory_format is not None or is_merge(variant)
        return bool(variant.covers) and changed

    ops = (
        msgspec.structs.replace(op, variants=tuple(v for v in op.variants if not holds(index, v)))
        for index, op in enumerate(trace.ops)
    )
    return msgspec.structs.replace(trace, ops=tuple(ops))
