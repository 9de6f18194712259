"""Captured training steps of the networks of tests, each captured once."""

from __future__ import annotations

from functools import cache
from types import ModuleType

from gpusim.formats.hardware import load_hardware
from gpusim.formats.trace import Trace
from gpusim.gpu.capture.estimate import capture_estimated
from gpusim.gpu.capture.options import CaptureOptions


@cache
def captured(models: ModuleType, name: str, batch: int = 2) -> Trace:
    """Capture a network of a module of this folder. Don't change what it returns."""
    options = CaptureOptions(spec=f"{models.__file__}:{name}", mode="train", batch=batch)
    return capture_estimated(options, load_hardware("h200"), lambda _: None)
