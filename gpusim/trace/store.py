"""Trace files and bundled traces: read, write, find by name, hash."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec

from gpusim.errors import TraceError
from gpusim.formats.trace import OLDER_SCHEMAS, SCHEMA, Trace
from gpusim.io.decompression import decompress
from gpusim.io.files import (
    decode_document,
    encode_json,
    read_bytes,
    read_document,
    write_document,
)
from gpusim.io.opening import bundled_or_file
from gpusim.io.resources import resource_dir
from gpusim.trace.check import check_trace

TRACE_SUFFIXES = (".json", ".json.gz")
#: Suffixes of profiles, which are read as traces, too: no bundled name ends in one.
PROFILE_SUFFIXES = (".sqlite", ".csv", ".et", ".gz", ".zip", ".tar")


def read_trace(path: Path) -> Trace:
    """Read and check a trace file. Raises `TraceError` with file, JSON path and value."""
    trace = read_document(path, Trace, SCHEMA, TraceError, OLDER_SCHEMAS)
    check_trace(trace, str(path))
    return trace


def parse_trace(data: bytes, name: str, max_bytes: int | None = None) -> Trace:
    """Parse and check a trace from bytes; `name` is for messages, `max_bytes` limits the decompressed size."""
    text = decompress(data, name, TraceError, max_bytes)
    trace = decode_document(text, Trace, SCHEMA, name, TraceError, OLDER_SCHEMAS)
    check_trace(trace, name)
    return trace


def write_trace(trace: Trace, path: Path) -> None:
    """Write a trace as JSON, gzipped if the name ends in `.gz`, atomically. Raises `OutputError`."""
    write_document(path, trace)


def load_trace(name_or_file: str) -> Trace:
    """Load a trace by bundled name, which takes precedence over a file of that name, or by file name.

    Raises `TraceError` for a bad file and `UnknownNameError`, with the nearest name, for an unknown bundled one.
    """
    return read_trace(bundled_or_file("trace", name_or_file, bundled_traces(), TRACE_SUFFIXES + PROFILE_SUFFIXES))


def bundled_traces() -> dict[str, Path]:
    """Return the file of each bundled trace, sorted by name."""
    folder = resource_dir("traces")
    return dict(sorted((path.name.removesuffix(".json.gz"), path) for path in folder.glob("*.json.gz")))


def other_batches(trace: Trace, others: Mapping[str, Trace]) -> dict[int, str]:
    """Return the names, by batch, of the traces of the same GPU that differ from `trace` only in the batch."""
    model = msgspec.structs.replace(trace.model, batch=1)
    return {
        other.model.batch: name
        for name, other in sorted(others.items())
        if other.model.batch != trace.model.batch
        and msgspec.structs.replace(other.model, batch=1) == model
        and other.provenance.gpu.name == trace.provenance.gpu.name
    }


def read_manifest() -> list[dict[str, Any]]:
    """Return the manifest of the bundled traces: file, GPU, torch, command, date, sha256, ops and kernels of each."""
    path = resource_dir("traces") / "manifest.json"
    if not path.is_file():
        return []
    document: dict[str, Any] = msgspec.json.decode(path.read_bytes())
    return list(document["traces"])


def trace_sha256(path: Path) -> str:
    """Hash the text in a trace's file, so that a later release's trace encoding does not change it."""
    return hashlib.sha256(read_bytes(path, TraceError)).hexdigest()


def structure_hash(trace: Trace) -> str:
    """Return a hash of the step's structure (ops, arguments, tensors), independent of its timings.

    Schedules are tied to it, so they stay valid when the same step is captured again, on this GPU or another.
    """
    structure: dict[str, Any] = {
        "ops": [[o.name, o.target, o.args, o.kwargs, o.outputs, o.reads, o.writes, o.random] for o in trace.ops],
        "tensors": [[t.shape, t.stride, t.offset, t.dtype, t.storage] for t in trace.tensors],
    }
    if trace.sources:
        structure["sources"] = [op.source for op in trace.ops]
    if any(op.after for op in trace.ops):  # an imported trace; other traces keep their hash
        structure["after"] = [[edge.op for edge in op.after] for op in trace.ops]
    return hashlib.sha256(encode_json(structure)).hexdigest()[:32]


def of_another_step(what: str, name: str, trace: Trace) -> str:
    """Say that a file is `what`, of a step named `name`, and not of this trace; both may have one name."""
    if name == trace.name:
        return f"is {what} of another trace, also named '{name}': its ops or tensors differ from this one's"
    return f"is {what} of another trace: of '{name}', not of this '{trace.name}'"
