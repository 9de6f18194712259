"""Opening whatever a name stands for: nobody waits for a pipe that nobody fills, or reads the holes of a sparse file.

Names come from users, and from files that others wrote.
"""

from __future__ import annotations

import os
import select
import stat
from pathlib import Path
from typing import IO, Final

from gpusim.units import MIB

#: A pipe or a terminal that is silent for so long gives nothing more.
SILENCE_S: Final = 10
#: Holes of a sparse file, together, above which it is not read: no text has any, and each takes memory when it is read.
MAX_HOLES_BYTES: Final = MIB
_PIECE_BYTES: Final = MIB


class UnreadableError(Exception):
    """Why a file is not read, in words that follow its name."""


class TooLargeError(Exception):
    """A file that is larger than the limit, which the exception's first argument is."""


def read_limited(path: Path, max_bytes: int, max_stream_bytes: int) -> bytes:
    """All of a file, or of what comes out of a pipe or a device, which has no size to look at first.

    Raises `TooLargeError`, `UnreadableError`, `OSError`, and `ValueError` for a NUL in the name.
    """
    handle = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC)
    with open(handle, "rb") as file:
        info = os.fstat(handle)
        if not stat.S_ISREG(info.st_mode) or not info.st_size:  # those in /proc have no size, either
            return _read_stream(handle, min(max_bytes, max_stream_bytes))
        if info.st_size > max_bytes:
            raise TooLargeError(max_bytes)
        _check_holes(handle, info)
        data = file.read(max_bytes + 1)  # it may grow while it is read
    if len(data) > max_bytes:
        raise TooLargeError(max_bytes)
    return data


def open_file(path: Path) -> IO[bytes]:
    """A regular file, open for reading. Raises `UnreadableError` for anything else, `OSError` and `ValueError`."""
    handle = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC)
    file = open(handle, "rb")  # noqa: SIM115  (the caller closes it)
    info = os.fstat(handle)
    if not stat.S_ISREG(info.st_mode):
        file.close()
        raise UnreadableError("is a pipe or a device: write its content to a file first")
    return file


def open_to_write(path: Path) -> IO[bytes]:
    """A device or a pipe, open for writing. Raises `OSError`, for a pipe that nobody reads, too."""
    handle = os.open(path, os.O_WRONLY | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC)
    os.set_blocking(handle, True)
    return open(handle, "wb")


def _read_stream(handle: int, max_bytes: int) -> bytes:
    ready = select.poll()
    ready.register(handle, select.POLLIN)
    pieces: list[bytes] = []
    size = 0
    while size <= max_bytes:
        try:
            piece = os.read(handle, _PIECE_BYTES) if ready.poll(SILENCE_S * 1000) else None
        except BlockingIOError:
            piece = None
        if piece is None:
            raise UnreadableError(f"has given nothing for {SILENCE_S} s")
        if not piece:
            return b"".join(pieces)
        pieces.append(piece)
        size += len(piece)
    raise TooLargeError(max_bytes)


def _check_holes(handle: int, info: os.stat_result) -> None:
    """Raise `UnreadableError` for a sparse file."""
    holes_bytes = info.st_size - 512 * info.st_blocks
    if holes_bytes <= MAX_HOLES_BYTES:
        return
    # A file that its file system has compressed takes less space than its size, too, and has no holes.
    hole = os.lseek(handle, 0, os.SEEK_HOLE)
    os.lseek(handle, 0, os.SEEK_SET)
    if hole < info.st_size:
        raise UnreadableError(f"has a hole from byte {hole} on: it was not written, or not copied, to its end")
