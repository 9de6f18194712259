"""The eager step as a plan: the ops of a trace in program order on one stream, launched one by one by the host."""

from __future__ import annotations

from gpusim.plan.graph import OpGraph
from gpusim.plan.lower import lower
from gpusim.plan.schedule import Schedule
from gpusim.plan.tasks import Plan

#: Number of consecutive steps averaged for an eager time, measured and predicted: the host runs ahead into the next
#: step while the GPU finishes one, as in a user's loop.
STEPS_IN_A_ROW = 4


def eager_plan(graph: OpGraph) -> Plan:
    """Return a plan of `STEPS_IN_A_ROW` consecutive eager steps on one stream."""
    tasks = lower(graph, Schedule.in_recorded_order(len(graph)), "stream", memory=False).tasks
    return Plan(tasks=tasks * STEPS_IN_A_ROW, mode="stream")
