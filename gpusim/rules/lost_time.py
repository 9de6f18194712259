"""Lost time: the progress that a running kernel loses against running alone, and its causes.

Alone, a kernel has as many resident blocks as the GPU holds of it, or as it has left. With other kernels fewer may be
resident: that share of the time is lost to the resource that the waiting blocks need. Resident blocks run slower than
alone on SMs with blocks of other kernels, or with more of their own, and when DRAM limits.

    share of time lost = (waiting blocks + slowed blocks x their loss) / blocks that could be resident

This is bookkeeping for the rules of `gpusim.rules.dispatch`, `contention` and `dram`, and has no constants.
"""

from __future__ import annotations

from typing import Final

#: Causes of lost time: a resource of the SMs, waiting behind another kernel (or block slots), another carve-out, issue
#: slots and L2 cache, DRAM bandwidth, and copies. `gpusim.engine.causes` has the names.
THREADS: Final = 0
REGISTERS: Final = 1
SMEM: Final = 2
BLOCKS: Final = 3
CARVEOUT: Final = 4
ISSUE: Final = 5
DRAM: Final = 6
COPY: Final = 7


def possible_blocks(left: int, resident: int, blocks_per_sm: int, sms: int) -> int:
    """Return the number of blocks that a kernel could have resident alone, from its unplaced and resident blocks."""
    return max(1, min(left + resident, sms * blocks_per_sm))


def slowed_blocks(blocks: float, rate: float, alone_rate: float) -> float:
    """Return the loss of `blocks` blocks to contention, in blocks at the rate alone."""
    return blocks * max(0.0, 1.0 - rate / alone_rate)


def short_blocks(blocks: float, rate: float, slowed_rate: float, alone_rate: float) -> float:
    """Return the loss of `blocks` blocks to DRAM, which lowers `rate` to `slowed_rate`, in blocks at the rate alone."""
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
    """Return the resource that an SM lacks for one more block; of several, the first in the dispatcher's order."""
    if threads_left < threads:
        return THREADS
    if regs_left < regs:
        return REGISTERS
    if slots_left < 1.0:
        return BLOCKS
    return CARVEOUT if carveout_bytes < least_carveout_bytes else SMEM


def copy_part(rate: float, full_rate: float) -> float:
    """Return the share of the time lost by work at `rate` instead of `full_rate`."""
    return 1.0 - rate / full_rate
