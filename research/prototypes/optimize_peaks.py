"""What makes the peak memory of optimized steps: state, tensors, and workspaces of products on each stream.

    python research/prototypes/optimize_peaks.py OUT.json TRACE...

For each row of the newest compile results with a trace of its step among TRACE (its ATen calls), predicts the peak of a
recording by `critical_path` on the row's number of streams: what is there before the step, the tensors alive in launch
order by the releases of the replay, and a workspace of cuBLAS for each stream that runs a product. The row's own
schedule is not stored, and runs Inductor's kernels, so a difference is no error of a rule. Also on one stream, and in
an arena packed by the schedule's happens-before order (`gpusim.plan.arena`). *Rest* is the measured peak less state and
tensors on one stream, in workspaces. Prints MiB and writes them to OUT.json. Steps without a trace with kernels were
captured by `gpusim capture SPEC --mode MODE --batch N --estimate`: their tensors are exact.
"""

from __future__ import annotations

import json
import statistics
import sys
from pathlib import Path
from typing import Final

from gpusim.defaults import DEFAULT_POLICY
from gpusim.formats.hardware import load_hardware
from gpusim.formats.results import ResultCase, read_results
from gpusim.formats.trace import Trace
from gpusim.plan.arena import pack
from gpusim.plan.graph import OpGraph
from gpusim.plan.happens_before import HappensBefore
from gpusim.plan.schedule import Schedule
from gpusim.plan.sync import plan_sync, storages_touched, works
from gpusim.policies.registry import POLICIES
from gpusim.trace.store import read_trace

RESULTS = Path(__file__).parents[2] / "validate" / "results"
OWN_GRAPH: Final = "torch_compile_own_graph"
MIB: Final = 1 << 20
#: cuBLAS's workspace of a stream on an H200, as measured (`research/2026-11-27-memory.md`, "A limit on a GPU").
WORKSPACE_BYTES: Final = 32 * MIB
#: PyTorch's allocator rounds to this.
ROUND_BYTES: Final = 512
PRODUCTS: Final = ("mm", "addmm", "bmm", "baddbmm")


def tensors_bytes(graph: OpGraph, schedule: Schedule) -> tuple[int, int]:
    """Return the peak of the tensors made by a recording in launch order, and the size of an arena for them."""
    trace = graph.trace
    sync = plan_sync(trace, graph.preds, schedule.order, schedule.streams)
    touched = storages_touched(trace)
    sizes = [-(-storage.bytes // ROUND_BYTES) * ROUND_BYTES for storage in trace.storages]
    there = {tensor.storage for tensor in trace.tensors if tensor.init is not None}
    live: set[int] = set(sync.early) - there
    level = peak = sum(sizes[storage] for storage in live)
    for place, op in enumerate(schedule.order):
        for storage in sync.releases[place]:
            if storage in live:
                live.discard(storage)
                level -= sizes[storage]
        for storage in touched[op] - there - live if works(trace.ops[op]) else ():
            live.add(storage)
            level += sizes[storage]
        peak = max(peak, level)
    order = HappensBefore.of_plan(trace, schedule.order, schedule.streams, sync)
    return peak, pack(trace, order, {}, kept=True).bytes


def streams_with_products(trace: Trace, schedule: Schedule) -> int:
    """Return the number of streams that run a product of cuBLAS."""
    products = [op for op, node in enumerate(trace.ops) if node.target.split(".")[1] in PRODUCTS]
    return len({schedule.streams[op] for op in products})


def row(case: ResultCase, trace: Trace) -> dict[str, float]:
    """Return the parts of one row's peak, in MiB."""
    graph = OpGraph.build(trace, load_hardware("h200"))
    there = {tensor.storage for tensor in trace.tensors if tensor.init is not None}
    state = sum(trace.storages[storage].bytes for storage in there)
    alone, _ = tensors_bytes(graph, Schedule.in_recorded_order(len(trace.ops)))
    schedule = POLICIES[DEFAULT_POLICY](graph, case.streams)
    tensors, arena = tensors_bytes(graph, schedule)
    workspaces = streams_with_products(trace, schedule) * WORKSPACE_BYTES
    own = case.baseline_peak_bytes[OWN_GRAPH]
    parts = {
        "measured": case.measured_peak_bytes,
        "own graph": own,
        "predicted": state + tensors + workspaces,
        "state": state,
        "tensors on one stream": alone,
        "tensors": tensors,
        "tensors in an arena": arena,
        "workspaces": workspaces,
    }
    rest = (case.measured_peak_bytes - state - alone) / WORKSPACE_BYTES
    shares = {
        "streams": case.streams,
        "over own graph": round(case.measured_peak_bytes / own, 2),
        "rest in workspaces": round(rest, 1),
    }
    return {**shares, **{name: round(size / MIB, 1) for name, size in parts.items()}}


def main(arguments: list[str]) -> None:
    """Print a line per step with a trace, and the differences of predicted from measured peaks."""
    out, *files = arguments
    traces = {Path(file).name.removesuffix(".json.gz"): Path(file) for file in files}
    cases = read_results(max(RESULTS.glob("compile_*.json"))).cases
    rows = {case.trace: row(case, read_trace(traces[case.trace])) for case in cases if case.trace in traces}
    for name, parts in sorted(rows.items(), key=lambda item: -item[1]["over own graph"]):
        print(f"{name:32} {parts['streams']} streams", ", ".join(f"{key} {parts[key]:g}" for key in list(parts)[1:]))
    for named in ("infer", "train"):
        off = [parts["predicted"] / parts["measured"] - 1 for name, parts in rows.items() if f"-{named}-" in name]
        middle = statistics.median(off)
        print(f"{named}: predicted over measured peak, median {middle:+.1%}, {min(off):+.1%} to {max(off):+.1%}")
    Path(out).write_text(json.dumps(rows, indent=1) + "\n")


if __name__ == "__main__":
    main(sys.argv[1:])
