"""DRAM bandwidth: if the traffic of all running kernels would exceed it, all kernels with traffic slow down alike.

    slowed rate = rate x min(1, bandwidth / total traffic)

A kernel's traffic is spread evenly over its time alone. Hardly tested: no measured step reached the bandwidth.
Constant: `Memory.dram_bytes_per_ns`.
"""

from __future__ import annotations

from gpusim.formats.hardware import Memory


def bytes_per_ns(memory: Memory, dram_bytes: float, dur_ns: float) -> float:
    """Return the traffic of a kernel that runs alone, at most the bandwidth, in bytes per ns."""
    return min(dram_bytes / dur_ns, memory.dram_bytes_per_ns) if dur_ns > 0.0 else 0.0


def block_bytes_per_ns(kernel_bytes_per_ns: float, waves: float, resident: int) -> float:
    """Return the traffic of a block at load 1, for a kernel with `resident` blocks and `waves` (`contention.waves`)."""
    return kernel_bytes_per_ns * min(1.0, waves) / resident


def slowed_frac(memory: Memory, wanted_bytes_per_ns: float) -> float:
    """Return the rate factor of kernels with traffic for a total demand of `wanted_bytes_per_ns`."""
    bandwidth = memory.dram_bytes_per_ns
    return bandwidth / wanted_bytes_per_ns if wanted_bytes_per_ns > bandwidth else 1.0


def time_ns(memory: Memory, dram_bytes: float) -> float:
    """Return the least time of a kernel's traffic, in ns."""
    return dram_bytes / memory.dram_bytes_per_ns


def moved_bytes(memory: Memory, dram_bytes: float, dur_ns: float) -> float:
    """Return the traffic of a kernel in its time alone, at most what the bandwidth allows, in bytes."""
    return min(dram_bytes, dur_ns * memory.dram_bytes_per_ns)
