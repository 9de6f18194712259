"""Members of tar and zip archives, read in sequence, in memory and within limits; nothing is written to disk."""

from __future__ import annotations

import struct
import tarfile
import zipfile
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from typing import IO, Final, NoReturn

from gpusim.importers.model import ImportFileError
from gpusim.importers.stream_json import GZIP_START
from gpusim.io import file_limits
from gpusim.io.packed import MAX_MEMBERS, problem_of_directory
from gpusim.units import KIB, format_bytes

ZIP_START: Final = b"PK\x03\x04"
#: Supported zip methods. Others need a dictionary of any size (LZMA), or are rare.
_PACKED_BY: Final = (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED)
_ENCRYPTED: Final = 1
#: Largest extended header of a tar archive, such as a long name, one and in total. The library reads each as a whole,
#: and matches patterns on it that take the square of its size.
MAX_TAR_NOTE_BYTES: Final = 4096
MAX_TAR_NOTES_BYTES: Final = 256 * KIB
_GLOBAL_COPIES: Final = 256
_NOTES: Final = (
    tarfile.XHDTYPE, tarfile.XGLTYPE, tarfile.SOLARIS_XHDTYPE, tarfile.GNUTYPE_LONGNAME, tarfile.GNUTYPE_LONGLINK,
)  # fmt: skip
#: Exceptions that the libraries raise for a malformed archive, in addition to their own.
_DAMAGED: Final = (EOFError, ValueError, OverflowError, IndexError, AttributeError, RuntimeError, struct.error)


def is_tar(first: bytes) -> bool:
    """Whether data begins as a tar archive."""
    if first[257:262] == b"ustar":
        return True
    if len(first) < 512 or first[:1] in b"{[":
        return False
    try:
        tarfile.TarInfo.frombuf(first[:512], "utf-8", "surrogateescape")
    except (tarfile.TarError, ValueError):
        return False
    return True


def members(opened: IO[bytes], size_bytes: int, file: str, max_bytes: int) -> Iterator[tuple[str, int, IO[bytes]]]:
    """Yield name, packed size and content of each ordinary file in an open archive, in order.

    Raises `ImportFileError` and the libraries' errors: read it and the contents within `naming_damage`.
    """
    opened.seek(0)
    start = opened.read(len(ZIP_START))
    opened.seek(0)
    limit = min(max_bytes, max(file_limits.FREE_EXPANSION_BYTES, file_limits.MAX_EXPANSION * size_bytes))
    if start == ZIP_START:
        yield from _zip_members(opened, size_bytes, file, limit)
    else:
        yield from _tar_members(opened, file, "r:gz" if start.startswith(GZIP_START) else "r:", limit)


@contextmanager
def naming_damage(file: str) -> Iterator[None]:
    """Turn the errors of a damaged archive into an `ImportFileError`."""
    try:
        yield
    except (tarfile.TarError, zipfile.BadZipFile, zlib.error, *_DAMAGED) as cause:
        raise ImportFileError(file, f"is a damaged archive: {cause}") from cause
    except OSError as cause:
        raise ImportFileError(file, f"cannot be read: {cause.strerror or cause}") from cause


class _TarFile(tarfile.TarFile):
    notes_bytes = 0
    """Size of all extended headers so far."""


class _TarInfo(tarfile.TarInfo):
    """Header of a tar archive, with extended headers of bounded size and no sparse files.

    The library calls the methods that begin with `_`.
    """

    def _proc_member(self, archive: _TarFile) -> tarfile.TarInfo:
        if self.type in _NOTES:
            # A global header is copied to every member.
            archive.notes_bytes += self.size * (_GLOBAL_COPIES if self.type == tarfile.XGLTYPE else 1)
            if not 0 <= self.size <= MAX_TAR_NOTE_BYTES or archive.notes_bytes > MAX_TAR_NOTES_BYTES:
                raise tarfile.ReadError("its extended headers are too long")
        elif self.type == tarfile.GNUTYPE_SPARSE:
            self._no_sparse_files()
        return super()._proc_member(archive)  # type: ignore[misc, no-any-return]

    def _no_sparse_files(self, *given: object) -> NoReturn:
        raise tarfile.ReadError("it has sparse files")

    _proc_gnusparse_00 = _proc_gnusparse_01 = _proc_gnusparse_10 = _no_sparse_files


def _tar_members(opened: IO[bytes], file: str, mode: str, limit: int) -> Iterator[tuple[str, int, IO[bytes]]]:
    number = taken = 0
    with _TarFile.open(fileobj=opened, mode=mode, tarinfo=_TarInfo) as archive:  # type: ignore[call-overload]
        for member in archive:
            number, taken = number + 1, taken + max(0, member.size)
            _check(file, number, taken, limit)
            content = archive.extractfile(member) if member.isreg() and member.size else None
            if content is not None:
                yield member.name, member.size, content


def _zip_members(opened: IO[bytes], size_bytes: int, file: str, limit: int) -> Iterator[tuple[str, int, IO[bytes]]]:
    problem = problem_of_directory(opened, size_bytes)
    if problem:
        raise ImportFileError(file, problem)
    number = taken = 0
    with zipfile.ZipFile(opened) as archive:
        for member in archive.infolist():
            number, taken = number + 1, taken + member.file_size
            _check(file, number, taken, limit)
            if not member.is_dir() and member.file_size:
                if member.flag_bits & _ENCRYPTED or member.compress_type not in _PACKED_BY:
                    raise ImportFileError(f"{file}:{member.filename}", "is encrypted, or its packing is unsupported")
                with archive.open(member) as content:
                    yield member.filename, member.compress_size, content


def _check(file: str, number: int, taken: int, limit: int) -> None:
    if number > MAX_MEMBERS:
        raise ImportFileError(file, f"has more than {MAX_MEMBERS} members")
    if taken > limit:
        raise ImportFileError(file, f"holds more than {format_bytes(limit)}")
