"""Gain from the list scheduler's event loop: a table in research/2026-11-23-engine-rules.md.

    python benchmarks/list_loop.py [--candidates 512] [-o PAGE]

Without that loop a list scheduler would place ops by times alone, and the engine's loop would simulate the result.
The same candidates are scheduled both ways: priorities as the search draws them, around the bottom levels, on 2 to 8
streams. "By times alone" is the same scheduler with kernels that take no room and no bandwidth and delay no other.
"""

from __future__ import annotations

import argparse
import time
from dataclasses import dataclass
from pathlib import Path

import msgspec
import numpy as np
import numpy.typing as npt
from page import fill

from gpusim.engine.batch import BatchEngine
from gpusim.plan.graph import OpGraph
from gpusim.policies.ios import one_pool
from gpusim.policies.shared.list_scheduling import MIN_SHARE, FastLists
from gpusim.rules.occupancy import NO_DEMAND
from gpusim.search.priorities import MOVE_SCALE
from gpusim.step import load

TRACES = (
    "squeezenet1_1-infer-b1",
    "googlenet-infer-b1",
    "inception_v3-infer-b1",
    "googlenet-train-b8",
    "resnet50-train-b8",
    "densenet121-train-b8",
)
STREAMS = range(2, 9)
SEED = 0
HEAD = (
    "| step | by times alone over while simulating: mean | best | while simulating, schedules a second "
    "| by times alone, then one pool |\n|---|--:|--:|--:|--:|"
)


@dataclass(frozen=True)
class Row:
    """One step: ratios of makespans with block-level SMs, and rates on one core."""

    name: str
    mean: float
    best: float
    simulating_per_s: float
    apart_per_s: float

    def line(self) -> str:
        """Return the row of the table."""
        rates = f"{self.simulating_per_s:,.0f} | {self.apart_per_s:,.0f}"
        return f"| {self.name} | {self.mean:.3f} | {self.best:.3f} | {rates} |"


def by_times_alone(graph: OpGraph) -> OpGraph:
    """Return the same step with kernels that no other kernel slows."""
    tasks = tuple(
        tuple(msgspec.structs.replace(task, demand=NO_DEMAND, dram_bytes=0.0) for task in each) for each in graph.tasks
    )
    return graph.with_tasks(graph.hardware, tasks)


def makespans(
    graph: OpGraph, scheduler: FastLists, priorities: npt.NDArray[np.float64], streams: npt.NDArray[np.int64]
) -> npt.NDArray[np.int64]:
    """Return the makespans, with block-level SMs, of the scheduler's schedules."""
    made = [scheduler.schedule(int(n), each).schedule for n, each in zip(streams, priorities, strict=True)]
    orders, places = [each.order for each in made], [each.streams for each in made]
    return BatchEngine(graph).evaluate(orders, places).makespan_ns


def measure(name: str, candidates: int) -> Row:
    """Return one row of the table."""
    graph, draw = load(name).graph, np.random.default_rng(SEED)
    levels = np.array(graph.bottom_ns)
    priorities = levels + draw.normal(0.0, MOVE_SCALE * levels.max(), (candidates, len(graph)))
    priorities[: len(STREAMS)] = levels
    streams = np.resize(np.array(STREAMS, np.int64), candidates)
    simulating, apart = FastLists(graph), FastLists(by_times_alone(graph))
    pool = BatchEngine(by_pool(graph))
    here, there = (makespans(graph, each, priorities, streams) for each in (simulating, apart))
    schedule = simulating.schedule(int(STREAMS[-1]), levels).schedule
    orders, places = (np.tile(np.array(each, np.int32), (candidates, 1)) for each in (schedule.order, schedule.streams))
    spent: list[tuple[float, float]] = []
    for _ in range(5):
        begin = time.thread_time()
        simulating.makespans(priorities, streams, MIN_SHARE, threads=1)
        between = time.thread_time()
        apart.makespans(priorities, streams, MIN_SHARE, threads=1)
        pool.evaluate(orders, places, threads=1)
        spent.append((between - begin, time.thread_time() - between))
    once_s, twice_s = (min(seconds) for seconds in zip(*spent, strict=True))
    mean = float(np.exp(np.mean(np.log(there / here))))
    return Row(name, mean, float(there.min() / here.min()), candidates / once_s, candidates / twice_s)


def by_pool(graph: OpGraph) -> OpGraph:
    """Return the same step with pooled SMs, as the list scheduler sees them."""
    return graph.with_tasks(one_pool(graph.hardware), graph.tasks)


def main() -> None:
    """Measure, print, write."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--candidates", type=int, default=512)
    parser.add_argument("-o", "--output", type=Path, metavar="PAGE", help="Fill the table in this page.")
    options = parser.parse_args()
    print(HEAD)
    lines = []
    for name in TRACES:
        lines.append(measure(name, options.candidates).line())
        print(lines[-1], flush=True)
    if options.output is not None:
        fill(options.output, "list_loop", "\n".join((HEAD, *lines)))


if __name__ == "__main__":
    main()
