"""Which code made something: the release with a hash of the source.

A release number alone would call results comparable between two states of a checkout.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from pathlib import Path

__version__ = "0.1.0"


@functools.cache
def code_version() -> str:
    """The version that traces, measurements and results carry: `0.1.0+1f2e3d4c`, over all of the package's source."""
    return version_of(("",))


def version_of(parts: Sequence[str]) -> str:
    """The release with a hash of these files and folders of the package; of folders, every Python file counts."""
    import hashlib  # not for everybody who only imports gpusim

    package = Path(__file__).parent
    digest = hashlib.sha256()
    for part in parts:
        top = package / part
        for file in sorted(top.rglob("*.py")) if top.is_dir() else [top]:
            digest.update(f"{file.relative_to(package).as_posix()}\0".encode())
            digest.update(file.read_bytes().replace(b"\r\n", b"\n"))
    return f"{__version__}+{digest.hexdigest()[:8]}"
