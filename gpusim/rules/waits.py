"""Waits of a schedule for events: only for what a stream does not know to have ended, the latest launch first.

A stream knows of every stream how many of its ops have ended (a vector clock). A wait for an op brings all that the
op's stream knew when that op ended, so one wait may save others, and the number of waits is least for this launch
order. At the end of the step one stream waits for all others.

Source: the semantics of `cudaStreamWaitEvent`. Sequences are lists here and arrays in compiled code.
"""

from __future__ import annotations

from typing import Any


def find_waits(
    order: Any,
    streams: Any,
    joining: int,
    first_pred: Any,
    preds: Any,
    known: Any,
    ended: Any,
    place: Any,
    launched: Any,
    latest: Any,
    last: Any,
    first_wait: Any,
    waits: Any,
) -> int:
    """Fill `waits` with the ops to wait for, and return their number.

    `order` has the ops with GPU work. Those before `order[p]` are from `first_wait[p]` on, those of stream `joining` at
    the end of the step from `first_wait[len(order)]` on. Op `op` needs `preds[first_pred[op] : first_pred[op + 1]]`,
    launched before.

    By op: `ended` has what is known at its end, `place` its number in its stream, from 1, `launched` its position. By
    stream: `known` has what it knows, zero at first, `last` its last op and `latest` scratch space, -1 at first.
    """
    count = 0
    for position in range(len(order)):
        op = order[position]
        stream = streams[op]
        first_wait[position] = count
        begin, end = first_pred[op], first_pred[op + 1]
        count = wait_for(known[stream], preds, begin, end, streams, ended, place, launched, latest, waits, count)
        known[stream][stream] += 1
        place[op] = known[stream][stream]
        launched[op] = position
        last[stream] = op
        for other in range(len(known)):
            ended[op][other] = known[stream][other]
    first_wait[len(order)] = count
    return wait_for(known[joining], last, 0, len(last), streams, ended, place, launched, latest, waits, count)


def wait_for(
    known: Any,
    befores: Any,
    first: int,
    end: int,
    streams: Any,
    ended: Any,
    place: Any,
    launched: Any,
    latest: Any,
    waits: Any,
    count: int,
) -> int:
    """Append to `waits`, which has `count` ops, those of `befores[first:end]` that a stream needs to wait for.

    Returns the new count. `known` is what the stream knows, before and after; a negative op is none. `latest` is
    scratch space by stream, -1 before and after.
    """
    left = 0
    for index in range(first, end):
        before = befores[index]
        if before >= 0 and known[streams[before]] < place[before]:
            stream = streams[before]
            if latest[stream] < 0:
                left += 1
            if latest[stream] < 0 or launched[latest[stream]] < launched[before]:
                latest[stream] = before
    while left > 0:
        left -= 1
        last = -1
        for stream in range(len(latest)):
            before = latest[stream]
            if before >= 0 and (last < 0 or launched[last] < launched[before]):
                last = before
        latest[streams[last]] = -1
        if known[streams[last]] < place[last]:
            waits[count] = last
            count += 1
            for stream in range(len(known)):
                known[stream] = max(known[stream], ended[last][stream])
    return count
