"""From a step on fixed inputs to its best schedule, ready and verified: capture, search, try, compare with eager."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from gpusim.errors import CaptureError, GpusimError, ReplayError, StepError
from gpusim.gpu.capture.options import CaptureOptions
from gpusim.gpu.capture.user_step import UserStep
from gpusim.gpu.optimize import cache
from gpusim.gpu.optimize.callable import Gain
from gpusim.gpu.optimize.captured import Captured, capture_bound
from gpusim.gpu.optimize.choose import Candidate, Wanted, candidates
from gpusim.gpu.optimize.executors import Executor, state_of
from gpusim.gpu.optimize.optimizers import Rates
from gpusim.gpu.optimize.snapshot import put_back
from gpusim.gpu.optimize.variant import Variant
from gpusim.gpu.optimize.verify import noise_of_step, verify
from gpusim.units import format_ns

Say = Callable[[str], None]


@dataclass(frozen=True)
class Checked:
    """A candidate whose results are eager's."""

    variant: Variant
    candidate: Candidate
    worst_error: float


class StepMaker:
    """Captures steps, searches their schedules and verifies them, on one executor."""

    def __init__(self, executor: Executor, wanted: Wanted, say: Say) -> None:
        self.executor, self.wanted, self.say = executor, wanted, say

    def make(
        self,
        step: UserStep,
        options: CaptureOptions,
        inputs: Sequence[torch.Tensor],
        roots: Sequence[Any] = (),
        kept: frozenset[int] = frozenset(),
    ) -> tuple[Variant, Gain]:
        """The best schedule of a step on fixed inputs, of which `inputs` are copied at each call.

        `roots` are objects from which the step can reach others of Python's. `kept` are results, by place, that are
        given out where they lie, not copied. Raises `GpusimError` where there is none that computes the same. The
        user's objects are as before in any case.
        """
        with put_back(step, roots) as snapshot:
            self.say("timing the eager step")
            try:
                step.run()
            except (torch.cuda.OutOfMemoryError, GpusimError):
                raise
            except Exception as cause:  # whatever the user's code raises
                problem = (str(cause) or type(cause).__name__).splitlines()[0]
                raise StepError(f"the step fails: {type(cause).__name__}: {problem}") from cause
            snapshot.check_objects()
            eager_ns = self.executor.time_call_ns(step.run)
        rates = Rates(step.optimizers, self.executor.device)
        self.say("recording its operators")
        with put_back(step, roots):
            captured = capture_bound(step, rates, options, inputs)
        facts = self._facts()
        cached = cache.find(captured.trace, facts, self.say)
        if cached is not None:
            entry, trace, schedule = cached
            with put_back(step), restored(captured):
                ready = self.executor.prepare(captured, trace, schedule)
            before = Candidate(schedule, ready, entry.optimized_ns, entry.predicted_ns)
            with contextlib.suppress(ReplayError):
                verified = self._verified(step, captured, rates, [before], kept)
                return self._gained(
                    verified, eager_ns, entry.sequential_ns, entry.predicted_sequential_ns, "what was found before"
                )
        with put_back(step), restored(captured):
            trace = self.executor.measured(captured, eager_ns, self.wanted.kernels, self.say)
            ranked, sequential = candidates(captured, trace, self.executor, self.wanted, self.say)
        verified = self._verified(step, captured, rates, ranked, kept)
        chosen = verified.candidate
        measured = {
            "eager_ns": eager_ns,
            "sequential_ns": sequential.time_ns,
            "optimized_ns": chosen.time_ns,
            "predicted_ns": chosen.predicted_ns,
            "predicted_sequential_ns": sequential.predicted_ns,
        }
        cache.keep(trace, facts, chosen.schedule, measured, self.say)
        _, calibrated = self.executor.hardware()
        decided_by = "search and trial" if calibrated else "trial alone (this GPU is not calibrated)"
        return self._gained(verified, eager_ns, sequential.time_ns, sequential.predicted_ns, decided_by)

    def _facts(self) -> dict[str, str]:
        wanted = self.wanted
        asked = {"streams": str(wanted.streams), "memory limit": str(wanted.memory_limit_bytes)}
        return {**self.executor.facts(), **asked}

    def _gained(
        self, verified: Checked, eager_ns: int, sequential_ns: int, predicted_sequential_ns: int, decided_by: str
    ) -> tuple[Variant, Gain]:
        """What is run, and what it gained. Raises `CaptureError` where the user's own step is no slower."""
        chosen = verified.candidate
        if 0 < eager_ns <= chosen.time_ns:
            times = f"{format_ns(chosen.time_ns)} against {format_ns(eager_ns)}"
            raise CaptureError(f"no schedule of a CUDA graph is faster than the step itself ({times})")
        gain = Gain(
            eager_ns=eager_ns,
            sequential_ns=sequential_ns,
            optimized_ns=chosen.time_ns,
            predicted_ns=chosen.predicted_ns,
            predicted_sequential_ns=predicted_sequential_ns,
            kernels_chosen=chosen.schedule.has_variants,
            streams=chosen.schedule.stream_count,
            policy=chosen.schedule.policy,
            peak_bytes=chosen.ready.peak_bytes,
            decided_by=decided_by,
            worst_error=verified.worst_error,
        )
        return verified.variant, gain

    def _verified(
        self,
        step: UserStep,
        captured: Captured,
        rates: Rates,
        ranked: Sequence[Candidate],
        kept: frozenset[int],
    ) -> Checked:
        """The fastest candidate whose results are eager's. Raises `ReplayError` where none's are."""
        self.say("verifying")
        problem: ReplayError | None = None
        for candidate in ranked:
            variant = Variant(captured, rates, candidate.ready, kept)

            def fast(ready: Variant = variant) -> Any:
                if not ready.adopt():
                    raise ReplayError("an optimizer's state is missing after a step")
                return ready.run([tensor.clone() for tensor in captured.inputs])

            with put_back(step), restored(captured):
                if not captured.states.adopt():
                    step.run()  # makes the optimizer's states
                with put_back(step) as second:
                    try:
                        checked = verify(
                            step,
                            step.run,
                            fast,
                            second.restore,
                            captured.options.dtype,
                            lambda: noise_of_step(captured, self.executor.device),
                        )
                    except ReplayError as cause:
                        problem = problem or cause
                        self.say(f"left out: {cause}")
                        continue
            return Checked(variant, candidate, checked.worst)
        assert problem is not None
        raise problem


class restored:  # noqa: N801  (a context manager)
    """Within, the captured step's tensors may change; afterwards they hold what they held when it was recorded."""

    def __init__(self, captured: Captured) -> None:
        self._state = state_of(captured)

    def __enter__(self) -> None:
        pass

    def __exit__(self, *_: object) -> None:
        with torch.no_grad():
            self._state.restore()
