"""Measured against simulated, kernel by kernel: python research/prototypes/kernel_by_kernel.py TIMELINES.json.gz ...

Reads what `concurrent_timelines.py` wrote. For each step and number of streams: errors of graphs of stand-in kernels,
the time a kernel in the serial graph takes more than in the sequential one; sums of kernels' time beyond
their time alone; and medians by the company of a kernel. Kernels are matched by name, blocks and stream order.
"""

from __future__ import annotations

import gzip
import json
import math
import statistics
import sys
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from gpusim.engine.fast import FastEngine
from gpusim.formats.hardware import HardwareModel
from gpusim.formats.trace import Kernel
from gpusim.plan.graph import OpGraph
from gpusim.plan.kernels import Fits
from gpusim.plan.lower import lower
from gpusim.plan.schedule import Schedule
from gpusim.plan.tasks import Plan
from gpusim.trace.store import read_trace
from gpusim.validation.again import trace_files
from gpusim.validation.chosen import hardware_of

RESULTS = Path(__file__).parents[2] / "validate" / "results"
#: As the stand-in kernels were compiled: registers a thread, and most shared memory.
REGISTERS, MOST_SMEM = 16, 200 << 10
#: No contention; an exponent of 0 would select the pool.
NONE = 1e-6
ENGINE = FastEngine()

Array = Any


def graph_of(name: str) -> OpGraph:
    """Return the step of a trace of any set."""
    for results in sorted(RESULTS.glob("*_h200_2*.json")):
        if not results.name.startswith(("memory", "parallel", "compile")) and name in (files := trace_files(results)):
            trace = read_trace(files[name])
            return OpGraph.build(trace, hardware_of(trace))
    raise SystemExit(f"no trace '{name}'")


def linear(recording: dict[str, Any]) -> tuple[Array, list[tuple[str, int]]]:
    """Return median durations of a recording whose kernels follow each other, in ns, with names and blocks."""
    replays = recording["replays"]
    count = statistics.mode(map(len, replays))
    same = [replay for replay in replays if len(replay) == count]
    names = recording["names"]
    durations = np.median([[event[1] for event in replay] for replay in same], axis=0)
    return durations, [(names[event[3]], event[4]) for event in same[0]]


def with_gap(hardware: HardwareModel, gap_ns: float, contention: bool = True) -> HardwareModel:
    changed = msgspec.structs.replace(hardware, graph=msgspec.structs.replace(hardware.graph, chain_ns=gap_ns))
    if contention:
        return changed
    free = msgspec.structs.replace(hardware.contention, sharing_exponent=NONE, matrix_exponent=NONE)
    graph = msgspec.structs.replace(changed.graph, busy_ns=0.0)
    return msgspec.structs.replace(changed, contention=free, graph=graph)


@dataclass
class Step:
    """A step with its recordings."""

    found: dict[str, Any]
    graph: OpGraph
    number: list[int]
    """Number of kernels before each op."""

    def schedule(self, streams: str) -> Schedule:
        return Schedule(tuple(self.found["order"][streams]), tuple(self.found["streams"][streams]))

    def plan(self, streams: str) -> Plan:
        return lower(self.graph, self.schedule(streams), memory=False)

    def ns(self, name: str) -> float:
        return float(self.found["timed"][name]["ns"])

    def retimed(self, plan: Plan, durations: Array, fits: list[Any] | None = None) -> Plan:
        """Return a plan with these times alone, and the places of stand-in kernels."""
        tasks = []
        for task in plan.tasks:
            number = self.number[task.op] + task.kernel
            changes: dict[str, Any] = {"dur_ns": float(durations[number])}
            if fits is not None:
                fit = fits[number]
                changes |= {"kind": "kernel", "extra_ns": 0.0, "idle_ns": 0.0, "dram_bytes": 0.0, "matrix": False}
                changes |= {"demand": fit.demand, "blocks": fit.blocks, "blocks_per_sm": fit.resident}
                changes |= {"footprint": fit.footprint}
            tasks.append(msgspec.structs.replace(task, **changes))
        return replace(plan, tasks=tuple(tasks))

    def stand_ins(self, kind: str) -> list[Any]:
        """Return the places of the kernels that stand in for each."""
        fits = Fits(self.graph.hardware)
        shapes = []
        for kernel in (kernel for op in self.graph.trace.ops for kernel in op.kernels):
            hold = kind == "hold" and kernel.kind == "kernel"
            shapes.append(
                fits.of(
                    Kernel(
                        name=kind,
                        kind="kernel",
                        dur_ns=1,
                        lo_ns=1,
                        hi_ns=1,
                        samples=1,
                        grid=(math.prod(kernel.grid) if hold else 1, 1, 1),
                        block=(math.prod(kernel.block) if hold else 32, 1, 1),
                        regs_per_thread=REGISTERS,
                        smem_bytes=min(kernel.smem_bytes, MOST_SMEM) if hold else 0,
                    )
                )
            )
        return shapes


def ladder(step: Step, streams: str) -> str:
    """Return errors of stand-in kernels, and what a kernel of the serial graph takes more."""
    cells = []
    for kind in ("spin", "hold"):
        durations, _ = linear(step.found["profiles"][f"{kind} 1"])
        gap_ns = max(0.0, (step.ns(f"{kind} 1") - durations.sum()) / (len(durations) - 1))
        plan = step.retimed(step.plan(streams), durations, step.stand_ins(kind))
        predicted = ENGINE.run(plan, with_gap(step.graph.hardware, gap_ns, contention=False)).makespan_ns
        cells.append(f"{kind} {predicted / step.ns(f'{kind} {streams}') - 1:+.1%}")
    serial_ns = (step.ns(f"serial {streams}") - step.ns("real 1")) / len(step.plan(streams).tasks)
    return ", ".join([*cells, f"serial {serial_ns:+.0f} ns a kernel"])


