"""Simulation of PyTorch's caching allocator: allocated and reserved bytes.

Source: c10/cuda/CUDACachingAllocator.cpp and the notes on memory management of PyTorch 2.x, with the default settings:

1. A request is rounded up to 512 bytes. Up to 1 MiB it comes from the small pool, else from the large one.
2. The smallest free block that is large enough is taken, the one at the lowest address among equals.
3. Where there is none, a segment is reserved: of 2 MiB for the small pool, of 20 MiB for requests below 10 MiB, else of
   the request rounded up to 2 MiB.
4. A block is split where what is left over is at least 512 bytes in the small pool, and more than 1 MiB in the large
   one. What is not split off counts as allocated.
5. A freed block is joined with free neighbours of its segment. Segments are kept.

Addresses are made up: segments lie one after the other in the order in which they were reserved, which only decides
between free blocks of equal size. Streams have pools of their own; a plan allocates on one stream.
"""

from __future__ import annotations

import bisect
from dataclasses import dataclass
from typing import Final

KIB: Final = 1 << 10
MIB: Final = 1 << 20
#: Granularity of every size (`kMinBlockSize`).
GRANULARITY_BYTES: Final = 512
#: Largest request of the small pool (`kSmallSize`), and the largest unused rest of a large block.
SMALL_BYTES: Final = MIB
#: Segment of the small pool (`kSmallBuffer`).
SMALL_SEGMENT_BYTES: Final = 2 * MIB
#: Segment of the large pool for requests below `OWN_SEGMENT_BYTES` (`kLargeBuffer`).
LARGE_SEGMENT_BYTES: Final = 20 * MIB
#: From this on a request gets a segment of its own (`kMinLargeAlloc`) ...
OWN_SEGMENT_BYTES: Final = 10 * MIB
#: ... of a multiple of this (`kRoundLarge`).
SEGMENT_STEP_BYTES: Final = 2 * MIB


def rounded(size_bytes: int) -> int:
    """Return the allocator's size of a request; a size of 0 allocates nothing."""
    return -(-size_bytes // GRANULARITY_BYTES) * GRANULARITY_BYTES


def segment_bytes(size_bytes: int) -> int:
    """Return the segment size for a rounded request without a suitable free block."""
    if size_bytes <= SMALL_BYTES:
        return SMALL_SEGMENT_BYTES
    if size_bytes < OWN_SEGMENT_BYTES:
        return LARGE_SEGMENT_BYTES
    return -(-size_bytes // SEGMENT_STEP_BYTES) * SEGMENT_STEP_BYTES


@dataclass(slots=True)
class Block:
    """A piece of a segment. `before` and `after` are its neighbours."""

    address: int
    bytes: int
    small: bool
    free: bool = True
    before: Block | None = None
    after: Block | None = None


class CachingAllocator:
    """An empty pool, as at the start of a process or of a graph's recording."""

    def __init__(self) -> None:
        self.allocated_bytes = 0
        self.reserved_bytes = 0
        self.peak_allocated_bytes = 0
        self._free: dict[bool, list[tuple[int, int]]] = {True: [], False: []}
        """Size and address of each free block, sorted, for the small and the large pool."""
        self._at: dict[int, Block] = {}

    def allocate(self, size_bytes: int) -> Block | None:
        """Take a block; None for a size of 0."""
        if not size_bytes:
            return None
        size = rounded(size_bytes)
        small = size <= SMALL_BYTES
        free = self._free[small]
        place = bisect.bisect_left(free, (size, -1))
        if place < len(free):
            block = self._at[free.pop(place)[1]]
        else:
            block = Block(self.reserved_bytes, segment_bytes(size), small)
            self._at[block.address] = block
            self.reserved_bytes += block.bytes
        left = block.bytes - size
        if left >= GRANULARITY_BYTES if small else left > SMALL_BYTES:
            rest = Block(block.address + size, left, small, before=block, after=block.after)
            if block.after is not None:
                block.after.before = rest
            block.after, block.bytes = rest, size
            self._at[rest.address] = rest
            bisect.insort(free, (rest.bytes, rest.address))
        block.free = False
        self.allocated_bytes += block.bytes
        if self.allocated_bytes > self.peak_allocated_bytes:
            self.peak_allocated_bytes = self.allocated_bytes
        return block

    def release(self, block: Block | None) -> None:
        """Free a block."""
        if block is None:
            return
        if block.free:
            raise ValueError(f"the block at {block.address} is free already")
        self.allocated_bytes -= block.bytes
        block.free = True
        free = self._free[block.small]
        if block.before is not None and block.before.free:
            block = self._joined(block.before, block, free, block.before)
        if block.after is not None and block.after.free:
            block = self._joined(block, block.after, free, block.after)
        bisect.insort(free, (block.bytes, block.address))

    def _joined(self, left: Block, right: Block, free: list[tuple[int, int]], listed: Block) -> Block:
        """Join two free neighbours; `listed` is the one in the list of free blocks."""
        free.pop(bisect.bisect_left(free, (listed.bytes, listed.address)))
        del self._at[right.address]
        left.bytes += right.bytes
        left.after = right.after
        if right.after is not None:
            right.after.before = left
        return left

    def segments(self) -> list[Block]:
        """Return the first block of each segment, by address."""
        return [block for _, block in sorted(self._at.items()) if block.before is None]

    @property
    def largest_free_bytes(self) -> int:
        """Largest free block: available without a new segment."""
        return max((free[-1][0] for free in self._free.values() if free), default=0)
