"""Interrupting a thread from another one."""

from __future__ import annotations

import ctypes


def interrupt_thread(thread: int, kind: type[BaseException]) -> None:
    """Raise `kind` in a thread (its `ident`) at its next line of Python; nothing where there is no such thread."""
    ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(thread), ctypes.py_object(kind))
