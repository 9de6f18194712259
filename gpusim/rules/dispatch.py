"""Block dispatch: on which SMs blocks of a kernel are placed, and how many of them.

1. *Head of line.* Blocks are placed kernel by kernel, in the order of their starts: behind a kernel with blocks left to
   place, nobody gets any placed (Amert et al., "GPU Scheduling on the NVIDIA TX2", RTSS 2017, rule X1).
2. *Most room.* The next block goes to the SM that could take the most further blocks of its kernel (Gilman et al.,
   "Demystifying the Placement Policies of the NVIDIA GPU Thread Block Scheduler", 2020); of several, to the one that
   has had so much room for longest.
3. *Carve-out.* An SM's shared memory is set to a size while it is empty and keeps that while any block runs there. A
   kernel joins only where that is room for as many of its blocks as an SM could hold. Where it has to wait for SMs to
   empty, they do so one after the other, and each is filled up at once: its blocks then crowd on a few SMs.

`gpusim.engine.placement` and `gpusim.engine.compiled.placement` keep the SMs and follow these; here is what is counted.
Source: block placements read on an H200 (research/2026-11-23-engine-rules.md, "Where blocks go"). Constants: those of
`Limits`; no measured ones.
"""

from __future__ import annotations

from typing import Final

#: A kernel of more waves of blocks than this is placed as blocks that each stand for several, one after the other: so
#: its steps do not grow with its grid. The longest of the bundled traces has 95 waves on its own GPU, 836 on a K40.
MOST_WAVES: Final = 4096
#: Blocks that a kernel counts as having at most: above, doubles skip numbers.
MOST_BLOCKS: Final = 1 << 53


def placed_blocks(blocks: int, at_once: int) -> int:
    """Blocks to place for a kernel of `blocks` blocks, `at_once` of which the GPU holds."""
    stands_for = (blocks - 1) // (MOST_WAVES * at_once) + 1
    return (blocks - 1) // stands_for + 1


def room(
    threads_left: float,
    regs_left: float,
    smem_left_bytes: float,
    slots_left: float,
    threads: float,
    regs: float,
    smem_bytes: float,
) -> int:
    """Further blocks that an SM has room for, from what it has left and what a block takes; it holds blocks already.

    Sizes are whole numbers, as floating point in compiled code: quotients of such numbers round down exactly.
    """
    if threads_left < threads or regs_left < regs or smem_left_bytes < smem_bytes or slots_left < 1.0:
        return 0
    blocks = min(slots_left, threads_left / threads)
    if regs > 0.0:
        blocks = min(blocks, regs_left / regs)
    if smem_bytes > 0.0:
        blocks = min(blocks, smem_left_bytes / smem_bytes)
    return int(blocks)


def carveout_allows(carveout_bytes: int, least_bytes: int) -> bool:
    """Whether a kernel that needs at least this size of an SM's shared memory may join where it is set to that."""
    return carveout_bytes >= least_bytes


def blocks_per_fill(left: int, room: int, sms: int) -> int:
    """Blocks that each of `sms` SMs gets of `left`, where each is filled up at once and has `room` for them."""
    return min(room, (left + sms - 1) // sms)
