"""Plans: what an engine runs. One GPU, memory migration and several GPUs are all just plans."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Literal

import msgspec

from gpusim.errors import PlanError
from gpusim.notebook import short_repr
from gpusim.rules.occupancy import NO_DEMAND, NO_FOOTPRINT, Demand, Footprint
from gpusim.units import counted

#: Partitions of one GPU: an H200 lets its 132 SMs be split into 15 groups of 8, and 12 are left over.
MAX_PARTITIONS = 32
#: Longest time that can be simulated, 104 days: up to here doubles have every whole nanosecond.
MAX_TIME_NS = 1 << 53

Kind = Literal["kernel", "memset", "memcpy", "h2d", "d2h"]
LaunchMode = Literal["graph", "stream"]


class Task(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """One piece of GPU work; a struct, since a step has up to a million. `msgspec.structs.replace` changes fields.

    `deps` are indices of tasks of the plan that must end first, besides the one before it in its queue.
    `dur_ns` is the time alone on the device. `copy_bytes` is what a copy moves, `dram_bytes` a kernel's DRAM traffic.
    """

    name: str
    kind: Kind = "kernel"
    device: int = 0
    queue: int = 0
    deps: tuple[int, ...] = ()
    dur_ns: float = 0.0
    extra_ns: float = 0.0
    """Fixed delay before it, over the usual gap (memory operations in graphs)."""
    demand: Demand = NO_DEMAND
    dram_bytes: float = 0.0
    copy_bytes: int = 0
    host_ns: float = 0.0
    """Host time spent before the launch call, since the launch before (stream mode)."""
    priority: int = 0
    """Larger starts first where several became ready at the same time; lowering a schedule leaves it 0."""
    blocks: int = 0
    """Blocks of the kernel; 0 where they are not known."""
    blocks_per_sm: int = 0
    """How many of them an SM holds."""
    footprint: Footprint = NO_FOOTPRINT
    """What one of them takes of its SM."""
    matrix: bool = False
    """Whether it multiplies matrices: products and convolutions."""
    partition: int = 0
    """The SM partition it runs in; `demand` is a share of that partition, which is the whole GPU where there is one."""
    partition_sms: int = 0
    """SMs of that partition; 0 for all of the GPU."""
    op: int = -1
    """Index of the trace's op, -1 for none."""
    kernel: int = -1
    """Which kernel of the op."""


@dataclass(frozen=True, slots=True)
class Buffer:
    """Memory of the plan: allocated when the first of `tasks` starts, freed when the last of them ends."""

    bytes: int
    tasks: tuple[int, ...]
    device: int = 0


@dataclass(frozen=True, slots=True, repr=False)
class Plan:
    """Tasks in launch order; `queue` of a task is its stream."""

    tasks: tuple[Task, ...]
    mode: LaunchMode = "graph"
    buffers: tuple[Buffer, ...] = field(default=())
    kept_bytes: int = 0
    """Memory in use throughout: parameters, inputs, optimizer state."""

    def __len__(self) -> int:
        return len(self.tasks)

    def __repr__(self) -> str:
        return short_repr("Plan", f"{counted(len(self), 'task')} on {counted(len(list(self.queues())), 'stream')}")

    def queues(self) -> Iterator[tuple[int, int]]:
        """Each (device, queue) in use, in order of first launch."""
        return iter(dict.fromkeys((task.device, task.queue) for task in self.tasks))

    @property
    def branches(self) -> bool:
        """Whether it has several queues. A CUDA graph of one is a straight line."""
        return len(dict.fromkeys(self.queues())) > 1


def check_plan(plan: Plan) -> None:
    """Raise `PlanError` for a dangling reference, a time that is not a number or negative, or a cycle.

    A cycle may go through queues: a task depends on a later one of its own queue.
    """
    n = len(plan)
    preds: list[list[int]] = []
    last: dict[tuple[int, int], int] = {}
    for index, task in enumerate(plan.tasks):
        for time_ns in (task.dur_ns, task.extra_ns, task.host_ns):
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
