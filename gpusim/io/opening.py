"""Safe opening of files, pipes and devices, without waiting for silent pipes or reading sparse files.

Names come from users and from files by other people.
"""

from __future__ import annotations

import os
import select
import stat
from collections.abc import Mapping
from pathlib import Path
from typing import IO, Final

from gpusim.errors import UnknownNameError
from gpusim.units import MIB

#: A pipe or terminal that is silent for this long is given up.
SILENCE_S: Final = 10
#: Limit on the holes of a sparse file in total: text files have none, and reading them takes memory.
MAX_HOLES_BYTES: Final = MIB
_PIECE_BYTES: Final = MIB


class UnreadableError(Exception):
    """A file that cannot be read; the text follows the file's name in messages."""


class TooLargeError(Exception):
    """A file larger than the limit, which is the first argument."""


def names_a_file(name: str, suffixes: str | tuple[str, ...]) -> bool:
    """Whether a name is that of a file, not of something bundled: by its suffix, or because the file is there.

    A pipe, a device and a broken link count, so that reading says what is wrong with them; a folder does not.
    """
    return name.endswith(suffixes) or (os.path.lexists(name) and not os.path.isdir(name))


def bundled_or_file(kind: str, name: str, bundled: Mapping[str, Path], suffixes: str | tuple[str, ...]) -> Path:
    """Return the file of a bundled name, which takes precedence over a file of that name, or of a file name.

    Raises `UnknownNameError`, with the nearest name of this `kind`.
    """
    if name in bundled:
        return bundled[name]
    if names_a_file(name, suffixes):
        return Path(name)
    raise UnknownNameError(kind, name, bundled)


def read_limited(path: Path, max_bytes: int, max_stream_bytes: int) -> bytes:
    """Read all of a file, or of a pipe or device, whose size is unknown in advance.

    Raises `TooLargeError`, `UnreadableError`, `OSError`, and `ValueError` for a NUL in the name.
    """
    handle = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC)
    with open(handle, "rb") as file:
        info = os.fstat(handle)
        if not stat.S_ISREG(info.st_mode) or not info.st_size:  # files in /proc have no size either
            return _read_stream(handle, min(max_bytes, max_stream_bytes))
        if info.st_size > max_bytes:
            raise TooLargeError(max_bytes)
        _check_holes(handle, info)
        data = file.read(max_bytes + 1)  # it may grow meanwhile
    if len(data) > max_bytes:
        raise TooLargeError(max_bytes)
    return data


def open_file(path: Path) -> IO[bytes]:
    """Open a regular file for reading. Raises `UnreadableError` for anything else, `OSError` and `ValueError`."""
    handle = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC)
    file = open(handle, "rb")  # noqa: SIM115  (the caller closes it)
    info = os.fstat(handle)
    if not stat.S_ISREG(info.st_mode):
        file.close()
        raise UnreadableError("is a pipe or a device: write its content to a file first")
    return file


def open_to_write(path: Path) -> IO[bytes]:
    """Open a device or pipe for writing. Raises `OSError`, also for a pipe without a reader."""
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
    # A file compressed by its file system also takes less space than its size, but has no holes.
    hole = os.lseek(handle, 0, os.SEEK_HOLE)
    os.lseek(handle, 0, os.SEEK_SET)
    if hole < info.st_size:
        raise UnreadableError(f"has a hole from byte {hole} on: it was not written, or not copied, to its end")
