"""Reading any file that an importer knows: plain, gzip, or the members of a tar archive, which never leave memory."""

from __future__ import annotations

import tarfile
import zlib
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import chain
from pathlib import Path
from typing import IO, Final

from gpusim import file_limits
from gpusim.formats_known import LOOKED_AT_BYTES, known_format, profile_format
from gpusim.importers.chakra import read_chakra, read_chakra_json
from gpusim.importers.cuda_graph import GraphDump, read_cuda_graph
from gpusim.importers.execution_trace import OperatorTrace, read_execution_trace
from gpusim.importers.kineto import read_kineto
from gpusim.importers.model import ImportFileError, Profile
from gpusim.importers.ncu import read_ncu
from gpusim.importers.nsys import read_nsys
from gpusim.importers.stream_json import PIECE_BYTES, Progress, text_pieces
from gpusim.units import format_bytes

#: Members of an archive that are looked at.
MAX_MEMBERS: Final = 4096
GPUSIM_TRACE: Final = "gpusim-trace"
_READ: Final = "read are Kineto JSON, nsys SQLite, ncu CSV, execution traces, Chakra .et, dumps of CUDA graphs"


@dataclass(slots=True)
class Contents:
    """All that was in the files: profiles with times, and what can be joined to them."""

    profiles: list[Profile] = field(default_factory=list)
    tables: list[Profile] = field(default_factory=list)
    """Of Nsight Compute."""
    operators: list[OperatorTrace] = field(default_factory=list)
    graphs: list[GraphDump] = field(default_factory=list)
    traces: list[str] = field(default_factory=list)
    """Files that are gpusim's own traces."""

    def all(self) -> list[Profile]:
        """The description of each part, in one list."""
        joined = [part.profile for part in self.operators] + [part.profile for part in self.graphs]
        return [*self.profiles, *self.tables, *joined]


def read_files(files: list[str], report: Progress | None = None) -> Contents:
    """Everything in these files. Raises `ImportFileError` for the first that cannot be read."""
    found = Contents()
    for file in files:
        _read_file(file, found, report)
    return found


def is_foreign(file: str) -> bool:
    """Whether a file begins as one in a format of another tool. False for one that cannot be opened."""
    try:
        with Path(file).open("rb") as opened:
            start = opened.read(LOOKED_AT_BYTES)
        if start.startswith(b"\x1f\x8b"):
            start = zlib.decompressobj(wbits=31).decompress(start, LOOKED_AT_BYTES)
    except (OSError, ValueError, zlib.error):  # ValueError: a NUL in the name
        return False
    return start[257:262] == b"ustar" or profile_format(start, file) not in ("", GPUSIM_TRACE)


def _read_file(file: str, found: Contents, report: Progress | None) -> None:
    path = Path(file)
    try:
        with path.open("rb") as opened:
            start = opened.read(LOOKED_AT_BYTES)
    except (OSError, ValueError) as cause:  # ValueError: a NUL in the name
        raise ImportFileError(file, f"cannot be read: {getattr(cause, 'strerror', None) or cause}") from cause
    if not start:
        raise ImportFileError(file, "is empty")
    if profile_format(start, file) == "nsys-sqlite":
        found.profiles.append(read_nsys(path, file))
        return
    pieces = text_pieces(path, file, report)
    first = next(pieces, b"")
    if first[257:262] == b"ustar" or (len(first) >= 512 and first[:1] not in b"{[" and _is_tar(first)):
        pieces.close()  # type: ignore[attr-defined]
        _read_archive(path, file, found)
        return
    _read_pieces(chain([first], pieces), first, file, found)


def _is_tar(first: bytes) -> bool:
    try:
        tarfile.TarInfo.frombuf(first[:512], "utf-8", "surrogateescape")
    except (tarfile.TarError, ValueError):
        return False
    return True


