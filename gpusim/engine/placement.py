"""The block dispatcher, SM by SM: placement of blocks and their rates under contention.

The rules (research/2026-11-23-engine-rules.md, "Where blocks go", has the measurement behind each):

1. *Head of line.* Blocks are placed kernel by kernel, in start order: while a kernel has unplaced blocks, no later
   kernel gets any placed (Amert et al., "GPU Scheduling on the NVIDIA TX2", RTSS 2017, rule X1).
2. *Most room.* The next block goes to the SM with room for the most further blocks of its kernel (Gilman et al.,
   "Demystifying the Placement Policies of the NVIDIA GPU Thread Block Scheduler", 2020); of several, to the one that
   has had that much room for longest.
3. *Carve-out.* The shared memory carve-out of an SM is set while it is empty and stays while any block runs there. A
   kernel joins only if the carve-out has room for as many of its blocks as an SM could hold. A kernel that waits for
   SMs to empty fills each of them at once, so its blocks crowd on a few SMs.
4. *Contention.* The load of an SM is the sum of its blocks' shares; a share is one over the number of the kernel's
   blocks that an SM could hold, so an SM full of one kernel has load 1. Blocks take load^p times as long as at load 1,
   also below 1. The time at load 1 is such that the kernel alone takes its measured time, wave by wave. GEMM-like
   kernels have a p of their own. Each kind counts in the load of the other with the factor `cross_load`.
5. *DRAM.* If the total traffic would exceed the bandwidth, all kernels with traffic slow down by one factor.

Rules 1 to 4 hold within each SM partition. SMs with equal contents form a group, and blocks placed on a group at the
same time form a cohort, which progresses alike. A kernel thus costs a few steps, not one per block. The rates of a
group stay constant between changes of its contents, so the cost of a step is proportional to its changes.

The interface is that of `gpusim.engine.pool.SmPool`, which treats all SMs as one pool.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field, replace

from gpusim.engine.budget import blocks_to_place
from gpusim.engine.sm_groups import Cohort, Placed, SmGroup, put
from gpusim.formats.hardware import HardwareModel
from gpusim.plan.tasks import Task
from gpusim.rules import contention, dispatch, dram, lost_time
from gpusim.rules.occupancy import NO_FOOTPRINT

#: A cohort with less remaining time than this has ended. So has one whose end time is reached, whatever rounding left:
#: late in a step, adjacent floating-point times are further apart than this.
ENDED_NS = 1e-6
#: When blocks of a kernel end, groups with an end within this time are checked as well.
NEAR_NS = 1e-3
#: Limit on groups of SMs. At the limit no group is split: blocks too few for a whole group count as one per SM.
#: Eight streams rarely reach it; without a limit, dozens of streams would make every SM a group of its own.
MOST_GROUPS = 32
#: Partition of memory operations, which need no SM.
NO_SMS = -1


@dataclass
class SmPlacement:
    """The kernels and blocks on one GPU. Call `advance` before any change, and `update` after it."""

    hardware: HardwareModel
    kernels: list[Placed] = field(default_factory=list)
    """Kernels in start order."""
    groups: list[SmGroup] = field(default_factory=list)
    others: SmGroup = field(default_factory=lambda: SmGroup(NO_SMS, 1))
    """Group of memory operations."""
    clock_ns: float = 0.0
    """Time since the GPU was last empty, in ns."""
    slow: float = 1.0
    """Rate factor of kernels with DRAM traffic (rule 5)."""
    placed: int = 0
    """Number of cohorts placed so far."""
    known_rates: dict[tuple[float, float], tuple[float, float]] = field(default_factory=dict)
    """Cache of rates by the loads of both classes: loads recur, and powers are slow."""

    @property
    def full(self) -> bool:
        """True if the GPU has no free grid slot for another kernel."""
        return len(self.kernels) >= self.hardware.limits.resident_grids

    @property
    def indices(self) -> list[int]:
        """Running tasks in start order."""
        return [kernel.index for kernel in self.kernels]

    def start(self, index: int, task: Task, wait_ns: float = 0.0) -> None:
        """Put a task on the GPU, last in start order; a memory operation takes `wait_ns` longer than alone."""
        traffic = dram.bytes_per_ns(self.hardware.memory, task.dram_bytes, task.dur_ns)
        if task.footprint == NO_FOOTPRINT or not task.blocks:
            kernel = Placed(index, task, 0, task.dur_ns + wait_ns, 0.0, traffic, on_sms=1)
            self._add_cohort(kernel, self.others, 1)
        else:
            sms = task.partition_sms or self.hardware.limits.sms
            if all(group.partition != task.partition for group in self.groups):
                self.groups.append(SmGroup(task.partition, sms))
            full_waves = waves(task, sms, self.hardware)
            kernel = Placed(
                index,
                task,
                left=blocks_to_place(task, sms),
                block_ns=task.dur_ns / full_waves,
                load=contention.block_load(task.blocks_per_sm),
                dram_bytes_per_ns=dram.block_bytes_per_ns(
                    traffic, full_waves, min(task.blocks, sms * task.blocks_per_sm)
                ),
            )
        self.kernels.append(kernel)

    def advance(self, elapsed_ns: float) -> None:
        """Advance the clock; rates stay constant meanwhile."""
        self.clock_ns += elapsed_ns

    @property
    def _all_groups(self) -> list[SmGroup]:
        return [self.others, *self.groups]

    @property
    def cohorts(self) -> list[Cohort]:
        """All cohorts on the GPU."""
        return [cohort for group in self._all_groups for cohort in group.cohorts]

    def _touch(self, group: SmGroup) -> None:
        """Update the remaining times of a group to now, before its contents or rates change."""
        if not group.changed:
            elapsed_ns = self.clock_ns - group.updated_ns
            for cohort in group.cohorts:
                cohort.remaining_ns -= elapsed_ns * cohort.rate
            group.updated_ns = self.clock_ns
            group.changed = True

    def finish(self, index: int) -> bool:
        """Remove the ended blocks of a task from the GPU; return True if the task has ended."""
        kernel = next(kernel for kernel in self.kernels if kernel.index == index)
        ended_ns = ENDED_NS + self.clock_ns * 2.0**-50  # rounding of a large clock must not keep a cohort alive
        first_ns = min(group.end_ns for group in self._all_groups)
        for group in self._all_groups:
            if group.end_ns - self.clock_ns > NEAR_NS and group.end_ns > first_ns:
                continue
            self._touch(group)
            if group.ending is not None and group.ending.kernel is kernel and group.end_ns <= first_ns:
                group.ending.remaining_ns = min(0.0, group.ending.remaining_ns)
            for cohort in group.cohorts:
                if cohort.kernel is kernel and cohort.remaining_ns <= ended_ns:
                    kernel.on_sms -= cohort.blocks * group.sms
                    if group is not self.others:
                        put(group, kernel.task, -cohort.blocks)
            group.cohorts = [c for c in group.cohorts if c.kernel is not kernel or c.remaining_ns > ended_ns]
        self._merge_empty()
        if kernel.on_sms or kernel.left:
            return False
        self.kernels.remove(kernel)
        if not self.kernels:
            self.clock_ns = 0.0
        return True

    def _merge_empty(self) -> None:
        """Merge the groups of empty SMs of each partition."""
        kept: dict[int, SmGroup] = {}
        for group in [group for group in self.groups if not group.blocks]:
            if group.partition in kept:
                kept[group.partition].sms += group.sms
                self.groups.remove(group)
            else:
                kept[group.partition] = group

    def update(self) -> None:
        """Place blocks and recompute the rate of every cohort."""
        blocked: set[int] = set()
        for kernel in self.kernels:
            if kernel.left and kernel.task.partition not in blocked:
                self._place(kernel)
                if kernel.left:
                    blocked.add(kernel.task.partition)
        self._set_rates()

    def _place(self, kernel: Placed) -> None:
        """Place as many blocks of a kernel as fit (rules 2 and 3)."""
        rooms = [self._room(group, kernel) for group in self.groups]
        if not any(rooms):
            kernel.crowds = kernel.crowds or any(self._only_carveout_differs(group, kernel) for group in self.groups)
        elif kernel.crowds and not kernel.on_sms:
            self._fill_up(kernel, rooms)
        else:
            self._spread(kernel, rooms)

    def _fill_up(self, kernel: Placed, rooms: list[int]) -> None:
        """Fill one SM after the other with blocks."""
        for group, room in zip(list(self.groups), rooms, strict=True):
            if room and kernel.left:
                wanted = -(-kernel.left // room)
                if wanted < group.sms and len(self.groups) < MOST_GROUPS:
                    self._split(group, wanted)
                self._add(kernel, group, dispatch.blocks_per_fill(kernel.left, room, group.sms))

    def _spread(self, kernel: Placed, rooms: list[int]) -> None:
        """Place block after block on the SM with the most room."""
        left, level = kernel.left, max(rooms)
        known = list(zip(self.groups, rooms, strict=True))
        while level and (a_block_each := sum(group.sms for group, room in known if room >= level)) <= left:
            left -= a_block_each
            level -= 1
        gets = {group: max(0, room - level) for group, room in known}
        # Too few blocks remain for all SMs with that much room; SMs with the least room at the start go first.
        for group, _ in sorted((entry for entry in known if entry[1] >= level > 0), key=lambda entry: entry[1]):
            if left > 0:
                if left < group.sms and len(self.groups) < MOST_GROUPS:
                    gets[self._split(group, left)] = gets[group]
                gets[group] += 1
                left -= group.sms
        for group, blocks in gets.items():
            if blocks:
                self._add(kernel, group, blocks)

    def _add(self, kernel: Placed, group: SmGroup, blocks: int) -> None:
        """Put `blocks` blocks on each SM of a group; the last SM may get fewer."""
        if not group.blocks:
            group.carveout_bytes = kernel.task.footprint.own_carveout_bytes
        put(group, kernel.task, blocks)
        kernel.left = max(0, kernel.left - blocks * group.sms)
        kernel.on_sms += blocks * group.sms
        self._add_cohort(kernel, group, blocks)

    def _add_cohort(self, kernel: Placed, group: SmGroup, blocks: int) -> None:
        self._touch(group)
        self.placed += 1
        group.cohorts.append(Cohort(kernel, group, self.placed, blocks, kernel.block_ns))

    def _split(self, group: SmGroup, sms: int) -> SmGroup:
        """Keep `sms` SMs in a group and return a new group of the others, with copies of the cohorts."""
        self._touch(group)
        others = replace(group, sms=group.sms - sms)
        others.cohorts = []
        for cohort in group.cohorts:
            self.placed += 1
            others.cohorts.append(replace(cohort, group=others, number=self.placed))
        group.sms = sms
        self.groups.append(others)
        return others

    def _room(self, group: SmGroup, kernel: Placed) -> int:
        """Return the number of further blocks of a kernel that fit on an SM of a group."""
        if group.partition != kernel.task.partition:
            return 0
        if not group.blocks:
            return kernel.task.blocks_per_sm
        if not dispatch.carveout_allows(group.carveout_bytes, kernel.task.footprint.carveout_bytes):
            return 0
        return self._room_for(group, kernel, kernel.task.footprint.smem_bytes)

    def _room_for(self, group: SmGroup, kernel: Placed, smem_bytes: int) -> int:
        limits, need = self.hardware.limits, kernel.task.footprint
        return dispatch.room(
            limits.threads_per_sm - group.threads,
            limits.regs_per_sm - group.regs,
            group.carveout_bytes - group.smem_bytes,
            limits.blocks_per_sm - group.blocks,
            need.threads,
            need.regs,
            smem_bytes,
        )

    def _only_carveout_differs(self, group: SmGroup, kernel: Placed) -> bool:
        """Return True if only the carve-out keeps a kernel off a group."""
        return (
            group.partition == kernel.task.partition
            and not dispatch.carveout_allows(group.carveout_bytes, kernel.task.footprint.carveout_bytes)
            and self._room_for(group, kernel, smem_bytes=0) > 0
        )

    def _set_rates(self) -> None:
        """Recompute rates (rules 4 and 5) of changed groups."""
        groups = self._all_groups
        for group in groups:
            if group.changed:
                loads, traffic = [0.0, 0.0], [0.0, 0.0]
                for cohort in group.cohorts:
                    loads[cohort.kernel.task.matrix] += cohort.blocks * cohort.kernel.load
                    traffic[cohort.kernel.task.matrix] += cohort.blocks * group.sms * cohort.kernel.dram_bytes_per_ns
                group.rates = self._rates(loads[0], loads[1])
                group.dram_bytes_per_ns = group.rates[0] * traffic[0] + group.rates[1] * traffic[1]
        wanted = 0.0
        for group in groups:
            wanted += group.dram_bytes_per_ns
        slow = dram.slowed_frac(self.hardware.memory, wanted)
        if slow != self.slow:
            for group in groups:
                if group.dram_bytes_per_ns > 0.0:
                    self._touch(group)
            self.slow = slow
        for group in groups:
            if group.changed:
                self._set_end(group)

    def _rates(self, others: float, gemms: float) -> tuple[float, float]:
        """Return the rates of other and of GEMM-like kernels on an SM with these loads; 1 for a class without load."""
        if (others, gemms) not in self.known_rates:
            costs, rates = self.hardware.contention, [1.0, 1.0]
            for gemm, (own, other) in enumerate(((others, gemms), (gemms, others))):
                if own > 0.0:
                    rates[gemm] = contention.rate(costs, contention.load(costs, own, other), gemm)
            self.known_rates[others, gemms] = rates[0], rates[1]
        return self.known_rates[others, gemms]

    def _set_end(self, group: SmGroup) -> None:
        """Set the rates of a group's cohorts and find the cohort that ends first."""
        group.changed, group.end_ns, group.ending = False, math.inf, None
        for cohort in group.cohorts:
            cohort.rate = group.rates[cohort.kernel.task.matrix]
            if cohort.kernel.dram_bytes_per_ns > 0.0:
                cohort.rate *= self.slow
            end_ns = self.clock_ns + max(0.0, cohort.remaining_ns / cohort.rate)
            if end_ns < group.end_ns:
                group.end_ns, group.ending = end_ns, cohort

    def next_end(self) -> tuple[float, int] | None:
        """Return the time to the next end of blocks at the current rates, and its task; of several, the first."""
        ends = [(group.end_ns, group.ending.number, group.ending) for group in self._all_groups if group.ending]
        if not ends:
            return None
        end_ns, _, cohort = min(ends)
        return max(0.0, end_ns - self.clock_ns), cohort.kernel.index

    def losses(self) -> Iterator[tuple[int, int, int, float]]:
        """Yield (task, cause, oldest other task or -1, lost share of the time) for each kernel that loses time now."""
        for kernel in self.kernels:
            sms, task = kernel.task.partition_sms or self.hardware.limits.sms, kernel.task
            possible = lost_time.possible_blocks(kernel.left, kernel.on_sms, task.blocks_per_sm, sms)
            alone = 1.0
            if kernel.load:
                shape = (possible, task.blocks_per_sm, sms, int(task.matrix))
                alone = contention.alone_rate(self.hardware.contention, *shape)
            resident, slowed, short = 0.0, 0.0, 0.0
            for group in self._all_groups:
                rate = group.rates[task.matrix]
                for cohort in group.cohorts:
                    if cohort.kernel is kernel:
                        blocks = float(cohort.blocks * group.sms)
                        resident += blocks
                        slowed += lost_time.slowed_blocks(blocks, rate, alone)
                        short += lost_time.short_blocks(blocks, rate, cohort.rate, alone)
            by = next((other.index for other in self.kernels if other is not kernel), -1)
            if kernel.left and possible > resident:
                yield kernel.index, self._held_by(kernel), by, (possible - resident) / possible
            if slowed > 0.0:
                yield kernel.index, lost_time.ISSUE, by, slowed / possible
            if short > 0.0:
                yield kernel.index, lost_time.DRAM, by, short / possible

    def _held_by(self, kernel: Placed) -> int:
        """Return the resource that a kernel's unplaced blocks wait for on most SMs."""
        for other in self.kernels:
            if other is kernel:
                break
            if other.left and other.task.partition == kernel.task.partition:
                return lost_time.BLOCKS  # head of line
        limits, need = self.hardware.limits, kernel.task.footprint
        missing: Counter[int] = Counter()
        for group in self.groups:
            if group.partition == kernel.task.partition:
                cause = lost_time.missing(
                    limits.threads_per_sm - group.threads,
                    limits.regs_per_sm - group.regs,
                    limits.blocks_per_sm - group.blocks,
                    group.carveout_bytes,
                    need.threads,
                    need.regs,
                    need.carveout_bytes,
                )
                missing[cause] += group.sms
        return missing.most_common(1)[0][0] if missing else lost_time.BLOCKS

    @property
    def occupied(self) -> float:
        """Occupied share of the GPU."""
        held = sum(
            cohort.blocks * group.sms / cohort.kernel.task.blocks_per_sm
            for group in self.groups
            for cohort in group.cohorts
        )
        return min(1.0, held / self.hardware.limits.sms)

    @property
    def traffic_bytes_per_ns(self) -> float:
        """DRAM traffic at the current rates, in bytes per ns."""
        return sum(c.rate * c.blocks * c.group.sms * c.kernel.dram_bytes_per_ns for c in self.cohorts)


def waves(task: Task, sms: int, hardware: HardwareModel) -> float:
    """Return `gpusim.rules.contention.waves` of a task on `sms` SMs."""
    blocks = blocks_to_place(task, sms)
    return contention.waves(hardware.contention, blocks, task.blocks_per_sm, sms, int(task.matrix))
