"""L2 cache misses of a schedule beyond those of one stream, from the memory touched on each stream.

The allocator of each stream is simulated, so every tensor has an address. A least recently used cache then processes
the accesses of ops in launch order, over two consecutive steps; the second one counts.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from typing import Final, NamedTuple

import msgspec

from gpusim.formats.trace import Op, Trace
from gpusim.plan.allocator import Block, CachingAllocator, rounded
from gpusim.plan.graph import OpGraph
from gpusim.plan.schedule import Schedule
from gpusim.plan.sync import kept_storages, plan_sync, storages_touched
from gpusim.plan.tasks import Task
from gpusim.plan.traffic import LAYOUT, SPLIT_SUM, TRANSFORM, family
from gpusim.rules.l2_cache import lost_ns, usable_bytes
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


class Miss(NamedTuple):
    """Bytes that an op reads from DRAM, and bytes that it evicts from the cache to DRAM."""

    read_bytes: int
    written_bytes: int


Touch = tuple[range, bool]
"""Chunks of memory, with True if the op reads them."""


@dataclass(frozen=True, slots=True)
class _Step:
    """Data shared by all schedules of a step."""

    accesses: Sequence[tuple[frozenset[int], frozenset[int]]]
    mentioned: Sequence[frozenset[int]]
    lasting: dict[int, int]
    """Addresses of storages that live throughout."""

    @classmethod
    def of(cls, trace: Trace) -> _Step:
        addresses: dict[int, int] = {}
        end = 0
        for storage in sorted(kept_storages(trace)):
            addresses[storage] = end
            end += rounded(max(1, trace.storages[storage].bytes))
        return cls(list(reads_writes_storages(trace)), storages_touched(trace), addresses)


def lost_times_ns(graph: OpGraph, schedule: Schedule) -> dict[int, tuple[float, ...]]:
    """Return the time lost to the cache by each task, for each op that loses any, in ns.

    Empty on one stream, and for a step that does not fit the cache on one stream: its kernels were timed with their
    misses. `graph` has the kernels of the schedule as its captured ones.
    """
    memory = graph.hardware.memory
    if schedule.stream_count < 2 or memory.l2_bytes_per_ns == 0.0 or not graph.may_lose_cache:
        return {}
    step: _Step = graph.encoded.get("touched memory") or _Step.of(graph.trace)
    chunks = int(usable_bytes(memory)) // CHUNK_BYTES
    before = graph.encoded.get("misses of one stream")
    if before is None:
        alone = Schedule.in_recorded_order(len(graph))
        before = misses(touched(graph, step, alone), alone.order, chunks)
        graph.encoded.update({"touched memory": step, "misses of one stream": before})
    now = misses(touched(graph, step, schedule), schedule.order, chunks)
    lost: dict[int, tuple[float, ...]] = {}
    for op, miss in now.items():
        base = before.get(op, Miss(0, 0))
        read_bytes = max(0, miss.read_bytes - base.read_bytes)
        written_bytes = max(0, miss.written_bytes - base.written_bytes)
        total_ns = sum(task.dur_ns for task in graph.tasks[op])
        if (read_bytes or written_bytes) and total_ns:
            lost[op] = tuple(
                lost_ns(memory, read_bytes, written_bytes, _warps(task, graph)) * task.dur_ns / total_ns
                for task in graph.tasks[op]
            )
    return lost


def slower_by_misses(task: Task, missed_ns: float) -> Task:
    """Return a task that loses this time to misses."""
    return msgspec.structs.replace(task, dur_ns=task.dur_ns + missed_ns, missed_ns=missed_ns)


def touched(graph: OpGraph, step: _Step, schedule: Schedule) -> dict[int, list[Touch]]:
    """Return the accesses of each op with work, in the memory given by the allocator of its stream."""
    trace = graph.trace
    sync = plan_sync(trace, graph.preds, schedule.order, schedule.streams, graph.covered)
    addresses = dict(step.lasting)
    pools: dict[int, CachingAllocator] = {}
    blocks: dict[int, tuple[CachingAllocator, Block | None]] = {}
    result: dict[int, list[Touch]] = {}
    for position, op in enumerate(schedule.order):
        for storage in sync.releases[position]:
            if storage in blocks:
                pool, block = blocks.pop(storage)
                pool.release(block)
        if not trace.ops[op].kernels and not trace.ops[op].writes:
            continue
        stream = schedule.streams[op]
        pool, base = pools.setdefault(stream, CachingAllocator()), (stream + 1) << STREAM_BITS
        for storage in step.mentioned[op]:
            if storage not in step.lasting and storage not in blocks:
                block = pool.allocate(trace.storages[storage].bytes)
                blocks[storage] = (pool, block)
                if block is not None:
                    addresses[storage] = base + block.address
        reads, writes = step.accesses[op]
        sizes = {storage: trace.storages[storage].bytes for storage in reads | writes}
        touches = [(_chunks(addresses[s], size), s in reads) for s, size in sizes.items() if size]
        workspace = pool.allocate(workspace_bytes(trace.ops[op], sizes.values()))
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


def _chunks(address: int, size_bytes: int) -> range:
    return range(address // CHUNK_BYTES, (address + size_bytes - 1) // CHUNK_BYTES + 1)


def _warps(task: Task, graph: OpGraph) -> float:
    """Return the resident warps of a task alone on the GPU."""
    if not task.blocks:
        return MEMORY_NODE_WARPS
    resident = min(task.blocks, graph.hardware.limits.sms * task.blocks_per_sm)
    return max(1.0, resident * task.footprint.threads / WARP_THREADS)
