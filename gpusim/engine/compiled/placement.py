"""`gpusim.engine.placement` compiled, rule by rule. A change there is the same change here.

What is on the SMs of one GPU are the first `device.running` records of `kernels`, `device.groups` of `groups` and
`device.cohorts` of `cohorts`, each in the order of the reference's lists.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from gpusim.engine.compiled.jit import int64, jit
from gpusim.engine.placement import ENDED_NS, MOST_GROUPS

#: `gpusim.engine.placement.Placed`, with what it needs of the task.
PLACED = np.dtype(
    [
        ("index", "i8"),
        ("left", "i8"),
        ("on_sms", "i8"),
        ("crowds", "i8"),
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
#: `gpusim.engine.placement.SmGroup`; `room` and `gets` are those of the kernel that is being placed. `changed` says
#: that its load is to be added up again, which gives the same number where nothing has changed.
SM_GROUP = np.dtype(
    [
        ("partition", "i8"),
        ("sms", "i8"),
        ("threads", "i8"),
        ("regs", "i8"),
        ("smem_bytes", "i8"),
        ("blocks", "i8"),
        ("split_bytes", "i8"),
        ("room", "i8"),
        ("gets", "i8"),
        ("changed", "i8"),
        ("load", "f8"),
        ("rate", "f8"),
    ],
    align=True,
)
#: `gpusim.engine.placement.Cohort`: kernel and group by their places, -1 for no group.
COHORT = np.dtype(
    [("kernel", "i8"), ("group", "i8"), ("blocks", "i8"), ("remaining_ns", "f8"), ("rate", "f8")], align=True
)


@jit
def start(hw: Any, device: Any, kernels: Any, groups: Any, cohorts: Any, index: int, task: Any) -> None:
    """`SmPlacement.start`."""
    kernel = kernels[device.running]
    kernel.index = index
    kernel.crowds = 0
    kernel.partition = int64(task.partition)
    bandwidth = hw.memory_dram_bytes_per_ns
    traffic = min(task.dram_bytes / task.dur_ns, bandwidth) if task.dur_ns != 0.0 else 0.0
    blocks = int64(task.blocks)
    kernel.threads = int64(task.footprint_threads)
    if kernel.threads == 0 or blocks == 0:
        kernel.left = 0
        kernel.on_sms = 1
        kernel.block_ns = task.dur_ns
        kernel.load = 0.0
        kernel.dram_bytes_per_ns = traffic
        add_cohort(device, cohorts, device.running, int64(-1), int64(1), task.dur_ns)
    else:
        sms = int64(task.partition_sms) if task.partition_sms > 0.0 else int64(hw.limits_sms)
        known = False
        for place in range(device.groups):
            known = known or groups[place].partition == kernel.partition
        if not known:
            group = groups[device.groups]
            device.groups += 1
            group.partition = kernel.partition
            group.sms = sms
            group.threads = group.regs = group.smem_bytes = group.blocks = group.split_bytes = 0
            group.changed = 0
            group.load = 0.0
            group.rate = 1.0
        kernel.blocks_per_sm = int64(task.blocks_per_sm)
        kernel.regs = int64(task.footprint_regs)
        kernel.smem_bytes = int64(task.footprint_smem_bytes)
        kernel.split_bytes = int64(task.footprint_split_bytes)
        kernel.own_split_bytes = int64(task.footprint_own_split_bytes)
        at_once = sms * kernel.blocks_per_sm
        kernel.left = blocks
        device.unplaced += 1
        kernel.on_sms = 0
        kernel.block_ns = task.dur_ns / ((blocks + at_once - 1) // at_once)
        kernel.load = 1.0 / min(kernel.blocks_per_sm, (blocks + sms - 1) // sms)
        kernel.dram_bytes_per_ns = traffic / min(blocks, at_once)
    device.running += 1


@jit
def add_cohort(device: Any, cohorts: Any, kernel: int, group: int, blocks: int, remaining_ns: float) -> None:
    """A cohort at the end of the list."""
    cohort = cohorts[device.cohorts]
    device.cohorts += 1
    cohort.kernel = kernel
    cohort.group = group
    cohort.blocks = blocks
    cohort.remaining_ns = remaining_ns
    cohort.rate = 0.0


@jit
def advance(device: Any, cohorts: Any, elapsed_ns: float) -> None:
    """`SmPlacement.advance`."""
    for place in range(device.cohorts):
        cohorts[place].remaining_ns -= elapsed_ns * cohorts[place].rate


@jit
def finish(device: Any, kernels: Any, groups: Any, cohorts: Any, index: int) -> bool:
    """`SmPlacement.finish`."""
    mine = int64(0)
    while kernels[mine].index != index:
        mine += 1
    kernel = kernels[mine]
    kept = int64(0)
    emptied = False
    for place in range(device.cohorts):
        cohort = cohorts[place]
        if cohort.kernel == mine and cohort.remaining_ns <= ENDED_NS:
            if cohort.group >= 0:
                group = groups[cohort.group]
                put(device, group, kernel, -cohort.blocks)
                kernel.on_sms -= cohort.blocks * group.sms
                emptied = emptied or group.blocks == 0
            else:
                kernel.on_sms -= cohort.blocks
        else:
            if kept < place:
                copy_cohort(cohorts[kept], cohort)
            kept += 1
    device.cohorts = kept
    if emptied:
        merge_empty(device, groups, cohorts)
    if kernel.on_sms > 0 or kernel.left > 0:
        return False
    device.running -= 1
    for place in range(mine, device.running):
        copy_placed(kernels[place], kernels[place + 1])
    for place in range(device.cohorts):
        if cohorts[place].kernel > mine:
            cohorts[place].kernel -= 1
    return True


@jit
def merge_empty(device: Any, groups: Any, cohorts: Any) -> None:
    """`SmPlacement._merge_empty`."""
    place = int64(0)
    while place < device.groups:
        into = int64(-1)
        if groups[place].blocks == 0:
            for earlier in range(place):
                if groups[earlier].blocks == 0 and groups[earlier].partition == groups[place].partition:
                    into = int64(earlier)
                    break
        if into < 0:
            place += 1
            continue
        groups[into].sms += groups[place].sms
        device.groups -= 1
        for later in range(place, device.groups):
            copy_group(groups[later], groups[later + 1])
        for number in range(device.cohorts):
            if cohorts[number].group > place:
                cohorts[number].group -= 1


@jit
def update(hw: Any, device: Any, kernels: Any, groups: Any, cohorts: Any, elapsed_ns: float) -> tuple[float, int]:
    """`SmPlacement.advance`, `update` and `next_end`: time until the next cohort ends, and of which task.

    Where none does, the time is infinite and the index -1.
    """
    advance(device, cohorts, elapsed_ns)
    if device.unplaced > 0:
        blocked = int64(0)  # a bit for each partition
        for place in range(device.running):
            kernel = kernels[place]
            if kernel.left > 0 and not (blocked >> kernel.partition) & 1:
                place_blocks(hw, device, kernel, int64(place), groups, cohorts)
                if kernel.left > 0:
                    blocked |= 1 << kernel.partition
                else:
                    device.unplaced -= 1
    return set_rates(hw, device, kernels, groups, cohorts)


@jit
def place_blocks(hw: Any, device: Any, kernel: Any, number: int, groups: Any, cohorts: Any) -> None:
    """`SmPlacement._place`."""
    most = int64(0)
    split_differs = False
    for place in range(device.groups):
        group = groups[place]
        group.room = group.gets = 0
        if group.partition != kernel.partition:
            continue
        if group.blocks == 0:
            room = kernel.blocks_per_sm
        else:
            room = min(
                (int64(hw.limits_threads_per_sm) - group.threads) // kernel.threads,
                int64(hw.limits_blocks_per_sm) - group.blocks,
            )
            if kernel.regs > 0:
                room = min(room, (int64(hw.limits_regs_per_sm) - group.regs) // kernel.regs)
            if group.split_bytes < kernel.split_bytes:
                split_differs = split_differs or room > 0
                room = int64(0)
            elif kernel.smem_bytes > 0:
                room = min(room, (group.split_bytes - group.smem_bytes) // kernel.smem_bytes)
        group.room = max(int64(0), room)
        most = max(most, group.room)
    if most == 0:
        if split_differs:
            kernel.crowds = 1
    elif kernel.crowds == 1 and kernel.on_sms == 0:
        fill_up(device, kernel, number, groups, cohorts)
    else:
        spread(device, kernel, number, groups, cohorts, most)


@jit
def fill_up(device: Any, kernel: Any, number: int, groups: Any, cohorts: Any) -> None:
    """`SmPlacement._fill_up`."""
    for place in range(device.groups):
        group = groups[place]
        if group.room > 0 and kernel.left > 0:
            wanted = (kernel.left + group.room - 1) // group.room
            if wanted < group.sms and device.groups < MOST_GROUPS:
                split(device, int64(place), wanted, groups, cohorts)
            blocks = min(group.room, (kernel.left + group.sms - 1) // group.sms)
            add(device, kernel, number, int64(place), blocks, groups, cohorts)


@jit
def spread(device: Any, kernel: Any, number: int, groups: Any, cohorts: Any, most: int) -> None:
    """`SmPlacement._spread`."""
    left = kernel.left
    known = device.groups
    level = int64(most)
    while level > 0:
        a_block_each = int64(0)
        for place in range(known):
            if groups[place].room >= level:
                a_block_each += groups[place].sms
        if a_block_each > left:
            break
        left -= a_block_each
        level -= 1
    for place in range(known):
        groups[place].gets = max(int64(0), groups[place].room - level)
    for room in range(level, most + 1):
        for place in range(known):
            group = groups[place]
            if level == 0 or left <= 0 or group.room != room:
                continue
            if left < group.sms and device.groups < MOST_GROUPS:
                others = split(device, int64(place), left, groups, cohorts)
                groups[others].gets = group.gets
            group.gets += 1
            left -= group.sms
    for place in range(device.groups):
        if groups[place].gets > 0:
            add(device, kernel, number, int64(place), groups[place].gets, groups, cohorts)


@jit
def add(device: Any, kernel: Any, number: int, place: int, blocks: int, groups: Any, cohorts: Any) -> None:
    """`SmPlacement._add`."""
    group = groups[place]
    if group.blocks == 0:
        group.split_bytes = kernel.own_split_bytes
    put(device, group, kernel, blocks)
    kernel.left = max(int64(0), kernel.left - blocks * group.sms)
    kernel.on_sms += blocks * group.sms
    add_cohort(device, cohorts, number, place, blocks, kernel.block_ns)


@jit
def put(device: Any, group: Any, kernel: Any, blocks: int) -> None:
    """`_put`."""
    group.changed = device.changed = 1
    group.threads += blocks * kernel.threads
    group.regs += blocks * kernel.regs
    group.smem_bytes += blocks * kernel.smem_bytes
    group.blocks += blocks


@jit
def split(device: Any, place: int, sms: int, groups: Any, cohorts: Any) -> int:
    """`SmPlacement._split`: the place of the new group."""
    others = int64(device.groups)
    device.groups += 1
    copy_group(groups[others], groups[place])
    groups[others].sms -= sms
    groups[others].room = groups[others].gets = 0
    groups[place].sms = sms
    for number in range(device.cohorts):
        cohort = cohorts[number]
        if cohort.group == place:
            copy_cohort(cohorts[device.cohorts], cohort)
            cohorts[device.cohorts].group = others
            device.cohorts += 1
    return others


@jit
def set_rates(hw: Any, device: Any, kernels: Any, groups: Any, cohorts: Any) -> tuple[float, int]:
    """`SmPlacement._set_rates` and `next_end`."""
    if device.changed:
        device.changed = 0
        for place in range(device.groups):
            if groups[place].changed:
                groups[place].load = 0.0
        for place in range(device.cohorts):
            cohort = cohorts[place]
            if cohort.group >= 0 and groups[cohort.group].changed:
                groups[cohort.group].load += cohort.blocks * kernels[cohort.kernel].load
        for place in range(device.groups):
            group = groups[place]
            if group.changed:
                group.changed = 0
                group.rate = 1.0 / group.load**hw.contention_sharing_exponent if group.load > 1.0 else 1.0
    traffic = 0.0
    end_ns, ending = np.inf, int64(-1)
    for place in range(device.cohorts):
        cohort = cohorts[place]
        kernel = kernels[cohort.kernel]
        blocks = cohort.blocks
        cohort.rate = 1.0
        if cohort.group >= 0:
            blocks *= groups[cohort.group].sms
            cohort.rate = groups[cohort.group].rate
        traffic += cohort.rate * (blocks * kernel.dram_bytes_per_ns)
        time_ns = max(0.0, cohort.remaining_ns / cohort.rate)
        if ending < 0 or time_ns < end_ns:
            end_ns, ending = time_ns, kernel.index
    if traffic > hw.memory_dram_bytes_per_ns:
        slow = hw.memory_dram_bytes_per_ns / traffic
        end_ns, ending = np.inf, int64(-1)
        for place in range(device.cohorts):
            cohort = cohorts[place]
            if kernels[cohort.kernel].dram_bytes_per_ns > 0.0:
                cohort.rate *= slow
            time_ns = max(0.0, cohort.remaining_ns / cohort.rate)
            if ending < 0 or time_ns < end_ns:
                end_ns, ending = time_ns, kernels[cohort.kernel].index
    return end_ns, ending


# Records are copied field by field: as a whole, they are copied byte by byte.


@jit
def copy_cohort(to: Any, source: Any) -> None:
    """All fields of a cohort."""
    to.kernel = source.kernel
    to.group = source.group
    to.blocks = source.blocks
    to.remaining_ns = source.remaining_ns
    to.rate = source.rate


@jit
def copy_group(to: Any, source: Any) -> None:
    """All fields of a group."""
    to.partition = source.partition
    to.sms = source.sms
    to.threads = source.threads
    to.regs = source.regs
    to.smem_bytes = source.smem_bytes
    to.blocks = source.blocks
    to.split_bytes = source.split_bytes
    to.room = source.room
    to.gets = source.gets
    to.changed = source.changed
    to.load = source.load
    to.rate = source.rate


@jit
def copy_placed(to: Any, source: Any) -> None:
    """All fields of a kernel."""
    to.index = source.index
    to.left = source.left
    to.on_sms = source.on_sms
    to.crowds = source.crowds
    to.partition = source.partition
    to.blocks_per_sm = source.blocks_per_sm
    to.threads = source.threads
    to.regs = source.regs
    to.smem_bytes = source.smem_bytes
    to.split_bytes = source.split_bytes
    to.own_split_bytes = source.own_split_bytes
    to.block_ns = source.block_ns
    to.load = source.load
    to.dram_bytes_per_ns = source.dram_bytes_per_ns
