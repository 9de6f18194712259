"""A queue of events in order of time, compiled: records of `ENTRY` in `line[head:tail]`.

Insertion searches from the end, since few events come before earlier insertions. Events at equal times keep the order
of insertion; `LATE` events follow all others of their time.
"""

from __future__ import annotations

from typing import Any, Final

from gpusim.engine.compiled.jit import jit, uint32

IN_TURN: Final = 0
LATE: Final = 1


@jit
def insert(line: Any, head: int, tail: int, at: float, rank: int, index: int) -> int:
    """Insert an event at time `at` and return the new tail."""
    place = tail
    while place > head:
        before = line[uint32(place - 1)]
        if before.time < at or (before.time == at and before.rank <= rank):
            break
        line[uint32(place)].time = before.time
        line[uint32(place)].rank = before.rank
        line[uint32(place)].index = before.index
        place -= 1
    line[uint32(place)].time = at
    line[uint32(place)].rank = rank
    line[uint32(place)].index = index
    return tail + 1
