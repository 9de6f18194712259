"""Recognition of other tools' formats by the first bytes of a file; loads no importer."""

from __future__ import annotations

import io
import os
import zlib
from pathlib import Path
from typing import IO, Final

from gpusim.importers.archives import ZIP_START, members, naming_damage
from gpusim.importers.model import ImportFileError
from gpusim.importers.stream_json import GZIP_START
from gpusim.io.file_limits import MAX_DOCUMENT_BYTES
from gpusim.io.known_formats import LOOKED_AT_BYTES, profile_format
from gpusim.io.opening import UnreadableError, open_file

GPUSIM_TRACE: Final = "gpusim-trace"


def is_foreign(file: str) -> bool:
    """Whether a file has another tool's format, or is a folder; False where it cannot be opened."""
    try:
        if os.path.isdir(file):
            return True
        with open_file(Path(file)) as opened:
            return _is_foreign(opened, Path(file).stat().st_size, file)
    except (OSError, ValueError, UnreadableError):  # ValueError: a NUL in the name
        return False


def is_foreign_data(data: bytes, name: str) -> bool:
    """Whether data in memory has another tool's format."""
    return _is_foreign(io.BytesIO(data), len(data), name)


def _is_foreign(opened: IO[bytes], size_bytes: int, name: str) -> bool:
    start = opened.read(LOOKED_AT_BYTES)
    try:
        if start.startswith(ZIP_START):
            with naming_damage(name):
                entries = members(opened, size_bytes, name, MAX_DOCUMENT_BYTES)
                return any(known_name(member) for member, _, _ in entries)
        if start.startswith(GZIP_START):
            start = zlib.decompressobj(wbits=31).decompress(start, LOOKED_AT_BYTES)
    except (zlib.error, ImportFileError):
        return False
    return start[257:262] == b"ustar" or profile_format(start, name) not in ("", GPUSIM_TRACE)


def known_name(name: str) -> bool:
    """Whether an archive member is named like a profile: weights, which torch saves as zip archives, are not."""
    base = name.rpartition("/")[2].lower()
    return not base.startswith("._") and base.removesuffix(".gz").endswith((".json", ".csv", ".et"))
