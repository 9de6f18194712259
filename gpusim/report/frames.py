"""Timelines and results as pandas data frames, for notebooks; times in ns, sizes in bytes."""

from __future__ import annotations

from typing import Final

import pandas as pd

from gpusim.engine.base import Timeline
from gpusim.formats.results import Results
from gpusim.formats.trace import Trace

#: Fields of a case with several values by name, which are no columns.
_BY_NAME: Final = ("baselines", "beside_ns", "bounds_ns", "baseline_peak_bytes", "deviations", "optimize_stages_s")


def timeline_frame(timeline: Timeline, trace: Trace) -> pd.DataFrame:
    """Return one row per task, in launch order: op, layer, phase, kernel, stream, start, end and wait.

    `slowdown` is the simulated time over the time alone.
    """
    rows = []
    for index, task in enumerate(timeline.plan.tasks):
        op = trace.ops[task.op] if task.op >= 0 else None
        start_ns, end_ns = timeline.start_ns[index], timeline.end_ns[index]
        rows.append(
            {
                "op": op.name if op else "",
                "target": op.target if op else "",
                "layer": op.layer if op else "",
                "phase": op.phase if op else "",
                "kernel": task.name,
                "kind": task.kind,
                "stream": task.queue,
                "ready_ns": timeline.ready_ns[index],
                "start_ns": start_ns,
                "end_ns": end_ns,
                "alone_ns": task.dur_ns,
                "slowdown": (end_ns - start_ns) / task.dur_ns if task.dur_ns else 1.0,
            }
        )
    return pd.DataFrame(rows)


def results_frame(results: Results) -> pd.DataFrame:
    """Return one row per case of a results file, with measured and predicted speed-up and errors."""
    rows = [
        {field: getattr(case, field) for field in case.__struct_fields__ if field not in _BY_NAME}
        | {
            "speedup": case.speedup,
            "predicted_speedup": case.predicted_speedup,
            "error": case.error,
            "sequential_prediction_error": case.sequential_prediction_error,
        }
        for case in results.cases
    ]
    return pd.DataFrame(rows)
