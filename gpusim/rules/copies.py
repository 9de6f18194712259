"""Copies between host and device: one engine per direction, first come first served; both directions share the link.

    time alone = latency_ns + bytes / bandwidth of the direction

While both directions are busy, both slow down by one factor, to `both_bytes_per_ns` together. A copy to the host takes
`1 + copy_slowdown` times as long, one to the device only while kernels run. Kernels take `1 + kernel_slowdown` times
as long during a copy, and `1 + 2 kernel_slowdown` during copies in both directions. In a CUDA graph, a copy after a
kernel starts `switch_ns` later than a kernel would. So does a kernel that waits for a copy, even if the copy has ended
before its other predecessors.
The slower copies are a replayed step's. Copies in a row, also concurrent with kernels, hardly slow down; the cause is
not known (research/2026-11-26-copies-out.md).
Source: copies of several sizes on an H200, single, in pairs, concurrent with kernels and alternating with them
(`gpusim.gpu.calibrate.copies`), and profiled replays of memory plans. Constants: `Copies.h2d_bytes_per_ns`,
`d2h_bytes_per_ns`, `both_bytes_per_ns`, `latency_ns`, `switch_ns`, `copy_slowdown`, `kernel_slowdown`. A trace may have
bandwidths of its own machine (`gpusim.plan.anchor`).
"""

from __future__ import annotations

from gpusim.formats.hardware import Copies


def full_bytes_per_ns(copies: Copies, to_device: bool) -> float:
    """Return the bandwidth of a direction alone, in bytes per ns."""
    return copies.h2d_bytes_per_ns if to_device else copies.d2h_bytes_per_ns


def work_bytes(copies: Copies, copy_bytes: float, to_device: bool) -> float:
    """Return the size of a copy plus the bytes equivalent to its latency."""
    return copy_bytes + copies.latency_ns * full_bytes_per_ns(copies, to_device)


def bytes_per_ns(copies: Copies, to_device: bool, both: bool, kernels: bool) -> float:
    """Return the rate of a copy in bytes per ns; `both` is True if the other direction is also busy, `kernels` while
    kernels run.
    """
    full = full_bytes_per_ns(copies, to_device)
    total = copies.h2d_bytes_per_ns + copies.d2h_bytes_per_ns
    shared = min(1.0, copies.both_bytes_per_ns / total) if both else 1.0
    return full * shared / (1.0 + (copies.copy_slowdown if kernels or not to_device else 0.0))


def alone_ns(copies: Copies, copy_bytes: float, to_device: bool) -> float:
    """Return the time of a copy while the other direction is idle, in ns."""
    return copies.latency_ns + copy_bytes / full_bytes_per_ns(copies, to_device)


def switch_ns(copies: Copies, copying: bool, after_copy: bool, waits_for_copy: bool) -> float:
    """Return the extra delay of a node in a graph between copies and kernels, in ns.

    A copy (`copying`) pays it if the predecessor that ended last is a kernel (not `after_copy`); a kernel if any
    predecessor is a copy (`waits_for_copy`).
    """
    return copies.switch_ns if (not after_copy if copying else waits_for_copy) else 0.0


def sm_rate(copies: Copies, working: int) -> float:
    """Return the rate of kernels during copies in `working` directions, over their rate without copies."""
    return 1.0 / (1.0 + copies.kernel_slowdown * working)


def least_loss(copies: Copies) -> float:
    """Return the least time that concurrent kernels lose for each ns that a copy takes alone."""
    return copies.kernel_slowdown / (1.0 + 2.0 * copies.kernel_slowdown) * (1.0 + copies.copy_slowdown)
