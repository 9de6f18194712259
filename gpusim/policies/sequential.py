"""Sequential: all ops on one stream in recorded order, like eager PyTorch."""

from __future__ import annotations

from gpusim.plan.graph import OpGraph
from gpusim.plan.schedule import Schedule


def sequential(graph: OpGraph, streams: int) -> Schedule:
    """Return the schedule on one stream; `streams` is ignored."""
    return Schedule.in_recorded_order(len(graph))
