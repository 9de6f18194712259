"""Reader of all supported files: plain, gzip, or members of a tar or zip archive, in memory."""

from __future__ import annotations

import io
import os
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import chain
from pathlib import Path
from typing import IO, Final

from gpusim.importers.archives import ZIP_START, is_tar, members, naming_damage
from gpusim.importers.chakra import read_chakra, read_chakra_json
from gpusim.importers.cuda_graph import GraphDump, read_cuda_graph
from gpusim.importers.execution_trace import OperatorTrace, read_execution_trace
from gpusim.importers.kineto import read_kineto
from gpusim.importers.model import ImportFileError, Profile
from gpusim.importers.ncu import read_ncu
from gpusim.importers.nsys import read_nsys
from gpusim.importers.recognise import GPUSIM_TRACE, known_name
from gpusim.importers.stream_json import Progress, as_utf8, unpacked
from gpusim.io.file_limits import MAX_DOCUMENT_BYTES
from gpusim.io.known_formats import IMPORTED, LOOKED_AT_BYTES, known_format, profile_format
from gpusim.io.opening import UnreadableError, open_file
from gpusim.text import shortened

_READ: Final = f"read are {IMPORTED}"


@dataclass(slots=True)
class Contents:
    """Contents of the files: profiles with times, and data to join to them."""

    profiles: list[Profile] = field(default_factory=list)
    tables: list[Profile] = field(default_factory=list)
    """Tables of Nsight Compute."""
    operators: list[OperatorTrace] = field(default_factory=list)
    graphs: list[GraphDump] = field(default_factory=list)
    traces: list[str] = field(default_factory=list)
    """Files that are gpusim traces."""

    def all(self) -> list[Profile]:
        """Return the description of each part, in one list."""
        joined = [part.profile for part in self.operators] + [part.profile for part in self.graphs]
        return [*self.profiles, *self.tables, *joined]


def read_files(files: list[str], report: Progress | None = None) -> Contents:
    """Read these files. Raises `ImportFileError` for the first that cannot be read."""
    contents = Contents()
    for file in files:
        _read_file(file, contents, report)
    return contents


def read_data(data: bytes, name: str, max_bytes: int = MAX_DOCUMENT_BYTES) -> Contents:
    """Read a file in memory; `max_bytes` is the most text in it. Raises `ImportFileError`."""
    contents = Contents()
    if profile_format(data, name) == "nsys-sqlite":
        contents.profiles.append(read_nsys(data, name))
    else:
        _read_open(io.BytesIO(data), len(data), name, contents, None, max_bytes)
    return contents


def _read_file(file: str, contents: Contents, report: Progress | None) -> None:
    path = Path(file)
    try:
        if os.path.isdir(path):
            raise ImportFileError(file, _in_folder(path))
        opened = open_file(path)
    except UnreadableError as cause:
        raise ImportFileError(file, str(cause)) from cause
    except (OSError, ValueError) as cause:  # ValueError: a NUL in the name
        raise ImportFileError(file, f"cannot be read: {getattr(cause, 'strerror', None) or cause}") from cause
    with opened:
        try:
            start = opened.read(LOOKED_AT_BYTES)
            if profile_format(start, file) == "nsys-sqlite":
                contents.profiles.append(read_nsys(path, file, report))
                return
            opened.seek(0)
            _read_open(opened, path.stat().st_size, file, contents, report, MAX_DOCUMENT_BYTES)
        except OSError as cause:
            raise ImportFileError(file, f"cannot be read: {cause.strerror or cause}") from cause


def _read_open(
    opened: IO[bytes], size_bytes: int, file: str, contents: Contents, report: Progress | None, max_bytes: int
) -> None:
    start = opened.read(len(ZIP_START))
    opened.seek(0)
    if start == ZIP_START:
        _read_archive(opened, size_bytes, file, contents, max_bytes)
        return
    pieces = as_utf8(unpacked(opened, size_bytes, file, report, max_bytes))
    first = next(pieces, b"")
    if is_tar(first):
        pieces.close()  # type: ignore[attr-defined]
        opened.seek(0)
        _read_archive(opened, size_bytes, file, contents, max_bytes)
        return
    _read_pieces(chain([first], pieces), first, file, contents)


def _in_folder(path: Path) -> str:
    """Return why a folder is not read: each rank of a run is a profile of its own."""
    names = sorted(entry.name for entry in path.iterdir() if known_name(entry.name) or entry.suffix == ".sqlite")
    shown = ", ".join(shortened(name, 60) for name in names[:3])
    if not names:
        return "is a folder, with no profile in it"
    more = f" and {len(names) - 3} more" if len(names) > 3 else ""
    return f"is a folder ({shown}{more}): give one of its files, or all of them and --rank"


def _read_pieces(pieces: Iterator[bytes], first: bytes, name: str, contents: Contents) -> None:
    kind = profile_format(first, name)
    if kind == "kineto":
        contents.profiles.append(read_kineto(pieces, name))
    elif kind == "ncu-csv":
        contents.tables.append(read_ncu(pieces, name))
    elif kind == "execution-trace":
        contents.operators.append(read_execution_trace(pieces, name))
    elif kind == "chakra-et":
        contents.profiles.append(read_chakra(pieces, name))
    elif kind == "chakra-json":
        contents.profiles.append(read_chakra_json(pieces, name))
    elif kind == "cuda-graph":
        contents.graphs.append(read_cuda_graph(pieces, name))
    elif kind == GPUSIM_TRACE:
        contents.traces.append(name)
    else:
        if first.startswith(b"SQLite format 3\0"):
            raise ImportFileError(name, "is a gzipped SQLite file: unpack it first (gunzip)")
        other = known_format(first, name.removesuffix(".gz"), GPUSIM_TRACE)
        raise ImportFileError(name, other or f"has no known format ({_READ})")


def _read_archive(opened: IO[bytes], size_bytes: int, file: str, contents: Contents, max_bytes: int) -> None:
    """Read the members of an archive that have known formats, in its order; others are skipped."""
    read = number = 0
    others = ""
    with naming_damage(file):
        for member, packed_bytes, content in members(opened, size_bytes, file, max_bytes):
            number += 1
            base = member.rpartition("/")[2]
            if base.startswith("._"):  # of macOS
                continue
            name = f"{file}:{member}"
            pieces = as_utf8(unpacked(content, packed_bytes, name, max_bytes=max_bytes))
            first = next(pieces, b"")
            kind = profile_format(first, base.removesuffix(".gz"))
            if kind == "nsys-sqlite":
                others = f"; {shortened(base, 60)} is an SQLite file: unpack it first"
            elif kind == GPUSIM_TRACE:
                others = f"; {shortened(base, 60)} is a trace of gpusim: unpack it first"
            elif kind:
                _read_pieces(chain([first], pieces), first, name, contents)
                read += 1
    if not read:
        problem = f"is an archive of {number} members, none of them in a known format ({_READ}){others}"
        raise ImportFileError(file, problem)
