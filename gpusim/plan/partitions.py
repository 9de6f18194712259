"""SM partitions: the SMs of each group of streams, and the time of kernels on fewer SMs.

A partition is a small GPU: only kernels of its streams use its SMs, and they use no others. On the GPU it is a green
context (`gpusim.gpu.replay.green_contexts`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import msgspec

from gpusim.errors import PlanError
from gpusim.formats.hardware import HardwareModel
from gpusim.formats.schedule import Partition
from gpusim.plan.tasks import MAX_PARTITIONS, Task
from gpusim.rules import partitions as rules
from gpusim.rules.dram import time_ns
from gpusim.rules.occupancy import Demand

#: A partition has a multiple of this number of SMs: 8 from compute capability 9.0 on (CUDA Driver API, "Green
#: Contexts"). SMs that fill no group (12 of an H200's 132, which it splits into 15 groups) can only go to the last
#: partition. Only the GPU itself knows its number of groups: `gpusim.gpu.replay.green_contexts` asks it.
GROUP_SMS = 8


@dataclass(frozen=True, slots=True)
class Layout:
    """Partitions for the engine: the SMs of each, and the partition of each stream."""

    sms: tuple[int, ...]
    of_stream: tuple[int, ...]


def lay_out(partitions: Sequence[Partition], streams: int, gpu_sms: int) -> Layout:
    """Return the layout of `streams` streams on a GPU of `gpu_sms` SMs. Raises `PlanError` for an impossible one.

    Streams outside all partitions form one more of the remaining SMs. Without partitions, all share the whole GPU.
    """
    if not partitions:
        return Layout((gpu_sms,), (0,) * streams)
    of_stream = [-1] * streams
    for number, partition in enumerate(partitions):
        for stream in partition.streams:
            if stream >= streams:
                raise PlanError(f"partition {number} has stream {stream}, of {streams} streams")
            if of_stream[stream] >= 0:
                raise PlanError(f"stream {stream} is in partitions {of_stream[stream]} and {number}")
            of_stream[stream] = number
        if not partition.streams or partition.sms < 1:
            problem = "no stream" if partition.sms else "0 SMs"
            raise PlanError(f"partition {number} has {problem}")
    used = sum(partition.sms for partition in partitions)
    sms = [partition.sms for partition in partitions]
    if -1 in of_stream:
        stream = of_stream.index(-1)
        if used >= gpu_sms:
            raise PlanError(f"stream {stream} is in no partition, and of {gpu_sms} SMs none are left for it")
        sms.append(gpu_sms - used)
        of_stream = [len(partitions) if number < 0 else number for number in of_stream]
    elif used > gpu_sms:
        raise PlanError(f"the partitions have {used} SMs in all, the GPU has {gpu_sms}")
    if len(sms) > MAX_PARTITIONS:
        raise PlanError(f"{len(sms)} partitions; the limit is {MAX_PARTITIONS}")
    for number, size in enumerate(sms[:-1]):
        if size % GROUP_SMS:
            raise PlanError(f"partition {number} has {size} SMs, not a multiple of {GROUP_SMS}")
    if sms[-1] % GROUP_SMS not in (0, gpu_sms % GROUP_SMS):
        raise PlanError(
            f"partition {len(sms) - 1} has {sms[-1]} SMs, neither a multiple of {GROUP_SMS} nor one and the "
            f"{gpu_sms % GROUP_SMS} that fill no group"
        )
    return Layout(tuple(sms), tuple(of_stream))


def in_partition(task: Task, partition: int, sms: int, hardware: HardwareModel) -> Task:
    """Return a task with its time alone and its demand in partition number `partition` of `sms` SMs."""
    whole = hardware.limits.sms
    if not task.blocks or not task.blocks_per_sm or sms >= whole:
        return msgspec.structs.replace(task, partition=partition, partition_sms=sms)
    resident = task.blocks_per_sm
    slowed = rules.slowed(task.blocks, resident, sms, whole)
    factor = rules.demand_factor(task.blocks, resident, sms, whole)
    demand = Demand(
        threads=min(1.0, task.demand.threads * factor),
        regs=min(1.0, task.demand.regs * factor),
        smem=min(1.0, task.demand.smem * factor),
        slots=min(1.0, task.demand.slots * factor),
        residency=min(task.blocks, resident * sms) / (resident * whole),
        cover=min(1.0, task.demand.cover * factor),
    )
    return msgspec.structs.replace(
        task,
        partition=partition,
        partition_sms=sms,
        dur_ns=rules.alone_ns(task.dur_ns, time_ns(hardware.memory, task.dram_bytes), slowed),
        demand=demand,
    )
