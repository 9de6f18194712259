"""Groups of SMs with equal contents, the cohorts on them and their rates: `gpusim.engine.placement` compiled.

The state of a device is its record and its row of `Blocks`. Kernels and groups keep their slots: `line` has the slots
of the `device.running` kernels in start order, `order` those of the `device.groups` groups in the reference's order,
with memory operations first; free slots follow. Values read at every step, the first end of each group and its traffic,
are indexed by that order. All other work is done only for changed groups, whose slots are in `touched_groups`.

Slots are unsigned, so compiled code need not check for negative indices. Dividends and divisors are floating-point
numbers, which divide faster and are exact at their sizes.
"""

from __future__ import annotations

from typing import Any, Final

import numpy as np

from gpusim.engine.compiled.ends import ROW, earlier, next_end, note_end
from gpusim.engine.compiled.jit import int64, jit, jit_apart, rule
from gpusim.engine.compiled.rates import cache_rates, load_of, slot_of
from gpusim.engine.placement import NO_SMS
from gpusim.rules import dram

slowed_frac = rule(dram.slowed_frac)

#: `gpusim.engine.sm_groups.Placed`, with its data of the task. `scanned` is 1 once all groups have been checked and all
#: room for it is used: from then on only groups that change can have room.
PLACED: Final = np.dtype(
    [
        ("left", "i8"),
        ("on_sms", "i8"),
        ("index", "i4"),
        ("crowds", "i2"),
        ("scanned", "i2"),
        ("partition", "i8"),
        ("blocks_per_sm", "i8"),
        ("threads", "f8"),
        ("regs", "f8"),
        ("smem_bytes", "f8"),
        ("carveout_bytes", "f8"),
        ("own_carveout_bytes", "f8"),
        ("block_ns", "f8"),
        ("dram_bytes_per_ns", "f8"),
        # Load and traffic of a block by kind of kernel, one of them 0: sums over both need no branch, which would often
        # be mispredicted. A kernel is GEMM-like if its `matrix_load` is not 0.
        ("other_load", "f8"),
        ("matrix_load", "f8"),
        ("other_bytes_per_ns", "f8"),
        ("matrix_bytes_per_ns", "f8"),  # 128 bytes: indexing needs no multiplication
    ],
    align=True,
)
#: `gpusim.engine.sm_groups.SmGroup`; `at` is its index in the order; its cohorts begin at `first`. `ending` is the slot
#: of the kernel whose cohort ends first and `number` the number of that cohort. `held_load`, `held_traffic` and, for
#: GEMM-like kernels, `held_matrix_...` are sums over its cohorts. `room`, `gets` and `differs` (only the carve-out
#: keeps it away) describe the kernel being placed.
SM_GROUP: Final = np.dtype(
    [
        ("at", "u4"),
        ("changed", "u4"),
        ("first", "u4"),
        ("cohorts", "u4"),
        ("threads", "f8"),
        ("regs", "f8"),
        ("smem_bytes", "f8"),
        ("carveout_bytes", "f8"),
        ("rate", "f8"),
        ("matrix_rate", "f8"),
        ("updated_ns", "f8"),
        ("held_load", "f8"),
        ("held_matrix_load", "f8"),
        ("held_traffic", "f8"),
        ("held_matrix_traffic", "f8"),
        ("sms", "i4"),
        ("partition", "i4"),
        ("blocks", "i4"),
        ("room", "i4"),
        ("gets", "i4"),
        ("differs", "i4"),
        ("ending", "i8"),
        ("number", "i8"),
    ],
    align=True,
)
#: `gpusim.engine.sm_groups.Cohort`, with the slot of its kernel.
COHORT: Final = np.dtype(
    [("kernel", "u4"), ("blocks", "u4"), ("number", "i8"), ("remaining_ns", "f8"), ("rate", "f8")], align=True
)
#: Share of the bandwidth up to which a running sum of the traffic decides; above, the traffic of all groups is added up
#: in order, since the running sum rounds differently.
SURELY_LESS: Final = 0.999


@jit
def set_up(device: Any, blocks: Any) -> None:
    """Reset a device to the empty group of memory operations."""
    device.groups = device.unplaced = device.placed = device.touched = device.waiting = device.known = 0
    device.clock_ns = device.wanted = 0.0
    device.slow = 1.0
    device.ends[:] = device.row_ends[:] = device.row_next[:] = np.inf
    device.row_at[:] = 0
    device.end_ns = np.inf
    device.end_place = -1
    device.alone = device.settled = 0
    new_group(device, blocks, int64(NO_SMS), int64(1))
    device.empty = 0


