"""Re-simulation of the observed step from its launches, edges and durations: a check of how well they explain it.

A record starts when its predecessors have ended and its launch has reached the GPU. A few numbers come from the file:
the usual launch latency on an idle GPU, and the usual gaps between a record and its predecessors. Gaps are separate for
the same stream and another one, and for an idle GPU and concurrent records. Usual gaps are means, since a step is a sum
of them. A launch delayed by a long host call counts from its late end, but never later than the start it led to.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean, median_low
from typing import Final

from gpusim.importers.edges import stream_edges
from gpusim.importers.model import Activity, Edge
from gpusim.units import counted, format_ns

#: A longer gap, in multiples of the usual one and in ns, is a wait for something outside the file.
MANY_GAPS, LONG_NS = 10, 10_000
#: A gap below this is a record that began too early: before its predecessor ended.
EARLY_NS: Final = -LONG_NS


@dataclass(frozen=True, slots=True)
class Resimulation:
    """Simulated starts of the records in ns on the file's clock, and starts that launches and edges do not explain."""

    starts: list[int]
    waits: int
    """Number of records that began much later than their predecessors allow."""
    waited_ns: int
    """Total delay of these records, in ns."""
    waits_unlaunched: int
    """Number of these records without a launch in the file."""
    early: int
    """Number of records that began much before the end of a predecessor."""

    def reason(self) -> str:
        """Describe the unexplained starts; empty where launches and edges explain all."""
        parts = []
        if self.waits:
            without = f", {self.waits_unlaunched} of them without a launch in the file" if self.waits_unlaunched else ""
            waited = f"{counted(self.waits, 'record')} waited {format_ns(self.waited_ns)} in all"
            parts.append(f"{waited} for something outside the file{without}")
        if self.early:
            parts.append(f"{counted(self.early, 'record')} began before the end of a predecessor")
        return "; ".join(parts)


def resimulated(activities: Sequence[Activity], edges: Sequence[Edge]) -> Resimulation:
    """Simulate each record, in the order of its stream. `activities` are in order of start.

    A record without predecessors starts as observed, since earlier work of its stream is outside the step.
    """
    before: list[list[int]] = [[] for _ in activities]
    for edge in (*stream_edges(activities), *edges):
        before[edge.after].append(edge.before)
    arrivals = _arrivals_ns(activities, before)
    concurrent = _began_concurrent(activities)
    usual = {
        kind: _usual_ns([gap for gap in gaps if gap > EARLY_NS])
        for kind, gaps in _gaps_ns(activities, before, arrivals, concurrent).items()
    }
    starts: list[int] = []
    waits = waited_ns = unlaunched = early = 0
    for index, activity in enumerate(activities):
        if not before[index]:
            starts.append(activity.start_ns)
            continue
        ended_ns, last = max((starts[b] + activities[b].dur_ns, b) for b in before[index])
        gap_ns = usual.get((activities[last].lane == activity.lane, concurrent[index]), 0.0)
        ready_ns = max(activities[b].end_ns for b in before[index])
        start_ns = ended_ns + gap_ns
        arrival_ns = arrivals[index]
        if arrival_ns is not None:
            start_ns, ready_ns = max(start_ns, arrival_ns), max(ready_ns, arrival_ns)
        starts.append(round(start_ns))
        late_ns = activity.start_ns - ready_ns
        if late_ns > _long_ns(gap_ns):
            waits, waited_ns, unlaunched = waits + 1, waited_ns + late_ns, unlaunched + (arrival_ns is None)
        early += late_ns < EARLY_NS
    return Resimulation(starts, waits, waited_ns, unlaunched, early)


def makespan_ns(activities: Sequence[Activity], starts: Sequence[int] | None = None) -> int:
    """Return the time from the first start to the last end, observed or with other starts, in ns."""
    if not activities:
        return 0
    times = [activity.start_ns for activity in activities] if starts is None else starts
    return max(t + a.dur_ns for t, a in zip(times, activities, strict=True)) - min(times)


def _arrivals_ns(activities: Sequence[Activity], before: Sequence[Sequence[int]]) -> list[int | None]:
    """Return the time when each record's launch reached the GPU; None without a launch of its own.

    The excess of a long call, which loads a module or waits for room, comes before the launch.
    """
    lengths = [a.launch_end_ns - a.launch_ns for a in activities if a.launch_ns is not None and a.launch_end_ns]
    call_ns = median_low(lengths) if lengths else 0
    seen: set[tuple[int, int]] = set()
    released: list[int | None] = []
    for activity in activities:
        key = (activity.process, activity.correlation)
        if activity.launch_ns is None or key in seen:
            released.append(None)
            continue
        seen.add(key)
        end_ns = activity.launch_ns if activity.launch_end_ns is None else activity.launch_end_ns
        released.append(min(max(activity.launch_ns, end_ns - call_ns), activity.start_ns))
    latencies = [
        activity.start_ns - release_ns
        for index, (activity, release_ns) in enumerate(zip(activities, released, strict=True))
        if release_ns is not None
        and before[index]  # for the first record, the work before it is unknown
        and all(activities[b].end_ns <= release_ns for b in before[index])
    ]
    latency_ns = median_low(latencies) if latencies else 0
    return [
        None if release_ns is None else min(release_ns + latency_ns, activity.start_ns)
        for activity, release_ns in zip(activities, released, strict=True)
    ]


def _gaps_ns(
    activities: Sequence[Activity],
    before: Sequence[Sequence[int]],
    arrivals: Sequence[int | None],
    concurrent: Sequence[bool],
) -> dict[tuple[bool, bool], list[int]]:
    """Return the gaps between records and their last predecessor, by whether both share a stream, and by `concurrent`.

    Only records whose launch arrived before count: others wait for the host.
    """
    gaps: dict[tuple[bool, bool], list[int]] = {}
    for index, activity in enumerate(activities):
        if not before[index]:
            continue
        last = max(before[index], key=lambda b: activities[b].end_ns)
        ended_ns, arrival_ns = activities[last].end_ns, arrivals[index]
        if arrival_ns is None or arrival_ns <= min(ended_ns, activity.start_ns - 1):
            kind = activities[last].lane == activity.lane, concurrent[index]
            gaps.setdefault(kind, []).append(activity.start_ns - ended_ns)
    return gaps


def _began_concurrent(activities: Sequence[Activity]) -> list[bool]:
    """Return whether another record was running when each one began: a busy GPU starts work more slowly."""
    reached_ns = activities[0].start_ns if activities else 0
    concurrent = []
    for activity in activities:
        concurrent.append(reached_ns > activity.start_ns)
        reached_ns = max(reached_ns, activity.end_ns)
    return concurrent


def _usual_ns(gaps: Sequence[int]) -> float:
    """Return the mean of all gaps without the long ones; 0 without any."""
    if not gaps:
        return 0.0
    limit_ns = _long_ns(median_low(gaps))
    return fmean([gap for gap in gaps if gap <= limit_ns] or [0])


def _long_ns(gap_ns: float) -> float:
    return max(LONG_NS, MANY_GAPS * gap_ns)
