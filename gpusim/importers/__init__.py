"""Traces that people already have: profiles, execution traces and CUDA graphs, read and made gpusim traces."""

from gpusim.importers.build import Imported, import_files
from gpusim.importers.doctor import Report, examine

__all__ = ["Imported", "Report", "examine", "import_files"]
