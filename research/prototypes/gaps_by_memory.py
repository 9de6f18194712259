"""Gap between kernels by the memory that a replay touches: of sequential graphs, and of profiled replays.

python research/prototypes/gaps_by_memory.py validate/results/kinds_h200_20261123.json ... [TIMELINES.json.gz ...]

A results file gives a line for each trace: the gap of its sequential graph, and the memory touched on one stream and
without any reuse. A file of `concurrent_timelines.py` gives the median gap of each profiled recording on one stream.
"""

from __future__ import annotations

import gzip
import json
import statistics
import sys
from itertools import pairwise
from pathlib import Path

from gpusim.plan.graph import OpGraph
from gpusim.rules.launch import extra_ns
from gpusim.trace.store import read_trace
from gpusim.validation.again import replayed_schedules, trace_files
from gpusim.validation.chosen import hardware_of


def lines_of(results: Path, seen: dict[str, tuple[float, str]]) -> None:
    """Add a line for each step with schedules on several streams."""
    files = trace_files(results)
    for name in dict.fromkeys(case.trace for case, _, _ in replayed_schedules(results) if case.streams > 1):
        trace = read_trace(files[name])
        graph = OpGraph.build(trace, hardware_of(trace))
        kernels = [kernel for op in trace.ops for kernel in op.kernels]
        nodes = sum(kernel.kind != "kernel" for kernel in kernels[1:])
        if trace.ground_truth is None:
            continue
        busy_ns = sum(kernel.dur_ns for kernel in kernels) + nodes * extra_ns(graph.hardware.graph, True)
        gap_ns = (trace.ground_truth.graph.median_ns - busy_ns) / (len(kernels) - 1)
        memory = graph.memory_touched
        seen[name] = (
            gap_ns,
            f"{memory.one_stream_bytes / 1e6:8.1f} MB on one stream, {memory.at_most_bytes / 1e6:8.1f} without reuse, "
            f"kernels of {busy_ns / len(kernels):6.0f} ns",
        )


def profiled(file: Path) -> None:
    """Print the median gap of each recording whose kernels follow each other."""
    for step in json.loads(gzip.decompress(file.read_bytes()))["steps"]:
        for name, recording in step.get("profiles", {}).items():
            if name.startswith("serial") or name.endswith(" 1"):
                gaps = [after[0] - e[0] - e[1] for replay in recording["replays"] for e, after in pairwise(replay)]
                print(f"{step['trace']:32} {name:10} {statistics.median(gaps):6.0f} ns")


def main() -> None:
    """Print all lines, by gap."""
    seen: dict[str, tuple[float, str]] = {}
    for file in map(Path, sys.argv[1:]):
        if file.suffix == ".gz":
            profiled(file)
        else:
            lines_of(file, seen)
    for name, (gap_ns, line) in sorted(seen.items(), key=lambda item: item[1]):
        print(f"{gap_ns:6.0f} ns  {name:40} {line}")


if __name__ == "__main__":
    main()
