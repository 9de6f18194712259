"""Processes that do not outlive the one that started them.

A process that is killed cannot end its children. They notice it themselves: `multiprocessing` gives each child a pipe
whose other end only the parent holds, and which the system closes with it.
"""

from __future__ import annotations

import multiprocessing
import os
import threading
from multiprocessing.connection import wait


def end_with_parent() -> None:
    """End this process at once when its parent is gone, whatever it computes then. No effect in a main process."""
    parent = multiprocessing.parent_process()
    if parent is not None:
        threading.Thread(target=_watch, args=(parent.sentinel,), name="parent", daemon=True).start()


def _watch(sentinel: int) -> None:
    wait([sentinel])
    os._exit(1)  # nobody is left to tell