def before(plan: Plan) -> list[list[int]]:
    """Return the predecessors of each task, with that of its stream."""
    last: dict[int, int] = {}
    found = []
    for number, task in enumerate(plan.tasks):
        found.append([*task.deps, *([last[task.queue]] if task.queue in last else [])])
        last[task.queue] = number
    return found


def matched(plan: Plan, preds: list[list[int]], events: list[list[Any]], wanted: list[tuple[int, int]]) -> list[int]:
    """Return the event of each task, or nothing where they do not match: by name, blocks and order on its stream."""
    lanes: dict[int, list[int]] = {}
    for number, task in enumerate(plan.tasks):
        lanes.setdefault(task.queue, []).append(number)
    event_of = [-1] * len(plan.tasks)
    last_lane: dict[int, int] = {}
    for place in sorted(range(len(events)), key=lambda each: events[each][0]):
        start, _, executor, name, blocks, _ = events[place]
        choices = []
        for lane, tasks in lanes.items():
            if not tasks or wanted[tasks[0]] != (name, blocks):
                continue
            ends = [events[event_of[p]][0] + events[event_of[p]][1] for p in preds[tasks[0]] if event_of[p] >= 0]
            ready = all(event_of[p] >= 0 for p in preds[tasks[0]])
            choices.append((not ready, max(ends, default=0) > start + 1000, last_lane.get(lane) != executor, lane))
        if not choices:
            return []
        lane = min(choices)[-1]
        event_of[lanes[lane].pop(0)] = place
        last_lane[lane] = executor
    return event_of


def kernels(step: Step, streams: str) -> list[str]:
    """Return lines of measured and simulated losses."""
    alone, launches = linear(step.found["profiles"]["real 1"])
    plan = step.retimed(step.plan(streams), alone)
    numbers = [step.number[task.op] + task.kernel for task in plan.tasks]
    extra_ns = sum(task.extra_ns for task in step.plan("1").tasks[1:])
    gap_ns = (step.ns("real 1") - alone.sum() - extra_ns) / (len(alone) - 1)
    simulated = ENGINE.run(plan, with_gap(step.graph.hardware, gap_ns))
    recording = step.found["profiles"][f"real {streams}"]
    place = {name: number for number, name in enumerate(recording["names"])}
    wanted = [(place.get(launches[n][0], -1), launches[n][1]) for n in numbers]
    preds, starts, ends = before(plan), [], []
    for events in recording["replays"]:
        found = matched(plan, preds, events, wanted) if len(events) == len(plan.tasks) else []
        if found:
            starts.append([events[each][0] for each in found])
            ends.append([events[each][0] + events[each][1] for each in found])
    if not starts:
        return ["kernels of no replay match"]
    start, end = np.median(starts, 0), np.median(ends, 0)
    solo = np.array([task.dur_ns for task in plan.tasks])
    more = np.median(np.array(ends) - np.array(starts), 0) - solo
    model = np.array(simulated.end_ns) - np.array(simulated.start_ns) - solo
    error = simulated.makespan_ns / step.ns(f"real {streams}") - 1
    lines = [
        f"{len(starts)} replays; schedule {error:+.1%}; kernels {solo.sum() / 1e3:.0f} us alone, "
        f"{more.sum() / 1e3:+.0f} measured, {model.sum() / 1e3:+.0f} simulated"
    ]
    others = [((start < end[n]) & (end > start[n])).sum() - 1 for n in range(len(solo))]
    during = [((start > start[n] + 1) & (start < end[n])).sum() for n in range(len(solo))]
    is_kernel = np.array([task.kind == "kernel" for task in plan.tasks])
    for name, which in (
        ("no company", np.array(others) == 0),
        ("company, no start", (np.array(others) > 0) & (np.array(during) == 0)),
        ("1 start", np.array(during) == 1),
        ("2 or more", np.array(during) > 1),
    ):
        if (here := which & is_kernel).sum() > 2:
            lines.append(
                f"  {name:18} {here.sum():4} kernels, {np.median(solo[here]):6.0f} ns alone, more by "
                f"{np.median(more[here]):5.0f} (model {np.median(model[here]):5.0f}) ns, medians"
            )
    gaps: dict[str, list[float]] = {"same stream": [], "another stream": []}
    for number, earlier in enumerate(preds):
        if earlier and is_kernel[number]:
            last = max(earlier, key=lambda each: end[each])
            same = plan.tasks[last].queue == plan.tasks[number].queue
            gaps["same stream" if same else "another stream"].append(start[number] - end[last])
    lines.append(
        "  gap after the last predecessor: "
        + ", ".join(
            f"{name} {statistics.median(each):.0f} ns, mean {statistics.fmean(each):.0f} ({len(each)})"
            for name, each in gaps.items()
            if each
        )
    )
    return lines


def main() -> None:
    """Print all lines."""
    for file in map(Path, sys.argv[1:]):
        for found in json.loads(gzip.decompress(file.read_bytes()))["steps"]:
            if "profiles" not in found:
                continue
            graph = graph_of(found["trace"])
            number = [0]
            for op in graph.trace.ops:
                number.append(number[-1] + len(op.kernels))
            step = Step(found, graph, number)
            for streams in list(found["order"])[1:]:
                print(f"{found['trace']}, {streams} streams ({found['stored'][streams]['policy']})")
                print(" ", ladder(step, streams))
                print(" ", "\n  ".join(kernels(step, streams)), flush=True)


if __name__ == "__main__":
    main()
