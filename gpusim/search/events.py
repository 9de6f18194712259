"""Comparison of schedules by predicted time and events; the search, the recommendation and trials all compare so.

Schedules with many events take longer than predicted: with a time held against each event, the schedule compared best
takes 0.8 % longer than the fastest measured one, in the mean of 74 steps, without it 1.1 %
(research/2026-11-27-events.md).
"""

from __future__ import annotations

from typing import Final, TypeVar

import numpy as np
import numpy.typing as npt

from gpusim.plan.graph import OpGraph
from gpusim.plan.schedule import Schedule
from gpusim.plan.sync import StepSync, count_events
from gpusim.trace.fusion import covered_by, place_fused

#: Time held against each event of a schedule where schedules are compared, in ns; no predicted time has it.
EVENT_NS: Final = 150

#: A number, or an array with one per schedule.
Numbers = TypeVar("Numbers", int, float, npt.NDArray[np.int64])


def compared_ns(makespan_ns: Numbers, events: Numbers) -> Numbers:
    """Return what schedules are compared by: the makespan, with `EVENT_NS` for each event."""
    return makespan_ns + EVENT_NS * events


def events_of(graph: OpGraph, schedule: Schedule, step: StepSync) -> int:
    """Return the number of events that the streams of a schedule wait for; `step` is that of the captured kernels."""
    if schedule.stream_count < 2:
        return 0
    order, streams = place_fused(schedule.order, schedule.streams, covered_by(graph.trace, schedule.variants))
    return count_events(step, order, streams)
