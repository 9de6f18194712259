"""Recording of causes (`gpusim.engine.causes`) by the compiled engine.

Compiled functions take a `Recording` or None; with None, numba leaves this code out.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from gpusim.engine import causes
from gpusim.engine.causes import COPY_ENGINE, FRONT_END, GRID_SLOT, NOTHING, Causes, Loss
from gpusim.engine.compiled.jit import int64, jit, jit_apart, rule
from gpusim.engine.placement import NO_SMS
from gpusim.formats.hardware import HardwareModel
from gpusim.plan.tasks import Plan
from gpusim.rules import contention, copies, lost_time
from gpusim.rules.lost_time import BLOCKS, COPY, DRAM, ISSUE, REGISTERS, SMEM, THREADS

possible_blocks, slowed_blocks = rule(lost_time.possible_blocks), rule(lost_time.slowed_blocks)
short_blocks, missing, copy_part = rule(lost_time.short_blocks), rule(lost_time.missing), rule(lost_time.copy_part)
alone_rate, full_bytes_per_ns = rule(contention.alone_rate), rule(copies.full_bytes_per_ns)

#: Causes of a task, as in `Causes`.
NOTED = np.dtype(
    [("last", "i8"), ("interference_ns", "f8"), ("product_ns", "f8"), ("held", "i8"), ("held_by", "i8")], align=True
)
#: State of a device: the last task started, the last task that freed a grid slot of a full GPU, and the last copies.
UNIT = np.dtype([("started", "i8"), ("room_at", "f8"), ("room_by", "i8"), ("h2d", "i8"), ("d2h", "i8")], align=True)
#: A `Loss`; records are in recording order.
LOST = np.dtype(
    [("task", "i8"), ("cause", "i8"), ("by", "i8"), ("from_ns", "f8"), ("until_ns", "f8"), ("lost_ns", "f8")],
    align=True,
)
#: Initial room for losses per task.
LOSSES_OF_A_TASK = 64


class Recording(NamedTuple):
    """Arrays for the causes of one plan; `noted` has the number of losses, stored or not."""

    tasks: npt.NDArray[Any]
    units: npt.NDArray[Any]
    losses: npt.NDArray[Any]
    noted: npt.NDArray[np.int64]
    rows: Any = None
    """Placement data of each task, from the event loop."""
    nodes: Any = None
    """Nodes of the plan, from the event loop."""

    @classmethod
    def of_size(cls, tasks: int, devices: int, losses: int) -> Recording:
        """Return empty arrays for a plan of `tasks` tasks on `devices` devices."""
        noted, units = np.zeros(tasks, NOTED), np.zeros(devices, UNIT)
        noted["last"] = noted["held_by"] = -1
        for name in ("started", "room_by", "h2d", "d2h"):
            units[name] = -1
        return cls(noted, units, np.zeros(losses, LOST), np.zeros(1, np.int64))

    def causes(
        self,
        plan: Plan,
        start_ns: tuple[int, ...],
        end_ns: tuple[int, ...],
        launched_ns: tuple[float, ...],
        hardware: HardwareModel,
    ) -> Causes:
        """Return the recorded causes of a finished simulation."""
        losses: list[list[Loss]] = [[] for _ in plan.tasks]
        for task, cause, by, *times_ns in self.losses[: self.noted[0]].tolist():
            losses[task].append(Loss(causes.LOSSES[cause], by if by >= 0 else None, *times_ns))
        return Causes(
            last=tuple(self.tasks["last"].tolist()),
            interference_ns=tuple(self.tasks["interference_ns"].tolist()),
            product_ns=tuple(self.tasks["product_ns"].tolist()),
            launched_ns=launched_ns,
            held=tuple(causes.HELD[held] for held in self.tasks["held"].tolist()),
            held_by=tuple(self.tasks["held_by"].tolist()),
            losses=causes.closed(losses, plan, start_ns, end_ns, hardware),
        )


@jit
def note_start(record: Any, number: int, device: Any, index: int, ready_ns: float, now: float) -> None:
    """Record the resource that a starting task waited for; call it before the front end becomes busy with the task."""
    unit, noted = record.units[number], record.tasks[index]
    by_front_end = device.front_end_free > unit.room_at
    by = unit.started if by_front_end else unit.room_by
    held = FRONT_END if by_front_end else GRID_SLOT
    noted.held = held if now > ready_ns and by >= 0 else NOTHING
    noted.held_by = by if noted.held != NOTHING else -1
    unit.started = index


@jit
def note_copy_start(record: Any, number: int, to_device: bool, index: int, ready_ns: float, now: float) -> None:
    """Record the resource that a starting copy waited for."""
    unit, noted = record.units[number], record.tasks[index]
    by = unit.h2d if to_device else unit.d2h
    noted.held = COPY_ENGINE if now > ready_ns and by >= 0 else NOTHING
    noted.held_by = by if noted.held != NOTHING else -1


@jit
def note_end(record: Any, number: int, index: int, kind: int, now: float, was_full: bool) -> None:
    """Record the end of a copy of direction `kind` (0, 1), or of a kernel (-1) that may have freed a grid slot."""
    unit = record.units[number]
    if kind == 0:
        unit.h2d = index
    elif kind == 1:
        unit.d2h = index
    elif was_full:
        unit.room_at = now
        unit.room_by = index


@jit
def add_loss(record: Any, task: int, cause: int, by: int, since: float, until: float, lost_ns: float) -> None:
    """Record one loss if there is room for it."""
    place = record.noted[0]
    record.noted[0] += 1
    if place < len(record.losses):
        row = record.losses[place]
        row.task = task
        row.cause = cause
        row.by = by
        row.from_ns = since
        row.until_ns = until
        row.lost_ns = lost_ns


@jit_apart
def note_block_losses(hw: Any, device: Any, blocks: Any, record: Any, until: float, sm_rate: float) -> None:
    """`SmPlacement.losses` since the last update of the device."""
    since, elapsed_ns = device.updated, until - device.updated
    running = int64(device.running)
    for number in range(running):
        place = int64(blocks.line[number])
        kernel = blocks.kernels[place]
        gemm = int64(1) if kernel.matrix_load > 0.0 else int64(0)
        possible, alone = int64(1), 1.0
        if kernel.partition != NO_SMS:
            sms, per_sm = int64(record.rows[record.nodes[kernel.index].row].on_sms), int64(kernel.blocks_per_sm)
            possible = int64(possible_blocks(int64(kernel.left), int64(kernel.on_sms), per_sm, sms))
            alone = alone_rate(hw.contention, possible, per_sm, sms, gemm)
        resident = slowed = short = 0.0
        for group_index in range(int64(device.groups)):
            group = blocks.groups[int64(device.order[group_index])]
            rate = group.matrix_rate if gemm == 1 else group.rate
            first = int64(group.first)
            for entry in range(first, first + int64(group.cohorts)):
                cohort = blocks.cohorts[entry]
                if int64(cohort.kernel) == place:
                    count = float(int64(cohort.blocks) * int64(group.sms))
                    resident += count
                    slowed += slowed_blocks(count, rate, alone)
                    short += short_blocks(count, rate, cohort.rate, alone)
        by = oldest_other(blocks.line, blocks.kernels, running, number)
        task, ns = int64(kernel.index), elapsed_ns * sm_rate
        if kernel.left > 0 and possible > resident:
            cause = held_by(hw, device, blocks, number)
            add_loss(record, task, cause, by, since, until, (possible - resident) / possible * ns)
        if slowed > 0.0:
            add_loss(record, task, int64(ISSUE), by, since, until, slowed / possible * ns)
        if short > 0.0:
            add_loss(record, task, int64(DRAM), by, since, until, short / possible * ns)


@jit
def oldest_other(line: Any, kernels: Any, running: int, number: int) -> int:
    """Return the oldest running kernel other than the `number`-th, or -1."""
    if number > 0:
        return int64(kernels[int64(line[0])].index)
    return int64(kernels[int64(line[1])].index) if running > 1 else int64(-1)


@jit
def held_by(hw: Any, device: Any, blocks: Any, number: int) -> int:
    """`SmPlacement._held_by` of the `number`-th running kernel."""
    kernel = blocks.kernels[int64(blocks.line[number])]
    for earlier in range(number):
        other = blocks.kernels[int64(blocks.line[earlier])]
        if other.left > 0 and other.partition == kernel.partition:
            return int64(BLOCKS)
    scarcest, most = int64(BLOCKS), int64(0)
    for first in range(int64(device.groups)):  # each cause at its first occurrence
        cause, sms, seen = int64(-1), int64(0), False
        for group_index in range(int64(device.groups)):
            group = blocks.groups[int64(device.order[group_index])]
            if group.partition != kernel.partition:
                continue
            lacks = int64(
                missing(
                    hw.limits.threads_per_sm - group.threads,
                    hw.limits.regs_per_sm - group.regs,
                    hw.limits.blocks_per_sm - group.blocks,
                    group.carveout_bytes,
                    kernel.threads,
                    kernel.regs,
                    kernel.carveout_bytes,
                )
            )
            if group_index == first:
                cause = lacks
            seen = seen or (group_index < first and lacks == cause)
            if cause == lacks:
                sms += int64(group.sms)
        if cause >= 0 and sms > most:
            scarcest, most = cause, sms
    return scarcest


@jit_apart
def note_pool_losses(hw: Any, device: Any, running: Any, record: Any, until: float, sm_rate: float) -> None:
    """`SmPool.losses` since the last update of the device."""
    since, elapsed_ns = device.updated, until - device.updated
    base, count = int64(device.first_running), int64(device.running)
    for number in range(count):
        kernel = running[base + number]
        elder = True
        for earlier in range(number):
            other = running[base + earlier]
            elder = elder and not (other.needs_sm and other.partition == kernel.partition)
        shared = kernel.share if elder else kernel.share / kernel.slowdown
        by = int64(-1)
        if number > 0:
            by = int64(running[base].index)
        elif count > 1:
            by = int64(running[base + 1].index)
        task, ns = int64(kernel.index), elapsed_ns * sm_rate
        if kernel.share < 1.0:
            add_loss(record, task, scarce(running, base, number), by, since, until, (1.0 - kernel.share) * ns)
        if shared < kernel.share:
            add_loss(record, task, int64(ISSUE), by, since, until, (kernel.share - shared) * ns)
        if kernel.rate < shared:
            add_loss(record, task, int64(DRAM), by, since, until, (shared - kernel.rate) * ns)


@jit
def scarce(running: Any, base: int, number: int) -> int:
    """`SmPool._scarce`."""
    kernel = running[base + number]
    threads = regs = smem = slots = 1.0
    for earlier in range(number):
        other = running[base + earlier]
        if other.partition == kernel.partition:
            threads = max(0.0, threads - other.share * other.threads)
            regs = max(0.0, regs - other.share * other.regs)
            smem = max(0.0, smem - other.share * other.smem)
            slots = max(0.0, slots - other.share * other.slots)
    scarcest, least = int64(BLOCKS), 1.0
    if kernel.share > 0.0:
        if kernel.threads > threads and threads / kernel.threads < least:
            scarcest, least = int64(THREADS), threads / kernel.threads
        if kernel.regs > regs and regs / kernel.regs < least:
            scarcest, least = int64(REGISTERS), regs / kernel.regs
        if kernel.smem > smem and smem / kernel.smem < least:
            scarcest, least = int64(SMEM), smem / kernel.smem
        if kernel.slots > slots and slots / kernel.slots < least:
            scarcest, least = int64(BLOCKS), slots / kernel.slots
    return scarcest


@jit_apart
def note_copy_losses(
    hw: Any, device: Any, blocks: Any, running: Any, engines: Any, number: int, record: Any, until: float
) -> None:
    """Record losses of kernels to copies, and of copies to each other, since the last change."""
    since, elapsed_ns = device.updated, until - device.updated
    h2d, d2h = engines[2 * number], engines[2 * number + 1]
    lost_ns = copy_part(device.sm_rate, 1.0) * elapsed_ns
    by = int64(h2d.active if h2d.active >= 0 else d2h.active)
    if lost_ns > 0.0:
        for place in range(int64(device.running)):
            task = int64(-1)
            if blocks is not None:
                task = int64(blocks.kernels[int64(blocks.line[place])].index)
            if running is not None:
                task = int64(running[device.first_running + place].index)
            add_loss(record, task, int64(COPY), by, since, until, lost_ns)
    for direction in range(2):
        engine, other = engines[2 * number + direction], engines[2 * number + 1 - direction]
        if engine.active >= 0:
            lost_ns = copy_part(engine.rate, full_bytes_per_ns(hw.copies, direction == 0)) * elapsed_ns
            if lost_ns > 0.0:
                add_loss(record, int64(engine.active), int64(COPY), int64(other.active), since, until, lost_ns)


@jit
def note_wait(engines: Any, number: int, record: Any, index: int, now: float, wait_ns: float) -> None:
    """Record how much longer a starting memset takes because of active and pending copies."""
    h2d, d2h = engines[2 * number], engines[2 * number + 1]
    by = int64(h2d.active if h2d.active >= 0 else d2h.active)
    add_loss(record, index, int64(COPY), by, now, now + wait_ns, wait_ns)