@jit
def new_group(device: Any, blocks: Any, partition: int, sms: int) -> None:
    """Append an empty group; its end is infinite already."""
    number = int64(device.groups)
    group = blocks.groups[int64(device.order[number])]
    group.at = number
    device.traffic[number] = 0.0
    device.groups += 1
    device.empty += 1
    group.partition = partition
    group.sms = sms
    group.blocks = 0
    group.threads = group.regs = group.smem_bytes = group.carveout_bytes = 0.0
    group.changed = group.cohorts = group.differs = 0
    group.ending = -1
    group.updated_ns = group.held_load = group.held_matrix_load = 0.0
    group.held_traffic = group.held_matrix_traffic = 0.0
    group.rate = group.matrix_rate = 1.0


@jit
def add_cohort(device: Any, blocks: Any, at: int, kernel: Any, place: int, count: int) -> None:
    """`SmPlacement._add_cohort`."""
    touch(device, blocks, at)
    device.placed += 1
    group = blocks.groups[at]
    cohort = blocks.cohorts[int64(group.first) + int64(group.cohorts)]
    group.cohorts += 1
    cohort.kernel = place
    cohort.number = device.placed
    cohort.blocks = count
    cohort.remaining_ns = kernel.block_ns
    cohort.rate = 0.0
    group.held_load += count * kernel.other_load
    group.held_matrix_load += count * kernel.matrix_load
    on_sms = float(count * int64(group.sms))
    group.held_traffic += on_sms * kernel.other_bytes_per_ns
    group.held_matrix_traffic += on_sms * kernel.matrix_bytes_per_ns


@jit
def touch(device: Any, blocks: Any, at: int) -> None:
    """`SmPlacement._touch`."""
    group = blocks.groups[at]
    if group.changed == 0:
        elapsed_ns = device.clock_ns - group.updated_ns
        first = int64(group.first)
        for number in range(first, first + int64(group.cohorts)):
            cohort = blocks.cohorts[number]
            cohort.remaining_ns -= elapsed_ns * cohort.rate
        group.updated_ns = device.clock_ns
        note_change(device, blocks, at)


@jit
def note_change(device: Any, blocks: Any, at: int) -> None:
    """Mark a group for recomputing its rates."""
    blocks.groups[at].changed = 1
    device.touched_groups[int64(device.touched)] = at
    device.touched += 1
    device.settled = 0


@jit
def copy_cohort(to: Any, source: Any) -> None:
    """Copy a cohort field by field: numba copies whole records byte by byte."""
    to.kernel = source.kernel
    to.number = source.number
    to.blocks = source.blocks
    to.remaining_ns = source.remaining_ns
    to.rate = source.rate


@jit
def put(group: Any, kernel: Any, blocks: int) -> None:
    """`gpusim.engine.sm_groups.put`."""
    group.threads += blocks * kernel.threads
    group.regs += blocks * kernel.regs
    group.smem_bytes += blocks * kernel.smem_bytes
    group.blocks += blocks


@jit_apart
def split(device: Any, blocks: Any, at: int, sms: int) -> int:
    """`SmPlacement._split`: return the slot of the new group, which has the same `gets` as the old one."""
    touch(device, blocks, at)
    group = blocks.groups[at]
    new = int64(device.order[int64(device.groups)])
    new_group(device, blocks, int64(group.partition), int64(group.sms - sms))
    note_change(device, blocks, new)
    others = blocks.groups[new]
    group.sms = sms
    device.empty -= 1 if group.blocks > 0 else 0
    others.blocks = group.blocks
    others.threads = group.threads
    others.regs = group.regs
    others.smem_bytes = group.smem_bytes
    others.carveout_bytes = group.carveout_bytes
    others.gets = group.gets
    others.differs = group.differs
    others.rate = group.rate
    others.matrix_rate = group.matrix_rate
    others.updated_ns = group.updated_ns
    others.cohorts = group.cohorts
    for number in range(int64(group.cohorts)):
        cohort = blocks.cohorts[int64(others.first) + number]
        copy_cohort(cohort, blocks.cohorts[int64(group.first) + number])
        device.placed += 1
        cohort.number = device.placed
    others.held_load = group.held_load
    others.held_matrix_load = group.held_matrix_load
    add_up_traffic(blocks, group)
    add_up_traffic(blocks, others)
    return new


@jit
def add_up_traffic(blocks: Any, group: Any) -> None:
    """Recompute the traffic of a group whose number of SMs has changed."""
    traffic = matrix_traffic = 0.0
    first = int64(group.first)
    for number in range(first, first + int64(group.cohorts)):
        cohort = blocks.cohorts[number]
        kernel = blocks.kernels[int64(cohort.kernel)]
        on_sms = float(int64(cohort.blocks) * group.sms)
        traffic += on_sms * kernel.other_bytes_per_ns
        matrix_traffic += on_sms * kernel.matrix_bytes_per_ns
    group.held_traffic = traffic
    group.held_matrix_traffic = matrix_traffic


