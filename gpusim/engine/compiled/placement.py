"""`gpusim.engine.placement` compiled, rule by rule: which blocks go where, and which end. A change there is one here.

`gpusim.engine.compiled.sm_groups` has what runs, and how fast.
"""

from __future__ import annotations

from typing import Any

from gpusim.engine.compiled.jit import int64, jit
from gpusim.engine.compiled.sm_groups import (
    add_cohort,
    copy_cohort,
    merge_empty,
    new_group,
    put,
    set_rates,
    split,
    touch,
)
from gpusim.engine.placement import ENDED_NS, MOST_GROUPS, NEAR_NS, NO_SMS


@jit
def start(hw: Any, device: Any, blocks: Any, here: int, index: int, task: Any) -> None:
    """`SmPlacement.start`."""
    place = blocks.line[here, device.running]
    device.running += 1
    kernel = blocks.kernels[here, place]
    kernel.index = index
    kernel.crowds = kernel.scanned = kernel.left = 0
    bandwidth = hw.memory_dram_bytes_per_ns
    traffic = min(task.dram_bytes / task.dur_ns, bandwidth) if task.dur_ns != 0.0 else 0.0
    count = int64(task.blocks)
    kernel.threads = int64(task.footprint_threads)
    if kernel.threads == 0 or count == 0:
        kernel.partition = NO_SMS
        kernel.on_sms = 1
        kernel.block_ns = task.dur_ns
        kernel.load = 0.0
        kernel.dram_bytes_per_ns = traffic
        others = int64(blocks.order[here, 0])
        add_cohort(device, blocks, here, others, kernel, place, int64(1))
    else:
        kernel.partition = int64(task.partition)
        sms = int64(task.partition_sms) if task.partition_sms > 0.0 else int64(hw.limits_sms)
        known = False
        for number in range(device.groups):
            known = known or blocks.groups[here, blocks.order[here, number]].partition == kernel.partition
        if not known:
            new_group(device, blocks, here, int64(kernel.partition), sms)
        kernel.blocks_per_sm = int64(task.blocks_per_sm)
        kernel.regs = int64(task.footprint_regs)
        kernel.smem_bytes = int64(task.footprint_smem_bytes)
        kernel.split_bytes = int64(task.footprint_split_bytes)
        kernel.own_split_bytes = int64(task.footprint_own_split_bytes)
        at_once = sms * kernel.blocks_per_sm
        kernel.left = count
        device.unplaced += 1
        kernel.on_sms = 0
        kernel.block_ns = task.dur_ns / ((count + at_once - 1) // at_once)
        kernel.load = 1.0 / min(kernel.blocks_per_sm, (count + sms - 1) // sms)
        kernel.dram_bytes_per_ns = traffic / min(count, at_once)


@jit
def finish(device: Any, blocks: Any, here: int, index: int) -> bool:
    """`SmPlacement.finish`."""
    line, kernels, ends = blocks.line[here], blocks.kernels[here], blocks.ends[here]
    mine = int64(0)
    while kernels[line[mine]].index != index:
        mine += 1
    place = line[mine]
    kernel = kernels[place]
    ended_ns = ENDED_NS + device.clock_ns * 2.0**-50
    near_ns = device.clock_ns
    for number in range(device.groups):
        if ends[number] - near_ns > NEAR_NS:
            continue
        at = int64(blocks.order[here, number])
        group, cohorts = blocks.groups[here, at], blocks.cohorts[here, at]
        touch(device, blocks, here, at)
        kept = int64(0)
        for other in range(group.cohorts):
            cohort = cohorts[other]
            if cohort.kernel == place and cohort.remaining_ns <= ended_ns:
                kernel.on_sms -= cohort.blocks * group.sms
                if number > 0:
                    put(group, kernel, -cohort.blocks)
                    device.empty += 1 if group.blocks == 0 else 0
            else:
                if kept < other:
                    copy_cohort(cohorts[kept], cohort)
                kept += 1
        group.cohorts = kept
    if device.empty > 1:
        merge_empty(device, blocks, here)
    if kernel.on_sms > 0 or kernel.left > 0:
        return False
    device.running -= 1
    for number in range(mine, device.running):
        line[number] = line[number + 1]
    line[device.running] = place
    if device.running == 0:
        device.clock_ns = 0.0
    return True


@jit
def update(hw: Any, device: Any, blocks: Any, here: int) -> tuple[float, int]:
    """`SmPlacement.update` and `next_end`: time until blocks end, and of which task.

    Where none do, the time is infinite and the index -1.
    """
    if device.unplaced > 0:
        blocked = int64(0)  # a bit for each partition
        for number in range(device.running):
            place = int64(blocks.line[here, number])
            kernel = blocks.kernels[here, place]
            if kernel.left > 0 and not (blocked >> kernel.partition) & 1:
                place_blocks(hw, device, blocks, here, kernel, place)
                if kernel.left > 0:
                    blocked |= 1 << kernel.partition
                else:
                    device.unplaced -= 1
    return set_rates(hw, device, blocks, here)


@jit
def place_blocks(hw: Any, device: Any, blocks: Any, here: int, kernel: Any, place: int) -> None:
    """`SmPlacement._place`. Candidates are the groups with room, in their order.

    Where a kernel has been placed as far as it goes, only groups that have changed since can have room for it.
    """
    groups, candidates = blocks.groups[here], blocks.candidates[here]
    most = count = holds = int64(0)
    again = kernel.scanned == 1
    on_empty = False
    for number in range(device.touched if again else device.groups):
        at = blocks.touched[here, number] if again else blocks.order[here, number]
        group = groups[at]
        if group.partition != kernel.partition:
            continue
        room = room_for(hw, group, kernel)
        if room > 0:
            group.room = room
            group.gets = 0
            on_empty = on_empty or group.blocks == 0
            candidates[count] = at
            count += 1
            most = max(most, room)
            holds += room * group.sms
    if count == 0:
        for number in range(device.groups):
            group = groups[blocks.order[here, number]]
            if group.partition == kernel.partition:
                kernel.crowds |= group.differs
    elif kernel.crowds == 1 and kernel.on_sms == 0:
        fill_up(device, blocks, here, kernel, place, count)
    else:
        spread(device, blocks, here, kernel, place, count, most, kernel.left >= holds)
    kernel.scanned = 1
    if on_empty and kernel.left > 0:  # an empty SM gets as many blocks as where the kernel is alone: it may hold more
        for number in range(count):
            if room_for(hw, groups[candidates[number]], kernel) > 0:
                kernel.scanned = 0


@jit
def room_for(hw: Any, group: Any, kernel: Any) -> int:
    """`SmPlacement._room` and, as `differs`, `_only_split_differs`."""
    group.differs = 0
    if group.blocks == 0:
        return int64(kernel.blocks_per_sm)
    room = min(
        (int64(hw.limits_threads_per_sm) - group.threads) // kernel.threads,
        int64(hw.limits_blocks_per_sm) - group.blocks,
    )
    if kernel.regs > 0:
        room = min(room, (int64(hw.limits_regs_per_sm) - group.regs) // kernel.regs)
    if group.split_bytes < kernel.split_bytes:
        group.differs = 1 if room > 0 else 0
        return int64(0)
    if kernel.smem_bytes > 0:
        room = min(room, (group.split_bytes - group.smem_bytes) // kernel.smem_bytes)
    return int64(max(int64(0), room))


@jit
def fill_up(device: Any, blocks: Any, here: int, kernel: Any, place: int, count: int) -> None:
    """`SmPlacement._fill_up`."""
    for number in range(count):
        at = int64(blocks.candidates[here, number])
        group = blocks.groups[here, at]
        if kernel.left > 0:
            wanted = (kernel.left + group.room - 1) // group.room
            if wanted < group.sms and device.groups <= MOST_GROUPS:
                split(device, blocks, here, at, wanted)
            group.gets = min(group.room, (kernel.left + group.sms - 1) // group.sms)
            add(device, blocks, here, kernel, place, at)


@jit
def spread(
    device: Any, blocks: Any, here: int, kernel: Any, place: int, count: int, most: int, all_of_it: bool
) -> None:
    """`SmPlacement._spread`; with `all_of_it`, all room is used, whatever the order."""
    groups, candidates = blocks.groups[here], blocks.candidates[here]
    known = count
    if not all_of_it:
        left, level = kernel.left, most
        while level > 0:
            a_block_each = int64(0)
            for number in range(known):
                if groups[candidates[number]].room >= level:
                    a_block_each += groups[candidates[number]].sms
            if a_block_each > left:
                break
            left -= a_block_each
            level -= 1
        for number in range(known):
            groups[candidates[number]].gets = max(int64(0), groups[candidates[number]].room - level)
        for room in range(max(int64(1), level), most + 1):
            for number in range(known):
                at = int64(candidates[number])
                group = groups[at]
                if level > 0 and left > 0 and group.room == room:
                    if left < group.sms and device.groups <= MOST_GROUPS:
                        candidates[count] = split(device, blocks, here, at, int64(left))
                        count += 1
                    group.gets += 1
                    left -= group.sms
    for number in range(count):
        at = int64(candidates[number])
        if all_of_it:
            groups[at].gets = groups[at].room
        if groups[at].gets > 0:
            add(device, blocks, here, kernel, place, at)


@jit
def add(device: Any, blocks: Any, here: int, kernel: Any, place: int, at: int) -> None:
    """`SmPlacement._add` of as many blocks as the group `gets`."""
    group = blocks.groups[here, at]
    if group.blocks == 0:
        group.split_bytes = kernel.own_split_bytes
        device.empty -= 1
    put(group, kernel, group.gets)
    kernel.left = max(int64(0), kernel.left - group.gets * group.sms)
    kernel.on_sms += group.gets * group.sms
    add_cohort(device, blocks, here, at, kernel, place, int64(group.gets))
