"""Anchoring: a trace's own sequential run sets the gap between its kernels.

Profiled durations overlap with the launch of the next kernel by an amount that differs between steps: the bundled ones
take 0.16 to 0.37 us a kernel more than their kernels, and one gap for all misses two of ten by 5 %. The capture
therefore times the sequential CUDA graph without a profiler, and what that takes over the sum of its kernels is the gap
of this trace. Everything concurrent is still predicted. On a GPU that the trace was not captured on there is nothing to
anchor to: the hardware model's gap holds.
"""

from __future__ import annotations

from dataclasses import dataclass

import msgspec

from gpusim.hardware.model import HardwareModel
from gpusim.trace.schema import Trace

#: Gaps outside this range are not believed; what is left over then scales the durations. Spin kernels on an H200
#: follow each other within 0.5 us (validate/results, calibration).
MIN_GAP_NS, MAX_GAP_NS = 100.0, 600.0
#: A sequential run that asks for more scaling than this does not belong to these kernels.
MIN_SCALE, MAX_SCALE = 0.2, 5.0


@dataclass(frozen=True, slots=True)
class Anchor:
    """The gap between kernels of a trace, and the factor on their durations (1 but for rounding, as a rule)."""

    chain_ns: float
    scale: float


def anchor(trace: Trace, hardware: HardwareModel) -> Anchor:
    """Gap and scale that make the sequential graph take what it took when the trace was captured."""
    kernels = [kernel for op in trace.ops for kernel in op.kernels]
    truth = trace.ground_truth
    total_ns = sum(kernel.dur_ns for kernel in kernels)
    if truth is None or trace.provenance.gpu.name != hardware.gpu or not total_ns or not truth.graph.median_ns:
        return Anchor(hardware.graph.chain_ns, 1.0)
    extra_ns = hardware.graph.memory_node_ns * sum(kernel.kind != "kernel" for kernel in kernels[1:])
    gaps = max(1, len(kernels) - 1)
    gap_ns = min(MAX_GAP_NS, max(MIN_GAP_NS, (truth.graph.median_ns - extra_ns - total_ns) / gaps))
    busy_ns = truth.graph.median_ns - extra_ns - gap_ns * (len(kernels) - 1)
    return Anchor(gap_ns, min(MAX_SCALE, max(MIN_SCALE, busy_ns / total_ns)))


def anchored(hardware: HardwareModel, chain_ns: float) -> HardwareModel:
    """The hardware model with another gap between the kernels of a chain."""
    return msgspec.structs.replace(hardware, graph=msgspec.structs.replace(hardware.graph, chain_ns=chain_ns))
