"""Copies between host and device: one engine a direction, first come first served; both at once share the link.

    time alone = latency_ns + bytes / bandwidth of the direction

While both directions work, both slow down by one factor, so that together they reach `both_bytes_per_ns`. Kernels
beside a copy take `1 + kernel_slowdown` times as long, beside both directions `1 + 2 kernel_slowdown`. In a CUDA graph,
a copy that waits for a kernel starts `switch_ns` later than a kernel would, and so does a kernel that waits for a copy.
Source: copies of several sizes on an H200, single, in pairs, beside kernels and in turns with them
(`gpusim.gpu.calibrate.copies`). Constants: `Copies.h2d_bytes_per_ns`, `d2h_bytes_per_ns`, `both_bytes_per_ns`,
`latency_ns`, `switch_ns`, `kernel_slowdown`. A trace may have bandwidths of its own machine (`gpusim.plan.anchor`).
"""

from __future__ import annotations

from gpusim.formats.hardware import Copies


def full_bytes_per_ns(copies: Copies, to_device: bool) -> float:
    """Bandwidth of a direction alone."""
    return copies.h2d_bytes_per_ns if to_device else copies.d2h_bytes_per_ns


def work_bytes(copies: Copies, copy_bytes: float, to_device: bool) -> float:
    """Bytes that stand for a copy and its latency: what its engine works off."""
    return copy_bytes + copies.latency_ns * full_bytes_per_ns(copies, to_device)


def bytes_per_ns(copies: Copies, to_device: bool, both: bool) -> float:
    """Rate of a copy; `both`: the other direction works, too."""
    full = full_bytes_per_ns(copies, to_device)
    total = copies.h2d_bytes_per_ns + copies.d2h_bytes_per_ns
    shared = min(1.0, copies.both_bytes_per_ns / total) if both else 1.0
    return full * shared


def alone_ns(copies: Copies, copy_bytes: float, to_device: bool) -> float:
    """Time of a copy while the other direction is idle."""
    return copies.latency_ns + copy_bytes / full_bytes_per_ns(copies, to_device)


def switch_ns(copies: Copies, one_copies: bool, other_copies: bool) -> float:
    """Extra delay in a graph where one of two tasks that follow each other is a copy and the other is none."""
    return copies.switch_ns if one_copies != other_copies else 0.0


def sm_rate(copies: Copies, working: int) -> float:
    """How fast kernels go on beside copies in so many directions, over their rate without any."""
    return 1.0 / (1.0 + copies.kernel_slowdown * working)
