"""SMs that hold the same, the cohorts of blocks on them, and their rates: `gpusim.engine.placement` compiled.

What is on the SMs of a device is in the rows `here` of `Blocks`. Kernels and groups stay where they are: `line` has the
places of the `device.running` kernels in the order of their starts, `order` those of the `device.groups` groups in that
of the reference's list, that of memory operations before them; behind these are the places that are free. What every
step looks at is by number in that order: when the first cohort of each group ends, and its traffic. Everything else is
done for groups that have changed; `touched` has the places of these.
"""

from __future__ import annotations

from typing import Any, Final

import numpy as np

from gpusim.engine.compiled.jit import int64, jit
from gpusim.engine.placement import NO_SMS

#: `gpusim.engine.placement.Placed`, with what it needs of the task. `scanned` says that all groups have been looked at
#: for it and what had room was used: from then on only groups that change can have room.
PLACED: Final = np.dtype(
    [
        ("index", "i8"),
        ("left", "i8"),
        ("on_sms", "i8"),
        ("crowds", "i8"),
        ("scanned", "i8"),
        ("partition", "i8"),
        ("blocks_per_sm", "i8"),
        ("threads", "i8"),
        ("regs", "i8"),
        ("smem_bytes", "i8"),
        ("split_bytes", "i8"),
        ("own_split_bytes", "i8"),
        ("block_ns", "f8"),
        ("load", "f8"),
        ("dram_bytes_per_ns", "f8"),
    ],
    align=True,
)
#: `gpusim.engine.placement.SmGroup`; `at` is its number in the order; of the cohort that ends first, `ending` is the
#: place of the kernel and `number` its own. `room` and `gets` are those of the kernel that is being placed, `differs`
#: says that only the split keeps it away.
SM_GROUP: Final = np.dtype(
    [
        ("at", "i8"),
        ("changed", "i8"),
        ("cohorts", "i8"),
        ("sms", "i8"),
        ("partition", "i8"),
        ("blocks", "i8"),
        ("threads", "i8"),
        ("regs", "i8"),
        ("smem_bytes", "i8"),
        ("split_bytes", "i8"),
        ("room", "i8"),
        ("gets", "i8"),
        ("differs", "i8"),
        ("ending", "i8"),
        ("number", "i8"),
        ("load", "f8"),
        ("rate", "f8"),
        ("updated_ns", "f8"),
    ],
    align=True,
)
#: `gpusim.engine.placement.Cohort`: its kernel by its place.
COHORT: Final = np.dtype(
    [("kernel", "i8"), ("number", "i8"), ("blocks", "i8"), ("remaining_ns", "f8"), ("rate", "f8")], align=True
)


@jit
def set_up(device: Any, blocks: Any, here: int) -> None:
    """Nothing runs: there is the group of memory operations alone."""
    device.groups = device.unplaced = device.placed = device.touched = 0
    device.clock_ns = 0.0
    device.slow = 1.0
    new_group(device, blocks, here, int64(NO_SMS), int64(1))
    device.empty = 0


@jit
def new_group(device: Any, blocks: Any, here: int, partition: int, sms: int) -> None:
    """An empty group, behind the others."""
    group = blocks.groups[here, blocks.order[here, device.groups]]
    group.at = device.groups
    blocks.ends[here, device.groups] = np.inf
    blocks.traffic[here, device.groups] = 0.0
    device.groups += 1
    device.empty += 1
    group.partition = partition
    group.sms = sms
    group.threads = group.regs = group.smem_bytes = group.blocks = group.split_bytes = 0
    group.changed = group.cohorts = group.differs = 0
    group.ending = -1
    group.load = group.updated_ns = 0.0
    group.rate = 1.0


@jit
def add_cohort(device: Any, blocks: Any, here: int, at: int, kernel: Any, place: int, count: int) -> None:
    """`SmPlacement._add_cohort`."""
    touch(device, blocks, here, at)
    device.placed += 1
    group = blocks.groups[here, at]
    cohort = blocks.cohorts[here, at, group.cohorts]
    group.cohorts += 1
    cohort.kernel = place
    cohort.number = device.placed
    cohort.blocks = count
    cohort.remaining_ns = kernel.block_ns
    cohort.rate = 0.0


@jit
def touch(device: Any, blocks: Any, here: int, at: int) -> None:
    """`SmPlacement._touch`."""
    group = blocks.groups[here, at]
    if group.changed == 0:
        elapsed_ns = device.clock_ns - group.updated_ns
        cohorts = blocks.cohorts[here, at]
        for number in range(group.cohorts):
            cohorts[number].remaining_ns -= elapsed_ns * cohorts[number].rate
        group.updated_ns = device.clock_ns
        note_change(device, blocks, here, at)


@jit
def note_change(device: Any, blocks: Any, here: int, at: int) -> None:
    """The rates of a group are to be set anew."""
    blocks.groups[here, at].changed = 1
    blocks.touched[here, device.touched] = at
    device.touched += 1


@jit
def copy_cohort(to: Any, source: Any) -> None:
    """All fields, one by one: as a whole, records are copied byte by byte."""
    to.kernel = source.kernel
    to.number = source.number
    to.blocks = source.blocks
    to.remaining_ns = source.remaining_ns
    to.rate = source.rate