def _read_pieces(pieces: Iterator[bytes], first: bytes, name: str, found: Contents) -> None:
    kind = profile_format(first, name)
    if kind == "kineto":
        found.profiles.append(read_kineto(pieces, name))
    elif kind == "ncu-csv":
        found.tables.append(read_ncu(pieces, name))
    elif kind == "execution-trace":
        found.operators.append(read_execution_trace(pieces, name))
    elif kind == "chakra-et":
        found.profiles.append(read_chakra(pieces, name))
    elif kind == "chakra-json":
        found.profiles.append(read_chakra_json(pieces, name))
    elif kind == "cuda-graph":
        found.graphs.append(read_cuda_graph(pieces, name))
    elif kind == GPUSIM_TRACE:
        found.traces.append(name)
    else:
        other = known_format(first, name.removesuffix(".gz"), GPUSIM_TRACE)
        raise ImportFileError(name, _refusal(first, name) or other or f"is in no format that gpusim knows ({_READ})")


def _refusal(first: bytes, name: str) -> str:
    """Why a file of a known kind is not read here, and what to give in its place; empty for any other."""
    lower = name.lower()
    if lower.endswith((".nsys-rep", ".qdrep")):
        return "is a report of Nsight Systems: write it as SQLite with `nsys export --type sqlite FILE`"
    if lower.endswith(".ncu-rep") or first.startswith(b"NVR\0"):
        return "is a report of Nsight Compute: write its table with `ncu --import FILE --csv --page raw`"
    if first.startswith(b"PK\x03\x04"):
        return "is a zip archive: unpack it and give the profile in it"
    return ""


def _rest(opened: IO[bytes]) -> Iterator[bytes]:
    while piece := opened.read(PIECE_BYTES):
        yield piece


def _read_archive(path: Path, file: str, found: Contents) -> None:
    """The members of a tar archive that are in known formats, in its order; others are passed over."""
    read = members = 0
    taken = 0
    try:
        with path.open("rb") as opened_file:
            packed = opened_file.read(2) == b"\x1f\x8b"
        with tarfile.open(path, "r:gz" if packed else "r:") as archive:
            allowed = max(file_limits.FREE_EXPANSION_BYTES, file_limits.MAX_EXPANSION * path.stat().st_size)
            for member in archive:
                members += 1
                if members > MAX_MEMBERS:
                    raise ImportFileError(file, f"has more than {MAX_MEMBERS} members")
                taken += max(0, member.size)
                if taken > min(allowed, file_limits.MAX_DOCUMENT_BYTES):
                    raise ImportFileError(
                        file, f"has more than {format_bytes(min(allowed, file_limits.MAX_DOCUMENT_BYTES))} in it"
                    )
                base = member.name.rpartition("/")[2]
                if not member.isreg() or base.startswith("._") or not member.size:
                    continue
                opened = archive.extractfile(member)
                if opened is None:
                    continue
                first = opened.read(PIECE_BYTES)
                name = f"{file}:{member.name}"
                if first[:2] == b"\x1f\x8b":
                    raise ImportFileError(name, "is gzip within an archive: unpack it first")
                if not profile_format(first, base) or profile_format(first, base) in (GPUSIM_TRACE, "nsys-sqlite"):
                    continue
                _read_pieces(chain([first], _rest(opened)), first, name, found)
                read += 1
    except (tarfile.TarError, zlib.error, EOFError) as cause:
        raise ImportFileError(file, f"is a damaged tar archive: {cause}") from cause
    except OSError as cause:
        raise ImportFileError(file, f"cannot be read: {cause.strerror or cause}") from cause
    except (ValueError, OverflowError, IndexError, AttributeError) as cause:  # of tarfile, with a malformed header
        raise ImportFileError(file, f"is a damaged tar archive: {cause}") from cause
    if not read:
        raise ImportFileError(
            file, f"is a tar archive of {members} members, none of them in a format that is read here ({_READ})"
        )