@jit_apart
def merge_empty(device: Any, blocks: Any) -> None:
    """`SmPlacement._merge_empty`."""
    groups, order, ends, traffic = blocks.groups, device.order, device.ends, device.traffic
    number, behind = int64(1), int64(device.groups)
    first = changed = behind  # first empty group, and first with a changed index
    while number < device.groups and device.empty > 1:  # a single empty group stays
        at = int64(order[number])
        into = int64(-1)
        if groups[at].blocks == 0:
            first = min(first, number)
            for earlier in range(first, number):
                other = groups[int64(order[earlier])]
                if other.blocks == 0 and other.partition == groups[at].partition:
                    into = int64(order[earlier])
                    break
        if into < 0:
            number += 1
            continue
        changed = min(changed, number)
        groups[into].sms += groups[at].sms
        groups[at].changed = 0
        device.wanted -= traffic[number]
        device.groups -= 1
        device.empty -= 1
        last = int64(device.groups)
        for later in range(number, last):
            order[later] = order[later + 1]
            ends[later] = ends[later + 1]
            traffic[later] = traffic[later + 1]
            groups[int64(order[later])].at = later
        order[last] = at
        ends[last] = np.inf
    for row in range(changed // ROW, (behind - 1) // ROW + 1):  # earlier rows are unchanged
        note_end(device, row * ROW, ends[row * ROW])
    kept = int64(0)
    for number in range(int64(device.touched)):  # drop the merged groups
        at = int64(device.touched_groups[number])
        if groups[at].changed == 1:
            device.touched_groups[kept] = at
            kept += 1
    device.touched = kept
    device.settled = 0


@jit
def set_rates(hw: Any, device: Any, blocks: Any) -> tuple[float, int]:
    """`SmPlacement._set_rates` and `next_end`."""
    while device.settled == 0:
        for number in range(int64(device.touched)):
            set_end(hw, device, blocks, int64(device.touched_groups[number]))
        device.touched = 0
        if device.slow != 1.0 or device.wanted > SURELY_LESS * hw.memory.dram_bytes_per_ns:
            limit_traffic(hw, device, blocks)
        if device.touched == 0:
            device.settled = 1
            next_end(device, blocks)
    if device.end_place < 0:
        return np.inf, int64(-1)
    return max(0.0, device.end_ns - device.clock_ns), int64(blocks.kernels[device.end_place].index)


@jit_apart
def limit_traffic(hw: Any, device: Any, blocks: Any) -> None:
    """Apply rule 5: touch the groups with traffic if the slowdown has changed."""
    wanted = 0.0
    for number in range(int64(device.groups)):
        wanted += device.traffic[number]
    device.wanted = wanted
    slow = slowed_frac(hw.memory, wanted)
    if slow != device.slow:
        for number in range(int64(device.groups)):
            if device.traffic[number] > 0.0:
                touch(device, blocks, int64(device.order[number]))
        device.slow = slow


@jit
def set_end(hw: Any, device: Any, blocks: Any, at: int) -> None:
    """`SmPlacement._set_rates` for one changed group, and `_set_end`."""
    group, kernels, cohorts = blocks.groups[at], blocks.kernels, blocks.cohorts
    first = int64(group.first)
    behind = first + int64(group.cohorts)
    clock_ns, slow = device.clock_ns, device.slow  # LLVM cannot know that stores below leave these unchanged
    load = load_of(hw.contention, group.held_load, group.held_matrix_load)
    matrix_load = load_of(hw.contention, group.held_matrix_load, group.held_load)
    # Both rates are looked up, used or not: a branch on which class is there is often mispredicted.
    slot, matrix_slot = slot_of(load), slot_of(matrix_load)
    if device.loads[slot] != load:
        cache_rates(hw, device, load)
    group_rate = device.load_rates[slot]
    if device.loads[matrix_slot] != matrix_load:
        cache_rates(hw, device, matrix_load)
    matrix_rate, first_ns, ending = device.load_matrix_rates[matrix_slot], np.inf, first
    group.rate, group.matrix_rate = group_rate, matrix_rate
    for number in range(first, behind):
        cohort = cohorts[number]
        kernel = kernels[int64(cohort.kernel)]
        rate = matrix_rate if kernel.matrix_load > 0.0 else group_rate
        if slow != 1.0 and kernel.dram_bytes_per_ns > 0.0:
            rate *= slow
        cohort.rate = rate
        end_ns = clock_ns + max(0.0, cohort.remaining_ns / rate)
        ending = number if end_ns < first_ns else ending
        first_ns = earlier(end_ns, first_ns)
    group.ending = int64(cohorts[ending].kernel)
    group.number = cohorts[ending].number
    group.changed = 0
    number = int64(group.at)
    note_end(device, number, first_ns)
    device.wanted -= device.traffic[number]
    device.traffic[number] = group_rate * group.held_traffic + matrix_rate * group.held_matrix_traffic
    device.wanted += device.traffic[number]
