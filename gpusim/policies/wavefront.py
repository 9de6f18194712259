"""Wavefront: level by level, all ops of a level concurrently.

Source: Ma et al., "Rammer: Enabling Holistic Deep Learning Compiler Optimizations with rTasks" (OSDI 2020), and its
released code (NNFusion's BlockFusion), whose waves are also the greedy baseline of IOS. The rules:

1. Waves by breadth-first search: an op is in the wave after the last of its inputs.
2. All ops of a wave run concurrently; the next wave follows.

Differences: Rammer fuses a wave into one kernel and places its blocks on the SMs itself, may replace kernels by ones
that need less of the GPU, and keeps a fused wave only if it is estimated to be faster. That changes kernels, which
schedules here do not. Here the ops of a wave go to streams, longest first, each to the stream with the least work so
far in the wave (Rammer has no streams, so this choice is ours). Its limit of 128 ops in a fused wave has no
counterpart. Waves follow each other in the launch order; only dependencies separate them, not a barrier.
"""

from __future__ import annotations

from gpusim.plan.graph import OpGraph
from gpusim.plan.schedule import Schedule
from gpusim.policies.shared.base import spread_views, work_order


def wavefront(graph: OpGraph, streams: int) -> Schedule:
    """Return levels in order; within a level, the longest op goes first, to the least loaded stream."""
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
