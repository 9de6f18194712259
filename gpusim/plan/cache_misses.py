"""L2 cache misses of a schedule beyond those of one stream, from the memory touched on each stream.

The allocator of each stream is simulated, so every tensor has an address. A least recently used cache then processes
the accesses of ops in launch order, over two consecutive steps; the second one counts.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from typing import Final, NamedTuple

import msgspec

from gpusim.formats.trace import Op
from gpusim.plan.allocator import Block, CachingAllocator, rounded
from gpusim.plan.graph import OpGraph
from gpusim.plan.schedule import Schedule
from gpusim.plan.sync import StepSync, kept_storages, plan_sync_of, storages_touched
from gpusim.plan.tasks import Task
from gpusim.plan.traffic import LAYOUT, SPLIT_SUM, TRANSFORM, family
from gpusim.rules.l2_cache import launch_lost_ns, lost_ns, usable_bytes
from gpusim.trace.dependencies import reads_writes_storages

#: Granularity of the cache. Its real lines are far shorter, but adjacent memory is touched together.
CHUNK_BYTES: Final = 64 << 10
#: Bits of an address range: storages that live throughout have the first, and each stream has its own.
STREAM_BITS: Final = 40
#: Families of kernels that write a copy of a tensor into a workspace.
COPYING: Final = (LAYOUT, TRANSFORM, SPLIT_SUM)
#: Number of warps assumed for a memory operation.
MEMORY_NODE_WARPS: Final = 1 << 10
WARP_THREADS: Final = 32
#: Ops with misses of all schedules of a step whose misses are kept: reports ask for the same schedule several times.
MOST_KNOWN_OPS: Final = 200_000


class Miss(NamedTuple):
    """Bytes that an op reads from DRAM, and bytes that it evicts from the cache to DRAM."""

    read_bytes: int
    written_bytes: int


NO_MISS: Final = Miss(0, 0)


class Missed(NamedTuple):
    """Misses of each op of a schedule that has any, and the memory that a replay touches, in bytes."""

    by_op: dict[int, Miss]
    touched_bytes: int


Touch = tuple[range, bool]
"""Chunks of memory, with True if the op reads them."""

Asked = tuple[Sequence[int], Sequence[int], int]
"""Order and streams of a schedule, and chunks of the cache."""


@dataclass(frozen=True, slots=True)
class _Step:
    """Data shared by all schedules of a step."""

    sync: StepSync
    accesses: Sequence[tuple[tuple[int, int, bool], ...]]
    """Of each op: storage, size in bytes, and True if the op reads it."""
    mentioned: Sequence[frozenset[int]]
    workspaces: Sequence[int]
    """Workspace of each op, in bytes."""
    lasting: dict[int, int]
    """Addresses of storages that live throughout."""
    missed: dict[Asked, Missed]
    """Misses of the newest schedules."""

    @classmethod
    def of(cls, graph: OpGraph) -> _Step:
        trace = graph.trace
        addresses: dict[int, int] = {}
        end = 0
        for storage in sorted(kept_storages(trace)):
            addresses[storage] = end
            end += rounded(max(1, trace.storages[storage].bytes))
        accesses, workspaces = [], []
        for op, (reads, writes) in zip(trace.ops, reads_writes_storages(trace), strict=True):
            sizes = {storage: trace.storages[storage].bytes for storage in reads | writes}
            accesses.append(tuple((storage, size, storage in reads) for storage, size in sizes.items()))
            workspaces.append(workspace_bytes(op, sizes.values()))
        sync = StepSync.of(trace, graph.preds, graph.covered)
        return cls(sync, accesses, storages_touched(trace), workspaces, addresses, {})


def lost_times_ns(graph: OpGraph, schedule: Schedule) -> dict[int, tuple[float, ...]]:
    """Return the time lost to the cache by each task, for each op that loses any, in ns.

    Empty on one stream, and for a step that does not fit the cache on one stream: its kernels were timed with their
    misses. `graph` has the kernels of the schedule as its captured ones.
    """
    memory = graph.hardware.memory
    if schedule.stream_count < 2 or not graph.predicts_misses:
        return {}
    step = _step_of(graph)
    chunks = int(usable_bytes(memory)) // CHUNK_BYTES
    before = _misses_of(graph, step, Schedule.in_recorded_order(len(graph)), chunks).by_op
    missed = _misses_of(graph, step, schedule, chunks)
    launch_ns = launch_lost_ns(memory, missed.touched_bytes)
    lost = {op: (launch_ns,) * len(tasks) for op, tasks in enumerate(graph.tasks) if launch_ns and tasks}
    for op, miss in missed.by_op.items():
        base = before.get(op, NO_MISS)
        read_bytes = max(0, miss.read_bytes - base.read_bytes)
        written_bytes = max(0, miss.written_bytes - base.written_bytes)
        total_ns = sum(task.dur_ns for task in graph.tasks[op])
        if (read_bytes or written_bytes) and total_ns:
            lost[op] = tuple(
                launch_ns + lost_ns(memory, read_bytes, written_bytes, _warps(task, graph)) * task.dur_ns / total_ns
                for task in graph.tasks[op]
            )
    return lost


def _step_of(graph: OpGraph) -> _Step:
    """Return the shared data of a graph's step, that of the graph it was made from if dependencies are the same."""
    step: _Step | None = graph.encoded.get("touched memory")
    if step is None:
        alike: OpGraph | None = graph.encoded.get("alike")
        step = _step_of(alike) if alike is not None and alike.preds is graph.preds else _Step.of(graph)
        graph.encoded["touched memory"] = step
    return step


