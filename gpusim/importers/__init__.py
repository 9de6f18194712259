"""Importers: profiles, execution traces and CUDA graphs of other tools, converted to gpusim traces.

Names are imported on first use, so that reading a gpusim trace loads no importer.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from gpusim.importers.build import Imported, import_contents, import_files
    from gpusim.importers.doctor import Report, examine
    from gpusim.importers.read import read_files
    from gpusim.importers.recognise import is_foreign

__all__ = ["Imported", "Report", "examine", "import_contents", "import_files", "is_foreign", "read_files"]

_MODULE_OF = {
    "Imported": "build",
    "import_contents": "build",
    "import_files": "build",
    "Report": "doctor",
    "examine": "doctor",
    "read_files": "read",
    "is_foreign": "recognise",
}


def __getattr__(name: str) -> Any:
    """Import a name of the package from its module on first use."""
    if name not in _MODULE_OF:
        raise AttributeError(f"module 'gpusim.importers' has no attribute '{name}'")
    return getattr(import_module(f"gpusim.importers.{_MODULE_OF[name]}"), name)
