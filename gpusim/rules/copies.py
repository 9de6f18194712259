"""Copies between host and device: one engine per direction, first come first served; both directions share the link.

    time alone = latency_ns + bytes / bandwidth of the direction

While both directions are busy, both slow down by one factor, to `both_bytes_per_ns` together. A copy to the host takes
`1 + copy_slowdown` times as long, one to the device only while kernels run. Kernels take `1 + kernel_slowdown` times
as long during a copy, and `1 + 2 kernel_slowdown` during copies in both directions. In a CUDA graph, a copy after a
kernel starts `switch_ns` later than a kernel would. So does a kernel that waits for a copy, even if the copy has ended
before its other predecessors.
A memset of less than `SMALL_MEMSET_BYTES` also runs on a copy engine: one that starts during a copy to the host takes
`memset_d2h_ns` longer, to the device or both `memset_h2d_ns`. In a CUDA graph, one between copies takes `memset_d2h_ns`
longer, too, once a copy has started and while at least `MANY_PENDING` have yet to. Larger ones do not wait.
Copies of most graphs are slow, and the cause is open: large kernels on several streams of the driver's are part of it.
A graph whose nodes are a chain runs on one stream, and its copies and memsets take as long as alone (`NONE_IN_CHAIN`,
research/2026-11-29-copies-and-streams.md).
Source: copies of several sizes on an H200, single, in pairs, concurrent with kernels and alternating with them
(`gpusim.gpu.calibrate.copies`), profiled replays of memory plans, and memsets of 96 bytes and of 1 MiB in turns with
kernels, beside copies (`gpusim.gpu.calibrate.memsets`). Constants: `Copies.h2d_bytes_per_ns`, `d2h_bytes_per_ns`,
`both_bytes_per_ns`, `latency_ns`, `switch_ns`, `copy_slowdown`, `kernel_slowdown`, `memset_d2h_ns`, `memset_h2d_ns`. A
trace may have bandwidths of its own machine (`gpusim.plan.anchor`).
"""

from __future__ import annotations

from typing import Final

from gpusim.formats.hardware import Copies
from gpusim.units import KIB

#: Memsets of 96 bytes and of 4 KiB run on a copy engine, those of 64 KiB and more as kernels: by their gaps
#: (research/2026-11-26-memsets.md). Nothing is measured between.
SMALL_MEMSET_BYTES: Final = 64 * KIB

#: Copies of a CUDA graph that have yet to start, from which on memsets between copies are slow. In timelines of
#: encoder_12, memsets take 1.9 to 4.1 us longer then, and at most 1.4 us with fewer. Before the first copy they are as
#: fast as without copies, whatever waits (research/2026-11-26-memsets.md).
MANY_PENDING: Final = 3

#: Constants that are 0 for a graph in which each node waits for the one before it.
NONE_IN_CHAIN: Final = ("copy_slowdown", "memset_d2h_ns", "memset_h2d_ns")


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


def on_copy_engine(memset: bool, set_bytes: int) -> bool:
    """Return True if a task runs on a copy engine although it is no copy: a small memset."""
    return memset and 0 < set_bytes < SMALL_MEMSET_BYTES


def memset_wait_ns(copies: Copies, to_host: bool, to_device: bool, started: int, pending: int) -> float:
    """Return how much longer a small memset takes that starts during copies in these directions, in ns.

    Of the copies of its graph, `started` have started or ended, and `pending` have yet to start.
    """
    if to_device:
        return copies.memset_h2d_ns
    return copies.memset_d2h_ns if to_host or (started > 0 and pending >= MANY_PENDING) else 0.0


def sm_rate(copies: Copies, working: int) -> float:
    """Return the rate of kernels during copies in `working` directions, over their rate without copies."""
    return 1.0 / (1.0 + copies.kernel_slowdown * working)


def least_loss(copies: Copies) -> float:
    """Return the least time that concurrent kernels lose for each ns that a copy takes alone."""
    return copies.kernel_slowdown / (1.0 + 2.0 * copies.kernel_slowdown) * (1.0 + copies.copy_slowdown)
