"""`gpusim.engine.pool` compiled, rule by rule and line by line. A change there needs the same change here.

The running kernels of one GPU are the records `running[base : base + count]`, in start order; the caller keeps the
count. Values needed only for recordings (occupied share) are left out.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from gpusim.engine.compiled.jit import int64, jit, rule
from gpusim.engine.pool import EPSILON
from gpusim.rules import dram, oldest_first

traffic_bytes_per_ns, slowed_frac = rule(dram.bytes_per_ns), rule(dram.slowed_frac)
later_slowdown = rule(oldest_first.later_slowdown)

#: `gpusim.engine.pool.Running`; `needs_sm` is `any(demand)`, `slowdown` the factor on its time next to an older kernel,
#: and `younger_rate` its inverse, which saves divisions.
RUNNING = np.dtype(
    [
        ("index", "i8"),
        ("threads", "f8"),
        ("regs", "f8"),
        ("smem", "f8"),
        ("slots", "f8"),
        ("slowdown", "f8"),
        ("younger_rate", "f8"),
        ("dram_bytes_per_ns", "f8"),
        ("remaining_ns", "f8"),
        ("rate", "f8"),
        ("share", "f8"),
        ("partition", "f8"),
        ("needs_sm", "?"),
    ],
    align=True,
)


@jit
def start(hw: Any, running: Any, place: int, index: int, task: Any, wait_ns: float) -> None:
    """`SmPool.start`: put a task on the GPU, last in start order."""
    kernel = running[place]
    kernel.index = index
    kernel.threads = task.threads
    kernel.regs = task.regs
    kernel.smem = task.smem
    kernel.slots = task.slots
    kernel.slowdown = later_slowdown(hw.contention, task.cover)
    kernel.younger_rate = 1.0 / kernel.slowdown
    needs_sm = task.threads != 0.0 or task.regs != 0.0 or task.smem != 0.0 or task.slots != 0.0
    kernel.needs_sm = needs_sm
    kernel.dram_bytes_per_ns = traffic_bytes_per_ns(hw.memory, task.dram_bytes, task.dur_ns)
    kernel.remaining_ns = task.dur_ns + wait_ns
    kernel.partition = task.partition
    kernel.rate = 0.0
    kernel.share = 0.0


@jit
def finish(running: Any, base: int, count: int, index: int) -> None:
    """`SmPool.finish`: remove a finished task; later ones move up."""
    last = base + count - 1
    place = base
    while place < last and running[place].index != index:
        place += 1
    while place < last:
        # field by field: numba copies whole records byte by byte
        kernel, following = running[place], running[place + 1]
        kernel.index = following.index
        kernel.threads = following.threads
        kernel.regs = following.regs
        kernel.smem = following.smem
        kernel.slots = following.slots
        kernel.slowdown = following.slowdown
        kernel.younger_rate = following.younger_rate
        kernel.needs_sm = following.needs_sm
        kernel.dram_bytes_per_ns = following.dram_bytes_per_ns
        kernel.remaining_ns = following.remaining_ns
        kernel.rate = following.rate
        kernel.share = following.share
        kernel.partition = following.partition
        place += 1


@jit
def update(hw: Any, running: Any, base: int, count: int, elapsed_ns: float) -> tuple[float, int]:
    """`SmPool.advance`, `update` and `next_end` in one pass: every further loop costs a branch misprediction.

    Return the time to the next end at the new rates and its task, or infinity and -1 if there is none.
    """
    several = hw.partitions > 1.0
    traffic, end_ns, ending = 0.0, np.inf, int64(-1)
    for partition in range(int64(hw.partitions)):
        traffic, end_ns, ending = share_out(hw, running, base, count, elapsed_ns, several, float(partition))
    if several:  # sum in start order, as in the reference
        traffic = 0.0
        for number in range(count):
            kernel = running[base + number]
            traffic += kernel.rate * kernel.dram_bytes_per_ns
    if several or traffic > hw.memory.dram_bytes_per_ns:
        return slow_down(hw, running, base, count, traffic)
    return end_ns, ending


@jit
def share_out(
    hw: Any, running: Any, base: int, count: int, elapsed_ns: float, several: bool, partition: float
) -> tuple[float, float, int]:
    """`SmPool.advance` and `_share_out`; return the traffic, and the next end and its task unless DRAM limits.

    With several partitions, only the kernels of `partition` count.
    """
    threads = regs = smem = slots = 1.0  # free shares
    blocked = False
    traffic = 0.0
    elder = True
    end_ns, ending = np.inf, -1
    for number in range(count):
        kernel = running[base + number]
        if several and kernel.partition != partition:
            continue
        # advance
        remaining_ns = kernel.remaining_ns - elapsed_ns * kernel.rate
        kernel.remaining_ns = remaining_ns
        # update
        if blocked and kernel.needs_sm:
            kernel.share = kernel.rate = 0.0
            continue
        share = 1.0
        rate = 1.0 if elder else kernel.younger_rate
        if kernel.needs_sm:
            fits = kernel.threads <= threads and kernel.regs <= regs and kernel.smem <= smem and kernel.slots <= slots
            if not fits:  # one check first: four divisions per kernel that fits would take most of the time
                if kernel.threads > threads:
                    share = min(share, threads / kernel.threads)
                if kernel.regs > regs:
                    share = min(share, regs / kernel.regs)
                if kernel.smem > smem:
                    share = min(share, smem / kernel.smem)
                if kernel.slots > slots:
                    share = min(share, slots / kernel.slots)
                rate = share if elder else share / kernel.slowdown
            threads -= share * kernel.threads
            regs -= share * kernel.regs
            smem -= share * kernel.smem
            slots -= share * kernel.slots
            threads = threads if threads > EPSILON else 0.0
            regs = regs if regs > EPSILON else 0.0
            smem = smem if smem > EPSILON else 0.0
            slots = slots if slots > EPSILON else 0.0
            blocked = share < 1.0
        kernel.share = share
        kernel.rate = rate
        elder = elder and not kernel.needs_sm
        traffic += rate * kernel.dram_bytes_per_ns
        # next_end
        if rate > 0.0:
            time_ns = max(0.0, remaining_ns / rate)
            if ending < 0 or time_ns < end_ns:
                end_ns, ending = time_ns, kernel.index
    return traffic, end_ns, ending


@jit
def slow_down(hw: Any, running: Any, base: int, count: int, traffic: float) -> tuple[float, int]:
    """`SmPool._limit_traffic` and `next_end`."""
    slow = slowed_frac(hw.memory, traffic)
    end_ns, ending = np.inf, -1
    for number in range(count):
        kernel = running[base + number]
        if kernel.dram_bytes_per_ns > 0.0:
            kernel.rate *= slow
        if kernel.rate > 0.0:
            time_ns = max(0.0, kernel.remaining_ns / kernel.rate)
            if ending < 0 or time_ns < end_ns:
                end_ns, ending = time_ns, kernel.index
    return end_ns, ending
