"""Suppression of warnings from torch's libraries that no user can act on."""

from __future__ import annotations

import os
import re
import sys
import tempfile
import warnings
from collections.abc import Iterator
from contextlib import contextmanager

STDERR = 2
#: A log line of torch or Kineto below an error: `[W1123 07:12:33 profiler_kineto.cpp:331] ...`, `WARNING:2026-...`.
WARNING_LINE = re.compile(rb"\[[WI]\S* |(INFO|STAGE|WARNING|USDT):\d{4}-\d\d-\d\d")


@contextmanager
def quiet() -> Iterator[None]:
    """Keep warnings from the terminal; only for calls of libraries that print nothing else.

    torch, Kineto and CUPTI write to file descriptor 2, bypassing Python. Every other line is passed on.
    """
    try:
        terminal = os.dup(STDERR)
    except OSError:  # there is no standard error
        yield
        return
    with warnings.catch_warnings(), tempfile.TemporaryFile() as written:
        warnings.simplefilter("ignore")
        _flush()
        os.dup2(written.fileno(), STDERR)
        try:
            yield
        finally:
            _flush()
            os.dup2(terminal, STDERR)
            os.close(terminal)
            written.seek(0)
            for line in written:
                if not WARNING_LINE.match(line):
                    os.write(STDERR, line)


def _flush() -> None:
    if sys.stderr is not None:
        sys.stderr.flush()
