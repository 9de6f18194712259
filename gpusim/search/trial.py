"""Trials of an exploration's schedules on the GPU: selection and results."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import zip_longest

from gpusim.defaults import SEARCHED
from gpusim.formats.measurement import Measurement
from gpusim.search.budget import POLICIES_WITH_VARIANTS, WITH_SEARCH
from gpusim.search.explored import Explored, Row

#: Number of schedules tried per search and stream count; the best ones are neighbours and much alike.
_OF_A_SEARCH = 2
#: Schedules compared slower than the best by more than this share are tried last: in a fair comparison none of them was
#: the fastest of its step (research/2026-11-28-fair-trials.md).
_WITHIN_REACH = 0.10


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
    limit, if any, and none has memory actions. If there are more than `count`, each search, the policies and the
    policies on other kernels get equal numbers, since predictions of one kind have similar errors; rows that are
    unlikely to be the fastest come after all others.
    """
    alike: dict[tuple[str, str, int], list[Row]] = {}
    for row in sorted((row for row in explored.allowed if row.plan is None), key=_rank):
        name = row.schedule.policy if row.policy == POLICIES_WITH_VARIANTS else row.policy
        alike.setdefault((_kind(row), name, row.streams if row.policy in SEARCHED else 0), []).append(row)
    rows = [row for (kind, *_), group in alike.items() for row in group[: _OF_A_SEARCH if kind in SEARCHED else 1]]
    rows.sort(key=_rank)
    distinct = sorted({row.makespan_ns: row for row in reversed(rows)}.values(), key=_rank)
    limit_ns = min((row.compared_ns for row in distinct), default=0) * (1 + _WITHIN_REACH)
    near, far = ([row for row in distinct if (row.compared_ns <= limit_ns) == within] for within in (True, False))
    return sorted([*_in_turn(near), *_in_turn(far)][:count], key=_rank)


def _kind(row: Row) -> str:
    """Return the name of a search, or of the kernels that a policy's schedule is for."""
    return row.policy if row.policy in WITH_SEARCH else ""


def _in_turn(rows: list[Row]) -> list[Row]:
    """Order rows, given best first, by turns of their kinds."""
    kinds: dict[str, list[Row]] = {}
    for row in rows:
        kinds.setdefault(_kind(row), []).append(row)
    return [row for turn in zip_longest(*kinds.values()) for row in turn if row is not None]


def _rank(row: Row) -> tuple[int, int]:
    return row.compared_ns, row.streams
