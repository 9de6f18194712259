"""Traces that people already have: profiles, execution traces and CUDA graphs, read and made gpusim traces."""

from __future__ import annotations

from pathlib import Path

from gpusim.importers.build import Imported, import_contents, import_files
from gpusim.importers.doctor import Report, examine
from gpusim.importers.read import read_files
from gpusim.trace.schema import Trace
from gpusim.trace.store import bundled_traces, load_trace

__all__ = ["Imported", "Report", "examine", "import_files", "load"]


def load(*files: str) -> Trace:
    """A trace out of any file that gpusim knows: its own, a bundled name, or a profile with what is joined to it.

    Raises `GpusimError`. `import_files` takes a step, a device or a rank, and tells what it found.
    """
    if len(files) == 1 and files[0] in bundled_traces() and not Path(files[0]).exists():
        return load_trace(files[0])
    contents = read_files(list(files))
    if len(files) == 1 and contents.traces:
        return load_trace(files[0])
    return import_contents(contents, files).trace
