"""Lost time: what a running kernel does not get done of what it would get done alone, and to what it loses that.

Alone, a kernel has as many blocks resident as the GPU holds of it, or as it has left. Beside others fewer may be: that
share of the time is lost to what the other blocks wait for. Those that are resident go on slower than alone on SMs that
hold blocks of others, or more of their own, and where DRAM is short.

    part of the time lost = (blocks that wait + blocks slowed x how much) / blocks that could be resident

It is bookkeeping of the rules of `gpusim.rules.dispatch`, `contention` and `dram`, and has no constants.
"""

from __future__ import annotations

from typing import Final

#: What is lost to: a resource of the SMs, being in line behind another kernel (or block slots), another carve-out,
#: issue slots and the L2 cache, DRAM bandwidth, and copies. `gpusim.engine.causes` has the names.
THREADS: Final = 0
REGISTERS: Final = 1
SMEM: Final = 2
BLOCKS: Final = 3
SPLIT: Final = 4
ISSUE: Final = 5
DRAM: Final = 6
COPY: Final = 7


def possible_blocks(left: int, resident: int, blocks_per_sm: int, sms: int) -> int:
    """Blocks that a kernel could have resident alone, with so many left to place and so many resident now."""
    return max(1, min(left + resident, sms * blocks_per_sm))


def slowed_blocks(blocks: float, rate: float, alone_rate: float) -> float:
    """Blocks that would do alone what so many lose by contention; `rate` is theirs, `alone_rate` that alone."""
    return blocks * max(0.0, 1.0 - rate / alone_rate)


def short_blocks(blocks: float, rate: float, slowed_rate: float, alone_rate: float) -> float:
    """The same by DRAM, which brings their rate down to `slowed_rate`."""
    return blocks * (rate - slowed_rate) / alone_rate


def missing(
    threads_left: float,
    regs_left: float,
    slots_left: float,
    carveout_bytes: float,
    threads: float,
    regs: float,
    least_carveout_bytes: float,
) -> int:
    """What an SM has too little of for one more block: of several, the first that the dispatcher asks for."""
    if threads_left < threads:
        return THREADS
    if regs_left < regs:
        return REGISTERS
    if slots_left < 1.0:
        return BLOCKS
    return SPLIT if carveout_bytes < least_carveout_bytes else SMEM


def copy_part(rate: float, full_rate: float) -> float:
    """Part of the time that work loses that goes on at `rate` instead of `full_rate`."""
    return 1.0 - rate / full_rate
