"""Local workers: one process and one pipe each.

`concurrent.futures` is not used: there, one killed process breaks the whole pool, loses the other workers' points, and
does not tell which point was at fault. With a pipe per worker, results arrive one by one, the others continue, and the
first point without a result is the one that was being computed.
"""

from __future__ import annotations

import multiprocessing
import signal
from collections import deque
from collections.abc import Generator, Sequence
from multiprocessing import resource_tracker
from multiprocessing.connection import Connection, wait
from typing import Final

from gpusim.api.sweeps import cores
from gpusim.errors import GpusimError, WorkerError
from gpusim.io.processes import end_with_parent
from gpusim.sweep import point as point_module
from gpusim.sweep.grid import Grid, Group, Point
from gpusim.sweep.point import Result
from gpusim.sweep.todo import Todo

#: Points held by a worker: the current one and the next, so that it never waits for this process.
WINDOW: Final = 2
#: A point is recorded as failed after this many deaths of its worker.
MAX_DEATHS: Final = 3
#: After this many deaths without a result in between, the machine is at fault, not the points. The limit is the larger
#: of the total and the number per worker, since all workers may die at once.
MAX_DEATHS_IN_A_ROW: Final = 12
MAX_DEATHS_A_WORKER: Final = 4
#: Interval at which the caller gets control without results.
TICK_S: Final = 0.2


class LocalWorkers:
    """Workers in `count` processes, by default one per core; see `gpusim.sweep.run.Workers`."""

    def __init__(self, count: int | None = None) -> None:
        self.count = count or cores()

    @property
    def description(self) -> str:
        """Number and place of the workers, for messages."""
        return f"{self.count} local {'worker' if self.count == 1 else 'workers'}"

    def run(self, grid: Grid, points: Sequence[Point]) -> Generator[list[Result], None, None]:
        """Yield results as they arrive, with an empty list now and then; closing the generator ends the processes.

        Raises `WorkerError` if processes die at start, or one after the other.
        """
        crew = _Crew(grid, points, min(self.count, len(points)))
        try:
            while crew.busy:
                yield crew.step()
        finally:
            crew.end()


class _Worker:
    """A worker process and the points given to it."""

    def __init__(self, version: str) -> None:
        spawn = multiprocessing.get_context("spawn")
        self.pipe, theirs = spawn.Pipe()
        self.process = spawn.Process(target=_serve, args=(theirs, version), daemon=True)
        # Started with SIGINT blocked: Ctrl-C reaches the whole foreground group, and only this process handles it.
        # The tracker is started first, since its start unblocks SIGINT.
        resource_tracker.ensure_running()
        before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
        try:
            self.process.start()
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)
        theirs.close()  # otherwise the pipe would stay open when the process dies
        self.started = False
        self.given: deque[Point] = deque()
        self.has: set[str] = set()
        self.group: Group | None = None

    def send(self, point: Point, contents: dict[str, bytes]) -> bool:
        """Send a point with the contents that the worker lacks; return False if it is dead."""
        new = {hash: contents[hash] for hash in point.group if hash not in self.has}
        try:
            self.pipe.send((point, new))
        except OSError:
            return False
        self.has |= set(new)
        self.group = point.group
        self.given.append(point)
        return True

    def end(self) -> int | None:
        """Kill the process and return its exit code."""
        self.process.kill()
        self.process.join()
        self.pipe.close()
        return self.process.exitcode


class _Crew:
    """All workers of a run, and the remaining points."""

    def __init__(self, grid: Grid, points: Sequence[Point], count: int) -> None:
        self.version = grid.version
        self.contents = grid.contents
        self.todo = Todo(points)
        self.deaths: dict[str, int] = {}
        self.deaths_in_a_row = 0
        self.workers: list[_Worker] = []
        try:
            for _ in range(count):
                self.workers.append(_Worker(self.version))
        except BaseException:
            self.end()
            raise

    @property
    def busy(self) -> bool:
        """True if any point is left."""
        return bool(self.todo) or any(worker.given for worker in self.workers)

    def step(self) -> list[Result]:
        """Hand out points, wait briefly, and return the results that have arrived."""
        for worker in self.workers:
            self._fill(worker)
        results: list[Result] = []
        ready = set(wait([worker.pipe for worker in self.workers], TICK_S))
        for number, worker in enumerate(self.workers):
            if worker.pipe in ready:
                results += self._receive(number)
        return results

    def end(self) -> None:
        """Kill all processes; the points in progress are lost."""
        for worker in self.workers:
            worker.process.kill()
        for worker in self.workers:
            worker.end()

    def _fill(self, worker: _Worker) -> None:
        while self.todo and len(worker.given) < WINDOW:
            others = {other.group for other in self.workers if other is not worker}
            point = self.todo.take(worker.group, others)
            # A large content would not fit into the pipe of a busy worker, and this process would wait.
            ahead = bool(worker.given) or not worker.started
            if (ahead and not worker.has.issuperset(point.group)) or not worker.send(point, self.contents):
                self.todo.put_back([point])
                return

    def _receive(self, number: int) -> list[Result]:
        worker = self.workers[number]
        results: list[Result] = []
        try:
            while worker.pipe.poll():
                answer = worker.pipe.recv()
                if isinstance(answer, GpusimError):
                    raise answer
                if answer is None:
                    worker.started = True
                    continue
                assert worker.given.popleft().key == answer.key
                self.deaths_in_a_row = 0
                results.append(answer)
        except (EOFError, OSError):  # OSError: killed in the middle of a message
            results += self._bury(number)
        return results

    def _bury(self, number: int) -> list[Result]:
        """Replace a dead worker; its current point is retried, or recorded as failed."""
        worker = self.workers[number]
        worker.process.join(1.0)
        code = worker.end()
        manner = f"killed by {signal.Signals(-code).name}" if code is not None and code < 0 else f"exit code {code}"
        self.deaths_in_a_row += 1
        if self.deaths_in_a_row >= max(MAX_DEATHS_IN_A_ROW, MAX_DEATHS_A_WORKER * len(self.workers)):
            raise WorkerError(f"{self.deaths_in_a_row} worker processes have died one after the other ({manner})")
        results = []
        if worker.started and worker.given:
            suspect = worker.given[0]
            deaths = self.deaths[suspect.key] = self.deaths.get(suspect.key, 0) + 1
            if deaths >= MAX_DEATHS:
                worker.given.popleft()
                text = f"its worker process died {deaths} times ({manner})"
                results = [Result(suspect.key, None, 0.0, "", error=text)]
        self.todo.put_back(worker.given)
        self.workers[number] = _Worker(self.version)
        return results


def _serve(pipe: Connection, version: str) -> None:
    """Run a worker process: receive points and send results until the other side ends."""
    end_with_parent()
    contents: dict[str, bytes] = {}
    try:
        pipe.send(None)
        while True:
            point, new = pipe.recv()
            contents |= new
            trace, hardware = (contents[hash] for hash in point.group)
            try:
                answer: Result | GpusimError = point_module.compute(point, trace, hardware, version)
            except GpusimError as error:
                answer = error
            pipe.send(answer)
    except (EOFError, OSError):
        return
