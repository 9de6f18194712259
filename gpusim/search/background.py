"""An exploration in a thread of its own: progress and results while it runs, and a way to stop it."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Collection, Sequence

from gpusim.defaults import DEFAULT_SEED
from gpusim.errors import GpusimError
from gpusim.formats.schedule import Partition
from gpusim.plan.graph import OpGraph
from gpusim.search.budget import SEARCHED
from gpusim.search.explore import Explored, Row, explore
from gpusim.search.interrupt import Cancelled, interrupt_thread


class Exploration:
    """Runs `explore` with the arguments given; every attribute may be read at any time.

    A stop during the search keeps the best found so far, as Ctrl-C does on the command line; before it, there is no
    result. `give_way` is called again and again, and may wait: what is more urgent then goes first.
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
        give_way: Callable[[], None] = lambda: None,
    ) -> None:
        self.what = "starting"
        self.share = 0.0
        """Of the search's budget, in [0, 1]."""
        self.best_ns: int | None = None
        self.rows: tuple[Row, ...] = ()
        self.result: Explored | None = None
        self.error: GpusimError | None = None
        self.bug: BaseException | None = None
        """Anything else that was raised: shown where the result is asked for."""
        self.started_s = time.monotonic()
        self._give_way = give_way
        self._stop = threading.Event()
        self._interrupted = False
        # A daemon: a page that nobody looks at any more must not keep the server from ending.
        self._thread = threading.Thread(
            target=self._run,
            args=(graph, streams, budget_s, evaluations, seed, policies, splits),
            name=f"explore {graph.trace.name}",
            daemon=True,
        )

    def start(self) -> Exploration:
        """Begin; gives itself."""
        self._thread.start()
        return self

    def stop(self) -> None:
        """Ask it to end soon."""
        self._stop.set()

    def interrupt(self) -> None:
        """End now, wherever it is: for a search whose result nobody waits for. Call again while it runs."""
        if self._thread.ident is not None:
            interrupt_thread(self._thread.ident, Cancelled)

    def wait(self, timeout_s: float | None = None) -> None:
        """Wait for the end."""
        self._thread.join(timeout_s)

    @property
    def running(self) -> bool:
        """Whether it has not ended."""
        return self._thread.is_alive()

    @property
    def stopped(self) -> bool:
        """Whether it was asked to end."""
        return self._stop.is_set()

    def _run(
        self,
        graph: OpGraph,
        streams: int,
        budget_s: float,
        evaluations: int | None,
        seed: int,
        policies: Collection[str] | None,
        splits: Sequence[tuple[Partition, ...]],
    ) -> None:
        try:
            self.result = explore(
                graph,
                streams=streams,
                budget_s=budget_s,
                seed=seed,
                evaluations=evaluations,
                policies=policies,
                splits=splits,
                on_row=self._add,
                report=self._report,
            )
        except Cancelled:
            self.what = "stopped"
        except GpusimError as error:
            self.error = error
        except BaseException as bug:  # a thread's own would only reach standard error
            self.bug = bug

    def _add(self, row: Row) -> None:
        self.rows = (*self.rows, row)
        self._give_way()
        # A searched row comes after the search: what is left is short, and its result is worth having.
        if row.policy not in SEARCHED:
            self._interrupt()

    def _report(self, what: str, share: float, best_ns: int) -> None:
        self.what, self.share, self.best_ns = what, share, best_ns
        self._interrupt()
        self._give_way()

    def _interrupt(self) -> None:
        """End the search, once: what comes after it is the end, and must not be cut off."""
        if self._stop.is_set() and not self._interrupted:
            self._interrupted = True
            raise Cancelled
