"""Traces: captured steps, their files, and the dependencies between their ops."""

from gpusim.formats.trace import Kernel, Op, Trace
from gpusim.trace.dependencies import dependencies
from gpusim.trace.store import bundled_traces, load_trace, parse_trace, read_trace, structure_hash, write_trace

__all__ = [
    "Kernel",
    "Op",
    "Trace",
    "bundled_traces",
    "dependencies",
    "load_trace",
    "parse_trace",
    "read_trace",
    "structure_hash",
    "write_trace",
]