@jit
def put(group: Any, kernel: Any, blocks: int) -> None:
    """`_put`."""
    group.threads += blocks * kernel.threads
    group.regs += blocks * kernel.regs
    group.smem_bytes += blocks * kernel.smem_bytes
    group.blocks += blocks


@jit
def split(device: Any, blocks: Any, here: int, at: int, sms: int) -> int:
    """`SmPlacement._split`: the place of the others, which get as many blocks as the group got before."""
    touch(device, blocks, here, at)
    group = blocks.groups[here, at]
    new = int64(blocks.order[here, device.groups])
    new_group(device, blocks, here, int64(group.partition), int64(group.sms - sms))
    note_change(device, blocks, here, new)
    others = blocks.groups[here, new]
    group.sms = sms
    device.empty -= 1 if group.blocks > 0 else 0
    others.blocks = group.blocks
    others.threads = group.threads
    others.regs = group.regs
    others.smem_bytes = group.smem_bytes
    others.split_bytes = group.split_bytes
    others.gets = group.gets
    others.differs = group.differs
    others.load = group.load
    others.rate = group.rate
    others.updated_ns = group.updated_ns
    others.cohorts = group.cohorts
    for number in range(group.cohorts):
        copy_cohort(blocks.cohorts[here, new, number], blocks.cohorts[here, at, number])
        device.placed += 1
        blocks.cohorts[here, new, number].number = device.placed
    return new


@jit
def merge_empty(device: Any, blocks: Any, here: int) -> None:
    """`SmPlacement._merge_empty`."""
    groups, order, ends, traffic = blocks.groups[here], blocks.order[here], blocks.ends[here], blocks.traffic[here]
    number = int64(1)
    while number < device.groups:
        at = order[number]
        into = int64(-1)
        if groups[at].blocks == 0:
            for earlier in range(1, number):
                other = groups[order[earlier]]
                if other.blocks == 0 and other.partition == groups[at].partition:
                    into = int64(order[earlier])
                    break
        if into < 0:
            number += 1
            continue
        groups[into].sms += groups[at].sms
        groups[at].changed = 0
        device.groups -= 1
        device.empty -= 1
        for later in range(number, device.groups):
            order[later] = order[later + 1]
            ends[later] = ends[later + 1]
            traffic[later] = traffic[later + 1]
            groups[order[later]].at = later
        order[device.groups] = at
    kept = int64(0)
    for number in range(device.touched):  # without those that are no more
        at = blocks.touched[here, number]
        if groups[at].changed == 1:
            blocks.touched[here, kept] = at
            kept += 1
    device.touched = kept


@jit
def set_rates(hw: Any, device: Any, blocks: Any, here: int) -> tuple[float, int]:
    """`SmPlacement._set_rates` and `next_end`, in one pass while DRAM slows nobody otherwise than before."""
    bandwidth = hw.memory_dram_bytes_per_ns
    ends, traffic = blocks.ends[here], blocks.traffic[here]
    while True:
        for number in range(device.touched):
            set_end(hw, device, blocks, here, int64(blocks.touched[here, number]))
        device.touched = 0
        wanted = 0.0
        end_ns, first = np.inf, int64(-1)
        for number in range(device.groups):
            wanted += traffic[number]
            if ends[number] < end_ns:
                end_ns, first = ends[number], number
        slow = bandwidth / wanted if wanted > bandwidth else 1.0
        if slow == device.slow:
            break
        for number in range(device.groups):
            if traffic[number] > 0.0:
                touch(device, blocks, here, int64(blocks.order[here, number]))
        device.slow = slow
    if first < 0:
        return np.inf, int64(-1)
    ending = blocks.groups[here, blocks.order[here, first]]
    for number in range(first + 1, device.groups):
        if ends[number] == end_ns:
            other = blocks.groups[here, blocks.order[here, number]]
            if other.number < ending.number:
                ending = other
    return max(0.0, end_ns - device.clock_ns), int64(blocks.kernels[here, ending.ending].index)


@jit
def set_end(hw: Any, device: Any, blocks: Any, here: int, at: int) -> None:
    """What `SmPlacement._set_rates` does with a group that has changed, and `_set_end`."""
    group, kernels, cohorts = blocks.groups[here, at], blocks.kernels[here], blocks.cohorts[here, at]
    load = traffic = 0.0
    for number in range(group.cohorts):
        cohort = cohorts[number]
        load += cohort.blocks * kernels[cohort.kernel].load
        traffic += cohort.blocks * group.sms * kernels[cohort.kernel].dram_bytes_per_ns
    if load != group.load:
        group.load = load
        group.rate = 1.0 / load**hw.contention_sharing_exponent if load > 1.0 else 1.0
    first_ns = np.inf
    for number in range(group.cohorts):
        cohort = cohorts[number]
        kernel = kernels[cohort.kernel]
        cohort.rate = group.rate
        if kernel.dram_bytes_per_ns > 0.0:
            cohort.rate *= device.slow
        end_ns = device.clock_ns + max(0.0, cohort.remaining_ns / cohort.rate)
        if end_ns < first_ns:
            first_ns = end_ns
            group.ending = cohort.kernel
            group.number = cohort.number
    group.changed = 0
    blocks.ends[here, group.at] = first_ns
    blocks.traffic[here, group.at] = group.rate * traffic
