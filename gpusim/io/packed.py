"""A folder of documents kept as one file: where `FOLDER/NAME` is missing, it is the member `NAME` of `FOLDER.zip`.

For traces that a recipe reads and nobody opens by hand: git then tracks one file in place of dozens. Members are stored
as they are (they are gzip already), so none takes more memory than the set has bytes. Nothing is written anywhere.
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
#: Members of an archive that are looked at.
MAX_MEMBERS: Final = 4096
#: The list of a zip archive's members: `MAX_MEMBERS` of them with names of 255 bytes take a third of it.
MAX_DIRECTORY_BYTES: Final = 4 * MIB
_END: Final = b"PK\x05\x06"
_END_BYTES, _COMMENT_BYTES, _SIZE_AT = 22, 65_535, 12
#: Where a zip archive says that its list is described elsewhere, for more than 4 GB.
_ZIP64: Final = b"PK\x06\x07"
_ZIP64_BYTES: Final = 20
#: What the libraries raise for a malformed archive.
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
    """What is wrong with a zip archive's list of members by the archive's end, before anything reads that list."""
    opened.seek(max(0, size_bytes - _END_BYTES - _COMMENT_BYTES))
    tail = opened.read()
    end = tail.rfind(_END)
    if end < 0 or end + _END_BYTES > len(tail):
        return "is a damaged zip archive: it has no list of members"
    if tail[max(0, end - _ZIP64_BYTES) : end].startswith(_ZIP64):
        return "is a zip archive for more than 4 GB, which is not read"
    (directory_bytes,) = struct.unpack_from("<I", tail, end + _SIZE_AT)
    if directory_bytes > MAX_DIRECTORY_BYTES:
        return f"has a list of members of more than {format_bytes(MAX_DIRECTORY_BYTES)}"
    return ""


def set_of(folder: Path) -> Path | None:
    """The set of a folder; None where it has none."""
    if not folder.name:
        return None
    file = folder.with_name(folder.name + SUFFIX)
    return file if os.path.isfile(file) else None


def is_file(path: Path) -> bool:
    """Whether `path` is a file, on its own or in the set of its folder. A set that cannot be read has no files."""
    if os.path.isfile(path):
        return True
    packed = set_of(path.parent)
    try:
        return packed is not None and path.name in _names(packed)
    except FileError:
        return False


def is_folder(path: Path) -> bool:
    """Whether `path` is a folder, or a set stands for it."""
    return os.path.isdir(path) or set_of(path) is not None


def files_in(folder: Path, suffix: str) -> list[Path]:
    """The files of a folder whose names end so, its own and those of its set, by name. Raises `FileError`."""
    own = {path.name: path for path in folder.glob(f"*{suffix}")}
    packed = set_of(folder)
    names = () if packed is None else _names(packed)
    return [folder / name for name in sorted({*own, *(name for name in names if name.endswith(suffix))})]


def read_packed(path: Path, max_bytes: int, error: type[FileError]) -> bytes | None:
    """The content of a missing file from the set of its folder, as it is; None where no set has it.

    Raises `error` for a damaged set.
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
    """A set within the limits on archives. Raises `error` for one that is damaged, or has too many members."""
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
