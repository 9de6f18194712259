"""DRAM bandwidth: where the traffic of all running kernels would exceed it, those with traffic slow down alike.

    slowed rate = rate x bandwidth / traffic of all, where that is below 1

A kernel's traffic is spread evenly over its time alone. Hardly tested: no measured step reached the bandwidth.
Constant: `Memory.dram_bytes_per_ns`.
"""

from __future__ import annotations

from gpusim.formats.hardware import Memory


def bytes_per_ns(memory: Memory, dram_bytes: float, dur_ns: float) -> float:
    """Traffic of a kernel that runs alone, at most the bandwidth."""
    return min(dram_bytes / dur_ns, memory.dram_bytes_per_ns) if dur_ns > 0.0 else 0.0


def block_bytes_per_ns(kernel_bytes_per_ns: float, waves: float, resident: int) -> float:
    """Traffic of a block at load 1, of a kernel with so many blocks resident and so many waves (`contention.waves`)."""
    return kernel_bytes_per_ns * min(1.0, waves) / resident


def slowed_frac(memory: Memory, wanted_bytes_per_ns: float) -> float:
    """What is left of the rate of kernels with traffic, where all want so much together."""
    bandwidth = memory.dram_bytes_per_ns
    return bandwidth / wanted_bytes_per_ns if wanted_bytes_per_ns > bandwidth else 1.0


def time_ns(memory: Memory, dram_bytes: float) -> float:
    """Least time of a kernel's traffic."""
    return dram_bytes / memory.dram_bytes_per_ns


def moved_bytes(memory: Memory, dram_bytes: float, dur_ns: float) -> float:
    """Traffic of a kernel in its time alone, at most what the bandwidth allows."""
    return min(dram_bytes, dur_ns * memory.dram_bytes_per_ns)
