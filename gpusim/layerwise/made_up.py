"""Synthetic kernels, for collectives and for shares of which only the time is known.

On a Hopper GPU, much of a layer's time is in matrix products with one or a few blocks per SM, which all run in one
wave. While a collective occupies some SMs, such a kernel needs two waves and twice the time. Others slow down in
proportion to the SMs they lose. So a share consists of both, in the proportion found in captured steps. This rule was
looked for because of eight measured steps of DistributedDataParallel; it has no blind test yet.
"""

from __future__ import annotations

from typing import Final

from gpusim.formats.hardware import HardwareModel
from gpusim.layerwise.layers import Layer
from gpusim.plan.tasks import Task
from gpusim.rules.occupancy import Demand, Footprint

#: Share of a layer's time in kernels of one wave, by its kind: 11 captured training steps on an H200, TF32, 21 to 61 %
#: of convolutions and 48 to 88 % of linear layers (`validate/layerwise/one_wave.py`).
ONE_WAVE: Final = {"convolution": 0.36, "linear": 0.74}
#: Compute capability for which this holds: that of the captured GPU.
_ONE_WAVE_CAPABILITY: Final = "9.0"
#: Threads of a block: 83 % of that time is in blocks of 384 threads with 168 registers each, one on an SM.
_ONE_WAVE_THREADS: Final = 384
#: A synthetic kernel for a share without captured kernels: blocks of 256 threads with 64 registers each, four on an SM,
#: in waves of about 10 us.
_BLOCK_THREADS, _BLOCK_REGS, _BLOCKS_PER_SM, _WAVE_NS = 256, 64, 4, 10_000.0
#: Threads of a block of a collective.
_COLLECTIVE_THREADS: Final = 512


def is_matrix(layer: Layer) -> bool:
    """Whether matrix products dominate the layer."""
    return layer.kind in ("convolution", "linear", "attention")


def made_up_pass(layer: Layer, dur_ns: float, traffic: float, hardware: HardwareModel) -> list[Task]:
    """Make the kernels of one pass of a layer's share, with this total time and traffic."""
    part = ONE_WAVE.get(layer.kind, 0.0) if hardware.limits.compute_capability == _ONE_WAVE_CAPABILITY else 0.0
    if not part:
        return [made_up_kernel(layer.name, dur_ns, traffic, is_matrix(layer), hardware)]
    return [
        _one_wave_kernel(layer.name, part * dur_ns, part * traffic, hardware),
        made_up_kernel(layer.name, (1 - part) * dur_ns, (1 - part) * traffic, False, hardware),
    ]


def _one_wave_kernel(name: str, dur_ns: float, traffic: float, hardware: HardwareModel) -> Task:
    """Make a matrix product with one block on each SM."""
    limits = hardware.limits
    return Task(
        name=name,
        dur_ns=dur_ns,
        dram_bytes=min(traffic, dur_ns * hardware.memory.dram_bytes_per_ns),
        demand=Demand(_ONE_WAVE_THREADS / limits.threads_per_sm, 1.0, 0.0, 1 / limits.blocks_per_sm, 1.0, 1.0),
        blocks=limits.sms,
        blocks_per_sm=1,
        footprint=Footprint(_ONE_WAVE_THREADS, limits.regs_per_sm, 0, 0, 0),
        matrix=True,
    )


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
