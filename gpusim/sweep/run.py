"""Running a sweep: workers compute the points missing from the store, and results are added to it."""

from __future__ import annotations

import contextlib
import signal
import threading
import time
from collections.abc import Callable, Generator, Iterator, Sequence
from dataclasses import dataclass
from types import FrameType
from typing import Protocol

from gpusim.sweep.grid import Grid, Point
from gpusim.sweep.point import Result
from gpusim.sweep.store import PointRow, Store, make_row


class Workers(Protocol):
    """Workers of a sweep: local processes or a cluster."""

    @property
    def description(self) -> str:
        """Number and place of the workers, for messages."""
        ...

    def run(self, grid: Grid, points: Sequence[Point]) -> Generator[list[Result], None, None]:
        """Yield results as they arrive, in any order, each once, with an empty list now and then.

        Closing the generator stops the work. Raises `WorkerError` if it cannot continue.
        """
        ...


@dataclass(frozen=True)
class Progress:
    """Progress of a sweep."""

    done: int
    """Points in the store."""
    total: int
    failed: int
    points_per_s: float
    """Rate of this run."""
    best: PointRow | None
    """Row of this run with the largest speed-up."""


@dataclass(frozen=True)
class Swept:
    """Result of a run."""

    total: int
    before: int
    """Points that were already in the store."""
    computed: int
    failed: int
    """Failed points among those computed."""
    interrupted: bool
    seconds: float

    @property
    def done(self) -> int:
        """Points of this sweep now in the store."""
        return self.before + self.computed

    @property
    def points_per_s(self) -> float:
        """Rate of this run, start of workers included."""
        return self.computed / self.seconds if self.seconds else 0.0


def run_sweep(
    grid: Grid,
    store: Store,
    workers: Workers,
    *,
    retry_failed: bool = False,
    progress: Callable[[Progress], None] = lambda state: None,
) -> Swept:
    """Compute the points missing from the store; each result is on disk before waiting for the next.

    Ctrl-C stops between two results. A point that hits a bug of gpusim is left out of the store, the others are
    computed, and the first such bug is raised at the end. Raises `WorkerError`, and the store's errors.
    """
    known = store.finished()
    keep = {key for key, good in known.items() if good or not retry_failed}
    todo = [point for point in grid.points if point.key not in keep]
    point_of = {point.key: point for point in todo}
    before = len(grid.points) - len(todo)
    computed = failed = 0
    bugs: list[str] = []
    best: PointRow | None = None
    begin = time.monotonic()
    interrupted = False
    with _interrupts() as pressed, contextlib.closing(workers.run(grid, todo)) as batches:
        for results in batches:
            good = [result for result in results if result.bug is None]
            bugs += [f"{point_of[result.key]}\n{result.bug}" for result in results if result.bug is not None]
            rows = [make_row(grid, point_of[result.key], result) for result in good]
            if rows:
                store.add(rows)
            computed += len(rows)
            failed += sum(row.error is not None for row in rows)
            best = max([row for row in (best, *rows) if row and row.speedup], key=_speedup, default=None)
            rate = computed / (time.monotonic() - begin)
            progress(Progress(before + computed, len(grid.points), failed, rate, best))
            if pressed():
                interrupted = before + computed + len(bugs) < len(grid.points)
                break
    if bugs:
        raise RuntimeError(
            f"{len(bugs)} points ran into a bug of gpusim and are not in the store; the first: {bugs[0]}"
        )
    return Swept(len(grid.points), before, computed, failed, interrupted, time.monotonic() - begin)


def _speedup(row: PointRow) -> float:
    return row.speedup or 0.0


@contextlib.contextmanager
def _interrupts() -> Iterator[Callable[[], bool]]:
    """Make the first Ctrl-C a flag that is checked between batches; the second one interrupts at once.

    Signal handling stays unchanged in other threads than the main one and if SIGINT is ignored.
    """
    before = signal.getsignal(signal.SIGINT)
    if threading.current_thread() is not threading.main_thread() or before in (signal.SIG_IGN, None):
        yield lambda: False
        return
    hit = False

    def note(_signal: int, _frame: FrameType | None) -> None:
        nonlocal hit
        hit = True
        signal.signal(signal.SIGINT, before)

    signal.signal(signal.SIGINT, note)
    try:
        yield lambda: hit
    finally:
        signal.signal(signal.SIGINT, before)
