"""Whose kernels a step may run: the ATen calls as they were recorded, or what Inductor makes of them, in some style.

Inductor decides once for the whole step what becomes one kernel and how images lie in memory. Where a schedule on
streams may like it otherwise, the step is compiled in other styles, too, as long as there is time.
"""

from __future__ import annotations

from collections.abc import Callable
from time import perf_counter
from typing import Final

import torch

from gpusim.engine.threads import cores
from gpusim.errors import CaptureError, GpusimError
from gpusim.formats.trace import Trace
from gpusim.gpu.capture.user_step import UserStep
from gpusim.gpu.inductor.step import has_images
from gpusim.gpu.inductor.styles import Noted, first_style
from gpusim.gpu.optimize.captured import Captured
from gpusim.gpu.optimize.executors import restored
from gpusim.gpu.optimize.fused import fused
from gpusim.gpu.optimize.snapshot import put_back

Say = Callable[[str], None]
#: What compiling one of Triton's kernels takes of one core.
KERNEL_S: Final = 2.0
#: What may go wrong with kernels of Inductor's, when they are made and when they are run.
CANNOT_RUN: Final = (GpusimError, torch.cuda.OutOfMemoryError)


class Inductors:
    """The step as Inductor's kernels, compiled when first asked for; or why it is left out."""

    def __init__(self, step: UserStep, captured: Captured, wanted: bool, say: Say) -> None:
        self._step, self._captured, self._wanted, self._say = step, captured, wanted, say
        self._made: dict[str, Captured] = {}
        self._noted = Noted()
        self._took_s = 0.0
        """What lowering the step to the text of kernels took."""
        self.problem = ""
        """Why it is left out, where it was wanted."""

    def first(self) -> Captured | None:
        """The step in the style that suits it by what is known beforehand, or None where it is left out."""
        if not self._wanted or self.problem:
            return None
        graph = self._captured.graph
        assert graph is not None
        style = first_style(has_images(graph), self._captured.options.mode == "train")
        begin = perf_counter()
        try:
            found = self.in_style(style, self._noted)
        except CANNOT_RUN as cause:
            self.leave_out(style, cause)
            return None
        self._took_s = perf_counter() - begin
        return found

    def in_style(self, style: str, noted: Noted | None = None) -> Captured:
        """The step in a style; its kernels are still being compiled.

        Raises `CaptureError` where Inductor's kernels are not asked for, and as `fused`.
        """
        if not self._wanted:
            raise CaptureError("Inductor's kernels are not asked for")
        if style not in self._made:
            self._say(f"compiling it with Inductor ({style})")
            with put_back(self._step), restored(self._captured):  # Inductor draws random numbers to time products
                self._made[style] = fused(self._step, self._captured, style, noted)
        return self._made[style]

    def others(self, left_s: Callable[[], float]) -> list[Captured]:
        """The step in styles that make other kernels than the first, as many as can be compiled in the time left."""
        compiling_s = 0.0
        for made in self._made.values():
            compiling_s += KERNEL_S * len(made.trace.sources) / max(1, cores())
        found: list[Captured] = []
        for style in self._noted.other_styles():
            if left_s() < self._took_s + (2 + len(found)) * compiling_s:
                self._say(f"no time is left for the style {style}")
                break
            try:
                found.append(self.in_style(style))
            except CANNOT_RUN as cause:
                self.leave_out(style, cause)
        return found

    def trace(self, style: str) -> Trace:
        """Its trace, without times. Raises as `in_style`."""
        return self.in_style(style).trace

    def leave_out(self, style: str, cause: Exception) -> None:
        """Do without this style from now on."""
        self._made.pop(style, None)
        self.problem = (str(cause) or type(cause).__name__).splitlines()[0]
        self._say(f"left out Inductor's kernels ({style}): {self.problem}")
