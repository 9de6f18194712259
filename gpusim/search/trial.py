"""Which schedules of an exploration are tried on the GPU, and what became of them."""

from __future__ import annotations

from dataclasses import dataclass

from gpusim.plan.measurement import Measurement
from gpusim.search.explore import Explored, Row
from gpusim.search.searches import SEARCHED

#: Of each search and number of streams, how many schedules are tried: the best ones are neighbours, and much alike.
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
    """The best of each policy, and of each search on each number of streams; at most `count`, best prediction first.

    Each makespan once, and those that keep the memory limit, if there is one.
    """
    rows: list[Row] = []
    kinds: dict[tuple[str, int], list[Row]] = {}
    for row in sorted(explored.allowed, key=_rank):
        kinds.setdefault((row.policy, row.streams if row.policy in SEARCHED else 0), []).append(row)
    for (policy, _), of_kind in kinds.items():
        rows += of_kind[: _OF_A_SEARCH if policy in SEARCHED else 1]
    rows.sort(key=_rank)
    return list({row.makespan_ns: row for row in reversed(rows)}.values())[::-1][:count]


def _rank(row: Row) -> tuple[int, int]:
    return row.makespan_ns, row.streams
