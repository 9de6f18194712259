"""Uploaded files, kept by the server for a while so that reloads and links find them.

They stay in memory, under the hash of their content, which cannot be guessed without the file or its address. The
server stores files rather than traces: their size is known, and they are checked again when reopened.
"""

from __future__ import annotations

import hashlib
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass

import streamlit as st

from gpusim.units import MIB

MAX_FILES = 16
MAX_BYTES = 256 * MIB
MAX_AGE_S = 12 * 3600
#: The limits, as pages state them.
BOUNDS = f"The server keeps the last {MAX_FILES} files, {MAX_BYTES // MIB} MiB in all, for {MAX_AGE_S // 3600} hours"


@dataclass(frozen=True)
class KeptFile:
    """An uploaded file."""

    name: str
    data: bytes


class Shelf:
    """The files of all sessions; the least recently opened is dropped first."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._lock = threading.Lock()
        self._files: dict[str, tuple[float, KeptFile]] = {}
        """Hash -> time of the last access and file, in order of access."""

    def put(self, name: str, data: bytes) -> str:
        """Store a file; returns the hash of its content."""
        content = hashlib.sha256(data).hexdigest()
        with self._lock:
            self._open(content, KeptFile(name, data))
            while len(self._files) > MAX_FILES or sum(len(file.data) for _, file in self._files.values()) > MAX_BYTES:
                del self._files[next(iter(self._files))]
        return content

    def get(self, prefix: str) -> KeptFile | None:
        """Return the file whose hash begins with `prefix`; None if there is none or it has expired."""
        with self._lock:
            for content, (opened_s, file) in list(self._files.items()):
                if self._clock() - opened_s > MAX_AGE_S:
                    del self._files[content]
                elif content.startswith(prefix):
                    self._open(content, file)
                    return file
        return None

    def _open(self, content: str, file: KeptFile) -> None:
        self._files.pop(content, None)
        self._files[content] = (self._clock(), file)


@st.cache_resource(show_spinner=False)
def _shelf() -> Shelf:
    return Shelf()


def shelf() -> Shelf:
    """The server's only `Shelf`."""
    shared: Shelf = _shelf()
    return shared
