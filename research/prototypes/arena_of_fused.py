"""Memory of a step with an arena for what Inductor's kernels write.

    python research/prototypes/arena_of_fused.py TRACE...

Inductor's kernels write into memory that they are given; other operators allocate their results. For each trace of the
front end inductor, by `critical_path` on eight streams: the peak of what a recording allocates in launch order, with
the releases of the plan of events, as `gpusim.optimize` does; an arena for all of it, in which results of operators
would have to be copied; and an arena for what operators do not return, with the peak of the rest. MiB.
"""

from __future__ import annotations

import sys
from collections.abc import Container, Iterator
from pathlib import Path
from typing import Any, Final
from unittest.mock import patch

from gpusim.defaults import DEFAULT_POLICY
from gpusim.formats.hardware import load_hardware
from gpusim.formats.trace import Trace
from gpusim.plan import arena
from gpusim.plan.allocator import rounded
from gpusim.plan.graph import OpGraph
from gpusim.plan.happens_before import HappensBefore
from gpusim.plan.schedule import Schedule
from gpusim.plan.sync import plan_sync, storages_touched, works
from gpusim.policies.registry import POLICIES
from gpusim.trace.store import read_trace

MIB: Final = 1 << 20
STREAMS: Final = 8


def returned(trace: Trace) -> set[int]:
    """Return the storages of results that operators allocate."""
    return {trace.tensors[index].storage for op in trace.ops for index in op.outputs if index is not None}


def peak_bytes(graph: OpGraph, schedule: Schedule, counted: Container[int]) -> int:
    """Return the peak of these storages in launch order."""
    trace = graph.trace
    sync = plan_sync(trace, graph.preds, schedule.order, schedule.streams)
    there = {tensor.storage for tensor in trace.tensors if tensor.init is not None}
    touched = storages_touched(trace)
    live = set(sync.early) - there

    def level() -> int:
        return sum(rounded(max(1, trace.storages[storage].bytes)) for storage in live if storage in counted)

    peak = level()
    for place, op in enumerate(schedule.order):
        live -= set(sync.releases[place])
        if works(trace.ops[op]):
            live |= set(touched[op]) - there
        peak = max(peak, level())
    return peak


def arena_bytes(graph: OpGraph, schedule: Schedule, placed: Container[int]) -> int:
    """Return the size of an arena for these storages."""
    sync = plan_sync(graph.trace, graph.preds, schedule.order, schedule.streams)
    order = HappensBefore.of_plan(graph.trace, schedule.order, schedule.streams, sync)
    all_uses = arena._uses

    def uses(*arguments: Any) -> Iterator[Any]:
        return (use for use in all_uses(*arguments) if use.storage in placed)

    with patch.object(arena, "_uses", uses):
        return arena.pack(graph.trace, order, kept=True).bytes


def main() -> None:
    """Print a row for each trace."""
    print("| step | pool | arena for all | for the kernels' results, and a pool |")
    for file in map(Path, sys.argv[1:]):
        trace = read_trace(file)
        graph = OpGraph.build(trace, load_hardware("h200"))
        schedule = POLICIES[DEFAULT_POLICY](graph, STREAMS)
        every, allocated = set(range(len(trace.storages))), returned(trace)
        given = arena_bytes(graph, schedule, every - allocated)
        rest = peak_bytes(graph, schedule, allocated)
        sizes = (peak_bytes(graph, schedule, every), arena_bytes(graph, schedule, every), given + rest)
        print(f"| {trace.name} | {' | '.join(f'{size / MIB:.1f}' for size in sizes)} |")


if __name__ == "__main__":
    main()
