"""Child processes that end with their parent.

A killed process cannot end its children, so they watch it: `multiprocessing` gives each child a pipe whose other end
only the parent holds and the system closes at the parent's end.
"""

from __future__ import annotations

import multiprocessing
import os
import threading
from multiprocessing.connection import wait


def end_with_parent() -> None:
    """End this process at once when its parent ends. No effect in a main process."""
    parent = multiprocessing.parent_process()
    if parent is not None:
        threading.Thread(target=_watch, args=(parent.sentinel,), name="parent", daemon=True).start()


def _watch(sentinel: int) -> None:
    wait([sentinel])
    os._exit(1)  # nobody is left to tell
