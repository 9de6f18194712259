"""Work ends with its session: closing the browser tab stops its computation.

Streamlit can stop a script only at its next element, and a simulation has none. So a thread checks which sessions are
still connected and interrupts the scripts and searches of the others.
"""

from __future__ import annotations

import contextlib
import ctypes
import threading
import time
from collections.abc import Iterator
from typing import TYPE_CHECKING

import streamlit as st
from streamlit.runtime import Runtime
from streamlit.runtime.scriptrunner import StopException, get_script_run_ctx

if TYPE_CHECKING:
    from gpusim.api.dashboard import Exploration

#: Time between checks, and how long a session must be gone: connections may break for a moment.
LOOK_S, GONE_S = 0.25, 0.6
#: Time for a stopped search to store its best schedule.
PATIENCE_S = 0.5
#: Longest time that a page with its answer waits for the answers of others.
ANSWERS_S = 2.0
#: Time without a running script after which background work may begin.
QUIET_S = 2.0


def interrupt(thread: int, kind: type[BaseException]) -> None:
    """Raise `kind` in a thread (its `ident`) at its next line of Python; does nothing if the thread has ended."""
    ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(thread), ctypes.py_object(kind))


class Watch:
    """Running scripts and searches, each with its session."""

    def __init__(self) -> None:
        # No lock: an interrupted script would keep it. Each change of a dictionary is atomic.
        self._scripts: dict[int, str] = {}
        """Thread -> session."""
        self._asked_s = time.monotonic()
        """When a script last ran."""
        self._answered: set[int] = set()
        """Threads of scripts whose page shows its answer."""
        self._searches: dict[Exploration, str] = {}
        self._gone_since: dict[str, float] = {}
        threading.Thread(target=self._run, name="session lifetime", daemon=True).start()

    @contextlib.contextmanager
    def script(self, session: str) -> Iterator[None]:
        """Interrupt this thread inside the block if its session ends."""
        thread = threading.get_ident()
        if thread in self._scripts:  # a part of a script that is watched as a whole
            yield
            return
        self._scripts[thread] = session
        try:
            yield
        finally:
            self._scripts.pop(thread, None)
            self._answered.discard(thread)
            self._asked_s = time.monotonic()

    def let_others_answer(self) -> None:
        """Wait, for a while at most, until the pages that mark their answer show it and others are done.

        This thread's page shows its answer. A new setting of it ends the wait. Python runs one thread at a time: what
        follows an answer would delay others' answers.
        """
        thread = threading.get_ident()
        if thread not in self._scripts:
            return
        self._answered.add(thread)
        until_s = time.monotonic() + ANSWERS_S
        while set(self._scripts) - self._answered and time.monotonic() < until_s:
            time.sleep(ANSWERS_S / 100)
            if get_script_run_ctx(suppress_warning=True) is not None:
                _ = "" in st.session_state  # Streamlit runs a page again where its script uses the state

    def wait_for_quiet(self) -> None:
        """Wait until no page has computed anything for `QUIET_S`."""
        while self._scripts or time.monotonic() < self._asked_s + QUIET_S:
            time.sleep(QUIET_S / 10)

    def search(self, session: str, job: Exploration) -> None:
        """End a search when its session ends."""
        self._searches[job] = session

    def _run(self) -> None:
        while True:
            time.sleep(LOOK_S)
            self._look(time.monotonic())

    def _look(self, now: float) -> None:
        for job in [job for job in list(self._searches) if not job.running]:
            del self._searches[job]
        alive = {thread.ident for thread in threading.enumerate()}
        for ident in [ident for ident in list(self._scripts) if ident not in alive]:
            self._scripts.pop(ident, None)
            self._answered.discard(ident)
        scripts, searches = dict(self._scripts), dict(self._searches)
        sessions = {*scripts.values(), *searches.values()}
        self._gone_since = {
            session: self._gone_since.get(session, now) for session in sessions if not is_connected(session)
        }
        gone = {session: now - since for session, since in self._gone_since.items() if now - since >= GONE_S}
        for thread, session in scripts.items():
            if session in gone:
                interrupt(thread, StopException)
        for job, session in searches.items():
            if session in gone:
                job.stop()
                if gone[session] >= GONE_S + PATIENCE_S:
                    job.interrupt()


@st.cache_resource(show_spinner=False)
def watch() -> Watch:
    """The server's only `Watch`."""
    return Watch()


def is_connected(session: str) -> bool:
    """Whether a browser is connected; always true without a server, as in tests of a page."""
    return not Runtime.exists() or Runtime.instance().is_active_session(session)


@contextlib.contextmanager
def script() -> Iterator[None]:
    """Context manager around a session's script."""
    context = get_script_run_ctx()
    if context is None:
        yield
        return
    with watch().script(context.session_id):
        yield


def search(job: Exploration) -> None:
    """Watch a search that this session has started."""
    context = get_script_run_ctx()
    if context is not None:
        watch().search(context.session_id, job)
