"""Block dispatch: the SMs and numbers of placed blocks of a kernel.

1. *Head of line.* Blocks are placed kernel by kernel, in start order: while a kernel has unplaced blocks, no later
   kernel gets any placed (Amert et al., "GPU Scheduling on the NVIDIA TX2", RTSS 2017, rule X1).
2. *Most room.* The next block goes to the SM with room for the most further blocks of its kernel (Gilman et al.,
   "Demystifying the Placement Policies of the NVIDIA GPU Thread Block Scheduler", 2020); of several, to the one that
   has had that much room for longest.
3. *Carve-out.* The shared memory carve-out of an SM is set while it is empty and stays while any block runs there. A
   kernel joins only if the carve-out has room for as many of its blocks as an SM could hold. A kernel that waits for
   SMs to empty fills each of them at once, so its blocks crowd on a few SMs.

`gpusim.engine.placement` and `gpusim.engine.compiled.placement` keep the SMs; this module has the arithmetic.
Source: block placements read on an H200 (research/2026-11-23-engine-rules.md, "Where blocks go"). Constants: those of
`Limits`; no measured ones.
"""

from __future__ import annotations

from typing import Final

#: Above this number of waves, each placed block stands for several consecutive ones, so that simulation steps do not
#: grow with the grid. The longest kernel of the bundled traces has 95 waves on its own GPU, 836 on a K40.
MOST_WAVES: Final = 4096
#: Maximum number of blocks counted: above, doubles skip integers.
MOST_BLOCKS: Final = 1 << 53


def placed_blocks(blocks: int, at_once: int) -> int:
    """Return the number of blocks to place for a kernel of `blocks` blocks, of which the GPU holds `at_once`."""
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
    """Return the number of further blocks that fit on a used SM, from its free resources and those of a block.

    Sizes are whole numbers, as floating point in compiled code: their quotients round down exactly.
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
    """Return True if a kernel that needs a carve-out of at least `least_bytes` may join an SM with `carveout_bytes`."""
    return carveout_bytes >= least_bytes


def blocks_per_fill(left: int, room: int, sms: int) -> int:
    """Return the blocks that each of `sms` SMs gets of `left` if each is filled at once and has `room` for them."""
    return min(room, (left + sms - 1) // sms)
