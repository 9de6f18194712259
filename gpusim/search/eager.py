"""Prediction of the eager step from the host's launch times and the kernels."""

from __future__ import annotations

from gpusim.engine.base import Engine
from gpusim.engine.batch import BatchEngine
from gpusim.engine.fast import FastEngine
from gpusim.plan.eager import STEPS_IN_A_ROW, eager_plan
from gpusim.plan.graph import OpGraph


def predict_eager(graph: OpGraph, engine: Engine | None = None) -> int | None:
    """Predict the wall time of an eager step in ns, the mean of `STEPS_IN_A_ROW`; None for a trace without host times.

    Host times are those of the trace, so the prediction holds for eager PyTorch on the machine of the capture: how long
    its host keeps the GPU waiting. research/2026-11-23-fidelity.md has the median error.
    """
    if not any(op.host_ns for op in graph.trace.ops):
        return None
    if engine is None or engine.name == FastEngine.name:
        return round(BatchEngine(graph).eager_ns(STEPS_IN_A_ROW) / STEPS_IN_A_ROW)
    return round(engine.run(eager_plan(graph), graph.hardware).makespan_ns / STEPS_IN_A_ROW)
