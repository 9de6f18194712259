"""Average memory of vDNN's plans over a step, beside their peak: vDNN's paper reports the average.

    python research/prototypes/average_memory.py TRACE... --json OUT

TRACE are files, as those of `validate/traces/memory.zip`. The average of what tensors take over the simulated step, and
its peak, over the bytes that Caffe allocates before it and keeps, by hardware model.
"""

from __future__ import annotations

import argparse
import json
from itertools import pairwise
from pathlib import Path

from gpusim.engine.base import Timeline
from gpusim.formats.hardware import load_hardware
from gpusim.memplan.evaluate import MemoryEvaluator
from gpusim.memplan.policies.base import Setting
from gpusim.memplan.policies.caffe import caffe
from gpusim.memplan.policies.vdnn import vdnn_all, vdnn_conv
from gpusim.plan.graph import OpGraph
from gpusim.trace.store import read_trace

GPUS = ("k40", "h200")


def average_bytes(timeline: Timeline) -> float:
    """Return the mean over time of the memory in use, in bytes."""
    levels = [*timeline.memory, (timeline.makespan_ns, 0)]
    return sum(level * (after - time) for (time, level), (after, _) in pairwise(levels)) / timeline.makespan_ns


def main() -> None:
    """Write a row for each step, hardware model and policy."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("traces", type=Path, nargs="+")
    parser.add_argument("--json", type=Path, required=True)
    arguments = parser.parse_args()
    rows: list[dict[str, str | float]] = []
    for path in arguments.traces:
        trace = read_trace(path)
        for gpu in GPUS:
            evaluator = MemoryEvaluator(OpGraph.build(trace, load_hardware(gpu)))
            setting = Setting(evaluator.graph, evaluator.storages)
            whole = evaluator.evaluate(caffe(setting)).peak_bytes
            initial = sum(evaluator.storages.bytes[s] for s in evaluator.storages.initial)
            for policy in (vdnn_all, vdnn_conv):
                plan = policy(setting)
                timeline = evaluator.time(evaluator.program(plan), memory=True)
                average = average_bytes(timeline)
                rows.append(
                    {
                        "trace": trace.name,
                        "hardware": gpu,
                        "policy": policy.__name__,
                        "average_share": round(average / whole, 4),
                        "peak_share": round(setting.peak_bytes(plan) / whole, 4),
                        "before_the_step_share": round(initial / whole, 4),
                    }
                )
    arguments.json.write_text("[\n" + ",\n".join(map(json.dumps, rows)) + "\n]\n", encoding="utf-8")


if __name__ == "__main__":
    main()
