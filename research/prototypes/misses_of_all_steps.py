"""Two candidate rules for misses of the L2 cache: of reads in all steps, and of the launches of idle streams.

    python research/prototypes/misses_of_all_steps.py FILE ...

- Reads: the rule of `gpusim.rules.l2_cache` also for steps that do not fit the cache on one stream, for more and for
  fewer misses than on one stream. A kernel misses no more than its warps could have read from the cache in its time.
- Launches: a kernel that waits for another stream starts `IDLE_NS` later where other streams have touched more than the
  whole cache since its own stream's last kernel, or since the start.

FILE is a results file, or timelines written by `concurrent_timelines.py`. For timelines, prints what kernels of serial
graphs, without company, take and wait beyond their sequential graph, beside both rules. For results, prints errors with
neither, each, and both rules, of two halves of the networks by the alphabet in turns, and of networks with a fitted
constant. All steps weigh the same in *mean*.
"""

from __future__ import annotations

import gzip
import json
import statistics
import sys
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import msgspec
import numpy as np
from kernel_by_kernel import Step, graph_of, linear

import gpusim.plan.lower as lowering
from gpusim.engine.fast import FastEngine
from gpusim.formats.hardware import Memory
from gpusim.plan import cache_misses
from gpusim.plan.cache_misses import CHUNK_BYTES, NO_MISS, Miss
from gpusim.plan.graph import OpGraph
from gpusim.plan.schedule import Schedule
from gpusim.plan.tasks import Task
from gpusim.rules.l2_cache import launch_lost_ns, lost_ns, usable_bytes
from gpusim.validation.again import replayed_schedules

Array = Any
ENGINE = FastEngine()
#: Mean of the first half's serial graphs where others touched more than the cache (1,247 ns, 5 kernels), to 100 ns.
IDLE_NS = 1200.0
#: Most of its time that a kernel gains by fewer misses.
MOST_GAIN = 0.5
WARPS, WINDOWS_MB = (0, 300, 912, 10**9), (0, 8, 16, 38, 63, 10**9)


def missed(graph: OpGraph, schedule: Schedule) -> dict[int, Miss]:
    """Return the misses of each op with any."""
    chunks = int(usable_bytes(graph.hardware.memory)) // CHUNK_BYTES
    return cache_misses._misses_of(graph, cache_misses._step_of(graph), schedule, chunks).by_op


def read_lost_ns(memory: Memory, task: Task, more_bytes: float, warps: float) -> float:
    """Return the time that a kernel loses to more misses, or gains by fewer, in ns."""
    most_bytes = task.dur_ns * min(memory.l2_bytes_per_ns, warps * memory.warp_l2_bytes_per_ns)
    time_ns = lost_ns(memory, min(abs(more_bytes), most_bytes), 0.0, warps)
    return time_ns if more_bytes > 0 else -min(time_ns, MOST_GAIN * task.dur_ns)


def lost_times_ns(graph: OpGraph, schedule: Schedule) -> dict[int, tuple[float, ...]]:
    """Return the time lost by each task of an op, in place of `gpusim.plan.cache_misses.lost_times_ns`."""
    memory = graph.hardware.memory
    if schedule.stream_count < 2 or not memory.l2_bytes_per_ns:
        return {}
    before, now = missed(graph, Schedule.in_recorded_order(len(graph))), missed(graph, schedule)
    launch_ns = 0.0
    if graph.predicts_misses:
        step = cache_misses._step_of(graph)
        launch_ns = launch_lost_ns(
            memory, cache_misses.touched_bytes(cache_misses.touched(graph, step, schedule).values())
        )
    lost = {op: (launch_ns,) * len(tasks) for op, tasks in enumerate(graph.tasks) if launch_ns and tasks}
    for op in {*before, *now}:
        total_ns = sum(task.dur_ns for task in graph.tasks[op])
        more, base = now.get(op, NO_MISS), before.get(op, NO_MISS)
        written = max(0, more.written_bytes - base.written_bytes) if graph.predicts_misses else 0
        if total_ns:
            lost[op] = tuple(
                launch_ns
                + written / memory.dram_bytes_per_ns * task.dur_ns / total_ns
                + read_lost_ns(
                    memory,
                    task,
                    (more.read_bytes - base.read_bytes) * task.dur_ns / total_ns,
                    cache_misses._warps(task, graph),
                )
                for task in graph.tasks[op]
            )
    return lost


