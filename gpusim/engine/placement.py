"""The block dispatcher, SM by SM: where blocks go, when, and how fast they run beside others.

The rules, in one place (research/2026-11-23-engine-rules.md, "Where blocks go", has the measurement behind each):

1. *Head of line.* Blocks are placed kernel by kernel, in the order of their starts: behind a kernel with blocks left to
   place, nobody gets any placed (Amert et al., "GPU Scheduling on the NVIDIA TX2", RTSS 2017, rule X1).
2. *Most room.* The next block goes to the SM that could take the most further blocks of its kernel (Gilman et al.,
   "Demystifying the Placement Policies of the NVIDIA GPU Thread Block Scheduler", 2020); of several, to the one that
   has had so much room for longest.
3. *Shared-memory split.* An SM's shared memory is set to a size while it is empty and keeps that while any block runs
   there. A kernel joins only where that is room for as many of its blocks as an SM could hold. Where it has to wait for
   SMs to empty, they do so one after the other, and each is filled up at once: its blocks then crowd on a few SMs.
4. *Sharing.* The load of an SM is the sum of its blocks' shares, one over the number of such blocks that it could
   hold: full of one kernel's blocks, it has load 1. Blocks take load^p times as long as at load 1, below 1, too; and at
   load 1 the time that makes their kernel take what it takes alone, wave by wave. Kernels that multiply matrices have a
   p of their own, and count only in part in the load of others, as others in theirs (`cross_load`).
5. *DRAM.* Where the traffic of all would exceed the bandwidth, those who use it slow down alike.

Rules 1 to 4 hold in each SM partition by itself. SMs that hold the same are one group, blocks placed on a group at one
time are one cohort: they go on alike. So a kernel costs a few steps, not one for each of its blocks. And between two
changes of what a group holds its rates stay as they are, so a step costs as much as what it changes.

It is driven as `gpusim.engine.pool.SmPool` is, which shares the SMs out as one pool.
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

#: A cohort with less than this left to do has ended. So has one whose end has come, whatever rounding left of it: far
#: from the start of a step two times are further apart than this.
ENDED_NS = 1e-6
#: Groups whose next end is as near are looked at when a kernel's blocks end.
NEAR_NS = 1e-3
#: Where there are as many groups of SMs, none is split any more: blocks that are too few for a whole group count as
#: enough for it. Eight streams rarely make as many; without a limit, dozens make a group of every SM.
MOST_GROUPS = 32
#: The partition of memory operations, which take no SM.
NO_SMS = -1


@dataclass
class SmPlacement:
    """What runs on the SMs of one GPU. Call `advance` before any change, and `update` after it."""

    hardware: HardwareModel
    kernels: list[Placed] = field(default_factory=list)
    """In the order of their starts."""
    groups: list[SmGroup] = field(default_factory=list)
    others: SmGroup = field(default_factory=lambda: SmGroup(NO_SMS, 1))
    """Memory operations."""
    clock_ns: float = 0.0
    """Since the GPU was last empty."""
    slow: float = 1.0
    """What is left of the rate of those who use DRAM (rule 5)."""
    placed: int = 0
    """Cohorts so far."""
    known_rates: dict[tuple[float, float], tuple[float, float]] = field(default_factory=dict)
    """By the loads of both classes: the same come up again and again, and powers take long."""

    @property
    def full(self) -> bool:
        """Whether no further kernel may start: the GPU has no more grid slots."""
        return len(self.kernels) >= self.hardware.limits.resident_grids

    @property
    def indices(self) -> list[int]:
        """The tasks that run, in the order of their starts."""
        return [kernel.index for kernel in self.kernels]

    def start(self, index: int, task: Task) -> None:
        """Put a task on the GPU, at the end of the line."""
        traffic = dram.bytes_per_ns(self.hardware.memory, task.dram_bytes, task.dur_ns)
        if task.footprint == NO_FOOTPRINT or not task.blocks:
            kernel = Placed(index, task, 0, task.dur_ns, 0.0, traffic, on_sms=1)
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
        """Let time pass at the current rates."""
        self.clock_ns += elapsed_ns

    @property
    def _all_groups(self) -> list[SmGroup]:
        return [self.others, *self.groups]

    @property
    def cohorts(self) -> list[Cohort]:
        """All that runs."""
        return [cohort for group in self._all_groups for cohort in group.cohorts]

    def _touch(self, group: SmGroup) -> None:
        """Bring a group up to now, before what it holds or the rates of its cohorts change."""
        if not group.changed:
            elapsed_ns = self.clock_ns - group.updated_ns
            for cohort in group.cohorts:
                cohort.remaining_ns -= elapsed_ns * cohort.rate
            group.updated_ns = self.clock_ns
            group.changed = True

    def finish(self, index: int) -> bool:
        """Take what has ended of a task off the GPU; whether that was all of it."""
        kernel = next(kernel for kernel in self.kernels if kernel.index == index)
        ended_ns = ENDED_NS + self.clock_ns * 2.0**-50  # rounding of a large clock must not keep a cohort forever
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
        """Empty SMs of a partition are alike again."""
        kept: dict[int, SmGroup] = {}
        for group in [group for group in self.groups if not group.blocks]:
            if group.partition in kept:
                kept[group.partition].sms += group.sms
                self.groups.remove(group)
            else:
                kept[group.partition] = group

    def update(self) -> None:
        """Place blocks and set the rate of every cohort."""
        blocked: set[int] = set()
        for kernel in self.kernels:
            if kernel.left and kernel.task.partition not in blocked:
                self._place(kernel)
                if kernel.left:
                    blocked.add(kernel.task.partition)
        self._set_rates()

    def _place(self, kernel: Placed) -> None:
        """Rules 2 and 3: place as many blocks of the kernel as there is room for."""
        rooms = [self._room(group, kernel) for group in self.groups]
        if not any(rooms):
            kernel.crowds = kernel.crowds or any(self._only_split_differs(group, kernel) for group in self.groups)
        elif kernel.crowds and not kernel.on_sms:
            self._fill_up(kernel, rooms)
        else:
            self._spread(kernel, rooms)

    def _fill_up(self, kernel: Placed, rooms: list[int]) -> None:
        """SM after SM, each to what it holds."""
        for group, room in zip(list(self.groups), rooms, strict=True):
            if room and kernel.left:
                wanted = -(-kernel.left // room)
                if wanted < group.sms and len(self.groups) < MOST_GROUPS:
                    self._split(group, wanted)
                self._add(kernel, group, dispatch.blocks_per_fill(kernel.left, room, group.sms))

    def _spread(self, kernel: Placed, rooms: list[int]) -> None:
        """Block after block, each to where there is most room."""
        left, level = kernel.left, max(rooms)
        known = list(zip(self.groups, rooms, strict=True))
        while level and (a_block_each := sum(group.sms for group, room in known if room >= level)) <= left:
            left -= a_block_each
            level -= 1
        gets = {group: max(0, room - level) for group, room in known}
        # Too few are left for all SMs with that much room; those that had no more from the start have had it longest.
        for group, _ in sorted((each for each in known if each[1] >= level > 0), key=lambda each: each[1]):
            if left > 0:
                if left < group.sms and len(self.groups) < MOST_GROUPS:
                    gets[self._split(group, left)] = gets[group]
                gets[group] += 1
                left -= group.sms
        for group, blocks in gets.items():
            if blocks:
                self._add(kernel, group, blocks)

    def _add(self, kernel: Placed, group: SmGroup, blocks: int) -> None:
        """Put `blocks` blocks on each SM of a group. The last of them may be fewer than that."""
        if not group.blocks:
            group.split_bytes = kernel.task.footprint.own_split_bytes
        put(group, kernel.task, blocks)
        kernel.left = max(0, kernel.left - blocks * group.sms)
        kernel.on_sms += blocks * group.sms
        self._add_cohort(kernel, group, blocks)

    def _add_cohort(self, kernel: Placed, group: SmGroup, blocks: int) -> None:
        self._touch(group)
        self.placed += 1
        group.cohorts.append(Cohort(kernel, group, self.placed, blocks, kernel.block_ns))

    def _split(self, group: SmGroup, sms: int) -> SmGroup:
        """Leave `sms` SMs in a group; the others form a new one, with cohorts of their own."""
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
        """How many further blocks of the kernel an SM of the group can take."""
        if group.partition != kernel.task.partition:
            return 0
        if not group.blocks:
            return kernel.task.blocks_per_sm
        if not dispatch.carveout_allows(group.split_bytes, kernel.task.footprint.split_bytes):
            return 0
        return self._room_for(group, kernel, kernel.task.footprint.smem_bytes)

    def _room_for(self, group: SmGroup, kernel: Placed, smem_bytes: int) -> int:
        limits, need = self.hardware.limits, kernel.task.footprint
        return dispatch.room(
            limits.threads_per_sm - group.threads,
            limits.regs_per_sm - group.regs,
            group.split_bytes - group.smem_bytes,
            limits.blocks_per_sm - group.blocks,
            need.threads,
            need.regs,
            smem_bytes,
        )

    def _only_split_differs(self, group: SmGroup, kernel: Placed) -> bool:
        """Whether the kernel would fit there, were the SM's shared memory set to another size."""
        return (
            group.partition == kernel.task.partition
            and not dispatch.carveout_allows(group.split_bytes, kernel.task.footprint.split_bytes)
            and self._room_for(group, kernel, smem_bytes=0) > 0
        )

    def _set_rates(self) -> None:
        """Rules 4 and 5, for groups that have changed."""
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
        """Of kernels that are not GEMM-like, and of those that are, on an SM with these loads; 1 for none."""
        if (others, gemms) not in self.known_rates:
            costs, rates = self.hardware.contention, [1.0, 1.0]
            for gemm, (own, other) in enumerate(((others, gemms), (gemms, others))):
                if own > 0.0:
                    rates[gemm] = contention.rate(costs, contention.load(costs, own, other), gemm)
            self.known_rates[others, gemms] = rates[0], rates[1]
        return self.known_rates[others, gemms]

    def _set_end(self, group: SmGroup) -> None:
        """The rates of a group's cohorts, and which of them ends first."""
        group.changed, group.end_ns, group.ending = False, math.inf, None
        for cohort in group.cohorts:
            cohort.rate = group.rates[cohort.kernel.task.matrix]
            if cohort.kernel.dram_bytes_per_ns > 0.0:
                cohort.rate *= self.slow
            end_ns = self.clock_ns + max(0.0, cohort.remaining_ns / cohort.rate)
            if end_ns < group.end_ns:
                group.end_ns, group.ending = end_ns, cohort

    def next_end(self) -> tuple[float, int] | None:
        """Time until blocks end at the current rates, and of which task: of those together, the first placed."""
        ends = [(group.end_ns, group.ending.number, group.ending) for group in self._all_groups if group.ending]
        if not ends:
            return None
        end_ns, _, cohort = min(ends)
        return max(0.0, end_ns - self.clock_ns), cohort.kernel.index

    def losses(self) -> Iterator[tuple[int, int, int, float]]:
        """For each kernel that loses time now: which, the cause, the oldest other kernel (or -1), what part of it."""
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
        """What the blocks that are not placed wait for: on most SMs, where it differs."""
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
                    group.split_bytes,
                    need.threads,
                    need.regs,
                    need.split_bytes,
                )
                missing[cause] += group.sms
        return missing.most_common(1)[0][0] if missing else lost_time.BLOCKS

    @property
    def occupied(self) -> float:
        """Share of the GPU's residency in use."""
        held = sum(
            cohort.blocks * group.sms / cohort.kernel.task.blocks_per_sm
            for group in self.groups
            for cohort in group.cohorts
        )
        return min(1.0, held / self.hardware.limits.sms)

    @property
    def traffic_bytes_per_ns(self) -> float:
        """DRAM traffic at the current rates."""
        return sum(c.rate * c.blocks * c.group.sms * c.kernel.dram_bytes_per_ns for c in self.cohorts)


def waves(task: Task, sms: int, hardware: HardwareModel) -> float:
    """`gpusim.rules.contention.waves` of a task on so many SMs."""
    blocks = blocks_to_place(task, sms)
    return contention.waves(hardware.contention, blocks, task.blocks_per_sm, sms, int(task.matrix))
