"""gpusim: predict, search and prove concurrent schedules of a PyTorch step on a GPU.

    step = gpusim.load("googlenet-train-b8")        # or gpusim.capture(model, (x,), loss=loss_fn)
    best = gpusim.explore(step, streams=8)
    measured = gpusim.replay(step, best.schedule)   # on a GPU

Names are imported when they are first used: `import gpusim` alone costs next to nothing.
"""

from __future__ import annotations

from importlib import import_module

from gpusim.version import __version__

TYPE_CHECKING = False  # type checkers take it for true; `typing` itself is half of what an import of gpusim costs
if TYPE_CHECKING:
    from typing import Any

    from gpusim.api import (
        WhatIf,
        explain,
        explore,
        limits,
        list_hardware,
        list_policies,
        list_traces,
        simulate,
        whatif,
        write_perfetto,
    )
    from gpusim.engine.base import Timeline
    from gpusim.errors import (
        CaptureError,
        FileError,
        GpuError,
        GpusimError,
        OptionError,
        ReplayError,
        UnknownNameError,
    )
    from gpusim.hardware.model import HardwareModel
    from gpusim.on_gpu import calibrate, capture, capture_step, replay
    from gpusim.plan.measurement import Measurement
    from gpusim.plan.schedule import Schedule
    from gpusim.search.bounds import Bounds
    from gpusim.search.explain import Explained
    from gpusim.search.explore import Explored
    from gpusim.search.limits import Limits
    from gpusim.search.simulation import Simulated
    from gpusim.search.verdict import Verdict
    from gpusim.step import Step, load
    from gpusim.trace.schema import Trace

__all__ = [
    "Bounds",
    "CaptureError",
    "Explained",
    "Explored",
    "FileError",
    "GpuError",
    "GpusimError",
    "HardwareModel",
    "Limits",
    "Measurement",
    "OptionError",
    "ReplayError",
    "Schedule",
    "Simulated",
    "Step",
    "Timeline",
    "Trace",
    "UnknownNameError",
    "Verdict",
    "WhatIf",
    "__version__",
    "calibrate",
    "capture",
    "capture_step",
    "explain",
    "explore",
    "limits",
    "list_hardware",
    "list_policies",
    "list_traces",
    "load",
    "replay",
    "simulate",
    "whatif",
    "write_perfetto",
]

#: Module -> the public names that it defines.
_DEFINED_IN = {
    "gpusim.api": (
        "WhatIf",
        "explain",
        "explore",
        "limits",
        "list_hardware",
        "list_policies",
        "list_traces",
        "simulate",
        "whatif",
        "write_perfetto",
    ),
    "gpusim.engine.base": ("Timeline",),
    "gpusim.errors": (
        "CaptureError",
        "FileError",
        "GpuError",
        "GpusimError",
        "OptionError",
        "ReplayError",
        "UnknownNameError",
    ),
    "gpusim.hardware.model": ("HardwareModel",),
    "gpusim.on_gpu": ("calibrate", "capture", "capture_step", "replay"),
    "gpusim.plan.measurement": ("Measurement",),
    "gpusim.plan.schedule": ("Schedule",),
    "gpusim.search.bounds": ("Bounds",),
    "gpusim.search.explain": ("Explained",),
    "gpusim.search.explore": ("Explored",),
    "gpusim.search.limits": ("Limits",),
    "gpusim.search.verdict": ("Verdict",),
    "gpusim.search.simulation": ("Simulated",),
    "gpusim.step": ("Step", "load"),
    "gpusim.trace.schema": ("Trace",),
}
_MODULE_OF = {name: module for module, names in _DEFINED_IN.items() for name in names}


def __getattr__(name: str) -> Any:
    """A public name, imported from its module on first use."""
    if name not in _MODULE_OF:
        raise AttributeError(f"module 'gpusim' has no attribute '{name}'")
    value = getattr(import_module(_MODULE_OF[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
