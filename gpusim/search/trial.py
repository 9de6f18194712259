"""Trials of an exploration's schedules on the GPU: selection and results."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import zip_longest

from gpusim.formats.measurement import Measurement
from gpusim.search.budget import SEARCHED
from gpusim.search.explored import Explored, Row

#: Number of schedules tried per search and stream count; the best ones are neighbours and much alike.
_OF_A_SEARCH = 2


@dataclass(frozen=True)
class Trial:
    """Schedules measured against each other, as ranked by `contenders`."""

    rows: tuple[Row, ...]
    times_ns: tuple[int, ...]
    """Measured times, quick measurements for the choice."""
    fastest: Row
    measurement: Measurement | None
    """Full replay of the fastest one with compared outputs; None if that is the sequential schedule."""
    best: Row
    """Fastest row, or the sequential one if that was not slower."""


def contenders(explored: Explored, count: int | None = None) -> list[Row]:
    """Return the best rows of each policy, and of each search and stream count, best first; at most `count`.

    Rows are ranked as they are compared, by predicted time and events. Makespans are distinct, rows keep the memory
    limit, if any, and none has memory actions. If there are more than `count`, policies and each search get equal
    numbers, since predictions of one kind have similar errors.
    """
    rows: list[Row] = []
    alike: dict[tuple[str, int], list[Row]] = {}
    for row in sorted((row for row in explored.allowed if row.plan is None), key=_rank):
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
    return row.compared_ns, row.streams
