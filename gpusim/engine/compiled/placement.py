"""`gpusim.engine.placement` compiled, rule by rule: starts and ends of blocks. A change there is a change here, too.

`gpusim.engine.compiled.spread` places the blocks of a kernel; `gpusim.engine.compiled.sm_groups` keeps groups, cohorts
and rates.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from gpusim.engine.compiled.heap import not_before
from gpusim.engine.compiled.jit import int64, jit, jit_apart, rule
from gpusim.engine.compiled.rates import waves
from gpusim.engine.compiled.record import note_block_losses
from gpusim.engine.compiled.sm_groups import (
    add_cohort,
    copy_cohort,
    merge_empty,
    new_group,
    note_change,
    put,
    set_rates,
)
from gpusim.engine.compiled.spread import place_blocks
from gpusim.engine.placement import ENDED_NS, NEAR_NS, NO_SMS
from gpusim.rules import contention, dispatch, dram
from gpusim.rules.dispatch import MOST_BLOCKS

placed_blocks = rule(dispatch.placed_blocks)
block_load, bytes_per_ns = rule(contention.block_load), rule(dram.bytes_per_ns)
block_bytes_per_ns = rule(dram.block_bytes_per_ns)

#: Kind of an end: part of a kernel; a part replaced at once by equal blocks; the last part.
PARTS, REFILLED, ALL_OF_IT = 0, 1, 2


@jit_apart
def go_on(hw: Any, device: Any, blocks: Any, ends: int, until_ns: float, record: Any) -> bool:
    """End blocks if the device is at such an end, and place others, as `SmPlacement.finish` and `update` do.

    The device is at an end if `ends` is 1, an integer because a bool would be compiled for True and for False. The loop
    continues with ends up to `until_ns` until a kernel ends as a whole. In that case the kernel is removed, the result
    is True, and the next call places blocks. Otherwise `device.end_at` and `device.end_index` describe the next end.
    It is a function of its own because it takes most of the event loop's time and so keeps more in registers. `record`
    is None unless causes are recorded.
    """
    while True:
        ended = finish(hw, device, blocks) if ends == 1 else PARTS
        if ended == ALL_OF_IT:
            return True
        if ended == PARTS:
            place_all(hw, device, blocks)
        delay_ns, index = set_rates(hw, device, blocks)
        now = device.updated
        device.end_index = index
        device.end_at = not_before(now, now + delay_ns) if index >= 0 else np.inf
        device.events_left -= 1
        if not device.end_at <= until_ns or index < 0 or device.events_left < 0:
            return False
        if record is not None and device.end_at > now:
            note_block_losses(hw, device, blocks, record, device.end_at, 1.0)
        device.clock_ns += device.end_at - now
        device.updated = device.end_at
        ends = int64(1)


@jit
def start(device: Any, blocks: Any, index: int, row: Any, wait_ns: float) -> None:
    """`SmPlacement.start`."""
    place = int64(blocks.line[int64(device.running)])
    device.running += 1
    kernel = blocks.kernels[place]
    kernel.index = index
    kernel.crowds = kernel.scanned = kernel.left = 0
    kernel.threads = row.threads
    kernel.partition = row.partition
    kernel.other_load = row.other_load
    kernel.matrix_load = row.matrix_load
    kernel.block_ns = row.block_ns
    kernel.dram_bytes_per_ns = row.dram_bytes_per_ns
    kernel.other_bytes_per_ns = row.other_bytes_per_ns
    kernel.matrix_bytes_per_ns = row.matrix_bytes_per_ns
    if row.partition == NO_SMS:
        kernel.on_sms = 1
        kernel.block_ns += wait_ns
        add_cohort(device, blocks, int64(device.order[0]), kernel, place, int64(1))
        return
    if not (device.known >> row.partition) & 1:
        device.known |= 1 << row.partition
        new_group(device, blocks, int64(row.partition), int64(row.on_sms))
    kernel.blocks_per_sm = row.blocks_per_sm
    kernel.regs = row.regs
    kernel.smem_bytes = row.smem_bytes
    kernel.carveout_bytes = row.carveout_bytes
    kernel.own_carveout_bytes = row.own_carveout_bytes
    kernel.left = row.left
    device.unplaced += 1
    kernel.on_sms = 0


@jit
def prepare(hw: Any, row: Any, task: Any) -> None:
    """Fill `row` with the data of a task that `start` needs in every plan; `row.on_sms` is the SMs of its partition."""
    prepare_blocks(hw, row, task)
    row.other_bytes_per_ns = 0.0 if task.matrix == 1 else row.dram_bytes_per_ns
    row.matrix_bytes_per_ns = row.dram_bytes_per_ns if task.matrix == 1 else 0.0


@jit
def prepare_blocks(hw: Any, row: Any, task: Any) -> None:
    """`prepare` without the traffic by kind."""
    traffic = bytes_per_ns(hw.memory, task.dram_bytes, task.dur_ns)
    count = int64(min(task.blocks, float(MOST_BLOCKS)))
    row.threads = task.footprint_threads
    if row.threads == 0.0 or count == 0:
        row.partition = NO_SMS
        row.left = 0
        row.block_ns = task.dur_ns
        row.other_load = row.matrix_load = 0.0
        row.dram_bytes_per_ns = traffic
        return
    row.partition = int64(task.partition)
    sms = int64(task.partition_sms) if task.partition_sms > 0.0 else int64(hw.limits.sms)
    row.on_sms = sms
    row.blocks_per_sm = int64(task.blocks_per_sm)
    row.regs = task.footprint_regs
    row.smem_bytes = task.footprint_smem_bytes
    row.carveout_bytes = task.footprint_carveout_bytes
    row.own_carveout_bytes = task.footprint_own_carveout_bytes
    row.left = placed_blocks(count, sms * int64(row.blocks_per_sm))
    full_waves = waves(hw.contention, int64(row.left), int64(row.blocks_per_sm), sms, int64(task.matrix))
    row.block_ns = task.dur_ns / full_waves
    load = block_load(row.blocks_per_sm)
    row.other_load = 0.0 if task.matrix == 1 else load
    row.matrix_load = load if task.matrix == 1 else 0.0
    row.dram_bytes_per_ns = block_bytes_per_ns(traffic, full_waves, min(count, sms * row.blocks_per_sm))


@jit
def finish(hw: Any, device: Any, blocks: Any) -> int:
    """`SmPlacement.finish` of the task that `set_rates` found to end next.

    If equally many blocks of the same kernel take the freed room, they are placed here as well.
    """
    place = int64(device.end_place)
    kernel = blocks.kernels[place]
    ended_ns = ENDED_NS + device.clock_ns * 2.0**-50
    # If one group ends alone, the others are not checked.
    first = int64(device.end_number) if device.alone == 1 else int64(0)
    behind = first + 1 if device.alone == 1 else int64(device.groups)
    for number in range(first, behind):
        end_ns = device.ends[number]
        if end_ns - device.clock_ns <= NEAR_NS or end_ns <= device.end_ns:
            at = int64(device.order[number])
            due = int64(blocks.groups[at].number) if end_ns <= device.end_ns else int64(-1)
            ended = end_cohorts(device, blocks, place, at, ended_ns, due)
            if ended > 0:
                group = blocks.groups[at]
                if device.alone == 1 and same_again(hw, device, group, kernel, ended):
                    kernel.left -= ended * group.sms
                    add_cohort(device, blocks, at, kernel, place, ended)
                    return REFILLED
                kernel.on_sms -= ended * group.sms
                if kernel.partition != NO_SMS:
                    put(group, kernel, -ended)
                    device.empty += 1 if group.blocks == 0 else 0
    if device.empty > 1:
        merge_empty(device, blocks)
    if kernel.on_sms > 0 or kernel.left > 0:
        return PARTS
    device.running -= 1
    number, line = int64(0), blocks.line
    while line[number] != place:
        number += 1
    if number < device.waiting:
        device.waiting -= 1
    behind = int64(device.running)
    while number < behind:
        line[number] = line[number + 1]
        number += 1
    line[behind] = place
    if device.running == 0:
        device.clock_ns = 0.0
    return ALL_OF_IT


@jit
def same_again(hw: Any, device: Any, group: Any, kernel: Any, ended: int) -> bool:
    """Return True if equally many blocks of the same kernel take the freed room and nothing else is placed.

    This holds if the kernel was next to be placed and had found no room.
    """
    return bool(
        hw.partitions == 1.0
        and kernel.scanned == 1
        and kernel.left > ended * group.sms
        and (
            group.blocks > ended
            or (
                kernel.blocks_per_sm == ended
                and kernel.own_carveout_bytes == group.carveout_bytes
                and device.empty == 0
            )
        )
    )


@jit
def end_cohorts(device: Any, blocks: Any, place: int, at: int, ended_ns: float, due: int) -> int:
    """`touch` a group, remove a kernel's ended cohorts and return their number of blocks per SM.

    The cohort with number `due` has ended in any case.
    """
    group, cohorts = blocks.groups[at], blocks.cohorts
    elapsed_ns = device.clock_ns - group.updated_ns
    group.updated_ns = device.clock_ns
    note_change(device, blocks, at)
    kept = first = int64(group.first)
    behind = first + int64(group.cohorts)
    load = matrix_load = traffic = matrix_traffic = 0.0
    ended = int64(0)
    for number in range(first, behind):
        cohort = cohorts[number]
        holder, count = int64(cohort.kernel), int64(cohort.blocks)
        remaining_ns = cohort.remaining_ns - elapsed_ns * cohort.rate
        if holder == place and (remaining_ns <= ended_ns or int64(cohort.number) == due):
            ended += count
            continue
        cohort.remaining_ns = remaining_ns
        load += count * blocks.kernels[holder].other_load
        matrix_load += count * blocks.kernels[holder].matrix_load
        on_sms = float(count * int64(group.sms))
        traffic += on_sms * blocks.kernels[holder].other_bytes_per_ns
        matrix_traffic += on_sms * blocks.kernels[holder].matrix_bytes_per_ns
        if kept < number:
            copy_cohort(cohorts[kept], cohort)
        kept += 1
    group.cohorts = kept - first
    group.held_load = load
    group.held_matrix_load = matrix_load
    group.held_traffic = traffic
    group.held_matrix_traffic = matrix_traffic
    return ended


@jit
def place_all(hw: Any, device: Any, blocks: Any) -> None:
    """`SmPlacement.update` without the rates."""
    if device.unplaced > 0:
        blocked = int64(0)  # a bit for each partition
        unbroken = True
        number = int64(device.waiting)  # all earlier kernels are placed
        while number < device.running:
            place = int64(blocks.line[number])
            kernel = blocks.kernels[place]
            if kernel.left > 0 and not (blocked >> kernel.partition) & 1:
                place_blocks(hw, device, blocks, kernel, place)
                if kernel.left == 0:
                    device.unplaced -= 1
                else:
                    blocked |= 1 << kernel.partition
            number += 1
            unbroken = unbroken and kernel.left == 0
            if unbroken:
                device.waiting = number
            elif hw.partitions == 1.0 and blocked != 0:
                break
