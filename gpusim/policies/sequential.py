"""Sequential: everything on one stream in recorded order, as eager PyTorch runs it."""

from __future__ import annotations

from gpusim.plan.graph import OpGraph
from gpusim.plan.schedule import Schedule


def sequential(graph: OpGraph, streams: int) -> Schedule:
    """One stream, whatever `streams` says."""
    return Schedule.in_recorded_order(len(graph))