def _misses_of(graph: OpGraph, step: _Step, schedule: Schedule, chunks: int) -> Missed:
    """Return the misses of a schedule."""
    asked = (schedule.order, schedule.streams, chunks)
    missed = step.missed.pop(asked, None)
    if missed is None:
        touches = touched(graph, step, schedule)
        of_ops = misses(touches, schedule.order, chunks)
        by_op = {op: miss for op, miss in of_ops.items() if miss != NO_MISS}
        missed = Missed(by_op, touched_bytes(touches.values()))
    step.missed[asked] = missed
    for old in list(step.missed)[:-1]:
        if sum(len(each.by_op) for each in list(step.missed.values())) <= MOST_KNOWN_OPS:  # other threads may use it
            break
        step.missed.pop(old, None)
    return missed


def slower_by_misses(task: Task, missed_ns: float) -> Task:
    """Return a task that loses this time to misses."""
    return msgspec.structs.replace(task, dur_ns=task.dur_ns + missed_ns, missed_ns=missed_ns)


def touched(graph: OpGraph, step: _Step, schedule: Schedule) -> dict[int, list[Touch]]:
    """Return the accesses of each op with work, in the memory given by the allocator of its stream."""
    trace = graph.trace
    sync = plan_sync_of(step.sync, schedule.order, schedule.streams)
    addresses = dict(step.lasting)
    pools: dict[int, CachingAllocator] = {}
    blocks: dict[int, tuple[CachingAllocator, Block | None]] = {}
    result: dict[int, list[Touch]] = {}
    for position, op in enumerate(schedule.order):
        for storage in sync.releases[position]:
            if storage in blocks:
                pool, block = blocks.pop(storage)
                pool.release(block)
        if not step.sync.works[op]:
            continue
        stream = schedule.streams[op]
        pool, base = pools.setdefault(stream, CachingAllocator()), (stream + 1) << STREAM_BITS
        for storage in step.mentioned[op]:
            if storage not in step.lasting and storage not in blocks:
                block = pool.allocate(trace.storages[storage].bytes)
                blocks[storage] = (pool, block)
                if block is not None:
                    addresses[storage] = base + block.address
        touches = [(_chunks(addresses[storage], size), read) for storage, size, read in step.accesses[op] if size]
        workspace = pool.allocate(step.workspaces[op])
        if workspace is not None:
            touches.append((_chunks(base + workspace.address, workspace.bytes), False))
            pool.release(workspace)
        result[op] = touches
    return result


def workspace_bytes(op: Op, sizes: Collection[int]) -> int:
    """Return the workspace of an op with tensors of these sizes; estimated if its trace has none.

    Kernels that change a layout or transform tiles write a copy of a tensor, of the largest ones if in doubt.
    """
    copies = sum(1 for kernel in op.kernels if family(kernel, True) in COPYING)
    return op.workspace_bytes or sum(sorted(sizes, reverse=True)[:copies])


def misses(touches: dict[int, list[Touch]], order: Iterable[int], chunks: int) -> dict[int, Miss]:
    """Return the misses of each op in the second of two consecutive steps, with a cache of `chunks` chunks."""
    cache: dict[int, bool] = {}  # True if changed; least recently used first
    working = [op for op in order if op in touches]
    result: dict[int, Miss] = {}
    for _ in range(2):
        for op in working:
            read = written = 0
            for touch, reads in touches[op]:
                for chunk in touch:
                    changed = cache.pop(chunk, None)
                    if changed is None:
                        read += reads
                        if len(cache) >= chunks:
                            written += cache.pop(next(iter(cache)))
                    cache[chunk] = bool(changed) or not reads
            result[op] = Miss(read * CHUNK_BYTES, written * CHUNK_BYTES)
    return result


def touched_bytes(touches: Iterable[list[Touch]]) -> int:
    """Return the size of all memory touched, in bytes."""
    return len({chunk for each in touches for touch, _ in each for chunk in touch}) * CHUNK_BYTES


def _chunks(address: int, size_bytes: int) -> range:
    return range(address // CHUNK_BYTES, (address + size_bytes - 1) // CHUNK_BYTES + 1)


def _warps(task: Task, graph: OpGraph) -> float:
    """Return the resident warps of a task alone on the GPU."""
    if not task.blocks:
        return MEMORY_NODE_WARPS
    resident = min(task.blocks, graph.hardware.limits.sms * task.blocks_per_sm)
    return max(1.0, resident * task.footprint.threads / WARP_THREADS)
