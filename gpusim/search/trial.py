"""Which schedules of an exploration are tried on the GPU, and what became of them."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import zip_longest

from gpusim.formats.measurement import Measurement
from gpusim.search.budget import SEARCHED
from gpusim.search.explore import Explored, Row

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

    Each makespan once, and those that keep the memory limit, if there is one. Where there are more than `count`, the
    policies and each of the searches have as many of them: predictions of one kind err alike.
    """
    rows: list[Row] = []
    alike: dict[tuple[str, int], list[Row]] = {}
    for row in sorted(explored.allowed, key=_rank):
        alike.setdefault((row.policy, row.streams if row.policy in SEARCHED else 0), []).append(row)
    for (policy, _), group in alike.items():
        rows += group[: _OF_A_SEARCH if policy in SEARCHED else 1]
    rows.sort(key=_rank)
    kinds: dict[str, list[Row]] = {}
    for row in {row.makespan_ns: row for row in reversed(rows)}.values():
        kinds.setdefault(row.policy if row.policy in SEARCHED else "", []).insert(0, row)
    in_turn = [row for turn in zip_longest(*sorted(kinds.values(), key=lambda kind: _rank(kind[0]))) for row in turn]
    return sorted([row for row in in_turn if row is not None][:count], key=_rank)


def _rank(row: Row) -> tuple[int, int]:
    return row.makespan_ns, row.streams
