#!/usr/bin/env python3
"""Print the main results of published memory systems beside the same policies here, on an old GPU and on an H200.

    python scripts/compare_memory_papers.py

Needs no GPU: peaks and times are simulated. Times on `k40` follow from traces of an H200 and both data sheets.
`research/2026-11-24-memory-papers.md` has the tables.
"""

from __future__ import annotations

import statistics
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

from gpusim.errors import PlanError
from gpusim.formats.hardware import load_hardware
from gpusim.formats.trace import Trace
from gpusim.memplan.evaluate import MemoryEvaluator, Outcome
from gpusim.memplan.policies.base import Setting
from gpusim.memplan.policies.least_time import LeastTime
from gpusim.memplan.policies.registry import MEMORY_POLICIES
from gpusim.plan.graph import OpGraph
from gpusim.trace.store import bundled_traces, read_trace

TRACES = Path(__file__).parents[1] / "validate" / "traces" / "memory"
STEPS = (
    "vgg16-train-b16",
    "resnet50-train-b16",
    "googlenet-train-b32",
    "inception_v3-train-b8",
    "densenet121-train-b8",
)
GPUS = ("k40", "h200")
POLICIES = (
    "vdnn_all", "vdnn_conv", "layrub", "superneurons", "superneurons_release", "layup", "checkpoint", "capuchin",
    "torch_budget", "torch_offload",
)  # fmt: skip
#: What the systems compare themselves to.
BASELINE = "caffe"


def outcomes(evaluator: MemoryEvaluator) -> Iterator[tuple[str, Outcome, Outcome | None]]:
    """Yield each policy's plan at half of what keeping all takes, and our own within the peak of that plan."""
    setting = Setting(evaluator.graph, evaluator.storages)
    planner = LeastTime(setting, evaluator)
    for name in (BASELINE, *POLICIES):
        try:
            outcome = evaluator.evaluate(MEMORY_POLICIES[name](setting))
        except PlanError:
            continue
        try:
            ours = evaluator.evaluate(planner.plan_for(outcome.peak_bytes))
        except PlanError:
            ours = None
        yield name, outcome, ours


def trace_of(step: str) -> Trace:
    """The trace of a step, bundled or of the memory recipe."""
    return read_trace(bundled_traces().get(step, TRACES / f"{step}.json.gz"))


def row(cells: Sequence[str]) -> None:
    sys.stdout.write(f"| {' | '.join(cells)} |\n")


def main() -> None:
    """A table for each GPU, and the means over all steps."""
    for gpu in GPUS:
        memory: dict[str, list[float]] = {}
        time: dict[str, list[float]] = {}
        faster: dict[str, list[float]] = {}
        for step in STEPS:
            evaluator = MemoryEvaluator(OpGraph.build(trace_of(step), load_hardware(gpu)))
            found = list(outcomes(evaluator))
            base = next(outcome for name, outcome, _ in found if name == BASELINE)
            for name, outcome, ours in found:
                memory.setdefault(name, []).append(outcome.peak_bytes / base.peak_bytes - 1)
                time.setdefault(name, []).append(outcome.step_ns / base.step_ns - 1)
                if ours is not None:
                    faster.setdefault(name, []).append(ours.step_ns / outcome.step_ns)
        row((f"{gpu}: memory and time over Caffe", *STEPS, "mean", "ours at its memory"))
        row(("---", *["--:"] * (len(STEPS) + 2)))
        for name in POLICIES:
            each = [f"{m:+.1%}, {t:+.1%}" for m, t in zip(memory[name], time[name], strict=True)]
            mean = f"{statistics.fmean(memory[name]):+.1%}, {statistics.fmean(time[name]):+.1%}"
            least, most = min(faster[name]), max(faster[name])
            row((name, *each, mean, f"{least:.2f} to {most:.2f} of its time, {len(faster[name])} steps"))
        sys.stdout.write("\n")


if __name__ == "__main__":
    main()
