"""Comparison of a step's schedules with eager, and the parts of a call's time."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from gpusim.errors import ReplayError
from gpusim.gpu.capture.user_step import UserStep, accumulated, give_back
from gpusim.gpu.device import precision
from gpusim.gpu.optimize.captured import Captured
from gpusim.gpu.optimize.choose import Candidate
from gpusim.gpu.optimize.eager_step import run_again
from gpusim.gpu.optimize.executors import Executor, Ready, restored
from gpusim.gpu.optimize.optimizers import LearningRates
from gpusim.gpu.optimize.progress import Progress
from gpusim.gpu.optimize.snapshot import put_back
from gpusim.gpu.optimize.variant import Variant
from gpusim.gpu.optimize.verify import noise_of_step, verify


@dataclass(frozen=True)
class Costs:
    """Parts of a call's time in ns, as in `Gain`."""

    around_ns: int
    around_sequential_ns: int
    host_ns: int
    device_ns: int
    call_device_ns: int
    launch_ns: int


@dataclass(frozen=True)
class Checked:
    """A candidate with eager's results."""

    variant: Variant
    candidate: Candidate
    worst_error: float
    bit_equal: bool
    costs: Costs

    @property
    def graph_ns(self) -> int:
        """Time of the candidate's graph without a call's copies, in ns."""
        return _without_copies(self.candidate.ready, self.candidate.time_ns, self.costs.around_ns)


class Checker:
    """Checker of schedules on one executor."""

    def __init__(self, executor: Executor, say: Progress) -> None:
        self.executor, self.say = executor, say

    def verified(
        self,
        step: UserStep,
        captured: Captured,
        rates: LearningRates,
        ranked: Sequence[Candidate],
        kept: frozenset[int],
        sequential: Sequence[Candidate] = (),
    ) -> Checked:
        """Return the fastest candidate with eager's results. Raises `ReplayError` where there is none.

        Raises `CaptureError` where the user's own step fails or differs from run to run.

        `captured` is the step as ATen calls, on the same tensors. `sequential` has the sequential graph of each front.
        """
        self.say("verifying")
        problem: ReplayError | None = None
        eager = partial(run_again, step)
        for candidate in ranked:
            variant = Variant(candidate.captured, rates, candidate.ready, kept)

            def fast(ready: Variant = variant) -> Any:
                if not ready.adopt():
                    raise ReplayError("an optimizer's state is missing after a step")
                return ready.run([tensor.clone() for tensor in captured.inputs])

            with put_back(step), restored(captured):
                if not captured.states.adopt():
                    given = accumulated(step)
                    eager()  # makes the optimizer's states
                    give_back(given)
                with put_back(step) as second:
                    try:
                        checked = verify(
                            step,
                            eager,
                            fast,
                            second.restore,
                            captured.options.dtype,
                            lambda: noise_of_step(captured, self.executor.device),
                            lambda: _without_tf32(eager),
                        )
                    except ReplayError as cause:
                        problem = problem or cause
                        self.say(f"left out: {cause}")
                        continue
                    alone = [each.ready for each in sequential if each.captured is candidate.captured]
                    costs = self._costs(variant, captured, candidate.streams, alone)
            return Checked(variant, candidate, checked.worst, checked.bit_equal, costs)
        assert problem is not None
        raise problem

    def _costs(self, variant: Variant, captured: Captured, streams: int, alone: Sequence[Ready]) -> Costs:
        """Measure the parts of a call. The state advances. `alone` has the sequential graph, if any."""
        device_ns = self.executor.device_ns
        tensors = [tensor.clone() for tensor in captured.inputs]

        def call() -> Any:  # with the checks of a call, which take the host's time too
            variant.is_current()
            variant.adopt()
            return variant.run(tensors)

        if variant.ready.copies is None:
            around_ns = self.executor.around_ns(lambda graph: variant.around(graph, tensors), streams)
        else:
            around_ns = self.executor.within_ns(
                lambda copies: variant.through(copies, tensors), variant.captured.inputs, variant.leaving(), streams
            )
        return Costs(
            around_ns=around_ns,
            around_sequential_ns=sum(
                device_ns(partial(variant.around, ready.run, tensors)) - device_ns(ready.run) for ready in alone
            ),
            host_ns=self.executor.host_ns(call),
            device_ns=_without_copies(variant.ready, device_ns(variant.ready.run), around_ns),
            call_device_ns=device_ns(call),
            launch_ns=self.executor.host_ns(variant.ready.run),
        )


def _without_copies(ready: Ready, run_ns: int, copies_ns: int) -> int:
    """Return the time of a run without the copies that it makes itself, in ns."""
    return run_ns if ready.copies is None else max(1, run_ns - copies_ns)


def _without_tf32(run: Callable[[], Any]) -> Any:
    with precision("fp32"):
        return run()
