"""Choice between ATen's calls and Inductor's kernels region by region, by predictions of the whole step.

It begins with the kernels that are predicted faster for the whole step. Equal regions, such as those of equal layers,
are exchanged together, most promising first, and stay exchanged where the prediction gets better. Times are those of
the two profiles.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Final

import msgspec

from gpusim.errors import CaptureError
from gpusim.formats.trace import Trace
from gpusim.gpu.capture.record import Recorded
from gpusim.gpu.capture.user_step import UserStep
from gpusim.gpu.inductor.mixed import Mixed, Mixer
from gpusim.gpu.inductor.regions import Region, Regions, Side, Step
from gpusim.gpu.optimize.captured import MIXED, Captured
from gpusim.gpu.optimize.executors import ground_truth
from gpusim.gpu.optimize.fused import bound
from gpusim.units import counted

Say = Callable[[str], None]
SIDES: Final[tuple[Side, Side]] = ("calls", "kernels")
#: Time to choose, in s: each prediction takes some ms per 100 ops.
CHOICE_S: Final = {"infer": 3.0, "train": 8.0}
#: Regions are tried where both front ends are predicted this close, or where their kernels are faster by this share of
#: the step in regions of the slower one.
CLOSE, MAY_GAIN_FRAC = 1.25, 0.02
#: Least predicted gain over both front ends: less is within the error of the predictions.
GAIN_FRAC: Final = 0.005


@dataclass(frozen=True)
class Profiled:
    """The step with kernels of one front end, their times, and its predicted time before any search."""

    captured: Captured
    trace: Trace
    predicted_ns: int

    @cached_property
    def gap_ns(self) -> float:
        """Time of the sequential graph beyond its kernels, for each kernel, in ns."""
        kernels = [kernel.dur_ns for op in self.trace.ops for kernel in op.kernels]
        truth = self.trace.ground_truth
        return 0.0 if truth is None or not kernels else (truth.graph.median_ns - sum(kernels)) / len(kernels)

    def op_ns(self, op: int) -> float:
        """Return an op's time in the sequential graph, in ns."""
        return sum(kernel.dur_ns + self.gap_ns for kernel in self.trace.ops[op].kernels)

    @property
    def recorded(self) -> Recorded:
        """The step with the constants that Inductor has computed."""
        constants = {i: tensor for i, tensor in self.captured.live.items() if i not in self.captured.recorded.named}
        return replace(self.captured.recorded, initial=constants)


@dataclass(frozen=True)
class Mix:
    """Regions with Inductor's kernels, and the predicted time of the step."""

    choice: RegionChoice
    fused: set[int]
    predicted_ns: int
    tries: int
    """Number of choices predicted."""

    @property
    def text(self) -> str:
        """Describe the choice in a few words."""
        return f"Inductor's in {len(self.fused)} of {counted(len(self.choice.regions.regions), 'region')}"

    def made(self, step: UserStep) -> Profiled:
        """Return the step with these kernels on the user's tensors. Raises as `bound`."""
        calls, kernels = (self.choice.timed[side].captured for side in SIDES)
        mixed = self.choice.mixer.mixed(self.fused)
        made, timed = bound(step, calls, mixed.recorded, MIXED, kernels.compiling), self.choice.trace(mixed)
        trace = msgspec.structs.replace(
            made.trace, ops=timed.ops, ground_truth=timed.ground_truth, provenance=timed.provenance
        )
        return Profiled(made, trace, self.predicted_ns)


def best_mix(
    calls: Profiled,
    kernels: Sequence[Profiled],
    predict: Callable[[Trace], int],
    left_s: Callable[[], float],
    say: Say,
) -> Mix | None:
    """Return the best choice of kernels by region, or None where none is predicted faster than each step alone.

    `kernels` is the step in several styles of Inductor, of which a choice takes one.
    """
    mixes: list[Mix] = []
    for each in sorted(kernels, key=lambda each: each.predicted_ns):
        with suppress(CaptureError):
            choice = RegionChoice(calls, each, predict)
            if choice.is_worth_it():
                mixes.append(choice.choose(left_s))
                say(f"tried {counted(mixes[-1].tries, 'choice')} of kernels together with {each.captured.label}")
    best_ns = min((each.predicted_ns for each in (calls, *kernels)), default=0)
    mixes = [mix for mix in mixes if mix.predicted_ns <= (1 - GAIN_FRAC) * best_ns]
    return min(mixes, key=lambda mix: mix.predicted_ns, default=None)


