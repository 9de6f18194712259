"""Critical path: list scheduling by bottom level, with resource demands as well as durations.

The priority of an op is the longest chain of solo times from its start to the end of the step.
"""

from __future__ import annotations

from gpusim.plan.graph import OpGraph
from gpusim.plan.schedule import Schedule


def critical_path(graph: OpGraph, streams: int) -> Schedule:
    """Return the list schedule with bottom levels as priorities."""
    from gpusim.policies.shared.list_scheduling import FastLists  # imports numba, which other policies do not need

    return FastLists(graph).schedule(streams, graph.bottom_ns).schedule
