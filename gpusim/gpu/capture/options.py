"""Options of `gpusim capture`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from gpusim.defaults import DEFAULT_SEED
from gpusim.errors import CaptureError
from gpusim.formats.trace import Dtype, Frontend, MemoryFormat, Mode
from gpusim.gpu.capture.calls import Call
from gpusim.gpu.inductor.styles import DEFAULT_STYLE, settings_of
from gpusim.gpu.inductor.versions import require_supported

Say = Callable[[str], None]
"""Receiver of progress messages."""


@dataclass(frozen=True)
class CaptureOptions:
    """Options of one capture."""

    spec: str
    mode: Mode
    batch: int
    dtype: Dtype = "tf32"
    memory_format: MemoryFormat = "contiguous"
    frontend: Frontend = "aten"
    style: str = DEFAULT_STYLE
    """Compile style of the front end `inductor`."""
    seed: int = DEFAULT_SEED
    variants: bool = False
    """Whether to measure other kernels of the operators that have some."""
    command: str = ""


def as_recorded(options: CaptureOptions, calls: Sequence[Call]) -> CaptureOptions:
    """Return the options with the mode `train` where these calls of the step compute gradients.

    A function may call `backward` and leave the optimizer to its caller.
    """
    return replace(options, mode="train") if any(call.phase == "backward" for call in calls) else options


def check_frontend(options: CaptureOptions) -> None:
    """Raise `CaptureError`, before any work, for a front end that this torch does not support."""
    if options.frontend == "inductor":
        require_supported()
        settings_of(options.style)
        if options.variants:
            raise CaptureError("variants are measured with the front end 'aten' only; leave one of the two out")
    elif options.style != DEFAULT_STYLE:
        raise CaptureError(f"style '{options.style}' is one of the front end 'inductor'")
