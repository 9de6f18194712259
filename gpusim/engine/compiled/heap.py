"""A binary heap of records, smallest (time, rank, index) first; the caller keeps the count."""

from __future__ import annotations

from typing import Any

import numpy as np

from gpusim.engine.compiled.jit import jit

ENTRY = np.dtype([("time", "f8"), ("rank", "i8"), ("index", "i8")], align=True)


@jit
def push(heap: Any, base: int, count: int, time: float, rank: int, index: int) -> None:
    """Add an entry to the heap in `heap[base : base + count]`."""
    place = count
    while place > 0:
        parent = (place - 1) >> 1
        above = heap[base + parent]
        if above.time < time or (
            above.time == time and (above.rank < rank or (above.rank == rank and above.index < index))
        ):
            break
        below = heap[base + place]
        below.time = above.time
        below.rank = above.rank
        below.index = above.index
        place = parent
    entry = heap[base + place]
    entry.time = time
    entry.rank = rank
    entry.index = index


@jit
def pop(heap: Any, base: int, count: int) -> None:
    """Remove the first entry of the heap in `heap[base : base + count]`; the caller reads it before."""
    count -= 1
    last = heap[base + count]
    time, rank, index = last.time, last.rank, last.index
    place = 0
    while 2 * place + 1 < count:
        child = 2 * place + 1
        least = heap[base + child]
        if child + 1 < count:
            right = heap[base + child + 1]
            if right.time < least.time or (
                right.time == least.time
                and (right.rank < least.rank or (right.rank == least.rank and right.index < least.index))
            ):
                child += 1
                least = right
        if time < least.time or (
            time == least.time and (rank < least.rank or (rank == least.rank and index < least.index))
        ):
            break
        above = heap[base + place]
        above.time = least.time
        above.rank = least.rank
        above.index = least.index
        place = child
    entry = heap[base + place]
    entry.time = time
    entry.rank = rank
    entry.index = index


@jit
def not_before(now: float, at: float) -> float:
    """Return the time of an event scheduled for `at`, as `now` plus a delay that rounding does not make too short."""
    delay = max(0.0, at - now)
    while now + delay < at:
        delay = np.nextafter(delay, np.inf)
    return now + delay
