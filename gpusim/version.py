"""Version of the code: the release with a hash of the source.

A release number alone would not distinguish two states of a checkout.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from pathlib import Path

__version__ = "0.1.0"


@functools.cache
def code_version() -> str:
    """Return the version stored in traces, measurements and results, `0.1.0+1f2e3d4c`, over all of the source."""
    return version_of(("",))


def version_of(parts: Sequence[str]) -> str:
    """Return the release with a hash of these files of the package, and of all Python files in these folders."""
    import hashlib  # not needed just to import gpusim

    package = Path(__file__).parent
    digest = hashlib.sha256()
    for part in parts:
        top = package / part
        for file in sorted(top.rglob("*.py")) if top.is_dir() else [top]:
            digest.update(f"{file.relative_to(package).as_posix()}\0".encode())
            digest.update(file.read_bytes().replace(b"\r\n", b"\n"))
    return f"{__version__}+{digest.hexdigest()[:8]}"
