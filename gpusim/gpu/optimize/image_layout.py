"""Comparison of two layouts of a step's images: its convolutions are timed as recorded, and channels last.

cuDNN's kernels for tensor cores take images channels last. Where images lie otherwise, it changes their layout within
each call, and back: a sixth of the kernel time of Inception-v3's training in TF32
(research/2026-11-27-channels-last.md). In FP32, with few channels, or in groups, the layout as recorded may be faster.
So both are timed.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from time import perf_counter
from typing import Any, Final

import torch

from gpusim.formats.trace import Op, Trace
from gpusim.gpu.inductor.channels_last import CONVOLUTIONS
from gpusim.gpu.replay.encode import DTYPES

#: Limit of all timings, in s.
LIMIT_S: Final = 6.0
IMAGE_DIMENSIONS: Final = 4
_OPERATORS: Final = {str(operator): operator for operator in CONVOLUTIONS}


@dataclass(frozen=True)
class LayoutTimes:
    """Times of a step's convolutions on their own, in ns, by the layout of their images and weights."""

    as_recorded_ns: float
    channels_last_ns: float
    timed: int
    """Number of convolutions whose times these are."""
    convolutions: int

    @property
    def text(self) -> str:
        """Summarize the times in one line."""
        if not self.timed:
            return "none of its convolutions could be timed"
        whose = "its" if self.timed == self.convolutions else f"{self.timed} of its {self.convolutions}"
        times = f"{self.as_recorded_ns / 1e3:.4g} us as recorded, {self.channels_last_ns / 1e3:.4g} us channels last"
        return f"{whose} convolutions take {times}"


@dataclass(frozen=True)
class _Like:
    """Shape, strides and data type of a tensor."""

    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype

    def made(self, device: torch.device, generator: torch.Generator) -> torch.Tensor:
        """Return such a tensor with random elements."""
        elements = 1 + sum((size - 1) * step for size, step in zip(self.shape, self.stride, strict=True))
        memory = torch.randn(elements, dtype=self.dtype, device=device, generator=generator)
        return memory.as_strided(self.shape, self.stride)


def layout_times(trace: Trace, device: torch.device, time_ns: Callable[[Callable[[], object]], float]) -> LayoutTimes:
    """Return the times of a step's convolutions of images in both layouts.

    `time_ns` returns the time of one call, in ns. Equal calls are timed once, the most frequent first, as many as the
    limit allows; a call that fails in a layout is left out of both. The user's random numbers are not touched.
    """
    calls = Counter(call for op in trace.ops if (call := _call_of(op, trace)) is not None)
    begin, given_ns, last_ns, timed = perf_counter(), 0.0, 0.0, 0
    with torch.no_grad(), torch.autocast(device.type, enabled=False):
        for (target, arguments), count in calls.most_common():
            if perf_counter() - begin > LIMIT_S:
                break
            try:
                one_ns, other_ns = (time_ns(_work(target, arguments, device, last)) for last in (False, True))
            except RuntimeError:  # out of memory, or no kernel
                continue
            given_ns, last_ns, timed = given_ns + count * one_ns, last_ns + count * other_ns, timed + count
    return LayoutTimes(given_ns, last_ns, timed, calls.total())


def _call_of(op: Op, trace: Trace) -> tuple[str, tuple[Any, ...]] | None:
    """Return a convolution's operator and arguments, equal for equal calls; None for other ops."""
    if op.target not in _OPERATORS:
        return None
    arguments = _hashable(op.args, trace)
    image = arguments[0]
    return (op.target, arguments) if len(image.shape) == IMAGE_DIMENSIONS else None


def _hashable(value: Any, trace: Trace) -> Any:
    """Return an encoded argument with its tensors by their form, and lists as tuples."""
    if isinstance(value, dict) and "tensor" in value:
        tensor = trace.tensors[value["tensor"]]
        return _Like(tuple(tensor.shape), tuple(tensor.stride), DTYPES[tensor.dtype])
    if isinstance(value, list | tuple):
        return tuple(_hashable(part, trace) for part in value)
    return value


def _work(target: str, arguments: tuple[Any, ...], device: torch.device, last: bool) -> Callable[[], object]:
    """Return a call on tensors of its own; with `last`, images and weights are channels last."""
    operator = _OPERATORS[target]
    generator = torch.Generator(device).manual_seed(0)
    made = [each.made(device, generator) if isinstance(each, _Like) else each for each in arguments]
    if last:
        for place in CONVOLUTIONS[operator]:
            made[place] = made[place].contiguous(memory_format=torch.channels_last)
    return partial(operator, *made)
