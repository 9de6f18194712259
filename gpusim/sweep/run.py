"""Running a sweep: what is not in the store yet goes to the workers, what comes back goes into the store."""

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
from gpusim.sweep.store import Row, Store, make_row


class Workers(Protocol):
    """Who computes: processes of this machine, or a cluster."""

    @property
    def description(self) -> str:
        """For messages: how many, and where."""
        ...

    def run(self, grid: Grid, points: Sequence[Point]) -> Generator[list[Result], None, None]:
        """Results as they come, in any order, each point's once, and an empty list now and then.

        Closing the generator stops the work. Raises `WorkerError` where it cannot go on.
        """
        ...


@dataclass(frozen=True)
class Progress:
    """How far a sweep is."""

    done: int
    """Points in the store."""
    total: int
    failed: int
    points_per_s: float
    """Of this run."""
    best: Row | None
    """The largest speed-up of this run."""


@dataclass(frozen=True)
class Swept:
    """What a run did."""

    total: int
    before: int
    """Points that were in the store already."""
    computed: int
    failed: int
    """Of those computed."""
    interrupted: bool
    seconds: float

    @property
    def done(self) -> int:
        """Points of this sweep that are in the store."""
        return self.before + self.computed

    @property
    def points_per_s(self) -> float:
        """Rate of this run, workers' start included."""
        return self.computed / self.seconds if self.seconds else 0.0


def run_sweep(
    grid: Grid,
    store: Store,
    workers: Workers,
    *,
    retry_failed: bool = False,
    progress: Callable[[Progress], None] = lambda state: None,
) -> Swept:
    """Compute the points that the store lacks; each result is on the disk before the next are waited for.

    Ctrl-C stops between two results. A point that ran into a bug of ours is left out of the store, the others are
    computed, and the first such bug is raised at the end. Raises `WorkerError`, and the store's errors.
    """
    known = store.finished()
    keep = {key for key, good in known.items() if good or not retry_failed}
    todo = [point for point in grid.points if point.key not in keep]
    point_of = {point.key: point for point in todo}
    before = len(grid.points) - len(todo)
    computed = failed = 0
    bugs: list[str] = []
    best: Row | None = None
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


def _speedup(row: Row) -> float:
    return row.speedup or 0.0


@contextlib.contextmanager
def _interrupts() -> Iterator[Callable[[], bool]]:
    """Make the first Ctrl-C a question that is asked between two batches; the second interrupts at once.

    Where signals are not ours to take (another thread, a shell that has them ignored), everything stays as it is.
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
