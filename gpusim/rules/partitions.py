"""SM partitions: time of a kernel alone on fewer SMs.

Blocks that fit the GPU at once may need several waves on fewer SMs; if they still fit, more of them share an SM.
The time explained by DRAM traffic does not change; the rest grows with

    work(k) = PACKING x blocks / (SMs x blocks per SM), rounded up (waves)
              + (1 - PACKING) x blocks / SMs, rounded up (blocks per SM in total)

each over its value on the whole GPU. Dispatch and contention hold within each partition, DRAM bandwidth for all
together. Source: schedules on partitions of an H200 (research/2026-11-23-variants.md, "Partitions"). Constant:
`Limits.sms`.
"""

from __future__ import annotations

from math import ceil
from typing import Final

#: Weight of whole waves against blocks per SM. Not fitted yet: the mean of the two rules.
PACKING: Final = 0.5


def slowed(blocks: int, blocks_per_sm: int, sms: int, gpu_sms: int) -> float:
    """Return the factor on a kernel's time without its DRAM traffic, on `sms` of `gpu_sms` SMs."""
    waves = ceil(blocks / (blocks_per_sm * sms)) / ceil(blocks / (blocks_per_sm * gpu_sms))
    packed = ceil(blocks / sms) / ceil(blocks / gpu_sms)
    return PACKING * waves + (1 - PACKING) * packed


def alone_ns(dur_ns: float, memory_ns: float, slowed: float) -> float:
    """Return the time alone in a partition, in ns; `memory_ns`, the time of the traffic, counts up to `dur_ns`."""
    memory_ns = min(dur_ns, memory_ns)
    return memory_ns + (dur_ns - memory_ns) * slowed


def demand_factor(blocks: int, blocks_per_sm: int, sms: int, gpu_sms: int) -> float:
    """Return a kernel's share of a partition over its share of the whole GPU."""
    return min(blocks, blocks_per_sm * sms) / sms / (min(blocks, blocks_per_sm * gpu_sms) / gpu_sms)
