"""What happens at a known time, as a line in that order, compiled: records of `ENTRY`, `line[head:tail]`.

An entry goes to its place from the end: hardly any comes before what was known earlier. Those of one time are in the
order in which they were put in; entries that are `LATE` come after all others of their time.
"""

from __future__ import annotations

from typing import Any, Final

from gpusim.engine.compiled.jit import jit, uint32

IN_TURN: Final = 0
LATE: Final = 1


@jit
def insert(line: Any, head: int, tail: int, at: float, rank: int, index: int) -> int:
    """Put in what happens at a time; the line's new tail."""
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
