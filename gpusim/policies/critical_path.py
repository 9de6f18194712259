"""Critical path: list scheduling by bottom level that asks the resource model, not durations alone.

The priority of an op is the longest chain of solo times from its start to the end of the step.
"""

from __future__ import annotations

from gpusim.plan.graph import OpGraph
from gpusim.plan.schedule import Schedule


def critical_path(graph: OpGraph, streams: int) -> Schedule:
    """List schedule with bottom levels as priorities."""
    from gpusim.policies.shared.list_scheduling import FastLists  # it brings numba, which other policies go without

    return FastLists(graph).schedule(streams, graph.bottom_ns).schedule
