"""Round robin by level: Taskflow's optimiser for captured GPU graphs.

Source: Lin and Huang, "Efficient GPU Computation Using Task Graph Parallelism" (Euro-Par 2021), and Taskflow's
documentation of `cudaFlowRoundRobinOptimizer`. The rules:

1. The graph is cut into levels: an op is one level behind the last of its inputs.
2. Level by level, the ops of each are dealt to the streams in turn, beginning with the first stream (there 4 by
   default).

Filled in: within a level, recorded order. Dependencies across streams become events, as there.
"""

from __future__ import annotations

from gpusim.plan.graph import OpGraph
from gpusim.plan.schedule import Schedule
from gpusim.policies.shared.base import spread_views, work_order


def round_robin(graph: OpGraph, streams: int) -> Schedule:
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
