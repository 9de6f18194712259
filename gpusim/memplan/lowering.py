"""Lowering of instructions to an engine plan: queues for ops, one for copies out, one for copies back."""

from __future__ import annotations

import itertools
from dataclasses import dataclass, field

import msgspec

from gpusim.memplan.program import Instruction, Program, needed, op_streams_of
from gpusim.memplan.storages import Storages
from gpusim.memplan.waits import Waits, waits_of
from gpusim.plan.cache_misses import lost_times_ns, slower_by_misses
from gpusim.plan.graph import OpGraph
from gpusim.plan.schedule import Schedule
from gpusim.plan.tasks import Buffer, Plan, Task

#: Queues of a plan whose ops run on one stream: ops, copies to the host, copies from the host.
OPS, OUT, BACK = 0, 1, 2


@dataclass(frozen=True)
class LoweredProgram:
    """Engine plan of a program, with the tasks of each instruction."""

    program: Program
    plan: Plan
    tasks_of: tuple[tuple[int, ...], ...]
    waits: Waits | None = None
    """Waits on several streams; None for one."""

    @property
    def is_chain(self) -> bool:
        """True if each task waits for the one before it, so that no two run at once."""
        pairs = enumerate(itertools.pairwise(self.plan.tasks))
        return all(task.queue == before.queue or number in task.deps for number, (before, task) in pairs)


def lower_program(
    graph: OpGraph, storages: Storages, program: Program, *, copies: bool = True, memory: bool = False
) -> LoweredProgram:
    """Return the engine plan of a program on a GPU, in one CUDA graph.

    Without `copies` there are none and nothing waits for them: only the ops remain, recomputation included. With
    `memory` the plan has the program's buffers, for its memory over time.
    """
    if op_streams_of(program) > 1:
        return _on_streams(graph, storages, program, copies, memory)
    lowering = _Lowering(graph, storages, copies)
    buffers = _Buffers(storages)
    tasks_of: list[tuple[int, ...]] = []
    for instruction in program:
        if instruction.kind in ("run", "again"):
            new = lowering.op(instruction.op, needed(storages, instruction))
        elif instruction.kind == "out":
            new = lowering.out(instruction.storage)
        elif instruction.kind == "back":
            new = lowering.back(instruction.storage)
        else:
            new = lowering.wait(None if instruction.kind == "barrier" else instruction.storage)
        tasks_of.append(new)
        if memory:
            if instruction.kind == "free":
                buffers.free(instruction.storage, lowering.last.get(OPS))
            else:
                buffers.use(needed(storages, instruction), new)
    plan = Plan(
        tasks=tuple(lowering.tasks),
        buffers=buffers.finished(len(lowering.tasks) - 1) if memory else (),
        kept_bytes=sum(storages.bytes[storage] for storage in storages.initial),
    )
    return LoweredProgram(program, plan, tuple(tasks_of))


def _on_streams(graph: OpGraph, storages: Storages, program: Program, copies: bool, memory: bool) -> LoweredProgram:
    """Return the engine plan of a program on several streams."""
    waits = waits_of(storages, program, copies=copies)
    lost_ns = lost_times_ns(graph, schedule_of(program))
    buffers = _Buffers(storages)
    tasks: list[Task] = []
    tasks_of: list[tuple[int, ...]] = []
    ends: dict[int, tuple[int, ...]] = {}
    """Instruction -> tasks to wait for."""
    for place, instruction in enumerate(program):
        queue = waits.queue[place]
        deps = tuple(sorted({task for before in waits.before[place] for task in ends[before]}))
        first = len(tasks)
        if queue < 0:
            tasks_of.append(())
        elif instruction.kind in ("out", "back"):
            tasks.append(_copy(storages, instruction, queue, deps))
        else:
            for number, task in enumerate(graph.tasks[instruction.op]):
                if instruction.kind == "run" and instruction.op in lost_ns:
                    task = slower_by_misses(task, lost_ns[instruction.op][number])
                tasks.append(msgspec.structs.replace(task, queue=queue, deps=deps if number == 0 else ()))
        if queue >= 0:
            tasks_of.append(tuple(range(first, len(tasks))))
            ends[place] = (len(tasks) - 1,) if len(tasks) > first else deps
        if memory:
            if instruction.kind == "free":
                buffers.free(instruction.storage, None)
            else:
                buffers.use(needed(storages, instruction), tasks_of[-1])
    plan = Plan(
        tasks=tuple(tasks),
        buffers=buffers.finished(len(tasks) - 1) if memory else (),
        kept_bytes=sum(storages.bytes[storage] for storage in storages.initial),
    )
    return LoweredProgram(program, plan, tuple(tasks_of), waits)


