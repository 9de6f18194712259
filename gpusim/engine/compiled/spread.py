"""Placement of the blocks of one kernel: `SmPlacement._place` compiled, with its rules."""

from __future__ import annotations

from typing import Any

from gpusim.engine.compiled.ends import earlier
from gpusim.engine.compiled.jit import int64, jit, jit_apart, rule
from gpusim.engine.compiled.sm_groups import add_cohort, put, split
from gpusim.engine.placement import MOST_GROUPS
from gpusim.rules import dispatch

blocks_per_fill = rule(dispatch.blocks_per_fill)


@jit
def place_blocks(hw: Any, device: Any, blocks: Any, kernel: Any, place: int) -> None:
    """`SmPlacement._place`, with the groups that have room as candidates, in their order.

    Once all room for a kernel is used, only groups that change later can have room for it.
    """
    groups, candidates = blocks.groups, device.candidates
    most = count = holds = int64(0)
    again = kernel.scanned == 1
    on_empty = False
    for number in range(int64(device.touched) if again else int64(device.groups)):
        at = int64(device.touched_groups[number]) if again else int64(device.order[number])
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
        number = int64(0) if kernel.crowds == 0 else int64(device.groups)
        while number < device.groups:
            group = groups[int64(device.order[number])]
            if group.partition == kernel.partition:
                kernel.crowds |= group.differs
            number += 1
    elif kernel.crowds == 1 and kernel.on_sms == 0:
        fill_up(device, blocks, kernel, place, count)
    elif count == 1:
        spread_on_one(device, blocks, kernel, place, int64(candidates[0]))
    else:
        spread(device, blocks, kernel, place, count, most, kernel.left >= holds)
    kernel.scanned = 1
    if on_empty and kernel.left > 0:  # an empty SM gets as many blocks as a kernel alone gets; it may hold more
        for number in range(count):
            if room_for(hw, groups[int64(candidates[number])], kernel) > 0:
                kernel.scanned = 0


@jit
def room_for(hw: Any, group: Any, kernel: Any) -> int:
    """`SmPlacement._room` and, as `differs`, `_only_carveout_differs`. These quotients round down exactly."""
    group.differs = 0
    if group.blocks == 0:
        return int64(kernel.blocks_per_sm)
    threads, regs = hw.limits.threads_per_sm - group.threads, hw.limits.regs_per_sm - group.regs
    slots, smem_bytes = hw.limits.blocks_per_sm - group.blocks, group.carveout_bytes - group.smem_bytes
    if earlier(earlier(threads - kernel.threads, regs - kernel.regs), slots - 1.0) < 0.0:  # most often
        return int64(0)
    if group.carveout_bytes < kernel.carveout_bytes:
        group.differs = 1
        return int64(0)
    if smem_bytes < kernel.smem_bytes:
        return int64(0)
    room = earlier(slots, threads / kernel.threads)
    room = earlier(regs / kernel.regs, room)  # if it needs no registers, infinity
    return int64(int(earlier(smem_bytes / kernel.smem_bytes, room)))


@jit_apart
def fill_up(device: Any, blocks: Any, kernel: Any, place: int, count: int) -> None:
    """`SmPlacement._fill_up`."""
    for number in range(count):
        at = int64(device.candidates[number])
        group = blocks.groups[at]
        if kernel.left > 0:
            wanted = (kernel.left + group.room - 1) // group.room
            if wanted < group.sms and device.groups <= MOST_GROUPS:
                split(device, blocks, at, wanted)
            group.gets = blocks_per_fill(int64(kernel.left), int64(group.room), int64(group.sms))
            add(device, blocks, kernel, place, at)


@jit
def spread_on_one(device: Any, blocks: Any, kernel: Any, place: int, at: int) -> None:
    """`SmPlacement._spread` for the usual case of one group with room."""
    group = blocks.groups[at]
    left, room, sms = int64(kernel.left), int64(group.room), int64(group.sms)
    if left >= room * sms:
        group.gets = room
        add(device, blocks, kernel, place, at)
        return
    level = left // sms  # blocks for each SM; some SMs get one more
    left -= level * sms
    group.gets = level
    others = at
    if left > 0:
        if left < sms and device.groups <= MOST_GROUPS:
            others = split(device, blocks, at, left)
        group.gets += 1
    add(device, blocks, kernel, place, at)
    if others != at and level > 0:
        add(device, blocks, kernel, place, others)


@jit_apart
def spread(device: Any, blocks: Any, kernel: Any, place: int, count: int, most: int, all_of_it: bool) -> None:
    """`SmPlacement._spread`; with `all_of_it`, all room is used and the order does not matter."""
    groups, candidates = blocks.groups, device.candidates
    behind = count
    if not all_of_it:
        known = behind
        left, level = int64(kernel.left), most
        while level > 0:
            a_block_each = int64(0)
            for number in range(known):
                if groups[int64(candidates[number])].room >= level:
                    a_block_each += groups[int64(candidates[number])].sms
            if a_block_each > left:
                break
            left -= a_block_each
            level -= 1
        for number in range(known):
            groups[int64(candidates[number])].gets = max(int64(0), groups[int64(candidates[number])].room - level)
        for room in range(max(int64(1), level), most + 1):
            for number in range(known):
                at = int64(candidates[number])
                group = groups[at]
                if level > 0 and left > 0 and group.room == room:
                    if left < group.sms and device.groups <= MOST_GROUPS:
                        candidates[behind] = split(device, blocks, at, left)
                        behind += 1
                    group.gets += 1
                    left -= group.sms
    for number in range(behind):
        at = int64(candidates[number])
        if all_of_it:
            groups[at].gets = groups[at].room
        if groups[at].gets > 0:
            add(device, blocks, kernel, place, at)


@jit
def add(device: Any, blocks: Any, kernel: Any, place: int, at: int) -> None:
    """`SmPlacement._add` of `gets` blocks per SM of the group."""
    group = blocks.groups[at]
    if group.blocks == 0:
        group.carveout_bytes = kernel.own_carveout_bytes
        device.empty -= 1
    put(group, kernel, int64(group.gets))
    kernel.left = max(int64(0), kernel.left - group.gets * group.sms)
    kernel.on_sms += group.gets * group.sms
    add_cohort(device, blocks, at, kernel, place, int64(group.gets))
