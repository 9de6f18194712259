"""Sequential: everything on one stream in recorded order, as eager PyTorch runs it."""

from __future__ import annotations

from gpusim.plan.graph import OpGraph
from gpusim.policies.base import Assignment


def sequential(graph: OpGraph, streams: int) -> Assignment:
    """One stream, whatever `streams` says."""
    return Assignment(tuple(range(len(graph))), (0,) * len(graph))
