"""Round robin by level: Taskflow's optimiser for captured GPU graphs.

Source: Lin and Huang, "Efficient GPU Computation Using Task Graph Parallelism" (Euro-Par 2021), and Taskflow's
documentation of `cudaFlowRoundRobinOptimizer`. The rules:

1. The graph is cut into levels: an op is one level after the last of its inputs.
2. Level by level, ops are assigned to the streams round-robin, starting with the first stream (4 streams by default).

Filled in: within a level, ops are in recorded order. Dependencies across streams become events, as in Taskflow.
"""

from __future__ import annotations

from gpusim.plan.graph import OpGraph
from gpusim.plan.schedule import Schedule
from gpusim.policies.shared.base import spread_views, work_order


def round_robin(graph: OpGraph, streams: int) -> Schedule:
    """Return levels in order; within a level, ops in recorded order are assigned round-robin."""
    ops = sorted(work_order(graph), key=lambda op: (graph.level[op], op))
    stream_of: dict[int, int] = {}
    level, turn = -1, 0
    for op in ops:
        if graph.level[op] != level:
            level, turn = graph.level[op], 0
        stream_of[op] = turn % streams
        turn += 1
    return spread_views(graph, ops, stream_of)
