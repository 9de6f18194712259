"""One step is optimized at a time in a process: its trials time the GPU, and set random states and precisions."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final

_LOCK: Final = threading.Lock()
_OWNER: Final[list[int]] = []
"""Thread that optimizes, if any."""


@contextmanager
def alone(wait: bool) -> Iterator[bool]:
    """Yield whether a step may be optimized now. Where another thread optimizes one, `wait` for it.

    Never within a step that is being optimized: it is to be recorded as it is.
    """
    free = _LOCK.acquire(blocking=wait and threading.get_ident() not in _OWNER)
    if free:
        _OWNER.append(threading.get_ident())
    try:
        yield free
    finally:
        if free:
            _OWNER.clear()
            _LOCK.release()
