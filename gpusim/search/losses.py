"""What a running kernel can lose time to."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

THREADS: Final = "threads"
REGISTERS: Final = "registers"
SMEM: Final = "shared memory"
BLOCKS: Final = "blocks"
SPLIT: Final = "shared-memory split"
ISSUE: Final = "issue and L2"
DRAM: Final = "DRAM"
COPY: Final = "copy engine"
#: In the order of `Demand.resources`. Block slots, and standing behind a kernel that is not placed, are both `BLOCKS`.
RESOURCES: Final = (THREADS, REGISTERS, SMEM, BLOCKS)
COPIES: Final = ("h2d", "d2h")


@dataclass(frozen=True, slots=True)
class Loss:
    """Time that one task lost while it ran, from one change on the device to the next."""

    cause: str
    by: int | None
    """The oldest other task that ran meanwhile; None where there was none."""
    from_ns: float
    until_ns: float
    lost_ns: float
