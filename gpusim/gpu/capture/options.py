"""What `gpusim capture` is asked for."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from gpusim.defaults import DEFAULT_SEED
from gpusim.errors import CaptureError
from gpusim.formats.trace import Dtype, Frontend, MemoryFormat, Mode
from gpusim.gpu.inductor.styles import DEFAULT_STYLE, settings_of
from gpusim.gpu.inductor.versions import require_supported

Say = Callable[[str], None]
"""Is told what capture does now."""


@dataclass(frozen=True)
class CaptureOptions:
    """What `gpusim capture` is asked for."""

    spec: str
    mode: Mode
    batch: int
    dtype: Dtype = "tf32"
    memory_format: MemoryFormat = "contiguous"
    frontend: Frontend = "aten"
    style: str = DEFAULT_STYLE
    """How the front end `inductor` compiles."""
    seed: int = DEFAULT_SEED
    variants: bool = False
    """Whether other kernels of the operators that have some are measured, too."""
    command: str = ""


def check_frontend(options: CaptureOptions) -> None:
    """Raise `CaptureError` before any work where this torch has no such front end."""
    if options.frontend == "inductor":
        require_supported()
        settings_of(options.style)
        if options.variants:
            raise CaptureError("variants are measured with the front end 'aten' only; leave one of the two out")
    elif options.style != DEFAULT_STYLE:
        raise CaptureError(f"style '{options.style}' is one of the front end 'inductor'")
