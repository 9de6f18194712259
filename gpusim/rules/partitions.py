"""SM partitions: what a kernel takes alone on fewer SMs.

Blocks that fit the GPU at once may need several waves on fewer SMs; and where they still fit, more of them share an SM.
The time that DRAM traffic explains does not change, the rest grows with

    work(k) = PACKING x blocks / (SMs x blocks an SM holds), rounded up (waves)
              + (1 - PACKING) x blocks / SMs, rounded up (blocks an SM works through)

each over its value on the whole GPU. Dispatch and contention hold in each partition alone, DRAM bandwidth for all
together. Source: schedules on partitions of an H200 (research/2026-11-23-variants.md, "Partitions"). Constant:
`Limits.sms`.
"""

from __future__ import annotations

from math import ceil
from typing import Final

#: Weight of whole waves against blocks an SM works through. Not fitted yet: the middle of the two rules.
PACKING: Final = 0.5


def slowed(blocks: int, blocks_per_sm: int, sms: int, gpu_sms: int) -> float:
    """Factor on the part of a kernel's time that DRAM traffic does not explain, on `sms` of `gpu_sms` SMs."""
    waves = ceil(blocks / (blocks_per_sm * sms)) / ceil(blocks / (blocks_per_sm * gpu_sms))
    packed = ceil(blocks / sms) / ceil(blocks / gpu_sms)
    return PACKING * waves + (1 - PACKING) * packed


def alone_ns(dur_ns: float, memory_ns: float, slowed: float) -> float:
    """Time alone in a partition; `memory_ns` is what the traffic takes at full bandwidth, at most `dur_ns` counts."""
    memory_ns = min(dur_ns, memory_ns)
    return memory_ns + (dur_ns - memory_ns) * slowed


def demand_factor(blocks: int, blocks_per_sm: int, sms: int, gpu_sms: int) -> float:
    """Share of a partition that a kernel asks for over its share of the whole GPU."""
    return min(blocks, blocks_per_sm * sms) / sms / (min(blocks, blocks_per_sm * gpu_sms) / gpu_sms)