class RegionChoice:
    """Choice of the kernels of each region. Raises `CaptureError` where the two front ends share no regions."""

    def __init__(self, calls: Profiled, kernels: Profiled, predict: Callable[[Trace], int]) -> None:
        self.timed: dict[Side, Profiled] = {"calls": calls, "kernels": kernels}
        self.predict = predict
        steps = (Step(side, each.captured.trace, each.recorded) for side, each in self.timed.items())
        self.regions = Regions(*steps)
        self.mixer = Mixer(self.regions)

    @property
    def best_ns(self) -> int:
        """Least predicted time with kernels of one front end."""
        return min(each.predicted_ns for each in self.timed.values())

    def is_worth_it(self) -> bool:
        """Whether mixing may win: both front ends are close, or the slower one has the faster regions."""
        times = sorted(each.predicted_ns for each in self.timed.values())
        saved_ns = sum(max(0.0, self._saved_ns(numbers)) for numbers in self._classes)
        return times[1] <= CLOSE * times[0] or saved_ns >= MAY_GAIN_FRAC * times[0]

    def choose(self, left_s: Callable[[], float]) -> Mix:
        """Return the best choice found within the time left."""
        chosen, best_ns, tries = self._begin, self.best_ns, 0
        classes = sorted(self._classes, key=self._saved_ns, reverse=True)
        waiting = deque(classes)
        improved = False
        while waiting and left_s() > 0:
            numbers = waiting.popleft()
            other = chosen.difference(numbers) if chosen.issuperset(numbers) else chosen.union(numbers)
            try:
                predicted_ns = self.predict(self.trace(self.mixer.mixed(other)))
            except CaptureError:  # these regions would wait for each other
                waiting.extend([number] for number in numbers if len(numbers) > 1)
            else:
                tries += 1
                if predicted_ns < best_ns:
                    chosen, best_ns, improved = other, predicted_ns, True
            if not waiting and improved:  # once more with what was exchanged
                waiting, improved = deque(classes), False
        return Mix(self, chosen, best_ns, tries)

    def trace(self, mixed: Mixed) -> Trace:
        """Return a mixed step with the profiled times, as a sequential graph of both kinds of kernels would have."""
        profiled = [self.timed[side].trace.ops[index] for side, index in mixed.origins]
        ops = tuple(
            msgspec.structs.replace(op, kernels=of.kernels, host_ns=of.host_ns, workspace_bytes=of.workspace_bytes)
            for op, of in zip(mixed.recorded.ops, profiled, strict=True)
        )
        calls = self.timed["calls"].trace
        total_ns = sum(self.timed[side].op_ns(index) for side, index in mixed.origins)
        eager_ns = calls.ground_truth.eager.median_ns if calls.ground_truth is not None else 0
        return msgspec.structs.replace(
            calls,
            model=msgspec.structs.replace(calls.model, frontend="inductor"),
            ops=ops,
            tensors=tuple(mixed.recorded.tensors),
            storages=tuple(mixed.recorded.storages),
            sources=tuple(mixed.recorded.sources),
            ground_truth=ground_truth(eager_ns, round(total_ns)),
        )

    # --- Regions that may be exchanged ---

    @property
    def _begin(self) -> set[int]:
        """Regions with Inductor's kernels to begin with: all, or none."""
        first = min(self.timed, key=lambda side: self.timed[side].predicted_ns)
        return set(range(len(self.regions.regions))) if first == "kernels" else set()

    @cached_property
    def _classes(self) -> list[list[int]]:
        """Equal regions, by number, where the two front ends do not make the same calls."""
        alike: dict[str, list[int]] = {}
        for number, region in enumerate(self.regions.regions):
            calls, kernels = self.timed["calls"].trace, self.timed["kernels"].trace
            kind = [_kind(calls, op) for op in region.calls], [_kind(kernels, op) for op in region.kernels]
            if not _same_calls(calls, region, kernels):
                alike.setdefault(repr(kind), []).append(number)
        return list(alike.values())

    def _saved_ns(self, numbers: Sequence[int]) -> float:
        """Return what the kernels of the other front end save in these regions, one after the other, in ns."""
        begin = self._begin
        saved = 0.0
        for number in numbers:
            region = self.regions.regions[number]
            calls_ns = sum(map(self.timed["calls"].op_ns, region.calls))
            kernels_ns = sum(map(self.timed["kernels"].op_ns, region.kernels))
            saved += kernels_ns - calls_ns if number in begin else calls_ns - kernels_ns
        return saved


def _same_calls(calls: Trace, region: Region, kernels: Trace) -> bool:
    """Whether both front ends call the same operators in a region, apart from where these put their results."""
    made = sorted(kernels.ops[op].target.rpartition(".")[0] for op in region.kernels)
    return made == sorted(calls.ops[op].target.rpartition(".")[0] for op in region.calls)


def _kind(trace: Trace, index: int) -> tuple[object, ...]:
    """Return a key of ops that run the same kernels on tensors of the same form."""
    op = trace.ops[index]
    forms = tuple((trace.tensors[t].shape, trace.tensors[t].stride) for t in (*op.reads, *op.writes))
    return op.source or op.target, forms
