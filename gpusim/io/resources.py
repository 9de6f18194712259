"""Data folders, inside the installed package or next to it in a checkout."""

from __future__ import annotations

from pathlib import Path

from gpusim.errors import GpusimError


def resource_dir(name: str) -> Path:
    """Return the folder `name` (`traces`, `hwmodels`, `topologies`, `app`) of this installation."""
    package = Path(__file__).resolve().parents[1]
    for candidate in (package / "_data" / name, package.parent / name):
        if candidate.is_dir():
            return candidate
    raise GpusimError(f"this installation of gpusim lacks its folder '{name}'; install it again")
