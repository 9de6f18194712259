"""Kernels that a step may run: ATen's as recorded, or Inductor's in some style.

Inductor decides once for the whole step on fusion and on the layout of images. Since a schedule on streams may prefer
other decisions, the step is compiled in other styles, too, while there is time.
"""

from __future__ import annotations

from collections.abc import Callable
from time import perf_counter
from typing import Final

import msgspec
import torch

from gpusim.engine.threads import cores
from gpusim.errors import CaptureError, GpusimError, TraceError
from gpusim.formats.trace import Kernel, Trace
from gpusim.gpu.capture.user_step import UserStep
from gpusim.gpu.inductor.combos import promises_combos
from gpusim.gpu.inductor.functional import Traced
from gpusim.gpu.inductor.gemv import mostly_gemv
from gpusim.gpu.inductor.seam import without_style
from gpusim.gpu.inductor.step import has_images
from gpusim.gpu.inductor.styles import CHANNELS_LAST, DEFAULT_STYLE, GEMV, GIVEN_LAYOUT, Noted, first_style
from gpusim.gpu.inductor.versions import require_supported
from gpusim.gpu.optimize.cache import Entry
from gpusim.gpu.optimize.captured import MIXED, Captured
from gpusim.gpu.optimize.executors import restored
from gpusim.gpu.optimize.fused import bound, fused
from gpusim.gpu.optimize.garbage import no_collection
from gpusim.gpu.optimize.image_layout import layout_times
from gpusim.gpu.optimize.kept_step import made_of
from gpusim.gpu.optimize.progress import Progress
from gpusim.gpu.optimize.snapshot import put_back
from gpusim.text import first_line
from gpusim.trace.check import check_trace
from gpusim.trace.store import structure_hash

#: Compile time of one Triton kernel on one core, in s.
KERNEL_S: Final = 2.0
#: Style -> the style to begin with where it cannot be compiled.
INSTEAD: Final = {CHANNELS_LAST: GIVEN_LAYOUT, GEMV: DEFAULT_STYLE}
#: Errors of Inductor's kernels, when they are made and when they are run.
CANNOT_RUN: Final = (GpusimError, torch.cuda.OutOfMemoryError)
#: Errors after which a step runs unoptimized, or without what has failed. After an error of the GPU itself (an illegal
#: access) nothing runs on it in this process, and the warning has the GPU's message.
CANNOT: Final = (*CANNOT_RUN, torch.AcceleratorError)


class Inductors:
    """The step as Inductor's kernels, compiled on first use, or the reason why they are left out."""

    def __init__(
        self,
        step: UserStep,
        captured: Captured,
        wanted: bool,
        time_ns: Callable[[Callable[[], object]], float],
        say: Progress,
    ) -> None:
        self._step, self._captured, self._wanted, self._say = step, captured, wanted, say
        self._time_ns = time_ns
        self._made: dict[str, Captured] = {}
        self._noted = Noted()
        self._traced = Traced()
        self._took_s = 0.0
        """Time of lowering the step to the text of kernels, in s."""
        self.problem = ""
        """Reason why requested kernels are left out."""

    def first(self) -> Captured | None:
        """Return the step in the style that should suit it best, or None where it is left out."""
        if not self._wanted or self.problem:
            return None
        try:
            require_supported()  # before any time is spent on a style
        except CaptureError as cause:
            self.leave_out(DEFAULT_STYLE, cause)
            return None
        style = self._first_style()
        for each in dict.fromkeys((style, INSTEAD.get(style, style))):
            begin, self._noted = perf_counter(), Noted()
            try:
                first = self.in_style(each, self._noted)
            except CANNOT_RUN as cause:
                self.leave_out(each, cause)
                continue
            self.problem = ""
            self._took_s = perf_counter() - begin
            return first
        return None

    def _first_style(self) -> str:
        if self._captured.options.mode != "train" or not has_images(self._captured.recorded):
            return first_style(False, False, mostly_gemv(self._captured.trace))
        if all(op.phase != "backward" for op in self._captured.trace.ops):
            return first_style(True, False)  # what a forward alone saves is copied back to the layout as recorded
        with self._say.stage("layout"):
            times = layout_times(self._captured.trace, self._step.device, self._time_ns)
        self._say(times.text)
        return first_style(True, times.channels_last_ns < times.as_recorded_ns)

    def in_style(self, style: str, noted: Noted | None = None) -> Captured:
        """Return the step in a style; its kernels are still being compiled.

        Raises `CaptureError` where Inductor's kernels are not requested, and as `fused`.
        """
        if not self._wanted:
            raise CaptureError("Inductor's kernels are not asked for")
        if style not in self._made and style == MIXED:
            raise CaptureError("its kernels were chosen region by region, which takes a search")
        if style not in self._made:
            self._say(f"compiling it with Inductor ({style})")
            with self._say.stage("lowering"), put_back(self._step), restored(self._captured), no_collection():
                # Inductor draws random numbers to time products.
                self._made[style] = fused(self._step, self._captured, style, noted, self._traced)
        return self._made[style]

    def again(self, entry: Entry, file: str) -> Captured:
        """Return the step as an entry of the cache has it, or compiled in its style. Raises as `in_style`."""
        kept, style = entry.step, entry.style
        if kept is None or not self._wanted or style in self._made:
            return self.in_style(style)
        try:
            require_supported()
            made = made_of(kept, self._captured.recorded, file)
            with torch.no_grad():
                front = bound(self._step, self._captured, made, style)
            check_trace(_with_a_kernel(front.trace), file)
            if structure_hash(front.trace) != entry.kernels:
                raise TraceError(file, "has another step than its hash says", place="$.step")
        except (GpusimError, KeyError, ValueError, IndexError) as cause:
            self._say(f"compiled again: {cause}")
            return self.in_style(style)
        self._made[style] = front
        return front

    def others(self, left_s: Callable[[], float]) -> list[Captured]:
        """Return the step in styles with other kernels than the first, as many as compile in the time left."""
        compiling_s, combos = 0.0, False
        for made in self._made.values():
            compiling_s += KERNEL_S * len(made.trace.sources) / max(1, cores())
            combos = combos or promises_combos(made.trace, self._step.device.type)
        fronts: list[Captured] = []
        for style in self._noted.other_styles(combos):
            if left_s() < self._took_s + (2 + len(fronts)) * compiling_s:
                self._say(f"no time is left for the style {style}")
                break
            known = [_kernels(each.trace) for each in self._made.values()]
            try:
                other = self.in_style(style)
            except CANNOT_RUN as cause:
                self.leave_out(style, cause)
                continue
            if _kernels(other.trace) in known:
                self._say(f"the style {style} makes the same kernels")
            else:
                fronts.append(other)
        return fronts

    def leave_out(self, style: str, cause: Exception) -> None:
        """Drop this style from now on."""
        self._made.pop(style, None)
        self.problem = first_line(cause)
        self._say(f"left out Inductor's kernels ({style}): {self.problem}")


def _kernels(trace: Trace) -> list[str]:
    """Return what distinguishes the kernels of two styles: each op's, by the hash of its text without its style."""
    texts = {source.sha256: without_style(source.text) for source in trace.sources}
    return [texts.get(op.source, op.target) for op in trace.ops]


def _with_a_kernel(trace: Trace) -> Trace:
    """Return a trace without times as one that can be checked: with one kernel."""
    timed = (msgspec.structs.replace(op, kernels=(Kernel(name="", dur_ns=1),)) for op in trace.ops[:1])
    return msgspec.structs.replace(trace, ops=(*timed, *trace.ops[1:]))
