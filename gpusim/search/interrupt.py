"""Ending a search early: Ctrl-C, a request, or an interrupt from another thread."""

from __future__ import annotations

import ctypes
from typing import Final


class Cancelled(BaseException):  # as `KeyboardInterrupt`, so that no handler of errors takes it for one
    """Somebody asked the work to end. What a search has found until then is its result."""


#: What ends a search early, which then keeps the best found.
STOPS: Final = (KeyboardInterrupt, Cancelled)


def interrupt_thread(thread: int, kind: type[BaseException]) -> None:
    """Raise `kind` in a thread (its `ident`) at its next line of Python; nothing where there is no such thread."""
    ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(thread), ctypes.py_object(kind))
