"""Comparison of a step's schedules with eager, and the parts of a call's time."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from gpusim.errors import ReplayError
from gpusim.gpu.capture.user_step import UserStep, accumulated, give_back
from gpusim.gpu.device import precision
from gpusim.gpu.optimize.captured import Captured
from gpusim.gpu.optimize.choose import Candidate
from gpusim.gpu.optimize.eager_step import run_again
from gpusim.gpu.optimize.executors import Executor, Ready, restored
from gpusim.gpu.optimize.fronts import CANNOT
from gpusim.gpu.optimize.optimizers import LearningRates
from gpusim.gpu.optimize.progress import Progress
from gpusim.gpu.optimize.snapshot import put_back
from gpusim.gpu.optimize.variant import Variant
from gpusim.gpu.optimize.verify import noise_of_step, verify
from gpusim.text import first_line


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
    copies_ns: int
    """Time of the copies that the candidate makes itself at each run, in ns."""

    @property
    def graph_ns(self) -> int:
        """Time of the candidate's graph without a call's copies, in ns."""
        return max(1, self.candidate.time_ns - self.copies_ns) if self.copies_ns else self.candidate.time_ns


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
                    costs, copies_ns = self._costs(variant, captured, candidate.streams, alone)
            return Checked(variant, candidate, checked.worst, checked.bit_equal, costs, copies_ns)
        assert problem is not None
        raise problem

    def _costs(self, variant: Variant, captured: Captured, streams: int, alone: Sequence[Ready]) -> tuple[Costs, int]:
        """Measure the parts of a call, and the copies that the schedule makes itself at each run. The state advances.

        `alone` has the sequential graph, if any.
        """
        device_ns = self.executor.device_ns
        tensors = [tensor.clone() for tensor in captured.inputs]

        def call() -> Any:  # with the checks of a call, which take the host's time too
            variant.is_current()
            variant.adopt()
            return variant.run(tensors)

        around_ns, copies_ns = self._copies_ns(variant, tensors, streams)
        costs = Costs(
            around_ns=around_ns,
            around_sequential_ns=sum(
                device_ns(partial(variant.around, ready.run, tensors)) - device_ns(ready.run) for ready in alone
            ),
            host_ns=self.executor.host_ns(call),
            device_ns=max(0, device_ns(variant.ready.run) - copies_ns),
            call_device_ns=device_ns(call),
            launch_ns=self.executor.host_ns(variant.ready.run),
        )
        return costs, copies_ns

    def _copies_ns(self, variant: Variant, tensors: Sequence[torch.Tensor], streams: int) -> tuple[int, int]:
        """Return the time that copies add to a call, and to a run of the schedule, in ns; 0 where it is not known."""
        if variant.ready.copies is None:
            return self.executor.around_ns(lambda graph: variant.around(graph, tensors), streams), 0
        try:
            return self.executor.copies_in_graph_ns(
                lambda copies: variant.run_with(copies, tensors),
                variant.captured.inputs,
                variant.results_to_copy(),
                streams,
            )
        except CANNOT as cause:  # the step itself is right
            self.say(f"a call's copies are not timed: {first_line(cause)}")
            return 0, 0


def _without_tf32(run: Callable[[], Any]) -> Any:
    with precision("fp32"):
        return run()
