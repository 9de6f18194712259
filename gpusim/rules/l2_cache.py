"""The L2 cache between kernels, which no prediction counts: whether a step may lose it by running on several streams.

The kernels of a trace were timed on one stream, again and again: a step that fits the cache finds its parameters there.
On several streams it touches more memory, since the allocator gives each stream its own.

Source: GoogLeNet inference on an H200 with 60 MiB: schedules that touch up to 38 MB take what is predicted, those that
touch 50 MB 8 % more (research/2026-11-23-fidelity.md). Constant: `Memory.l2_bytes`.
"""

from __future__ import annotations

from typing import Final

from gpusim.formats.hardware import Memory

#: Share of the L2 cache that a step may fill before it loses what it would read again.
USABLE_SHARE: Final = 0.6


def may_lose(memory: Memory, one_stream_bytes: int, at_most_bytes: int) -> bool:
    """Whether a step that touches so many bytes on one stream, and at most so many on several, fits the one alone."""
    usable = USABLE_SHARE * memory.l2_bytes
    return one_stream_bytes <= usable < at_most_bytes


def missed_bytes(memory: Memory, moved_bytes: int) -> int:
    """Estimated DRAM traffic of an op that moves so many bytes: what the cache does not hold.

    What fits the cache is taken to be there, written just before and read again soon, so this is a lower limit.
    Counters, where a trace has them, replace it.
    """
    return max(0, moved_bytes - memory.l2_bytes)