def windows(graph: OpGraph, schedule: Schedule) -> dict[int, int]:
    """Return the bytes touched between the last op of its stream, or the start, and each op, in launch order."""
    touches = cache_misses.touched(graph, cache_misses._step_of(graph), schedule)
    order = [op for op in schedule.order if op in touches]
    sums, last, before = [0] * (len(order) + 1), dict[int, int](), dict[int, int]()
    found, total = {}, 0

    def add(place: int, chunks: int) -> None:
        place += 1
        while place < len(sums):
            sums[place] += chunks
            place += place & -place

    for place, op in enumerate(order):
        first, older = before.get(schedule.streams[op], 0), 0
        while first:
            older += sums[first]
            first -= first & -first
        found[op] = (total - older) * CHUNK_BYTES
        chunks = {chunk for touch, _ in touches[op] for chunk in touch}
        for chunk in chunks:
            if chunk in last:
                add(last[chunk], -1)
            else:
                total += 1
            last[chunk] = place
        add(place, len(chunks))
        before[schedule.streams[op]] = place
    return found


def predicted_ns(graph: OpGraph, schedule: Schedule) -> list[int]:
    """Return the makespan with neither, with reads, with launches, and with both."""
    found = {}
    since = windows(graph.choosing(schedule.variants), schedule)
    for reads in (False, True):
        with patch.object(lowering, "lost_times_ns", lost_times_ns if reads else cache_misses.lost_times_ns):
            plan = lowering.lower(graph, schedule, memory=False)
        idle = [
            msgspec.structs.replace(task, extra_ns=task.extra_ns + IDLE_NS)
            if task.deps and task.kernel == 0 and since[task.op] > graph.hardware.memory.l2_bytes
            else task
            for task in plan.tasks
        ]
        found[reads, False] = ENGINE.run(plan, graph.hardware).makespan_ns
        found[reads, True] = ENGINE.run(replace(plan, tasks=tuple(idle)), graph.hardware).makespan_ns
    return [found[False, False], found[True, False], found[False, True], found[True, True]]


def cells(rows: list[tuple[str, Array]]) -> str:
    """Return mean over steps, median, 95 % within, largest and bias of each column."""
    steps = np.array([step for step, _ in rows])
    every = np.array([errors for _, errors in rows])
    found = []
    for errors in every.T:
        mean = np.mean([np.abs(errors[steps == step]).mean() for step in set(steps)])
        sizes = np.sort(np.abs(errors))
        most = sizes[min(len(sizes) - 1, int(np.ceil(0.95 * len(sizes))) - 1)]
        found.append(
            f"{100 * mean:.2f}, {100 * np.median(sizes):.1f}, {100 * most:.1f}, "
            f"{100 * sizes[-1]:.1f}, {100 * errors.mean():+.1f} %"
        )
    return f"{len(rows)} | " + " | ".join(found)


def of_results(files: Iterable[Path]) -> None:
    """Print errors of stored schedules."""
    rows: defaultdict[str, list[tuple[str, Array]]] = defaultdict(list)
    sets: defaultdict[str, list[tuple[str, Array]]] = defaultdict(list)
    kinds: defaultdict[str, list[tuple[str, Array]]] = defaultdict(list)
    families: dict[str, str] = {}
    cases = []
    for file in files:
        for case, graph, schedule in replayed_schedules(file):
            if case.streams < 2 or schedule.has_variants or schedule.partitions:
                continue
            family = case.network.partition("_")[0] if graph.less_known else case.network
            errors = np.array(predicted_ns(graph, schedule)) / case.measured_ns - 1
            cases.append((file.stem, family, case, graph.less_known, errors))
            families.setdefault(family, "")
    for place, family in enumerate(sorted(families)):
        families[family] = "first" if place % 2 == 0 else "second"
    for file_name, family, case, less_known, errors in cases:
        row = (case.trace, errors)
        sets[file_name].append(row)
        if case.fitted:
            rows["fitted: " + case.trace].append(row)
        else:
            kind = "other kinds" if less_known else "mostly convolutional"
            rows[f"{families[family]} half, {kind}"].append(row)
            rows[f"all, {kind}"].append(row)
            kinds[family if less_known else kind].append(row)
    print("mean, median, 95 % within, largest, bias\n| | schedules | neither | reads | launches | both |")
    for each in (rows, kinds, sets):
        for name in sorted(each):
            print(f"| {name} | {cells(each[name])} |", flush=True)


