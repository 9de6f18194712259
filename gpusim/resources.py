"""What belongs to this installation: its data folders, inside the package or beside it in a checkout, and its code."""

from __future__ import annotations

import functools
import hashlib
from pathlib import Path

import gpusim
from gpusim.errors import GpusimError

#: What a result follows from, besides trace and hardware model: these parts of the package.
_SIMULATION = ("trace", "hardware", "plan", "engine", "policies", "search/bounds.py", "sweep/point.py", "units.py")


def resource_dir(name: str) -> Path:
    """The folder `name` (`traces`, `hwmodels`, `app`) of this installation."""
    package = Path(__file__).resolve().parent
    for candidate in (package / "_data" / name, package.parent / name):
        if candidate.is_dir():
            return candidate
    raise GpusimError(f"this installation of gpusim lacks its folder '{name}'; install it again")


@functools.cache
def code_version() -> str:
    """Version of gpusim with a hash of the code that simulates: `0.1.0+1f2e3d4c`.

    A release number alone would call results comparable between two states of a checkout.
    """
    package = Path(gpusim.__file__).parent
    found = hashlib.sha256()
    for part in _SIMULATION:
        top = package / part
        for file in sorted(top.rglob("*.py")) if top.is_dir() else [top]:
            found.update(f"{file.relative_to(package).as_posix()}\0".encode())
            found.update(file.read_bytes().replace(b"\r\n", b"\n"))
    return f"{gpusim.__version__}+{found.hexdigest()[:8]}"
