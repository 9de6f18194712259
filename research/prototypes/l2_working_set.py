"""Does a schedule still fit the L2 cache? Errors with and without a rule for it: python THIS_FILE [RESULTS ...].

The allocator of each stream is played through, so that every tensor has an address. A least recently used cache then
holds what the ops touch, in simulated order of their starts, for two steps in a row. Bytes that the second step reads
from DRAM, or writes back to it, beyond those of the recorded order on one stream lengthen their op. Steps of more than
3 ms are left out: the cache is far too small for them in any order.
"""

from __future__ import annotations

import re
import sys
from collections import OrderedDict
from collections.abc import Iterable, Mapping
from dataclasses import replace
from pathlib import Path

import msgspec
import numpy as np

from gpusim.engine.fast import FastEngine
from gpusim.formats.results import read_results
from gpusim.plan.allocator import Block, CachingAllocator, rounded
from gpusim.plan.graph import OpGraph
from gpusim.plan.lower import lower
from gpusim.plan.schedule import Schedule
from gpusim.plan.sync import kept_storages, plan_sync, storages_touched
from gpusim.trace.dependencies import reads_writes_storages
from gpusim.trace.store import read_trace
from gpusim.validation.again import trace_files
from gpusim.validation.chosen import hardware_of
from gpusim.validation.replayed import SUFFIX, read_replayed

RESULTS = Path(__file__).parents[2] / "validate" / "results"
DEFAULT = ("kinds_h200_20261123", "blind_again_h200_20261123", "blind_h200_20261122", "loop_h200_20261121")
LONGEST_NS = 3_000_000
#: Kernels that write a copy of a tensor into a workspace, whose size traces of these recipes do not have.
WORKSPACE = re.compile(r"nchwToNhwc|nhwcToNchw|tensorTransform|AddPadding|winograd|splitK|fft")
CHUNK_BYTES = 32 << 10
#: Address ranges of streams, and of what lives throughout.
STREAM_BITS, LASTING = 40, 1 << 50

Touch = tuple[int, int, bool]
"""Address, bytes, and whether the op reads them."""


def touched(graph: OpGraph, schedule: Schedule) -> dict[int, tuple[Touch, ...]]:
    """What each op of a schedule touches, in launch order."""
    trace = graph.trace
    accesses, mentioned, lasting = list(reads_writes_storages(trace)), storages_touched(trace), kept_storages(trace)
    sync = plan_sync(trace, graph.preds, schedule.order, schedule.streams)
    address: dict[int, int] = {}
    end = LASTING
    for storage in sorted(lasting):
        address[storage] = end
        end += rounded(max(1, trace.storages[storage].bytes))
    pools: dict[int, CachingAllocator] = {}
    blocks: dict[int, tuple[CachingAllocator, Block | None]] = {}
    result: dict[int, tuple[Touch, ...]] = {}
    for position, op in enumerate(schedule.order):
        stream = schedule.streams[op]
        pool = pools.setdefault(stream, CachingAllocator())
        for storage in sync.releases[position]:
            if storage in blocks:
                owner, block = blocks.pop(storage)
                owner.release(block)
        if not trace.ops[op].kernels and not trace.ops[op].writes:
            continue
        for storage in mentioned[op]:
            if storage not in lasting and storage not in blocks:
                block = pool.allocate(trace.storages[storage].bytes)
                blocks[storage] = (pool, block)
                address[storage] = (stream << STREAM_BITS) + block.address if block else -1
        reads, writes = accesses[op]
        sizes = sorted((trace.storages[storage].bytes for storage in reads | writes), reverse=True)
        copies = sum(1 for kernel in trace.ops[op].kernels if WORKSPACE.search(kernel.name))
        workspace = pool.allocate(sum(sizes[:copies]))
        touches = [(address[s], trace.storages[s].bytes, s in reads) for s in reads | writes if address[s] >= 0]
        if workspace is not None:
            touches.append(((stream << STREAM_BITS) + workspace.address, workspace.bytes, False))
            pool.release(workspace)
        result[op] = tuple(touches)
    return result