def of_timelines(file: Path) -> None:
    """Print what kernels of serial graphs lose, measured and by the rules."""
    for found in json.loads(gzip.decompress(file.read_bytes()))["steps"]:
        graph, number = graph_of(found["trace"]), [0]
        for op in graph.trace.ops:
            number.append(number[-1] + len(op.kernels))
        step = Step(found, graph, number)
        alone = linear(found["profiles"]["real 1"])[0]
        for streams in list(found["order"])[1:]:
            plan, schedule = step.retimed(step.plan(streams), alone), step.schedule(streams)
            replays = [sorted(each) for each in found["profiles"][f"serial {streams}"]["replays"]]
            replays = [each for each in replays if len(each) == len(plan.tasks)]
            start, lasts = (np.median([[event[n] for event in each] for each in replays], 0) for n in (0, 1))
            before, now, since = (
                missed(graph, Schedule.in_recorded_order(len(graph))),
                missed(graph, schedule),
                windows(graph, schedule),
            )
            reads: defaultdict[int, list[float]] = defaultdict(lambda: [0, 0.0, 0.0])
            gaps: defaultdict[int, list[float]] = defaultdict(list)
            same = []
            for n, task in enumerate(plan.tasks):
                if task.kind != "kernel":
                    continue
                warps = cache_misses._warps(task, graph)
                share = task.dur_ns / sum(alone[number[task.op] : number[task.op + 1]])
                more = now.get(task.op, NO_MISS).read_bytes - before.get(task.op, NO_MISS).read_bytes
                if more > 0:
                    at = max(place for place, least in enumerate(WARPS) if warps >= least)
                    lost = read_lost_ns(graph.hardware.memory, task, more * share, warps)
                    reads[at] = [a + b for a, b in zip(reads[at], (1, lost, lasts[n] - task.dur_ns), strict=True)]
                if n and plan.tasks[n - 1].kind == "kernel":
                    gap = start[n] - start[n - 1] - lasts[n - 1]
                    if plan.tasks[n - 1].queue == task.queue:
                        same.append(gap)
                    elif gap < 5000:
                        window = since[task.op] / 1e6
                        gaps[max(p for p, least in enumerate(WINDOWS_MB) if window >= least)].append(gap)
            longer: defaultdict[str, float] = defaultdict(float)
            for n, task in enumerate(plan.tasks):
                if task.kind == "kernel":
                    longer[graph.trace.ops[task.op].target] += (lasts[n] - task.dur_ns) / 1e3
            most = max(longer, key=longer.__getitem__)
            written = sum(miss.written_bytes for miss in now.values()) - sum(m.written_bytes for m in before.values())
            print(
                f"{found['trace']}, {streams} streams, serial graph: kernels {sum(longer.values()):+.0f} us, "
                f"{most} {longer[most]:+.0f} us, {written / 1e6:+.0f} MB written"
            )
            for at in sorted(reads):
                count, lost, measured = reads[at]
                print(
                    f"  reads, {WARPS[at]} to {WARPS[at + 1]} warps: {count:.0f} kernels, "
                    f"{lost / 1e3:.1f} us predicted, {measured / 1e3:.1f} measured"
                )
            usual = statistics.median(same)
            more = [
                f"{WINDOWS_MB[at]} MB on {statistics.fmean(gaps[at]) - usual:.0f} ({len(gaps[at])})"
                for at in sorted(gaps)
            ]
            print("  gap beyond the stream's own, ns, by memory touched since: " + ", ".join(more))


def main() -> None:
    """Print all."""
    files = [Path(each) for each in sys.argv[1:]]
    for file in files:
        if file.name.endswith(".gz"):
            of_timelines(file)
    if results := [file for file in files if not file.name.endswith(".gz")]:
        of_results(results)


if __name__ == "__main__":
    main()
