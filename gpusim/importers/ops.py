"""Grouping of records into ops: records of one operator call form one op, and ops are in program order.

Only for records that an execution trace links to operators. Otherwise each record is an op of its own.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from heapq import heapify, heappop, heappush

from gpusim.formats.trace import EdgeKind
from gpusim.importers.model import Activity, Edge

Groups = list[tuple[int, ...]]


def grouped(
    activities: Sequence[Activity], edges: Sequence[Edge], calls: Mapping[int, int]
) -> tuple[Groups, list[dict[int, EdgeKind]]]:
    """Return the records of each op, and for each op its earlier predecessors with the kind of the edge.

    `calls` has the position of each record's operator call in the program. Records of one call on one stream form one
    op, unless another op lies between them by its edges. `activities` are in order of start, and edges lead forward.
    """
    members: dict[object, list[int]] = {}
    for index, activity in enumerate(activities):
        call = calls.get(index)
        members.setdefault((call, activity.lane) if call is not None else index, []).append(index)
    groups: Groups = [tuple(indices) for indices in members.values()]
    order = _ordered(groups, activities, edges, calls)
    while len(order) < len(groups):  # calls wait for each other's records; single records have a legal order
        stuck = set(range(len(groups))) - set(order)
        parts = [[(index,) for index in group] if number in stuck else [group] for number, group in enumerate(groups)]
        groups = sorted(part for some in parts for part in some)
        order = _ordered(groups, activities, edges, calls)
    groups = [groups[number] for number in order]
    place = {index: number for number, group in enumerate(groups) for index in group}
    after: list[dict[int, EdgeKind]] = [{} for _ in groups]
    for edge in edges:
        before, number = place[edge.before], place[edge.after]
        if before != number and after[number].get(before) != "data":
            after[number][before] = edge.kind
    return groups, after


def _ordered(
    groups: Groups, activities: Sequence[Activity], edges: Sequence[Edge], calls: Mapping[int, int]
) -> list[int]:
    """Return a legal order of the groups, close to program order, without groups in or behind a cycle.

    A record without a call follows the one before it on its stream.
    """
    place = {index: number for number, group in enumerate(groups) for index in group}
    keys: list[tuple[int, int]] = []
    last: dict[tuple[int, int, int], int] = {}
    for index, activity in enumerate(activities):
        last[activity.lane] = calls.get(index, last.get(activity.lane, -1))
        if groups[place[index]][0] == index:
            keys.append((last[activity.lane], index))
    successors: list[set[int]] = [set() for _ in groups]
    waiting = [0] * len(groups)
    for edge in edges:
        before, after = place[edge.before], place[edge.after]
        if before != after and after not in successors[before]:
            successors[before].add(after)
            waiting[after] += 1
    ready = [(keys[number], number) for number, count in enumerate(waiting) if not count]
    heapify(ready)
    order: list[int] = []
    while ready:
        _, number = heappop(ready)
        order.append(number)
        for after in successors[number]:
            waiting[after] -= 1
            if not waiting[after]:
                heappush(ready, (keys[after], after))
    return order
