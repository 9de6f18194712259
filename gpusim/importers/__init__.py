"""Traces that people already have: profiles, execution traces and CUDA graphs, read and made gpusim traces."""

from __future__ import annotations

from gpusim.importers.build import Imported, import_contents, import_files
from gpusim.importers.doctor import Report, examine
from gpusim.importers.read import is_foreign, read_files

__all__ = ["Imported", "Report", "examine", "import_contents", "import_files", "is_foreign", "read_files"]
