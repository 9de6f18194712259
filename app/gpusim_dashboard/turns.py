"""Long work takes turns, so that short answers need not wait for it: what a session asks next is seldom long.

As many pages compute for long at once as there are processors; others wait until one of them is done. Work that nobody
has asked for yet waits until nobody asks for anything (`lifetime.Watch.wait_for_quiet`). A search is a process of its
own.
"""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Iterator

import streamlit as st

#: How often who waits for a turn looks for one.
LOOK_S = 0.25


@st.cache_resource(show_spinner=False)
def _turns() -> threading.BoundedSemaphore:
    return threading.BoundedSemaphore(max(1, os.cpu_count() or 1))


#: Work within work takes no turn of its own.
_within = threading.local()


@contextlib.contextmanager
def work() -> Iterator[None]:
    """Around long work."""
    if getattr(_within, "turn", False):
        yield
        return
    turns = _turns()
    # Again and again: a script that is interrupted while it waits may take the call that was meant for another.
    while not turns.acquire(timeout=LOOK_S):
        pass
    _within.turn = True
    try:
        yield
    finally:
        _within.turn = False
        turns.release()