def _copy(storages: Storages, instruction: Instruction, queue: int, deps: tuple[int, ...]) -> Task:
    size, out = storages.bytes[instruction.storage], instruction.kind == "out"
    name = f"{'offload' if out else 'prefetch'} {instruction.storage}"
    return Task(name=name, kind="d2h" if out else "h2d", copy_bytes=size, queue=queue, deps=deps)


def schedule_of(program: Program) -> Schedule:
    """Return launch order and streams of a program's ops, as a schedule without memory actions."""
    runs = [instruction for instruction in program if instruction.kind == "run"]
    streams = [0] * len(runs)
    for instruction in runs:
        streams[instruction.op] = instruction.stream
    return Schedule(tuple(instruction.op for instruction in runs), tuple(streams))


@dataclass
class _Lowering:
    """Tasks so far, with pending waits."""

    graph: OpGraph
    storages: Storages
    copies: bool
    tasks: list[Task] = field(default_factory=list)
    last: dict[int, int] = field(default_factory=dict)
    """Queue -> its last task."""
    leaving: dict[int, int] = field(default_factory=dict)
    """Storage -> its copy out, until something has waited for it."""
    coming: dict[int, int] = field(default_factory=dict)
    """Storage -> its copy back, until something has waited for it."""
    waits: set[int] = field(default_factory=set)
    """Copies that the next op waits for."""

    def op(self, op: int, needs: frozenset[int]) -> tuple[int, ...]:
        """Add the kernels of an op; the first of them waits."""
        if self.coming:
            self.waits.update(self.coming.pop(storage) for storage in needs if storage in self.coming)
        first = len(self.tasks)
        for task in self.graph.tasks[op]:
            self._add(task, OPS, self.waits)
            self.waits = set()
        return tuple(range(first, len(self.tasks)))

    def out(self, storage: int) -> tuple[int, ...]:
        """Add a copy to the host, after all ops so far."""
        if not self.copies:
            return ()
        task = Task(name=f"offload {storage}", kind="d2h", copy_bytes=self.storages.bytes[storage])
        self.leaving[storage] = self._add(task, OUT, self._ops())
        return (self.leaving[storage],)

    def back(self, storage: int) -> tuple[int, ...]:
        """Add a copy from the host, after all ops so far and their waits: its memory may have been theirs."""
        if not self.copies:
            return ()
        task = Task(name=f"prefetch {storage}", kind="h2d", copy_bytes=self.storages.bytes[storage])
        out = {self.leaving.pop(storage)} if storage in self.leaving else set()
        self.coming[storage] = self._add(task, BACK, self._ops() | self.waits | out)
        return (self.coming[storage],)

    def wait(self, storage: int | None) -> tuple[int, ...]:
        """Let the next op wait for the copy out of this storage; None: for all copies so far."""
        if storage is None:
            self.waits |= {self.last[queue] for queue in (OUT, BACK) if queue in self.last}
        elif storage in self.leaving:
            self.waits.add(self.leaving.pop(storage))
        return ()

    def _ops(self) -> set[int]:
        return {self.last[OPS]} if OPS in self.last else set()

    def _add(self, task: Task, queue: int, deps: set[int]) -> int:
        others = tuple(sorted(dep for dep in deps if self.tasks[dep].queue != queue))
        self.tasks.append(msgspec.structs.replace(task, queue=queue, deps=others))
        self.last[queue] = len(self.tasks) - 1
        return self.last[queue]


@dataclass
class _Buffers:
    """Memory of a program in pieces: a storage that comes back is another piece."""

    storages: Storages
    tasks: dict[int, set[int]] = field(default_factory=dict)
    done: list[Buffer] = field(default_factory=list)

    def use(self, storages: frozenset[int], tasks: tuple[int, ...]) -> None:
        for storage in storages - self.storages.initial:
            self.tasks.setdefault(storage, set()).update(tasks)

    def free(self, storage: int, last_op: int | None) -> None:
        users = self.tasks.pop(storage, set())
        if users and last_op is not None:
            users.add(last_op)
        if users:
            self.done.append(Buffer(self.storages.bytes[storage], tuple(sorted(users))))

    def finished(self, last: int) -> tuple[Buffer, ...]:
        """Return all pieces; those not freed live to the end."""
        for storage, users in self.tasks.items():
            if users:
                self.done.append(Buffer(self.storages.bytes[storage], tuple(sorted({*users, last}))))
        self.tasks.clear()
        return tuple(self.done)
