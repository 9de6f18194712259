"""Critical path: list scheduling by bottom level that asks the resource model, not durations alone.

The priority of an op is the longest chain of solo times from its start to the end of the step.
"""

from __future__ import annotations

from gpusim.plan.graph import COMPILED_FROM_OPS, OpGraph
from gpusim.plan.schedule import Schedule
from gpusim.policies.list_scheduling import list_schedule


def critical_path(graph: OpGraph, streams: int) -> Schedule:
    """List schedule with bottom levels as priorities."""
    if len(graph) >= COMPILED_FROM_OPS:
        from gpusim.policies.fast_lists import FastLists

        return FastLists(graph).schedule(streams, graph.bottom_ns).schedule
    return list_schedule(graph, streams, graph.bottom_ns).schedule
