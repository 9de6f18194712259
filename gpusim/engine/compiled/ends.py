"""The next end of blocks: `SmPlacement.next_end` compiled, by rows of eight groups.

`device.ends` has the first end of a cohort in each group, by the group's index in `device.order`. `row_ends` and
`row_next` have the first two ends of each row, and `row_at` the group of the first.
"""

from __future__ import annotations

from typing import Any, Final

import numpy as np

from gpusim.engine.compiled.jit import int64, jit
from gpusim.engine.placement import NEAR_NS

#: Groups per row.
ROW: Final = 8


@jit
def note_end(device: Any, number: int, end_ns: float) -> None:
    """Set the first end of a group, and recompute the first two ends of its row."""
    ends, row = device.ends, number >> 3 & 15
    ends[number] = end_ns
    at = row << 3
    a, b, c, d = ends[at], ends[at + 1], ends[at + 2], ends[at + 3]
    ab, cd = earlier(b, a), earlier(d, c)
    abcd, next_abcd = earlier(cd, ab), earlier(earlier(later(a, b), later(c, d)), later(ab, cd))
    in_ab, in_cd = int64(1) if b < a else int64(0), int64(3) if d < c else int64(2)
    e, f, g, h = ends[at + 4], ends[at + 5], ends[at + 6], ends[at + 7]
    ef, gh = earlier(f, e), earlier(h, g)
    efgh, next_efgh = earlier(gh, ef), earlier(earlier(later(e, f), later(g, h)), later(ef, gh))
    in_ef, in_gh = int64(5) if f < e else int64(4), int64(7) if h < g else int64(6)
    in_abcd, in_efgh = in_cd if cd < ab else in_ab, in_gh if gh < ef else in_ef
    device.row_ends[row] = earlier(efgh, abcd)
    device.row_next[row] = earlier(earlier(next_abcd, next_efgh), later(abcd, efgh))
    device.row_at[row] = at + (in_efgh if efgh < abcd else in_abcd)


@jit
def earlier(a: float, b: float) -> float:
    """Return the smaller of two numbers."""
    return a if a < b else b


@jit
def later(a: float, b: float) -> float:
    """Return the larger of two numbers."""
    return a if b < a else b


@jit
def next_end(device: Any, blocks: Any) -> None:
    """Find the next end as `SmPlacement.next_end`; `device.alone` is 1 if the group ends well before all others."""
    end_ns, next_ns, end_row = device.row_ends[0], device.row_next[0], int64(0)
    for row in range(1, (int64(device.groups) + ROW - 1) >> 3):
        row_ns = device.row_ends[row]
        end_row = row if row_ns < end_ns else end_row  # the first of equal ones; reading here would branch
        next_ns = earlier(earlier(next_ns, device.row_next[row]), later(end_ns, row_ns))
        end_ns = earlier(row_ns, end_ns)
    end_number = int64(device.row_at[end_row])
    group = blocks.groups[int64(device.order[end_number])]
    device.alone = 1 if next_ns > end_ns + 2 * NEAR_NS else 0
    if next_ns == end_ns:  # of several, the one placed first
        for number in range(end_number + 1, int64(device.groups)):
            other = blocks.groups[int64(device.order[number])]
            if device.ends[number] == end_ns and other.number < group.number:
                group = other
    device.end_ns = end_ns
    device.end_number = end_number
    device.end_place = group.ending if end_ns < np.inf else int64(-1)
