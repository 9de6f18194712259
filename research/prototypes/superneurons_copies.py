"""Peaks of SuperNeurons' plans beside vDNN's, and what is in them.

    python research/prototypes/superneurons_copies.py --json OUT

For each step of `validate/results/memory_*.json`: measured peak and time of `vdnn_all` and `superneurons` by their
newest rows, in shares of keeping all; predicted peak and time of `superneurons`, how much of the peak is moved tensors
whose memory is not yet free, and its peaks with a link that is many times as fast; predicted peak and time of
`vdnn_all` with events in place of its waits after each layer (`gpusim memory --sync events`).
"""

from __future__ import annotations

import argparse
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec

from gpusim.formats.results import ResultCase, read_results
from gpusim.memplan.evaluate import MemoryEvaluator, Outcome
from gpusim.memplan.policies.base import Setting
from gpusim.memplan.policies.superneurons import superneurons
from gpusim.memplan.policies.vdnn import vdnn_all
from gpusim.plan.graph import OpGraph
from gpusim.trace.store import read_trace
from gpusim.validation.again import trace_files
from gpusim.validation.chosen import hardware_of

RESULTS = Path(__file__).parents[2] / "validate" / "results"
#: The later file of a step counts.
FILES = (
    "memory_h200_20261126.json",
    "memory_again_h200_20261128.json",
    "memory_superneurons_h200_20261128.json",
)
TIMES_AS_FAST = (4, 16, 64)


def newest_rows() -> dict[str, tuple[Path, dict[str, ResultCase]]]:
    """Return the results file of each step, and its rows by policy."""
    steps: dict[str, tuple[Path, dict[str, ResultCase]]] = {}
    for file in (RESULTS / name for name in FILES):
        rows: dict[str, dict[str, ResultCase]] = {}
        for case in read_results(file).cases:
            if case.policy in ("vdnn_all", "superneurons"):
                rows.setdefault(case.trace, {})[case.policy] = case
        steps |= {step: (file, each) for step, each in rows.items()}
    return steps


def with_faster_copies(graph: OpGraph, times: float) -> OpGraph:
    """Return the step on a GPU with so many times the bandwidth of copies."""
    link = graph.hardware.copies
    faster = msgspec.structs.replace(
        link,
        h2d_bytes_per_ns=times * link.h2d_bytes_per_ns,
        d2h_bytes_per_ns=times * link.d2h_bytes_per_ns,
        both_bytes_per_ns=times * link.both_bytes_per_ns,
    )
    return replace(graph, hardware=msgspec.structs.replace(graph.hardware, copies=faster))


def leaving_bytes(evaluator: MemoryEvaluator, outcome: Outcome) -> int:
    """Return the bytes of storages at the peak whose copy out was launched and whose memory is not yet free."""
    leaving: set[int] = set()
    for instruction in outcome.program[: outcome.use.peak.place]:
        if instruction.kind == "out":
            leaving.add(instruction.storage)
        elif instruction.kind == "free":
            leaving.discard(instruction.storage)
    return sum(evaluator.storages.bytes[storage] for storage in leaving)


def row_of(step: str, file: Path, rows: dict[str, ResultCase]) -> dict[str, Any]:
    """Return the numbers of one step."""
    trace = read_trace(trace_files(file)[step])
    graph = OpGraph.build(trace, hardware_of(trace))
    evaluator = MemoryEvaluator(graph)
    setting = Setting(graph, evaluator.storages)
    whole = setting.keep_all_bytes
    outcome = evaluator.evaluate(superneurons(setting))
    by_events = evaluator.evaluate(vdnn_all(replace(setting, synchronous=False)))
    row: dict[str, Any] = {"step": step, "results": file.name, "keep_all_bytes": whole}
    for policy, case in rows.items():
        row[f"{policy}_measured_peak_share"] = round(case.measured_peak_bytes / case.sequential_peak_bytes, 4)
        row[f"{policy}_measured_times_as_long"] = round(case.measured_ns / case.sequential_ns, 3)
    row["vdnn_all_peak_share"] = round(setting.peak_bytes(vdnn_all(setting)) / whole, 4)
    row["superneurons_peak_share"] = round(outcome.peak_bytes / whole, 4)
    row["superneurons_times_as_long"] = round(outcome.step_ns / evaluator.keep_all_ns, 3)
    row["superneurons_leaving_share"] = round(leaving_bytes(evaluator, outcome) / whole, 4)
    row["vdnn_all_events_peak_share"] = round(by_events.peak_bytes / whole, 4)
    row["vdnn_all_events_times_as_long"] = round(by_events.step_ns / evaluator.keep_all_ns, 3)
    for times in TIMES_AS_FAST:
        faster = Setting(with_faster_copies(graph, times), evaluator.storages)
        row[f"superneurons_link_{times}_peak_share"] = round(faster.peak_bytes(superneurons(faster)) / whole, 4)
    return row


def main() -> None:
    """Write one row a step."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", type=Path, required=True)
    rows = [row_of(step, file, found) for step, (file, found) in sorted(newest_rows().items())]
    parser.parse_args().json.write_text(json.dumps(rows, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
