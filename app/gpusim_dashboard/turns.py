"""Turns for long work, so that short requests need not wait for it.

At most as many pages compute for long as there are processors; the others wait. Background work waits until no page
computes (`lifetime.Watch.wait_for_quiet`). A search runs in its own process.
"""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Iterator

import streamlit as st

#: Time between attempts to get a turn.
LOOK_S = 0.25


@st.cache_resource(show_spinner=False)
def _turns() -> threading.BoundedSemaphore:
    return threading.BoundedSemaphore(max(1, os.cpu_count() or 1))


#: Marks a thread that has a turn: nested work takes no other.
_within = threading.local()


@contextlib.contextmanager
def work() -> Iterator[None]:
    """Context manager around long work, which waits for its turn."""
    if getattr(_within, "turn", False):
        yield
        return
    turns = _turns()
    # Polls: a script that is interrupted while waiting could swallow the wake-up of another.
    while not turns.acquire(timeout=LOOK_S):
        pass
    _within.turn = True
    try:
        yield
    finally:
        _within.turn = False
        turns.release()
