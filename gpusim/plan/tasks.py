"""Plans, the input of an engine; memory moves and several GPUs are plans with other tasks."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Literal

import msgspec

from gpusim.errors import PlanError
from gpusim.formats.hardware import HardwareModel
from gpusim.notebook import short_fields, short_repr
from gpusim.rules import block_turnover, launch
from gpusim.rules.occupancy import NO_DEMAND, NO_FOOTPRINT, Demand, Footprint
from gpusim.units import counted

#: Maximum number of partitions of one GPU; an H200 splits its 132 SMs into 15 groups of 8, with 12 left over.
MAX_PARTITIONS = 32
#: Longest time that can be simulated, 104 days: doubles represent every whole nanosecond up to here.
MAX_TIME_NS = 1 << 53

Kind = Literal["kernel", "memset", "memcpy", "h2d", "d2h"]
LaunchMode = Literal["graph", "stream"]


class Task(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """One unit of GPU work; a struct, since a step has up to a million. `msgspec.structs.replace` changes fields.

    `deps` are the indices of tasks that must end first, besides the previous one in its queue. `dur_ns` is the time
    alone on the device, `copy_bytes` the size of a copy and `dram_bytes` the DRAM traffic of a kernel.
    """

    name: str
    kind: Kind = "kernel"
    device: int = 0
    queue: int = 0
    deps: tuple[int, ...] = ()
    dur_ns: float = 0.0
    missed_ns: float = 0.0
    """Part of `dur_ns` lost to L2 cache misses of the schedule (`gpusim.plan.cache_misses`)."""
    extra_ns: float = 0.0
    """Fixed delay before it, beyond the usual gap (memory operations in graphs)."""
    idle_ns: float = 0.0
    """Time that its idle blocks take, before the next kernel may start (`gpusim.rules.idle_blocks`)."""
    demand: Demand = NO_DEMAND
    dram_bytes: float = 0.0
    copy_bytes: int = 0
    on_copy_engine: bool = False
    """True for a small memset, which waits for copies (`gpusim.rules.copies`)."""
    host_ns: float = 0.0
    """Host time between the previous launch and this one (stream mode)."""
    blocks: int = 0
    """Number of blocks; 0 if unknown."""
    blocks_per_sm: int = 0
    """Blocks that fit on an SM."""
    footprint: Footprint = NO_FOOTPRINT
    """Resources that a block takes of its SM."""
    matrix: bool = False
    """True for a GEMM-like kernel: matrix products and convolutions."""
    product: bool = False
    """True for a GEMM-like kernel that is no convolution (`gpusim.rules.products`)."""
    partition: int = 0
    """SM partition; `demand` is a share of that partition, the whole GPU if there is only one."""
    partition_sms: int = 0
    """SMs of the partition; 0 for the whole GPU."""
    op: int = -1
    """Index of the op in the trace; -1 for none."""
    kernel: int = -1
    """Index of the kernel in the op; -1 for none."""

    def __repr__(self) -> str:
        return short_fields(self)


@dataclass(frozen=True, slots=True)
class Buffer:
    """Memory allocated when the first of `tasks` starts and freed when the last of them ends."""

    bytes: int
    tasks: tuple[int, ...]
    device: int = 0


@dataclass(frozen=True, slots=True, repr=False)
class Plan:
    """Tasks in launch order, with buffers; the `queue` of a task is its stream."""

    tasks: tuple[Task, ...]
    mode: LaunchMode = "graph"
    buffers: tuple[Buffer, ...] = field(default=())
    kept_bytes: int = 0
    """Memory live throughout: parameters, inputs, optimizer state."""

    def __len__(self) -> int:
        return len(self.tasks)

    def __repr__(self) -> str:
        return short_repr("Plan", f"{counted(len(self), 'task')} on {counted(len(list(self.queues())), 'stream')}")

    def queues(self) -> Iterator[tuple[int, int]]:
        """Iterate over the (device, queue) pairs in use, in order of first launch."""
        return iter(dict.fromkeys((task.device, task.queue) for task in self.tasks))

    @property
    def branches(self) -> bool:
        """True if it has several queues; a CUDA graph of one queue has no branches."""
        return len(dict.fromkeys(self.queues())) > 1


def start_interval_ns(task: Task, hardware: HardwareModel, in_graph: bool) -> float:
    """Return the minimum time from the start of a task to the next start of the front end, in ns."""
    sms = hardware.limits.sms
    blocks_ns = block_turnover.time_ns(hardware.graph, task.blocks, task.blocks_per_sm, sms, task.partition_sms)
    alone_ns = task.dur_ns - task.missed_ns
    return launch.start_interval_ns(hardware.graph, in_graph, alone_ns, max(task.idle_ns, blocks_ns))


def check_plan(plan: Plan) -> None:
    """Raise `PlanError` for a dangling reference, a NaN, negative or too long time, or a cycle.

    A cycle may go through queues, if a task depends on a later one of its own queue.
    """
    n = len(plan)
    preds: list[list[int]] = []
    last: dict[tuple[int, int], int] = {}
    for index, task in enumerate(plan.tasks):
        for time_ns in (task.dur_ns, task.extra_ns, task.idle_ns, task.host_ns):
            if not 0 <= time_ns <= MAX_TIME_NS:
                problem = f"has a duration of {time_ns} ns; at most {MAX_TIME_NS} ns (104 days) can be simulated"
                raise PlanError(f"task {index} '{task.name[:60]}' {problem}")
        if not 0 <= task.partition < MAX_PARTITIONS:
            raise PlanError(f"task {index} '{task.name[:60]}' is in partition {task.partition} of {MAX_PARTITIONS}")
        for before in task.deps:
            if not 0 <= before < n:
                raise PlanError(f"task {index} '{task.name[:60]}' depends on task {before}, of {n} tasks")
        lane = (task.device, task.queue)
        preds.append([*task.deps, *([last[lane]] if lane in last else [])])
        last[lane] = index
    waiting = [len(p) for p in preds]
    succs: list[list[int]] = [[] for _ in preds]
    for index, needed in enumerate(preds):
        for p in needed:
            succs[p].append(index)
    ready = [index for index in range(n) if not waiting[index]]
    done = 0
    while ready:
        done += 1
        for after in succs[ready.pop()]:
            waiting[after] -= 1
            if not waiting[after]:
                ready.append(after)
    if done < n:
        stuck = next(index for index in range(n) if waiting[index])
        raise PlanError(f"cycle: task {stuck} '{plan.tasks[stuck].name[:60]}' waits for itself through others")
