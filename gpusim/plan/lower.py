"""Lowering: step + schedule -> plan."""

from __future__ import annotations

import msgspec

from gpusim.formats.trace import Op
from gpusim.plan.graph import OpGraph
from gpusim.plan.partitions import in_partition, lay_out
from gpusim.plan.schedule import Schedule
from gpusim.plan.sync import kept_storages
from gpusim.plan.tasks import Buffer, LaunchMode, Plan, Task


def lower(graph: OpGraph, schedule: Schedule, mode: LaunchMode = "graph", *, memory: bool = True) -> Plan:
    """The plan that runs a schedule of a step, in one CUDA graph or kernel by kernel.

    Ops without kernels (views) take no GPU time: they hand their dependencies on. Kernels of one op follow each other.
    Without `memory` the plan has no buffers: enough where nobody asks for its memory.
    The schedule must be legal (`Schedule.check`). Raises `PlanError` for partitions that the GPU cannot have.
    """
    graph = graph.choosing(schedule.variants)
    streams, partitions = schedule.streams, schedule.partitions
    layout = lay_out(partitions, schedule.laid_out_streams, graph.hardware.limits.sms)
    tasks: list[Task] = []
    ends: dict[int, tuple[int, ...]] = {}  # op -> last tasks to wait for
    tasks_of: dict[int, list[int]] = {}
    host_ns = 0.0
    for op in schedule.order:
        waits = tuple(sorted({task for before in graph.preds[op] for task in ends[before]}))
        host_ns += graph.trace.ops[op].host_ns
        if not graph.tasks[op]:
            ends[op] = waits
            continue
        share = host_ns / len(graph.tasks[op])
        partition = layout.of_stream[streams[op]]
        for number, task in enumerate(graph.tasks[op]):
            deps = waits if number == 0 else (len(tasks) - 1,)
            if partitions:
                task = in_partition(task, partition, layout.sms[partition], graph.hardware)
            queue, device = streams[op], task.device  # a queue's order implies what its own tasks wait for
            deps = tuple(d for d in deps if tasks[d].queue != queue or tasks[d].device != device)
            tasks.append(msgspec.structs.replace(task, queue=queue, deps=deps, host_ns=share))
            tasks_of.setdefault(op, []).append(len(tasks) - 1)
        host_ns = 0.0
        ends[op] = (len(tasks) - 1,)
    for op, doing in graph.covered.items():  # its storages are in use as long as the op runs that does its work
        tasks_of[op] = tasks_of[doing]
    buffers, kept = _buffers(graph, tasks_of) if memory else ((), 0)
    return Plan(tasks=tuple(tasks), mode=mode, buffers=buffers, kept_bytes=kept)


def op_buffers(graph: OpGraph) -> tuple[list[list[int]], list[int], int]:
    """For each op with kernels the numbers of the buffers it uses, ascending; the bytes of each buffer; bytes kept.

    A buffer is a storage that ops with kernels use and that does not live throughout. What an op covers counts as its.
    """
    trace, covered = graph.trace, graph.covered
    kept = kept_storages(trace)
    storage_of = [tensor.storage for tensor in trace.tensors]

    def storages_of(op: Op) -> set[int]:
        return {storage_of[tensor] for tensor in (*op.reads, *op.writes)} - kept

    used_by = [tuple(storages_of(op)) if tasks else () for op, tasks in zip(trace.ops, graph.tasks, strict=True)]
    for index, doing in covered.items():
        if graph.tasks[doing]:
            used_by[doing] = tuple(storages_of(trace.ops[index]).union(used_by[doing]))
    used = sorted(set().union(*used_by))
    number_of = {storage: number for number, storage in enumerate(used)}
    return (
        [sorted([number_of[storage] for storage in storages]) for storages in used_by],
        [trace.storages[storage].bytes for storage in used],
        sum(trace.storages[storage].bytes for storage in kept),
    )


def _buffers(graph: OpGraph, tasks_of: dict[int, list[int]]) -> tuple[tuple[Buffer, ...], int]:
    """Storages as buffers of the plan, and the bytes of those that live throughout."""
    buffers_of, sizes, kept_bytes = op_buffers(graph)
    users: list[list[int]] = [[] for _ in sizes]
    for op, numbers in enumerate(buffers_of):
        for number in numbers:
            users[number] += tasks_of.get(op, ())
    buffers = tuple(Buffer(size, tuple(sorted(tasks))) for size, tasks in zip(sizes, users, strict=True) if tasks)
    return buffers, kept_bytes
