"""An exploration in a separate process, with progress and results while it runs, and a way to stop it.

It is a process, not a thread: Python runs one thread at a time, so a search would block the rest of its process, and
the system could not lower its priority. The process is started, not forked, since the calling server has threads.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
import traceback
from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from multiprocessing.connection import Connection, Pipe
from typing import Final, Literal

from gpusim.defaults import DEFAULT_SEED
from gpusim.errors import GpusimError, WorkerError
from gpusim.formats.schedule import Partition
from gpusim.plan.graph import OpGraph
from gpusim.search.budget import WITH_SEARCH
from gpusim.search.explore import explore
from gpusim.search.explored import Explored, Row
from gpusim.search.interrupt import Cancelled

#: Increment of `nice` for the search.
BEHIND: Final = 10

_PROGRAM: Final = "import sys; sys.path[:] = sys.argv[2:]; from gpusim.search.background import serve; serve()"


@dataclass(frozen=True, slots=True)
class _Work:
    """The arguments of `explore`."""

    graph: OpGraph
    streams: int
    budget_s: float
    evaluations: int | None
    seed: int
    policies: Collection[str] | None
    splits: Sequence[tuple[Partition, ...]]


@dataclass(frozen=True, slots=True)
class _Progress:
    what: str
    share: float
    best_ns: int


@dataclass(frozen=True, slots=True)
class _Defect:
    text: str


_STOP: Final = "stop"
_STOPPED: Final = "stopped"
_Message = Row | _Progress | Explored | GpusimError | _Defect | Literal["stopped"]


class Exploration:
    """A running `explore` in a separate process; every attribute may be read at any time.

    A stop during the search keeps the best schedule so far, like Ctrl-C on the command line; before it, there is no
    result.
    """

    def __init__(
        self,
        graph: OpGraph,
        *,
        streams: int,
        budget_s: float,
        evaluations: int | None = None,
        seed: int = DEFAULT_SEED,
        policies: Collection[str] | None = None,
        splits: Sequence[tuple[Partition, ...]] = (),
    ) -> None:
        self.what = "starting"
        self.share = 0.0
        """Used share of the search's budget, in [0, 1]."""
        self.best_ns: int | None = None
        self.rows: tuple[Row, ...] = ()
        self.result: Explored | None = None
        self.error: GpusimError | None = None
        self.bug: BaseException | None = None
        """Any other exception, to be shown in place of the result."""
        self.started_s = time.monotonic()
        self._work = _Work(graph, streams, budget_s, evaluations, seed, policies, tuple(splits))
        self._stopped = False
        self._asked = False
        """True once the process has its work; an earlier stop is sent afterwards."""
        self._sending = threading.Lock()
        self._process: subprocess.Popen[bytes] | None = None
        # A daemon, so that an abandoned page does not keep the server alive.
        self._thread = threading.Thread(target=self._listen, name=f"explore {graph.trace.name}", daemon=True)

    def start(self) -> Exploration:
        """Start the process and return self. Raises `WorkerError` if no process can be started."""
        self._pipe, theirs = Pipe()
        number = theirs.fileno()
        try:
            self._process = subprocess.Popen(
                [sys.executable, "-c", _PROGRAM, str(number), *sys.path],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                pass_fds=(number,),
            )
        except OSError as cause:
            self._pipe.close()
            raise WorkerError(f"no process can be started for the search: {cause}") from cause
        finally:
            theirs.close()  # otherwise the pipe would stay open when the process dies
        self._thread.start()
        return self

    def stop(self) -> None:
        """Ask the search to end soon."""
        self._stopped = True
        if self._asked:
            self._send(_STOP)

    def interrupt(self) -> None:
        """Kill the process at once, for a search with an unwanted result."""
        self._stopped = True
        if self._process is not None:
            self._process.kill()

    def wait(self, timeout_s: float | None = None) -> None:
        """Wait for the end of the exploration."""
        self._thread.join(timeout_s)

    @property
    def running(self) -> bool:
        """True until the exploration has ended."""
        return self._thread.is_alive()

    @property
    def stopped(self) -> bool:
        """True if it was asked to end."""
        return self._stopped

    @property
    def process(self) -> int | None:
        """Process id of the search; None before the start."""
        return None if self._process is None else self._process.pid

    def _listen(self) -> None:
        """Receive messages from the process until it ends."""
        assert self._process is not None
        try:
            self._send(self._work)
            self._asked = True
            if self._stopped:
                self._send(_STOP)
            while True:
                self._take(self._pipe.recv())
        except (EOFError, OSError):
            self._pipe.close()
        except BaseException as bug:  # an exception in a thread would only reach standard error
            self.bug = bug
            self._process.kill()
        status = self._process.wait()
        if self._stopped and self.result is None:
            self.what = _STOPPED
        elif status and not (self.error or self.bug):
            ended = f"was ended by {signal.Signals(-status).name}" if status < 0 else f"ended with status {status}"
            self.error = WorkerError(f"the process of the search {ended}")

    def _take(self, message: _Message) -> None:
        match message:
            case Row():
                self.rows = (*self.rows, message)
            case _Progress():
                self.what, self.share, self.best_ns = message.what, message.share, message.best_ns
            case Explored():
                self.result = replace(message, graph=self._work.graph)
            case GpusimError():
                self.error = message
            case _Defect():
                self.bug = RuntimeError(f"the search failed in its process:\n{message.text}")
            case _:
                self.what = _STOPPED

    def _send(self, message: object) -> None:
        try:
            with self._sending:
                self._pipe.send(message)
        except OSError:  # it has ended; the reason is in the pipe or in its status
            return


class _Search:
    """The exploration in the separate process, which sends results and listens for a stop."""

    def __init__(self, pipe: Connection) -> None:
        self._pipe = pipe
        self._work: _Work = pipe.recv()
        self._stop = threading.Event()
        self._interrupted = False
        threading.Thread(target=self._listen, name="stop", daemon=True).start()

    def run(self) -> None:
        work = self._work
        try:
            explored = explore(
                work.graph,
                streams=work.streams,
                budget_s=work.budget_s,
                seed=work.seed,
                evaluations=work.evaluations,
                policies=work.policies,
                splits=work.splits,
                on_row=self._add,
                report=self._report,
            )
            self._pipe.send(explored)
        except Cancelled:
            self._pipe.send(_STOPPED)
        except GpusimError as error:
            self._pipe.send(error)
        except Exception:
            self._pipe.send(_Defect(traceback.format_exc()))

    def _listen(self) -> None:
        try:
            while True:
                self._pipe.recv()
                self._stop.set()
        except (EOFError, OSError):
            os._exit(1)  # nobody is left to tell

    def _add(self, row: Row) -> None:
        self._pipe.send(row)
        # These rows come after the search: the rest is short, and its result is useful.
        if row.policy not in WITH_SEARCH:
            self._interrupt()

    def _report(self, stage: str, share: float, best_ns: int) -> None:
        self._pipe.send(_Progress(stage, share, best_ns))
        self._interrupt()

    def _interrupt(self) -> None:
        """Interrupt the search once; the conclusion after it must not be interrupted."""
        if self._stop.is_set() and not self._interrupted:
            self._interrupted = True
            raise Cancelled


def serve() -> None:
    """Run the exploration requested through the pipe named on the command line."""
    os.nice(BEHIND)
    _Search(Connection(int(sys.argv[1]))).run()
    os._exit(0)  # the listening thread would mistake the end of the pipe for a lost parent
