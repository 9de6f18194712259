"""Synthetic kernels, for collectives and for shares of which only the time is known.

While a collective occupies some SMs, a kernel slows down in proportion to the SMs it loses. Steps of five networks
beside a kernel that holds 12 to 48 of 132 SMs of an H200 agree with this within 5 % in the median and 23 % at most
(`research/prototypes/occupied_sms.py`).
"""

from __future__ import annotations

from typing import Final

from gpusim.formats.hardware import HardwareModel
from gpusim.layerwise.layers import Layer
from gpusim.plan.tasks import Task
from gpusim.rules.occupancy import Demand, Footprint

#: A synthetic kernel for a share without captured kernels: blocks of 256 threads with 64 registers each, four on an SM,
#: in waves of about 10 us.
_BLOCK_THREADS, _BLOCK_REGS, _BLOCKS_PER_SM, _WAVE_NS = 256, 64, 4, 10_000.0
#: Least time of a kernel: an empty kernel of a CUDA graph takes 1.5 us by the profiler.
LATENCY_NS: Final = 1500.0
#: Threads of a block of a collective.
_COLLECTIVE_THREADS: Final = 512


def is_matrix(layer: Layer) -> bool:
    """Whether matrix products dominate the layer."""
    return layer.kind in ("convolution", "linear", "attention")


def made_up_kernel(name: str, dur_ns: float, traffic: float, matrix: bool, hardware: HardwareModel) -> Task:
    """Make a kernel of this time that fills the GPU, for shares with unknown kernels."""
    limits = hardware.limits
    regs = _BLOCK_THREADS * _BLOCK_REGS
    blocks = limits.sms * _BLOCKS_PER_SM * max(1, round(dur_ns / _WAVE_NS))
    traffic = min(traffic, dur_ns * hardware.memory.dram_bytes_per_ns)
    per_sm = _BLOCKS_PER_SM * _BLOCK_THREADS / limits.threads_per_sm
    demand = Demand(
        per_sm, _BLOCKS_PER_SM * regs / limits.regs_per_sm, 0.0, _BLOCKS_PER_SM / limits.blocks_per_sm, 1.0, 1.0
    )
    footprint = Footprint(_BLOCK_THREADS, regs, 0, 0, 0)
    return Task(
        name=name,
        dur_ns=dur_ns,
        dram_bytes=traffic,
        demand=demand,
        blocks=blocks,
        blocks_per_sm=min(_BLOCKS_PER_SM, limits.regs_per_sm // regs),
        footprint=footprint,
        matrix=matrix,
    )


def copy_ns(size_bytes: int, hardware: HardwareModel) -> float:
    """Time in ns of a kernel that reads and writes this many bytes."""
    return max(LATENCY_NS, 2 * size_bytes / hardware.memory.dram_bytes_per_ns)


def copy_kernel(size_bytes: int, hardware: HardwareModel) -> Task:
    """Make a kernel that reads and writes this many bytes."""
    return streaming_kernel("copy", 2 * size_bytes, hardware)


def sum_kernel(users: int, output_bytes: int, hardware: HardwareModel) -> Task:
    """Make the kernels that add the gradients of an output with several users: each reads two and writes one."""
    return streaming_kernel("sum of gradients", 3 * output_bytes * (users - 1), hardware)


def streaming_kernel(name: str, traffic: int, hardware: HardwareModel) -> Task:
    """Make a kernel that moves this many bytes to and from memory."""
    dur_ns = max(LATENCY_NS, traffic / hardware.memory.dram_bytes_per_ns)
    return made_up_kernel(name, dur_ns, float(traffic), False, hardware)


def collective_kernel(dur_ns: float, traffic: float, sms: int, hardware: HardwareModel, name: str) -> Task:
    """Make the kernel of a collective: a block on each of `sms` SMs, with all of their registers."""
    limits = hardware.limits
    share = sms / limits.sms
    demand = Demand(
        share * _COLLECTIVE_THREADS / limits.threads_per_sm, share, 0.0, share / limits.blocks_per_sm, share, 1.0
    )
    footprint = Footprint(_COLLECTIVE_THREADS, limits.regs_per_sm, 0, 0, 0)
    traffic = min(traffic, dur_ns * hardware.memory.dram_bytes_per_ns)
    return Task(
        name=name,
        dur_ns=dur_ns,
        dram_bytes=traffic,
        demand=demand,
        blocks=min(sms, limits.sms),
        blocks_per_sm=1,
        footprint=footprint,
    )
