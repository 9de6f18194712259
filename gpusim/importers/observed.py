"""The observed step again, from its launches, edges and durations alone: how well they explain the file's timeline.

A record starts when all that it waits for has ended and its launch has reached the GPU. Two numbers come from the file:
the time from a launch to the start on an idle GPU, and the gap between records that follow each other at once.
"""

from __future__ import annotations

from collections.abc import Sequence
from statistics import median_low

from gpusim.importers.model import Activity, Edge


def resimulated(activities: Sequence[Activity], edges: Sequence[Edge]) -> list[int]:
    """Start of each record in ns, on the file's clock; the first one starts as observed."""
    before: list[list[int]] = [[] for _ in activities]
    for edge in edges:
        before[edge.after].append(edge.before)
    first_of_launch: dict[tuple[int, int], int] = {}
    for index, activity in enumerate(activities):
        if activity.launch_ns >= 0:
            first_of_launch.setdefault((activity.process, activity.correlation), index)
    call_ns = _call_ns(activities)
    released = [
        max(activity.launch_ns, activity.launch_end_ns - call_ns)
        if first_of_launch.get((activity.process, activity.correlation)) == index
        else -1
        for index, activity in enumerate(activities)
    ]
    latency_ns = _latency_ns(activities, before, released)
    gap_ns = _gap_ns(activities, before, released, latency_ns)
    starts: list[int] = []
    for index, activity in enumerate(activities):
        times = [starts[b] + activities[b].dur_ns + gap_ns for b in before[index]]
        if released[index] >= 0:
            times.append(released[index] + latency_ns)
        starts.append(activity.start_ns if not index else max(times, default=activity.start_ns))
    return starts


def makespan_ns(activities: Sequence[Activity], starts: Sequence[int] | None = None) -> int:
    """From the first start to the last end, as observed or with other starts."""
    if not activities:
        return 0
    times = [activity.start_ns for activity in activities] if starts is None else starts
    return max(t + a.dur_ns for t, a in zip(times, activities, strict=True)) - min(times)


def _call_ns(activities: Sequence[Activity]) -> int:
    """Usual length of a launch; what a call takes longer, loading a module or waiting for room, comes before it."""
    found = [a.launch_end_ns - a.launch_ns for a in activities if 0 <= a.launch_ns <= a.launch_end_ns]
    return median_low(found) if found else 0


def _latency_ns(activities: Sequence[Activity], before: Sequence[Sequence[int]], released: Sequence[int]) -> int:
    """Median time from the launch to the start of records that found their GPU idle; 0 without any."""
    found = [
        activity.start_ns - released[index]
        for index, activity in enumerate(activities)
        if released[index] >= 0
        and before[index]  # of the first one nobody knows what ran before
        and activity.start_ns >= released[index]
        and all(activities[b].end_ns <= released[index] for b in before[index])
    ]
    return median_low(found) if found else 0


def _gap_ns(
    activities: Sequence[Activity], before: Sequence[Sequence[int]], released: Sequence[int], latency_ns: int
) -> int:
    """Median gap between a record and the last one that it waits for, where its launch was there before that ended."""
    found = []
    for index, activity in enumerate(activities):
        if before[index]:
            ended_ns = max(activities[b].end_ns for b in before[index])
            if released[index] + latency_ns <= ended_ns:
                found.append(max(0, activity.start_ns - ended_ns))
    return median_low(found) if found else 0
