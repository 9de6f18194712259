"""From a step on fixed inputs to its best schedule: capture, search, trial, comparison with eager.

The step is considered as ATen calls and as Inductor's kernels in several styles. The best predictions are searched,
with other kernels of their calls, and the schedule that is fastest on the GPU is run.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from time import perf_counter
from typing import Any, Final

import torch

from gpusim.engine.compiled.warm import compiling_ahead, warm_up
from gpusim.errors import CaptureError, ReplayError
from gpusim.formats.trace import Mode, Trace
from gpusim.gpu.capture.options import CaptureOptions
from gpusim.gpu.capture.user_step import UserStep
from gpusim.gpu.inductor.kernels import start_compiling
from gpusim.gpu.optimize import cache
from gpusim.gpu.optimize.callable import Gain
from gpusim.gpu.optimize.captured import MIXED, Captured, capture_bound
from gpusim.gpu.optimize.check import Checked, Checker
from gpusim.gpu.optimize.choose import Candidate, Wanted, as_called, candidates, in_turns, quick_ns
from gpusim.gpu.optimize.eager_step import timed_eager
from gpusim.gpu.optimize.executors import Executor, Ready, restored
from gpusim.gpu.optimize.fronts import CANNOT_RUN, Inductors
from gpusim.gpu.optimize.garbage import quick_collections
from gpusim.gpu.optimize.hooks import Hooks
from gpusim.gpu.optimize.kept_step import KeptStep, kept_step
from gpusim.gpu.optimize.memory import prepare_memory
from gpusim.gpu.optimize.mix import CHOICE_S, Profiled, best_mix
from gpusim.gpu.optimize.optimizers import LearningRates
from gpusim.gpu.optimize.progress import Progress
from gpusim.gpu.optimize.snapshot import put_back
from gpusim.gpu.optimize.variant import Variant
from gpusim.memplan.evaluate import MemoryEvaluator
from gpusim.memplan.plan import MemoryPlan
from gpusim.plan.graph import OpGraph
from gpusim.plan.schedule import Schedule
from gpusim.text import first_line
from gpusim.units import format_bytes, format_ns

Say = Callable[[str], None]

#: Time to make a step ready, compilation included, in s. Other styles of Inductor, and other kernels of operators, are
#: tried only where that still fits.
LIMIT_S: Final[dict[Mode, float]] = {"infer": 60.0, "train": 150.0}
#: Time to measure other kernels of one front end's calls, in s (GoogLeNet, H200).
VARIANTS_S: Final = 12.0
#: Time to try schedules and to check the fastest, in s (GoogLeNet, inference 1 and training 8, H200).
TRIALS_S: Final[dict[Mode, float]] = {"infer": 10.0, "train": 16.0}
#: Number of front ends and styles to search; and their largest predicted slow-down over the best, before any search.
SEARCHED, MAY_BE_SLOWER = 2, 1.25


@dataclass(frozen=True)
class Tried:
    """The step with kernels of one front end, and its tried schedules, fastest first."""

    captured: Captured
    trace: Trace
    ranked: list[Candidate]
    sequential: Candidate


@dataclass(frozen=True)
class _Task:
    """A recorded step that needs a schedule."""

    step: UserStep
    captured: Captured
    """The step as ATen calls."""
    rates: LearningRates
    inductors: Inductors
    """The step as Inductor's kernels."""
    kept: frozenset[int]
    eager_ns: int
    end: float
    """When searches have to begin, by `perf_counter`."""

    def left_s(self) -> float:
        """Return the time until then, in s."""
        return self.end - perf_counter()


