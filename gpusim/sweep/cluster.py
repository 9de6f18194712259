"""Workers of a Dask cluster (the extra `sweep`); the only module that imports dask.

Traces and hardware models are sent as content: workers on other machines need not see this machine's files, and a
bundled name could mean another file there. Each content is a task of its own, so it is sent once to the scheduler and
once to each worker, and Dask restores it when the worker that holds it dies.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import queue
import socket
import time
import uuid
from collections import Counter
from collections.abc import Callable, Generator, Iterator, Sequence
from concurrent.futures import CancelledError, ThreadPoolExecutor, wait
from dataclasses import astuple
from types import TracebackType
from typing import Any, Final
from urllib.parse import urlsplit

from gpusim.errors import GpusimError, OptionError, WorkerError
from gpusim.sweep.grid import Grid, Group, Point, code_version
from gpusim.sweep.point import Result
from gpusim.sweep.todo import Todo
from gpusim.text import short_value

MISSING_DASK: Final = "a cluster needs dask, which is not installed (pip install 'gpusim[sweep]')"
CONNECT_S: Final = 5.0
#: Time to wait for the first worker, and for another one after all have gone.
NO_WORKERS_S: Final = 30.0
#: Outstanding tasks per thread of a worker: it never waits for this process, and its death loses little.
WINDOW: Final = 2
#: Target duration of a task, of one or several points: a task costs this process, the scheduler and the worker some
#: milliseconds each. If a worker dies, the results of its current task are lost.
TASK_S: Final = 0.1
MAX_TASK_POINTS: Final = 32
TICK_S: Final = 0.2
#: Interval between checks for new and lost workers.
LOOK_S: Final = 2.0


def check_scheduler(address: str) -> None:
    """Check that a Dask scheduler answers; raises `OptionError` for a wrong address, or `WorkerError` within seconds.

    `Client` alone would retry a refused connection again and again, and wait forever for a server of another kind.
    """
    from distributed import rpc

    try:
        parts = urlsplit(address)
        host, port = parts.hostname, parts.port
    except ValueError:
        host = port = None
    if not host or not port or parts.scheme != "tcp" or parts.path:
        raise OptionError(
            f"--scheduler '{short_value(address)}': the address of a scheduler looks like tcp://HOST:PORT"
        )

    async def ask() -> str:
        async with rpc(address) as remote:
            return str((await remote.identity())["type"])

    try:
        socket.create_connection((host, port), CONNECT_S).close()
        # In a separate thread: this one may have a running event loop (a notebook).
        with ThreadPoolExecutor(1) as thread:
            kind = thread.submit(asyncio.run, asyncio.wait_for(ask(), CONNECT_S)).result()
    except TimeoutError as cause:
        raise WorkerError(f"no Dask scheduler at '{address}': no answer in {CONNECT_S:.0f} s") from cause
    except (OSError, ValueError, MemoryError) as cause:
        raise WorkerError(f"no Dask scheduler at '{address}': {getattr(cause, 'strerror', None) or cause}") from cause
    if kind != "Scheduler":
        raise WorkerError(f"no Dask scheduler at '{address}': it is a {kind.lower()}")


class ClusterWorkers:
    """The workers behind a Dask scheduler; a context manager. See `gpusim.sweep.run.Workers`.

    Raises `WorkerError` without a scheduler or workers, or if workers run another gpusim.
    """

    def __init__(self, address: str, *, no_workers_s: float = NO_WORKERS_S) -> None:
        try:
            import distributed
        except ImportError as cause:
            raise WorkerError(MISSING_DASK) from cause

        self.address = address
        self.no_workers_s = no_workers_s
        # Connection errors are raised here as one line; the library would log them a second time.
        for name in ("distributed", "distributed.client"):
            logging.getLogger(name).setLevel(logging.CRITICAL)
        check_scheduler(address)
        try:
            self.client = distributed.Client(address, timeout=CONNECT_S, set_as_default=False)
        except OSError as cause:  # asyncio's timeouts are OSErrors
            raise WorkerError(f"no Dask scheduler at '{address}': {cause}") from cause
        try:
            self.threads = self._wait_for_workers()
            self._check_versions()
        except BaseException:
            self.client.close()
            raise

    @property
    def description(self) -> str:
        """Number and place of the workers, for messages."""
        count = len(self.threads)
        return f"{count} {'worker' if count == 1 else 'workers'} of the cluster at {self.address}"

    def __enter__(self) -> ClusterWorkers:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.client.close()

    def run(self, grid: Grid, points: Sequence[Point]) -> Generator[list[Result], None, None]:
        """Yield results as they arrive, with an empty list now and then; closing the generator cancels open tasks.

        Raises `WorkerError` if the scheduler or all workers are lost, or one runs another gpusim.
        """
        run = _Run(self, grid)
        try:
            yield from run.all(points)
            # The scheduler blames all points of a dead worker; these are retried one at a time.
            suspects, run.last_chance = list(run.suspects), True
            for suspect in suspects:
                yield from run.all([suspect])
        finally:
            run.end()

    def look(self) -> int:
        """Update the list of workers and return their number. Raises `WorkerError` if the scheduler is gone."""
        with self.talking():
            self.threads = dict(self.client.nthreads())
        return len(self.threads)

    @contextlib.contextmanager
    def talking(self) -> Iterator[None]:
        """Raise `WorkerError` for a broken connection to the scheduler."""
        try:
            yield
        except (OSError, CancelledError) as cause:  # futures are cancelled when the scheduler goes
            raise self.lost() from cause

    def lost(self) -> WorkerError:
        """Return the error for a lost scheduler."""
        return WorkerError(f"lost the Dask scheduler at '{self.address}'")

    def _wait_for_workers(self) -> dict[str, int]:
        deadline = time.monotonic() + self.no_workers_s
        while not self.look():
            if time.monotonic() > deadline:
                raise WorkerError(f"the Dask scheduler at '{self.address}' has no workers: dask worker {self.address}")
            time.sleep(TICK_S)
        return self.threads

    def _check_versions(self) -> None:
        """Check the gpusim version of every worker; `compute` checks again, for workers that join later."""

        # A nested function is sent as code, so it also runs without gpusim on the worker.
        def ask() -> str:
            try:
                from gpusim.sweep.grid import code_version
            except ImportError as cause:
                return f"no gpusim ({cause})"
            return f"gpusim {code_version()}"

        wanted = f"gpusim {code_version()}"
        versions: dict[str, str] = self.client.run(ask)
        for worker, version in versions.items():
            if version != wanted:
                raise WorkerError(f"worker {worker} has {version}, this process {wanted}: install the same on both")


class _Run:
    """State of a run: outstanding points and the contents that they need."""

    def __init__(self, cluster: ClusterWorkers, grid: Grid) -> None:
        self.cluster = cluster
        self.client = cluster.client
        self.version = grid.version
        self.name = f"gpusim-sweep-{uuid.uuid4().hex[:8]}"
        self.contents = {
            hash: self.client.submit(_keep, data, key=f"{self.name}-content-{hash}", pure=True)
            for hash, data in grid.contents.items()
        }
        self.todo = Todo([])
        self.out: dict[Any, tuple[list[Point], str]] = {}
        self.seconds: dict[str, float] = {}
        self.held: Counter[str] = Counter()
        self.group_of: dict[str, Group] = {}
        self.done: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self.tries = 0
        self.suspects: list[Point] = []
        self.last_chance = False
        self.looked_at = self.seen_at = time.monotonic()

    def all(self, points: Sequence[Point]) -> Iterator[list[Result]]:
        """Submit points as results arrive, keeping every worker busy, and yield results."""
        self.todo.put_back(points)
        while self.todo or self.out:
            for worker, threads in self.cluster.threads.items():
                while self.todo and self.held[worker] < WINDOW * threads:
                    others = {group for other, group in self.group_of.items() if other != worker}
                    first = self.todo.take(self.group_of.get(worker), others)
                    self._submit([first, *self.todo.take_more(first, self._size(first) - 1)], worker)
            yield self._collect()
            self._look()

    def _size(self, first: Point) -> int:
        """Return the number of points for a task, from the policy's times so far and an even share of the points."""
        seconds = self.seconds.get(first.policy, TASK_S)
        share = len(self.todo) // (WINDOW * sum(self.cluster.threads.values()))
        return max(1, min(MAX_TASK_POINTS, share, int(TASK_S / max(seconds, 1e-9))))

    def end(self) -> None:
        """Cancel outstanding tasks, unless the scheduler is gone."""
        if self.client.status == "running":
            self.client.cancel([*self.out, *self.contents.values()], force=True)

    def _submit(self, points: list[Point], worker: str) -> None:
        """Send points of one group to a worker, or to another one if it has died."""
        self.tries += 1
        group = points[0].group
        trace, hardware = (self.contents[hash] for hash in group)
        future = self.client.submit(
            _compute,
            [astuple(point) for point in points],
            trace,
            hardware,
            self.version,
            TASK_S,
            key=f"{self.name}-task-{self.tries}",
            workers=[worker],
            allow_other_workers=True,
            pure=False,
        )
        self.out[future] = points, worker
        self.held[worker] += 1
        self.group_of[worker] = group
        future.add_done_callback(self.done.put)

    def _collect(self) -> list[Result]:
        """Return the results that have arrived, after a short wait if there are none."""
        futures = []
        with contextlib.suppress(queue.Empty):
            futures.append(self.done.get(timeout=TICK_S))
        if self.client.status != "running":  # it may come back, but without our tasks
            raise self.cluster.lost()
        while not self.done.empty():
            futures.append(self.done.get())
        good = [future for future in futures if future.status == "finished"]
        results = {result.key: result for task in self._gather(good) for result in task}
        for future in futures:
            points, worker = self.out.pop(future)
            self.held[worker] -= 1
            if points[0].key not in results:
                results |= {result.key: result for result in self._failed(future, points)}
            self._note(points, results)
        return list(results.values())

    def _gather(self, futures: list[Any]) -> list[list[Result]]:
        """Return the results of finished tasks.

        If a worker has died since, its tasks are recomputed, and left out if that fails. The library would wait forever
        without workers, so this checks for workers meanwhile.
        """

        async def ask() -> list[list[Result]]:
            gathered: list[list[Result]] = await self.client.gather(futures, errors="skip", asynchronous=True)
            return gathered

        with self.cluster.talking():
            asked = asyncio.run_coroutine_threadsafe(ask(), self.client.loop.asyncio_loop)
            try:
                while not wait([asked], timeout=TICK_S).done:
                    self._look()
                return asked.result()
            finally:
                asked.cancel()

    def _note(self, points: list[Point], results: dict[str, Result]) -> None:
        """Update the times of policies, and put back the points for which a task had no time."""
        for point in points:
            if point.key in results:
                before = self.seconds.get(point.policy, results[point.key].seconds)
                self.seconds[point.policy] = (before + results[point.key].seconds) / 2
        if points[0].key in results:
            self.todo.put_back([point for point in points if point.key not in results])

    def _failed(self, future: Any, points: list[Point]) -> list[Result]:
        """Handle a task without results, and return results for points that have failed."""
        from distributed import KilledWorker

        cause = self._cause(future)
        if cause is None:
            return [result for task in self._gather([future]) for result in task]
        if isinstance(cause, GpusimError):
            raise cause
        if isinstance(cause, ImportError):
            raise WorkerError(f"a worker of '{self.cluster.address}' lacks something that gpusim needs: {cause}")
        if not isinstance(cause, KilledWorker):
            raise cause
        if not self.last_chance:
            self.suspects += points
            return []
        text = f"its worker died {cause.allowed_failures + 1} times"
        return [Result(point.key, None, 0.0, "", error=text) for point in points]

    def _cause(self, future: Any) -> BaseException | None:
        """Return the exception of a task; None if its result was lost with a worker and has been recomputed."""
        with self.cluster.talking():
            while True:
                try:
                    cause: BaseException | None = future.exception(timeout=TICK_S)
                    return cause
                except TimeoutError:
                    self._look()

    def _look(self) -> None:
        """Check for workers now and then. Raises `WorkerError` if there have been none for a while."""
        now = time.monotonic()
        if now < self.looked_at + LOOK_S:
            return
        self.looked_at = now
        if self.cluster.look():
            self.seen_at = now
        elif now > self.seen_at + self.cluster.no_workers_s:
            raise WorkerError(f"the Dask scheduler at '{self.cluster.address}' has no workers left")


def _travelling() -> tuple[Callable[..., bytes], Callable[..., list[Result]]]:
    """Return the functions that run on workers; nested functions are sent as code, with plain values as arguments.

    So the scheduler, which unpacks every task, needs no gpusim.
    """

    def keep(data: bytes) -> bytes:
        return data

    def compute(
        points: list[tuple[Any, ...]], trace: bytes, hardware: bytes, version: str, limit_s: float
    ) -> list[Result]:
        from gpusim.sweep import point as module
        from gpusim.sweep.grid import Point

        return module.compute_some([Point(*fields) for fields in points], trace, hardware, version, limit_s)

    return keep, compute


_keep, _compute = _travelling()
