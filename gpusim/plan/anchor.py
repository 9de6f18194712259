"""Anchoring: the sequential run of a trace sets the gap between its kernels, and its link the bandwidth of copies.

Capture times the sequential CUDA graph without a profiler; its time beyond the sum of the kernels gives the gap of the
trace (`gpusim.rules.anchor`). Concurrent execution is still predicted. On any other GPU there is no measurement to
anchor to, and the hardware model's gap holds.
"""

from __future__ import annotations

from dataclasses import dataclass

import msgspec

from gpusim.formats.hardware import HardwareModel
from gpusim.formats.trace import Trace
from gpusim.rules import anchor as rules
from gpusim.rules import l2_cache, launch


@dataclass(frozen=True, slots=True)
class Anchor:
    """Gap between the kernels of a trace, in ns, and factor on their durations (usually 1 up to rounding)."""

    chain_ns: float
    scale: float


def anchor(trace: Trace, hardware: HardwareModel) -> Anchor:
    """Return the gap and scale with which the sequential graph takes its time measured at capture."""
    truth = trace.ground_truth
    if truth is None or trace.provenance.gpu.name != hardware.gpu or not truth.graph.median_ns:
        return Anchor(hardware.graph.chain_ns, 1.0)
    kernels = [kernel for op in trace.ops for kernel in op.kernels]
    total_ns = sum(kernel.dur_ns for kernel in kernels)
    if not total_ns:
        return Anchor(hardware.graph.chain_ns, 1.0)
    nodes = sum(kernel.kind != "kernel" for kernel in kernels[1:])
    measured = (truth.graph.median_ns, total_ns, launch.extra_ns(hardware.graph, True) * nodes, len(kernels))
    gap_ns = rules.gap_ns(*measured)
    return Anchor(gap_ns, rules.scale(*measured, gap_ns))


def anchored_to(trace: Trace, sequential_ns: int) -> Trace:
    """Return a trace with ground truth as if its sequential graph had taken `sequential_ns` at capture."""
    assert trace.ground_truth is not None
    graph = msgspec.structs.replace(trace.ground_truth.graph, median_ns=sequential_ns)
    return msgspec.structs.replace(trace, ground_truth=msgspec.structs.replace(trace.ground_truth, graph=graph))


def anchored(trace: Trace, hardware: HardwareModel, chain_ns: float) -> HardwareModel:
    """Return the hardware model with gap `chain_ns` and, on the trace's own GPU, with its measured link.

    The gap may contain misses of launches: only the rest can come on top. The bandwidth of both directions together is
    scaled like the sum of the single ones.
    """
    launch_miss_ns = l2_cache.launch_miss_left_ns(hardware.memory, chain_ns)
    anchored_to = msgspec.structs.replace(
        hardware,
        graph=msgspec.structs.replace(hardware.graph, chain_ns=chain_ns),
        memory=msgspec.structs.replace(hardware.memory, launch_miss_ns=launch_miss_ns),
    )
    link = trace.ground_truth.link if trace.ground_truth is not None else None
    if link is None or trace.provenance.gpu.name != hardware.gpu:
        return anchored_to
    copies = hardware.copies
    alone = copies.h2d_bytes_per_ns + copies.d2h_bytes_per_ns
    share = (link.h2d_bytes_per_ns + link.d2h_bytes_per_ns) / alone
    measured = msgspec.structs.replace(
        copies,
        h2d_bytes_per_ns=link.h2d_bytes_per_ns,
        d2h_bytes_per_ns=link.d2h_bytes_per_ns,
        both_bytes_per_ns=copies.both_bytes_per_ns * share,
    )
    return msgspec.structs.replace(anchored_to, copies=measured)
