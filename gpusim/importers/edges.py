"""Edges between records, from streams, recorded waits, execution traces and CUDA graphs; each edge has its source.

Without a better source, an edge across streams is assumed wherever the observed order allows it: that keeps every order
the program may need, at the cost of freedom for schedules.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Sequence

from gpusim.formats.trace import EdgeKind, Quality
from gpusim.importers.model import Activity, Edge, Wait, WorkLimit

Lane = tuple[int, int, int]

#: Largest overlap of two consecutive records that clock error explains, in ns.
OVERLAP_NS = 1_000
#: Most streams of a host wait; beyond, only the order on each stream counts.
MAX_LANES = 256
#: Edges per record; each further one counts as `MORE_STEPS` steps of work, for its memory.
USUAL_EDGES, MORE_STEPS = 4, 24


def observed_edges(
    activities: Sequence[Activity], waits: Sequence[Wait], has_waits: bool, resolution_ns: int, file: str = ""
) -> tuple[list[Edge], Quality, int]:
    """Return the edges of a profile, their quality, and the number of recorded waits that contradict the timeline.

    `activities` are in order of start. Raises `ImportFileError` where they combine in too many ways.
    """
    work = WorkLimit(file)
    edges = stream_edges(activities)
    lanes = {activity.lane for activity in activities}
    if len(lanes) < 2:
        return edges, "stream", 0
    contradicted = 0
    quality: Quality = "event"
    from_graphs = any(activity.shared_launch for activity in activities)
    unknown = [wait for wait in waits if wait.recorded < 0]
    if has_waits:
        known = [wait for wait in waits if wait.recorded >= 0]
        event_edges, contradicted = _event_edges(activities, known, OVERLAP_NS + resolution_ns, work)
        edges += event_edges
    if not has_waits or from_graphs or unknown:
        everywhere = not has_waits or any(wait.stream is None for wait in unknown)
        waiting = None if everywhere else _first_after(activities, unknown, work)
        edges += _assumed_edges(activities, waiting, work)
        quality = "assumed"
    return _without_doubles(edges), quality, contradicted


def stream_edges(activities: Sequence[Activity], kind: EdgeKind = "stream") -> list[Edge]:
    """Return an edge from each record to the next on its stream."""
    last: dict[Lane, int] = {}
    edges = []
    for index, activity in enumerate(activities):
        if activity.lane in last:
            edges.append(Edge(last[activity.lane], index, kind))
        last[activity.lane] = index
    return edges


def _event_edges(
    activities: Sequence[Activity], waits: Sequence[Wait], overlap_ns: int, work: WorkLimit
) -> tuple[list[Edge], int]:
    """Return the edges of waits; calls are numbered in the host's order."""
    lanes = _launches(activities)
    edges: list[Edge] = []
    contradicted = 0
    for wait in waits:
        mine = [lane for lane in lanes if not wait.process or lane[0] == wait.process]
        sources = [lane for lane in mine if wait.source is None or lane[2] == wait.source][:MAX_LANES]
        waiting = [lane for lane in mine if wait.stream is None or lane[2] == wait.stream][:MAX_LANES]
        work.spend(len(lanes) + 4 * len(sources) * len(waiting))
        for source in sources:
            place = bisect_left(lanes[source], (wait.recorded, -1)) - 1
            if place < 0:
                continue
            before = lanes[source][place][1]
            for lane in waiting:
                at = bisect_right(lanes[lane], (wait.correlation, len(activities)))
                if lane == source or at == len(lanes[lane]):
                    continue
                after = lanes[lane][at][1]
                if before < after and activities[before].end_ns <= activities[after].start_ns + overlap_ns:
                    edges.append(Edge(before, after, "event"))
                    work.spend(MORE_STEPS * (len(edges) > USUAL_EDGES * len(activities)))
                else:
                    contradicted += 1
    return edges, contradicted


def _launches(activities: Sequence[Activity]) -> dict[Lane, list[tuple[int, int]]]:
    """Return, by stream, the correlations and indices of its records in launch order."""
    lanes: dict[Lane, list[tuple[int, int]]] = {}
    for index, activity in enumerate(activities):
        if activity.correlation >= 0:
            lanes.setdefault(activity.lane, []).append((activity.correlation, index))
    for launches in lanes.values():
        launches.sort()
    return lanes


def _first_after(activities: Sequence[Activity], waits: Sequence[Wait], work: WorkLimit) -> set[int]:
    """Return the first record on a waiting stream after each wait."""
    lanes = _launches(activities)
    first: set[int] = set()
    for wait in waits:
        work.spend(len(lanes))
        for lane, launches in lanes.items():
            if lane[2] == wait.stream and (not wait.process or lane[0] == wait.process):
                at = bisect_right(launches, (wait.correlation, len(activities)))
                first.update(index for _, index in launches[at : at + 1])
    return first


def _assumed_edges(activities: Sequence[Activity], waiting: set[int] | None, work: WorkLimit) -> list[Edge]:
    """Return edges to each record from the last record of every other stream that had ended when it began.

    With `waiting`, only edges to these records, and between records of CUDA graphs.
    """
    ended: dict[Lane, list[int]] = {}
    """Records so far by stream, in order of start."""
    told: dict[tuple[Lane, Lane], int] = {}
    edges: list[Edge] = []
    for index, activity in enumerate(activities):
        work.spend(len(ended))
        for lane, records in ended.items():
            if lane == activity.lane:
                continue
            at = len(records) - 1
            while at >= 0 and activities[records[at]].end_ns > activity.start_ns:
                at -= 1
                if len(records) - at > 64:
                    break
            work.spend(len(records) - 1 - at)
            if at < 0 or activities[records[at]].end_ns > activity.start_ns:
                continue
            before = records[at]
            in_graphs = activity.shared_launch and activities[before].shared_launch
            if waiting is not None and index not in waiting and not in_graphs:
                continue
            if told.get((lane, activity.lane), -1) < before:
                told[lane, activity.lane] = before
                edges.append(Edge(before, index, "assumed"))
                work.spend(MORE_STEPS * (len(edges) > USUAL_EDGES * len(activities)))
        ended.setdefault(activity.lane, []).append(index)
    return edges


def _without_doubles(edges: Iterable[Edge]) -> list[Edge]:
    """Return one edge per pair, of the first kind given, in the order of the later record."""
    kept: dict[tuple[int, int], Edge] = {}
    for edge in edges:
        kept.setdefault((edge.before, edge.after), edge)
    return sorted(kept.values(), key=lambda edge: (edge.after, edge.before))


def restricted(edges: Sequence[Edge], chosen: Sequence[int]) -> list[Edge]:
    """Return the edges between the chosen records, renumbered by their position in `chosen`."""
    place = {index: at for at, index in enumerate(chosen)}
    return [
        Edge(place[edge.before], place[edge.after], edge.kind)
        for edge in edges
        if edge.before in place and edge.after in place
    ]