class StepMaker:
    """Maker of optimized steps: capture, search and verification, on one executor."""

    def __init__(self, executor: Executor, wanted: Wanted, say: Say) -> None:
        self.executor, self.wanted, self.say = executor, wanted, Progress(say)
        self.checker = Checker(executor, self.say)

    def make(
        self,
        step: UserStep,
        options: CaptureOptions,
        inputs: Sequence[torch.Tensor],
        roots: Sequence[Any] = (),
        kept: frozenset[int] = frozenset(),
    ) -> tuple[Variant, Gain]:
        """Return the best schedule of a step on fixed inputs, of which `inputs` are copied at each call.

        `roots` are objects from which the step can reach other Python objects. `kept` are results, by position, that
        are returned in place, not copied. Raises `GpusimError` where none computes the same. The user's objects are
        restored in any case.
        """
        try:
            made = self._made(step, options, inputs, roots, kept)
        except CANNOT_RUN:  # the user's own step runs on, and trials have made its launches slow
            self.executor.make_launches_fast()
            raise
        self.executor.give_back()
        if not self.executor.make_launches_fast():
            self.say("launches stay slow: no second context could be made")
        return made

    def _made(
        self,
        step: UserStep,
        options: CaptureOptions,
        inputs: Sequence[torch.Tensor],
        roots: Sequence[Any],
        kept: frozenset[int],
    ) -> tuple[Variant, Gain]:
        """As `make`. What it tried is dropped when it returns."""
        begin = perf_counter()
        self.say.begin()
        if self.wanted.inductor:
            start_compiling(self.executor.device)
        roots = (*roots, *Hooks(step).functions())
        eager_ns = timed_eager(step, roots, options.dtype, self.executor.time_call_ns, self.say)
        rates = LearningRates(step.optimizers, self.executor.device)
        self.say("recording its operators")
        with self.say.stage("recording"), put_back(step, roots):
            captured = capture_bound(step, rates, options, inputs, roots)
        inductors = Inductors(step, captured, self.wanted.inductor, self.executor.brief_ns, self.say)
        limit_s = self.wanted.limit_s or LIMIT_S[captured.options.mode]
        end = begin + limit_s - self.wanted.search_s - TRIALS_S[captured.options.mode]
        task = _Task(step, captured, rates, inductors, kept, eager_ns, end)
        facts = self._facts()
        found = self._found_before(task, facts)
        if found is not None:
            return found
        hardware, calibrated = self.executor.hardware()
        with compiling_ahead(hardware) as wait_for_engine:
            fronts = self._fronts(task)
            with self.say.stage("engine"):
                wait_for_engine()
                warm_up(hardware)
        captured.graph = None
        with quick_collections():
            profiled = self._profiled(task, fronts)
            mixed = self._mixed(task, profiled)
            tried = self._tried(task, _promising([*profiled, *mixed]))
            with self.say.stage("trial"):
                ranked = self._recorded(task, tried)
            with self.say.stage("check"):
                sequential = [each.sequential for each in tried]
                verified = self._verified(task, ranked, sequential)
        for each in (captured, *fronts, *(mine.captured for mine in mixed)):
            each.drop_copies()
        chosen = verified.candidate
        (front,) = (each for each in tried if each.captured is chosen.captured)
        measured = {
            "eager_ns": eager_ns,
            "sequential_ns": front.sequential.time_ns,
            "optimized_ns": verified.graph_ns,
            "predicted_ns": chosen.predicted_ns,
            "interval_ns": chosen.interval_ns,
            "predicted_sequential_ns": front.sequential.predicted_ns,
        }
        made = front.captured

        def as_kernels() -> KeptStep | None:
            return None if made is captured else kept_step(made.recorded, captured.recorded)

        cache.keep(
            captured.trace, facts, front.trace, made.style, chosen.schedule, chosen.plan, measured, self.say, as_kernels
        )
        decided_by = "search and trial" if calibrated else "trial alone (this GPU is not calibrated)"
        without = "" if any(each.captured.frontend == "inductor" for each in tried) else inductors.problem
        return self._gained(
            verified, eager_ns, front.sequential.time_ns, front.sequential.predicted_ns, decided_by, without
        )

    def _recorded(self, task: _Task, tried: Sequence[Tried]) -> list[Candidate]:
        """Return all candidates, fastest first, and that one in the fastest of many recordings."""
        with put_back(task.step), restored(task.captured):
            ranked = in_turns([each.ranked for each in tried], self.executor)
            (of_first,) = (each for each in tried if each.captured is ranked[0].captured)
            limit_bytes = self.wanted.memory_limit_bytes
            first = as_called(ranked[0], of_first.trace, self.executor, limit_bytes, task.kept, self.say)
        return [first, *ranked[1:]]

    def _verified(self, task: _Task, ranked: Sequence[Candidate], sequential: Sequence[Candidate] = ()) -> Checked:
        return self.checker.verified(task.step, task.captured, task.rates, ranked, task.kept, sequential)

    def _found_before(self, task: _Task, facts: dict[str, str]) -> tuple[Variant, Gain] | None:
        """Return the schedule that the cache has for this step, or None where there is none or it does not run."""
        captured, inductors = task.captured, task.inductors
        with self.say.stage("cache"):
            cached = cache.find(captured.trace, facts, lambda entry, file: inductors.again(entry, file).trace, self.say)
        if cached is None:
            return None
        entry, trace, schedule, plan = cached
        of_kernels = inductors.in_style(entry.style) if entry.frontend == "inductor" else captured
        try:
            with self.say.stage("cache"), put_back(task.step), restored(captured):
                ready = self._prepared(of_kernels, trace, schedule, plan)
            limit_bytes = self.wanted.memory_limit_bytes
            if limit_bytes is not None and ready.peak_bytes > limit_bytes:
                raise ReplayError(f"it takes {format_bytes(ready.peak_bytes)} now")
            before = Candidate(
                of_kernels, schedule, ready, entry.optimized_ns, entry.predicted_ns, entry.interval_ns, plan
            )
            with self.say.stage("cache"), put_back(task.step), restored(captured):
                before = as_called(before, trace, self.executor, limit_bytes, task.kept, self.say)
            with self.say.stage("check"):
                verified = self._verified(task, [before])
        except CANNOT_RUN as cause:
            self.say(f"what was found before does not run: {first_line(cause)}")
            return None
        for each in (captured, of_kernels):
            each.drop_copies()
        return self._gained(
            verified, task.eager_ns, entry.sequential_ns, entry.predicted_sequential_ns, "what was found before"
        )

    def _prepared(self, of_kernels: Captured, trace: Trace, schedule: Schedule, plan: MemoryPlan | None) -> Ready:
        """Return a schedule, or the memory plan that replaces it, ready to run."""
        if plan is None:
            return self.executor.prepare(of_kernels, trace, schedule)
        hardware, _ = self.executor.hardware()
        evaluator = MemoryEvaluator(OpGraph.build(trace, hardware))
        return prepare_memory(of_kernels, evaluator, evaluator.evaluate(plan), self.executor.device, self.say).ready

    def _fronts(self, task: _Task) -> list[Captured]:
        """Return the step with each kind of kernels to try. Raises `CaptureError` where there are none."""
        fronts = [task.captured] if "aten" in self.wanted.frontends else []
        first = task.inductors.first()
        if first is not None:
            others = task.inductors.others(lambda: task.left_s() - VARIANTS_S) if self.wanted.kernels else ()
            fronts += [first, *others]
        if not fronts:
            raise CaptureError(task.inductors.problem or "no kernels are asked for")
        return fronts

    def _profiled(self, task: _Task, fronts: Sequence[Captured]) -> list[Profiled]:
        """Return the fronts with times. Raises the first one's error if all fail.

        ATen's calls come first, as Inductor's kernels are compiled meanwhile. One style of these is compared with eager
        before any time is spent on it.
        """
        timed: list[Profiled] = []
        problem: Exception | None = None
        checked = False
        for front in fronts:
            try:
                with self.say.stage("compiling"):
                    _ = front.functions  # waits until they are compiled
                if front is not task.captured and not checked:
                    self._check_alone(task, front)
                    checked = True
                with self.say.stage("profiling"), put_back(task.step), restored(task.captured):
                    trace = self.executor.measured(front, task.eager_ns, self.say)
                timed.append(Profiled(front, trace, quick_ns(trace, self.executor, self.wanted)))
                self.say(f"{front.label}: {format_ns(timed[-1].predicted_ns)} predicted before any search")
            except CANNOT_RUN as cause:
                problem = problem or cause
                if front is not task.captured:
                    task.inductors.leave_out(front.style, cause)
        if not timed:
            assert problem is not None
            raise problem
        return timed

    def _mixed(self, task: _Task, profiled: Sequence[Profiled]) -> list[Profiled]:
        """Return the step with the kernels of both front ends, chosen by region, where that is predicted faster."""
        if not self.wanted.regions:
            return []
        captured = task.captured
        calls = [each for each in profiled if each.captured is captured]
        kernels = [each for each in profiled if each.captured is not captured] if self.wanted.kernels else []
        begin, limit_s = perf_counter(), min(CHOICE_S[captured.options.mode], task.left_s() - VARIANTS_S)
        try:
            with self.say.stage("regions"):
                mix = calls and best_mix(
                    calls[0],
                    kernels,
                    lambda trace: quick_ns(trace, self.executor, self.wanted),
                    lambda: begin + limit_s - perf_counter(),
                    self.say,
                )
            if not mix:
                return []
            with self.say.stage("regions"), put_back(task.step), restored(captured):
                mixed = mix.made(task.step)
                trace = self.executor.anchored(mixed.captured, mixed.trace)
            self._check_alone(task, mixed.captured)
        except CANNOT_RUN as cause:
            self.say(f"left out kernels by region: {first_line(cause)}")
            return []
        mixed = Profiled(mixed.captured, trace, quick_ns(trace, self.executor, self.wanted))
        self.say(f"{mixed.captured.label}: {format_ns(mixed.predicted_ns)} predicted before any search; {mix.text}")
        return [mixed]

    def _check_alone(self, task: _Task, front: Captured) -> None:
        """Compare a front with eager, its ops in sequence. Raises `ReplayError`."""
        alone = Schedule.in_recorded_order(len(front.trace.ops))
        with self.say.stage("check"):
            with put_back(task.step), restored(task.captured):
                ready = self.executor.prepare(front, front.trace, alone)
            self._verified(task, [Candidate(front, alone, ready, 0, 0)])

    def _tried(self, task: _Task, profiled: Sequence[Profiled]) -> list[Tried]:
        """Return schedules of the step with each of these kernels. Raises the first one's error where all fail."""
        tried: list[Tried] = []
        problem: Exception | None = None
        for each in profiled:
            front, trace = each.captured, each.trace
            try:
                with put_back(task.step), restored(task.captured):
                    if self.wanted.kernels and self.wanted.variants and task.left_s() >= VARIANTS_S:
                        trace = self._with_variants(front, trace, task.left_s() - VARIANTS_S)
                    budget_s = self.wanted.search_s / len(profiled)
                    ranked = candidates(front, trace, self.executor, self.wanted, budget_s, self.say)
            except CANNOT_RUN as cause:
                problem = problem or cause
                if front is not task.captured:
                    task.inductors.leave_out(front.style, cause)
                continue
            tried.append(Tried(front, trace, *ranked))
        if not tried:
            assert problem is not None
            raise problem
        return tried

    def _with_variants(self, front: Captured, trace: Trace, tuning_s: float) -> Trace:
        """Return the trace with other kernels of its calls, or as it is where they cannot be measured."""
        try:
            with self.say.stage("variants"):
                return self.executor.with_variants(front, trace, tuning_s, self.say)
        except CANNOT_RUN as cause:
            self.say(f"left out other kernels of its calls: {first_line(cause)}")
            return trace

    def _facts(self) -> dict[str, str]:
        wanted = self.wanted
        asked = {
            "streams": str(wanted.streams),
            "memory limit": str(wanted.memory_limit_bytes),
            "kernels": " ".join(each for each in wanted.frontends if each == "aten" or wanted.inductor),
            "variants": str(wanted.variants),
            "regions": str(wanted.regions),
            "time limit": str(wanted.limit_s),
            # Where torch must be deterministic, Inductor's kernels add nothing atomically.
            "deterministic": str(torch.are_deterministic_algorithms_enabled()),
        }
        return {**self.executor.facts(), **asked}

    def _gained(
        self,
        verified: Checked,
        eager_ns: int,
        sequential_ns: int,
        predicted_sequential_ns: int,
        decided_by: str,
        without: str = "",
    ) -> tuple[Variant, Gain]:
        """Return the variant to run, and its gain. Raises `CaptureError` where the user's own step is no slower.

        A memory plan may be slower: the user's own step needs more memory than the limit.
        """
        chosen = verified.candidate
        if chosen.plan is None and 0 < eager_ns <= verified.graph_ns:
            times = f"{format_ns(verified.graph_ns)} against {format_ns(eager_ns)}"
            raise CaptureError(f"no schedule of a CUDA graph is faster than the step itself ({times})")
        gain = Gain(
            eager_ns=eager_ns,
            sequential_ns=sequential_ns,
            optimized_ns=verified.graph_ns,
            predicted_ns=chosen.predicted_ns,
            interval_ns=chosen.interval_ns,
            predicted_sequential_ns=predicted_sequential_ns,
            kernels_chosen=chosen.schedule.has_variants or chosen.captured.style == MIXED,
            mixed=chosen.captured.style == MIXED,
            streams=chosen.streams,
            policy=chosen.policy,
            peak_bytes=chosen.ready.peak_bytes,
            decided_by=decided_by,
            worst_error=verified.worst_error,
            bit_equal=verified.bit_equal,
            frontend=chosen.captured.frontend,
            stages_s=dict(self.say.seconds),
            **asdict(verified.costs),
            without=without,
        )
        self.say(self.say.text)
        return verified.variant, gain


def _promising(profiled: Sequence[Profiled]) -> list[Profiled]:
    """Return the steps worth a search, best prediction first."""
    ranked = sorted(profiled, key=lambda each: each.predicted_ns)
    return [each for each in ranked if each.predicted_ns <= MAY_BE_SLOWER * ranked[0].predicted_ns][:SEARCHED]
