"""Wavefront: level by level, all ops of a level side by side (Rammer's wavefronts, Ma et al., OSDI 2020).

Rammer fuses a wave into one kernel; here its ops go to streams, the longest ones first, each to the stream with the
least work so far in the wave. Waves follow each other in the launch order; dependencies alone hold them apart, not a
barrier.
"""

from __future__ import annotations

from gpusim.plan.graph import OpGraph
from gpusim.policies.base import Assignment, spread_views, work_order


def wavefront(graph: OpGraph, streams: int) -> Assignment:
    """Levels in order; within one, longest op first to the least loaded stream."""
    ops = sorted(work_order(graph), key=lambda op: (graph.level[op], -graph.solo_ns[op], op))
    stream_of: dict[int, int] = {}
    level, load = -1, [0.0] * streams
    for op in ops:
        if graph.level[op] != level:
            level, load = graph.level[op], [0.0] * streams
        stream = min(range(streams), key=lambda s: (load[s], s))
        stream_of[op] = stream
        load[stream] += graph.solo_ns[op]
    return spread_views(graph, ops, stream_of)
