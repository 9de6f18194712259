"""Folders of documents stored as one archive: a missing `FOLDER/NAME` is the member `NAME` of `FOLDER.zip`.

This is for traces that a recipe reads and nobody opens by hand, so that git tracks one file in place of dozens. Members
are stored uncompressed (they are gzip already), so none takes more memory than the archive has bytes. Archives are
never written here.
"""

from __future__ import annotations

import os
import struct
import zipfile
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Final

from gpusim.errors import FileError
from gpusim.io.opening import UnreadableError, open_file
from gpusim.units import MIB, format_bytes

SUFFIX: Final = ".zip"
#: Maximum number of members of an archive.
MAX_MEMBERS: Final = 4096
#: Maximum size of a zip archive's directory; `MAX_MEMBERS` with names of 255 bytes take a third of it.
MAX_DIRECTORY_BYTES: Final = 4 * MIB
_END: Final = b"PK\x05\x06"
_END_BYTES, _COMMENT_BYTES, _SIZE_AT = 22, 65_535, 12
#: Marker of a zip archive above 4 GB or 65,535 members, which has its directory described elsewhere.
_ZIP64: Final = b"PK\x06\x07"
_ZIP64_BYTES: Final = 20
#: Exceptions of the libraries for a malformed archive.
_DAMAGED: Final = (
    zipfile.BadZipFile,
    zlib.error,
    struct.error,
    EOFError,
    ValueError,
    OverflowError,
    IndexError,
    AttributeError,
    RuntimeError,
)


def problem_of_directory(opened: IO[bytes], size_bytes: int) -> str:
    """Return the problem of a zip archive's directory, from the end of the archive, before the directory is read."""
    opened.seek(max(0, size_bytes - _END_BYTES - _COMMENT_BYTES))
    tail = opened.read()
    end = tail.rfind(_END)
    if end < 0 or end + _END_BYTES > len(tail):
        return "is a damaged zip archive: it has no list of members"
    if tail[max(0, end - _ZIP64_BYTES) : end].startswith(_ZIP64):
        return "is a zip archive for more than 4 GB or 65,535 members, which is not read"
    (directory_bytes,) = struct.unpack_from("<I", tail, end + _SIZE_AT)
    if directory_bytes > MAX_DIRECTORY_BYTES:
        return f"has a list of members of more than {format_bytes(MAX_DIRECTORY_BYTES)}"
    return ""


def set_of(folder: Path) -> Path | None:
    """Return the archive of a folder, or None."""
    if not folder.name:
        return None
    file = folder.with_name(folder.name + SUFFIX)
    return file if os.path.isfile(file) else None


def is_file(path: Path) -> bool:
    """Return True if `path` is a file, itself or in the archive of its folder; an unreadable archive has no files."""
    if os.path.isfile(path):
        return True
    packed = set_of(path.parent)
    try:
        return packed is not None and path.name in _names(packed)
    except FileError:
        return False


def is_folder(path: Path) -> bool:
    """Return True if `path` is a folder or has an archive in its place."""
    return os.path.isdir(path) or set_of(path) is not None


def files_in(folder: Path, suffix: str) -> list[Path]:
    """Return the files of a folder and its archive with a suffix, by name. Raises `FileError`."""
    own = {path.name: path for path in folder.glob(f"*{suffix}")}
    packed = set_of(folder)
    names = () if packed is None else _names(packed)
    return [folder / name for name in sorted({*own, *(name for name in names if name.endswith(suffix))})]


def read_packed(path: Path, max_bytes: int, error: type[FileError]) -> bytes | None:
    """Return the content of a missing file from the archive of its folder, or None.

    Raises `error` for a damaged archive.
    """
    packed, name = set_of(path.parent), path.name
    if packed is None or os.path.lexists(path):
        return None
    with _opened(packed, error) as archive:
        try:
            member = archive.getinfo(name)
        except KeyError:
            return None
        if member.compress_type != zipfile.ZIP_STORED or member.flag_bits & 1:
            raise error(f"{packed}: {name}", "is compressed or encrypted: a set stores its members as they are")
        with archive.open(member) as content:
            data = content.read(max_bytes + 1)
    if len(data) > max_bytes:
        raise error(f"{packed}: {name}", f"is larger than {format_bytes(max_bytes)}")
    return data


def _names(packed: Path) -> tuple[str, ...]:
    with _opened(packed, FileError) as archive:
        return tuple(archive.namelist())


@contextmanager
def _opened(packed: Path, error: type[FileError]) -> Iterator[zipfile.ZipFile]:
    """Open an archive within limits. Raises `error` for a damaged one or one with too many members."""
    try:
        with open_file(packed) as opened:
            size_bytes = os.fstat(opened.fileno()).st_size
            problem = problem_of_directory(opened, size_bytes)
            if problem:
                raise error(str(packed), problem)
            with zipfile.ZipFile(opened) as archive:
                if len(archive.infolist()) > MAX_MEMBERS:
                    raise error(str(packed), f"has more than {MAX_MEMBERS} members")
                yield archive
    except UnreadableError as cause:
        raise error(str(packed), str(cause)) from cause
    except _DAMAGED as cause:
        raise error(str(packed), f"is a damaged archive: {cause}") from cause
    except OSError as cause:
        raise error(str(packed), f"cannot be read: {cause.strerror or cause}") from cause
