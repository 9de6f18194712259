"""Numbers of events of schedules of an op graph, compiled; the waits are those of the replay (`gpusim.rules.waits`)."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from gpusim.engine.compiled.arrays import Indices
from gpusim.engine.compiled.jit import entry, int64, rule
from gpusim.engine.compiled.op_graph import OpArrays, choose
from gpusim.rules import waits as rules

find_waits = rule(rules.find_waits)
#: For `joining`: the stream of the first op waits for the others at the end of the step.
FIRST_USED = -1


class EventsRoom(NamedTuple):
    """State of counting one schedule at a time: that of `find_waits`, and the ops fused into each op as lists."""

    order: Indices
    stream_of: Indices
    done_by: Indices
    choice: Indices
    first_member: Indices
    next_member: Indices
    known: Indices
    ended: Indices
    place: Indices
    launched: Indices
    latest: Indices
    last: Indices
    first_wait: Indices
    waits: Indices

    @classmethod
    def of_size(cls, ops: int, preds: int, streams: int) -> EventsRoom:
        """Return the state for schedules of `ops` ops with `preds` predecessors on up to `streams` streams."""
        by_op, by_stream = (ops,), (streams,)
        tables = ((streams, streams), (ops, streams))
        shapes = (*(by_op,) * 6, *tables, by_op, by_op, by_stream, by_stream, (ops + 1,), (preds + streams,))
        return cls(*(np.zeros(shape, np.int32) for shape in shapes))


@entry
def count_events(
    graph: OpArrays,
    first_pred: Indices,
    orders: Indices,
    streams: Indices,
    chosen: Indices | None,
    joining: int,
    room: EventsRoom,
    events: npt.NDArray[np.int64],
    first: int,
    last: int,
) -> None:
    """Fill `events` for legal schedules `first` to `last` - 1; `chosen` as for `lower_schedules`.

    `orders` may leave out ops without kernels. An op that writes without a kernel counts as a view.
    """
    ops = graph.ops
    for number in range(first, last):
        for op in range(len(ops)):
            room.done_by[op] = op
            room.first_member[op] = -1
        if chosen is not None:
            choose(ops, graph.variants, graph.covers, chosen[number], room.choice, room.done_by)
        for later in range(len(ops)):  # an op with what it does as one launch: members in recorded order
            op = len(ops) - 1 - later
            doing = room.done_by[op]
            room.stream_of[op] = streams[number, doing]
            if ops[op].rows > 0:
                room.next_member[op] = room.first_member[doing]
                room.first_member[doing] = op
        count = int64(0)
        for op in orders[number]:
            if room.done_by[op] == op:
                member = int64(room.first_member[op])
                while member >= 0:
                    room.order[count] = member
                    count += 1
                    member = int64(room.next_member[member])
        for stream in range(len(room.known)):
            room.last[stream] = room.latest[stream] = -1
            for other in range(len(room.known)):
                room.known[stream, other] = 0
        for op in range(len(ops)):
            room.place[op] = 0
        at_end = int64(joining)
        if at_end == FIRST_USED:
            at_end = int64(room.stream_of[room.order[0]]) if count > 0 else int64(0)
        awaited = find_waits(
            room.order[:count],
            room.stream_of,
            at_end,
            first_pred,
            graph.preds,
            room.known,
            room.ended,
            room.place,
            room.launched,
            room.latest,
            room.last,
            room.first_wait,
            room.waits,
        )
        events[number] = 0
        for wait in range(awaited):  # each op once, however many streams wait for it
            op = room.waits[wait]
            events[number] += 1 if room.place[op] > 0 else 0
            room.place[op] = 0
