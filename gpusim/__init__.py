"""gpusim: predict, search and prove concurrent schedules of a PyTorch step on a GPU.

    step = gpusim.load("googlenet-train-b8")        # or gpusim.capture(model, (x,), loss=loss_fn)
    best = gpusim.explore(step, streams=8)
    measured = gpusim.replay(step, best.schedule)   # on a GPU

Names are imported on first use, so `import gpusim` alone costs almost nothing.
"""

from __future__ import annotations

from importlib import import_module

from gpusim.version import __version__

TYPE_CHECKING = False  # true for type checkers; importing `typing` would double the import time of gpusim
if TYPE_CHECKING:
    from typing import Any

    from gpusim.analysis.explain import Explained
    from gpusim.analysis.limits import Limits
    from gpusim.analysis.simulation import Simulated
    from gpusim.analysis.transfer import Transfer
    from gpusim.api.gpu import (
        calibrate,
        calibrate_links,
        capture,
        capture_step,
        checkpoint_policy,
        mark_offloads,
        optimize,
        replay,
    )
    from gpusim.api.predict import (
        explain,
        explore,
        limits,
        list_hardware,
        list_memory_policies,
        list_policies,
        list_traces,
        memory,
        parallel,
        simulate,
        write_parallel_plan,
        write_perfetto,
    )
    from gpusim.api.transfer import transfer
    from gpusim.api.what_if import WhatIf, whatif
    from gpusim.bounds.bounds import Bounds
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
    from gpusim.formats.hardware import HardwareModel
    from gpusim.formats.measurement import Measurement
    from gpusim.formats.topology import Topology
    from gpusim.formats.trace import Trace
    from gpusim.layerwise.explore import Parallel
    from gpusim.memplan.compare import MemoryComparison
    from gpusim.memplan.plan import MemoryPlan
    from gpusim.plan.schedule import Schedule
    from gpusim.search.explored import Explored
    from gpusim.search.verdict import Verdict
    from gpusim.step import Step, load

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
    "MemoryComparison",
    "MemoryPlan",
    "OptionError",
    "Parallel",
    "ReplayError",
    "Schedule",
    "Simulated",
    "Step",
    "Timeline",
    "Topology",
    "Trace",
    "Transfer",
    "UnknownNameError",
    "Verdict",
    "WhatIf",
    "__version__",
    "calibrate",
    "calibrate_links",
    "capture",
    "capture_step",
    "checkpoint_policy",
    "explain",
    "explore",
    "limits",
    "list_hardware",
    "list_memory_policies",
    "list_policies",
    "list_traces",
    "load",
    "mark_offloads",
    "memory",
    "optimize",
    "parallel",
    "replay",
    "simulate",
    "transfer",
    "whatif",
    "write_parallel_plan",
    "write_perfetto",
]

#: Public names by the module that defines them.
_DEFINED_IN = {
    "gpusim.api.predict": (
        "explain",
        "explore",
        "limits",
        "list_hardware",
        "list_memory_policies",
        "list_policies",
        "list_traces",
        "memory",
        "parallel",
        "simulate",
        "write_parallel_plan",
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
    "gpusim.formats.hardware": ("HardwareModel",),
    "gpusim.memplan.compare": ("MemoryComparison",),
    "gpusim.memplan.plan": ("MemoryPlan",),
    "gpusim.api.gpu": (
        "calibrate",
        "calibrate_links",
        "capture",
        "capture_step",
        "checkpoint_policy",
        "mark_offloads",
        "optimize",
        "replay",
    ),
    "gpusim.formats.topology": ("Topology",),
    "gpusim.layerwise.explore": ("Parallel",),
    "gpusim.formats.measurement": ("Measurement",),
    "gpusim.plan.schedule": ("Schedule",),
    "gpusim.bounds.bounds": ("Bounds",),
    "gpusim.analysis.explain": ("Explained",),
    "gpusim.search.explored": ("Explored",),
    "gpusim.analysis.limits": ("Limits",),
    "gpusim.search.verdict": ("Verdict",),
    "gpusim.analysis.simulation": ("Simulated",),
    "gpusim.analysis.transfer": ("Transfer",),
    "gpusim.api.transfer": ("transfer",),
    "gpusim.step": ("Step", "load"),
    "gpusim.api.what_if": ("WhatIf", "whatif"),
    "gpusim.formats.trace": ("Trace",),
}
_MODULE_OF = {name: module for module, names in _DEFINED_IN.items() for name in names}


def __getattr__(name: str) -> Any:
    """Import a public name from its module on first use."""
    if name not in _MODULE_OF:
        raise AttributeError(f"module 'gpusim' has no attribute '{name}'")
    value = getattr(import_module(_MODULE_OF[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
