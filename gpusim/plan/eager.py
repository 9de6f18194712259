"""The eager step as a plan: the trace's ops in program order on one stream, launched one by one at the host's pace."""

from __future__ import annotations

from gpusim.plan.graph import OpGraph
from gpusim.plan.lower import lower
from gpusim.plan.schedule import Schedule
from gpusim.plan.tasks import Plan

#: Steps in a row that an eager time is the mean of, measured and predicted: the host is ahead with the next step while
#: the GPU ends one, as in a user's loop.
STEPS_IN_A_ROW = 4


def eager_plan(graph: OpGraph) -> Plan:
    """`STEPS_IN_A_ROW` eager steps, one after another on one stream."""
    tasks = lower(graph, Schedule.in_recorded_order(len(graph)), "stream", memory=False).tasks
    return Plan(tasks=tasks * STEPS_IN_A_ROW, mode="stream")
