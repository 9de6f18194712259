"""Which schedules of an exploration are tried on the GPU, and what became of them."""

from __future__ import annotations

from dataclasses import dataclass

from gpusim.plan.measurement import Measurement
from gpusim.search.explore import SEARCHED, Explored, Row

#: Of each search, how many schedules are tried: its best ones are neighbours, and much alike.
_OF_A_SEARCH = 2


@dataclass(frozen=True)
class Trial:
    """Schedules that were measured against each other, best prediction first."""

    rows: tuple[Row, ...]
    times_ns: tuple[int, ...]
    """What each took; quick measurements, to choose one by."""
    fastest: Row
    measurement: Measurement | None
    """The fastest of them replayed at length, outputs compared; None where that is the sequential schedule."""
    best: Row
    """The fastest, or the sequential row where that was not slower."""


def contenders(explored: Explored, count: int | None = None) -> list[Row]:
    """The best of each search and each policy, best prediction first, each makespan once; at most `count`.

    Those that keep the memory limit, if there is one.
    """
    rows: list[Row] = []
    for policy in dict.fromkeys(row.policy for row in explored.allowed):
        of_policy = sorted((row for row in explored.allowed if row.policy == policy), key=_rank)
        rows += of_policy[: _OF_A_SEARCH if policy in SEARCHED else 1]
    rows.sort(key=_rank)
    return list({row.makespan_ns: row for row in reversed(rows)}.values())[::-1][:count]


def _rank(row: Row) -> tuple[int, int]:
    return row.makespan_ns, row.streams
