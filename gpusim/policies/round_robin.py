"""Round robin by level: Taskflow's cudaFlow optimiser (Huang et al., Euro-Par 2021).

The graph is cut into levels, and the ops of each level are dealt to the streams in turn.
"""

from __future__ import annotations

from gpusim.plan.graph import OpGraph
from gpusim.policies.base import Assignment, spread_views, work_order


def round_robin(graph: OpGraph, streams: int) -> Assignment:
    """Levels in order; within one, recorded order, dealt out in turn."""
    ops = sorted(work_order(graph), key=lambda op: (graph.level[op], op))
    stream_of: dict[int, int] = {}
    level, turn = -1, 0
    for op in ops:
        if graph.level[op] != level:
            level, turn = graph.level[op], 0
        stream_of[op] = turn % streams
        turn += 1
    return spread_views(graph, ops, stream_of)
