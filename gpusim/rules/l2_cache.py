"""L2 cache between kernels: time lost by a kernel whose data were in the cache when it was timed, and no longer are.

    lost = read x (1 / DRAM rate - 1 / L2 rate) + written / DRAM bandwidth + miss_ns, if anything is read
    rate = min(bandwidth, warps x bandwidth per warp), for DRAM and for L2

In a replay that touches more than the cache holds, the data of a launch (code, parameters) are not there either. On one
stream they count in the gap of the trace, and what of it is not there yet counts as time of the kernel:

    launch lost = launch_miss_ns, at most MISSING_GAP_NS - gap of the trace

The kernels of a trace were timed on one stream, in repeated replays: a step that fits the cache finds its data there.
On several streams it touches more memory, since the allocator gives each stream its own blocks. `read` is the bytes
that the kernel must then read from DRAM, `written` the changed bytes that it evicts from the cache.

Source: bandwidth by SMs and warps on an H200 (research/data/rules_h200_20261123.json). Schedules of GoogLeNet that
touch up to 38 MB take the time predicted without this rule, those that touch 50 MB take 8 % more
(research/2026-11-24-l2-cache.md). Gaps of profiled replays (research/2026-11-26-launch-misses.md). Constants:
`Memory.l2_bytes`, `l2_bytes_per_ns`, `warp_l2_bytes_per_ns`, `warp_dram_bytes_per_ns`, `miss_ns`, `launch_miss_ns`.
"""

from __future__ import annotations

from typing import Final

from gpusim.formats.hardware import Memory

#: Share of the L2 cache that a step may fill before it loses data that it would reuse.
USABLE_SHARE: Final = 0.6
#: Gap of sequential graphs whose launches miss: 12 inference steps beyond the cache have 341 to 469 ns, median 397.
MISSING_GAP_NS: Final = 400.0


def usable_bytes(memory: Memory) -> float:
    """Return the number of bytes of a step that stay in the cache."""
    return USABLE_SHARE * memory.l2_bytes


def may_lose(memory: Memory, one_stream_bytes: int, at_most_bytes: int) -> bool:
    """Return True if the memory of a step fits the cache on one stream, and may not on several."""
    return one_stream_bytes <= usable_bytes(memory) < at_most_bytes


def lost_ns(memory: Memory, read_bytes: float, written_bytes: float, warps: float) -> float:
    """Return the time that a kernel with `warps` resident warps loses to these misses, in ns.

    It is 0 on a GPU without a measured cache.
    """
    if memory.l2_bytes_per_ns == 0.0:
        return 0.0
    lost_ns = written_bytes / memory.dram_bytes_per_ns
    if read_bytes > 0.0:
        dram_bytes_per_ns = min(memory.dram_bytes_per_ns, warps * memory.warp_dram_bytes_per_ns)
        l2_bytes_per_ns = min(memory.l2_bytes_per_ns, warps * memory.warp_l2_bytes_per_ns)
        lost_ns += max(0.0, read_bytes / dram_bytes_per_ns - read_bytes / l2_bytes_per_ns) + memory.miss_ns
    return lost_ns


def launch_miss_left_ns(memory: Memory, gap_ns: float) -> float:
    """Return the time by which a launch that misses exceeds the gap of the sequential graph, in ns."""
    return min(memory.launch_miss_ns, max(0.0, MISSING_GAP_NS - gap_ns))


def launch_lost_ns(memory: Memory, touched_bytes: float) -> float:
    """Return the time that each kernel of a replay that touches these bytes loses to its launch, in ns.

    It is 0 on a GPU without a measured cache.
    """
    missed = memory.l2_bytes_per_ns > 0.0 and touched_bytes > usable_bytes(memory)
    return memory.launch_miss_ns if missed else 0.0


def missed_bytes(memory: Memory, moved_bytes: int) -> int:
    """Return the estimated DRAM traffic of an op that moves `moved_bytes`: the bytes beyond the cache.

    Data that fit the cache are assumed to be there, so this is a lower limit. Counters in a trace replace it.
    """
    return max(0, moved_bytes - memory.l2_bytes)
