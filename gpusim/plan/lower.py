"""Lowering: op graph + schedule -> plan."""

from __future__ import annotations

from itertools import chain, pairwise
from operator import attrgetter
from typing import NamedTuple

import msgspec
import numpy as np
import numpy.typing as npt

from gpusim.plan.cache_misses import lost_times_ns, slower_by_misses
from gpusim.plan.graph import OpGraph
from gpusim.plan.partitions import in_partition, lay_out
from gpusim.plan.schedule import Schedule
from gpusim.plan.sync import kept_storages
from gpusim.plan.tasks import Buffer, LaunchMode, Plan, Task


def lower(graph: OpGraph, schedule: Schedule, mode: LaunchMode = "graph", *, memory: bool = True) -> Plan:
    """Return the plan of a schedule, in one CUDA graph or kernel by kernel.

    Ops without kernels (views) take no GPU time and pass their dependencies on. Kernels of one op follow each other.
    Without `memory` the plan has no buffers, for callers that do not need its memory.
    The schedule must be legal (`Schedule.check`). Raises `PlanError` for impossible partitions.
    """
    graph = graph.choosing(schedule.variants)
    lost_ns = lost_times_ns(graph, schedule)
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
            if op in lost_ns:
                task = slower_by_misses(task, lost_ns[op][number])
            deps = waits if number == 0 else (len(tasks) - 1,)
            if partitions:
                task = in_partition(task, partition, layout.sms[partition], graph.hardware)
            queue, device = streams[op], task.device  # the order of a queue implies dependencies within it
            deps = tuple(d for d in deps if tasks[d].queue != queue or tasks[d].device != device)
            tasks.append(msgspec.structs.replace(task, queue=queue, deps=deps, host_ns=share))
            tasks_of.setdefault(op, []).append(len(tasks) - 1)
        host_ns = 0.0
        ends[op] = (len(tasks) - 1,)
    for op, doing in graph.covered.items():  # its storages are live while that op runs
        tasks_of[op] = tasks_of[doing]
    buffers, kept = _buffers(graph, tasks_of) if memory else ((), 0)
    return Plan(tasks=tuple(tasks), mode=mode, buffers=buffers, kept_bytes=kept)


class OpBuffers(NamedTuple):
    """Buffers of a step: one per storage that ops with kernels use and that does not live throughout.

    The buffers of an op are `numbers[first[op] : first[op + 1]]`, ascending; those of ops fused into it are included.
    """

    first: npt.NDArray[np.int64]
    numbers: npt.NDArray[np.int64]
    sizes: list[int]
    """Size of each buffer, in bytes."""
    kept_bytes: int
    """Bytes live throughout the step."""

    @classmethod
    def of(cls, graph: OpGraph) -> OpBuffers:
        """Return the buffers of a step, as arrays since a step may have a million ops."""
        trace, ops = graph.trace, len(graph)
        doer = np.arange(ops)
        if graph.covered:
            doer[list(graph.covered)] = list(graph.covered.values())
        works = np.fromiter(map(bool, graph.tasks), np.bool_, ops)
        kept = kept_storages(trace)
        is_kept = np.zeros(len(trace.storages), np.bool_)
        is_kept[list(kept)] = True
        storage_of = np.fromiter(map(attrgetter("storage"), trace.tensors), np.int64, len(trace.tensors))
        uses = []
        for touched in (list(map(attrgetter(name), trace.ops)) for name in ("reads", "writes")):
            counts = np.fromiter(map(len, touched), np.int64, ops)
            storages = storage_of[np.fromiter(chain.from_iterable(touched), np.int64, int(counts.sum()))]
            by = np.repeat(doer, counts)
            counted = works[by] & ~is_kept[storages]
            uses.append(by[counted] * len(trace.storages) + storages[counted])
        use = np.sort(np.concatenate(uses), kind="stable")  # both are nearly sorted
        use = use[np.append(np.ones(min(1, len(use)), np.bool_), use[1:] != use[:-1])]  # drop duplicates
        by, storages = np.divmod(use, len(trace.storages))
        is_used = np.zeros(len(trace.storages), np.bool_)
        is_used[storages] = True
        return cls(
            np.searchsorted(by, np.arange(ops + 1)),
            (np.cumsum(is_used) - 1)[storages],
            [trace.storages[storage].bytes for storage in np.flatnonzero(is_used).tolist()],
            sum(trace.storages[storage].bytes for storage in kept),
        )

    def of_ops(self, ops: npt.NDArray[np.int64]) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
        """Return the number of buffers of each of some ops, and their buffers, concatenated."""
        counts = (self.first[1:] - self.first[:-1])[ops]
        ends = np.cumsum(counts)
        places = np.repeat(self.first[ops] - (ends - counts), counts) + np.arange(len(ops) and ends[-1])
        return counts, self.numbers[places]


def _buffers(graph: OpGraph, tasks_of: dict[int, list[int]]) -> tuple[tuple[Buffer, ...], int]:
    """Return the buffers of a plan, and the bytes of storages that live throughout."""
    buffers = OpBuffers.of(graph)
    users: list[list[int]] = [[] for _ in buffers.sizes]
    first, numbers = buffers.first.tolist(), buffers.numbers.tolist()
    for op, (begin, end) in enumerate(pairwise(first)):
        for number in numbers[begin:end]:
            users[number] += tasks_of.get(op, ())
    placed = (Buffer(size, tuple(sorted(tasks))) for size, tasks in zip(buffers.sizes, users, strict=True) if tasks)
    return tuple(placed), buffers.kept_bytes