def traffic(touches: Mapping[int, tuple[Touch, ...]], order: Iterable[int], cache_bytes: int) -> dict[int, np.ndarray]:
    """DRAM bytes that each op reads, and has written back, in the second of two steps in a row."""
    order = list(order)
    cache: OrderedDict[int, bool] = OrderedDict()
    result: dict[int, np.ndarray] = {}
    for step in range(2):
        for op in order:
            moved = np.zeros(2)
            for begin, size, reads in touches[op]:
                for chunk in range(begin // CHUNK_BYTES, (begin + size - 1) // CHUNK_BYTES + 1):
                    dirty = cache.pop(chunk, None)
                    if dirty is None:
                        moved[0] += CHUNK_BYTES if reads else 0
                        if len(cache) >= cache_bytes // CHUNK_BYTES:
                            moved[1] += CHUNK_BYTES if cache.popitem(last=False)[1] else 0
                    cache[chunk] = bool(dirty) or not reads
            if step:
                result[op] = moved
    return result


def errors(names: Iterable[str], cache_bytes: int, latency_ns: float) -> dict[str, list[tuple[float, float]]]:
    """For each step the errors of its schedules, without the rule and with it; relative to the sequential graph."""
    engine = FastEngine()
    graphs: dict[str, OpGraph] = {}
    alone: dict[str, dict[int, np.ndarray]] = {}
    result: dict[str, list[tuple[float, float]]] = {}
    for name in names:
        path = RESULTS / f"{name}.json"
        files = trace_files(path)
        for case, replayed in zip(read_results(path).cases, read_replayed(RESULTS / f"{name}{SUFFIX}"), strict=True):
            schedule = replayed.schedule
            if case.policy == "sequential" or schedule.has_variants or case.sequential_ns > LONGEST_NS:
                continue
            if case.trace not in graphs:
                trace = read_trace(files[case.trace])
                graphs[case.trace] = graph = OpGraph.build(trace, hardware_of(trace))
                recorded = touched(graph, Schedule.in_recorded_order(len(graph)))
                alone[case.trace] = traffic(recorded, recorded, cache_bytes)
            graph = graphs[case.trace]
            plan = lower(graph, schedule)
            timeline = engine.run(plan, graph.hardware)
            start: dict[int, int] = {}
            total: dict[int, float] = {}
            for task, begin in zip(plan.tasks, timeline.start_ns, strict=True):
                start[task.op] = min(start.get(task.op, begin), begin)
                total[task.op] = total.get(task.op, 0.0) + task.dur_ns
            touches = touched(graph, schedule)
            extra = traffic(touches, sorted(touches, key=lambda op: start.get(op, -1)), cache_bytes)
            tasks = []
            for task in plan.tasks:
                read, written = extra[task.op] - alone[case.trace][task.op] if task.op in extra else (0.0, 0.0)
                bandwidth, sms = graph.hardware.memory.dram_bytes_per_ns, graph.hardware.limits.sms
                share = min(1.0, (task.blocks or sms) / sms)
                more_ns = read / (bandwidth * share) + written / bandwidth + float(np.sign(read)) * latency_ns
                factor = max(0.5, 1 + more_ns / total[task.op]) if total[task.op] else 1.0
                tasks.append(msgspec.structs.replace(task, dur_ns=task.dur_ns * factor))
            with_rule = engine.run(replace(plan, tasks=tuple(tasks)), graph.hardware)
            measured_ns = case.measured_ns * case.predicted_sequential_ns / case.sequential_ns
            pair = (timeline.makespan_ns / measured_ns - 1, with_rule.makespan_ns / measured_ns - 1)
            result.setdefault(case.trace, []).append(pair)
    return result


def main() -> None:
    """Print errors for several sizes of the cache and times of a first miss."""
    names = sys.argv[1:] or DEFAULT
    for cache_mib, latency_ns in ((36, 0.0), (36, 300.0), (36, 600.0), (40, 600.0)):
        by_step = errors(names, cache_mib << 20, latency_ns)
        everything = np.array([pair for pairs in by_step.values() for pair in pairs])
        print(f"cache {cache_mib} MiB, {latency_ns:.0f} ns for a first miss")
        for title, column in (("without", everything[:, 0]), ("with", everything[:, 1])):
            size = np.abs(column)
            median, within, bias = np.median(size), np.quantile(size, 0.95), column.mean()
            print(
                f"  {title:8} median {median:.1%}, 95 % within {within:.1%}, largest {size.max():.1%}, bias {bias:+.1%}"
            )
        for trace, pairs in by_step.items():
            without, with_rule = np.array(pairs).mean(axis=0)
            print(f"    {trace:34} bias {without:+.1%} -> {with_rule:+.1%}")


if __name__ == "__main__":
    main()
