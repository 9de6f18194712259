"""Idle blocks: those of a kernel that launches more blocks than it has work for.

They begin and end at once, but all of them pass the dispatcher and the SMs. Until they have, the front end starts no
other kernel. Blocks with work go on for the rest of the kernel's time. `IDLE_BLOCK_NS` is the time of one alone on the
GPU. On full SMs, and in several waves, they take longer by the rules of `gpusim.rules.contention`:

    time = IDLE_BLOCK_NS x (blocks an SM holds)^p x waves

The exponent p is that of kernels that multiply no matrices.

Source: kernels of one block, and four recommendation models whose schedules show that lookups take turns by such a time
(research/2026-11-26-recommendation.md).
"""

from __future__ import annotations

from typing import Final

from gpusim.formats.hardware import Contention
from gpusim.rules.contention import block_load, rate, waves
from gpusim.rules.dispatch import placed_blocks

#: Shortest profiled kernel of one block in 68 traces of an H200, all without embedding bags: a fill of one value
#: (`python research/prototypes/shortest_kernels.py`).
IDLE_BLOCK_NS: Final = 672.0


def time_ns(contention: Contention, blocks: int, blocks_per_sm: int, sms: int) -> float:
    """Return the time of a kernel of idle blocks, in ns; `blocks_per_sm` is the number that an SM holds."""
    placed = placed_blocks(blocks, sms * blocks_per_sm)
    full_sm_ns = IDLE_BLOCK_NS * rate(contention, block_load(blocks_per_sm), 0)
    return full_sm_ns * waves(contention, placed, blocks_per_sm, sms, 0)
