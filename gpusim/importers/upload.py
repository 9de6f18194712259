"""Uploaded files, of gpusim or another tool, read in a process of their own as a trace."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing

import msgspec

from gpusim.errors import TraceError
from gpusim.formats.trace import Op, Storage, Tensor, Trace
from gpusim.importers.build import import_contents
from gpusim.importers.read import read_data
from gpusim.importers.recognise import is_foreign_data
from gpusim.io.decoding import decode_json
from gpusim.io.file_limits import MAX_UPLOAD_BYTES, MAX_UPLOAD_DOCUMENT_BYTES, PARTS_AT_A_TIME
from gpusim.io.files import Document, encode_json
from gpusim.io.sandbox import read_apart
from gpusim.trace.store import parse_trace
from gpusim.units import format_bytes


def parse_upload(data: bytes, name: str) -> Trace:
    """Return the trace in an uploaded file; for another tool's file, the trace of its usual step.

    The file is read within size limits, in a process of its own (`gpusim.io.sandbox`). The source of an imported step's
    dependencies is in `provenance.imported_from`. Raises `TraceError`. Nothing in the file runs.
    """
    if len(data) > MAX_UPLOAD_BYTES:
        raise TraceError(name, f"is {format_bytes(len(data))}; the limit is {format_bytes(MAX_UPLOAD_BYTES)}")
    storages: list[Storage] = []
    tensors: list[Tensor] = []
    ops: list[Op] = []
    frame: Trace | None = None
    with closing(
        read_apart(f"{__name__}:{upload_pieces.__name__}", data, name, TraceError, max_bytes=MAX_UPLOAD_DOCUMENT_BYTES)
    ) as pieces:
        for piece in pieces:
            part: _Piece = decode_json(piece, _Piece)
            storages += part.storages
            tensors += part.tensors
            ops += part.ops
            frame = part.frame or frame
    assert frame is not None
    return msgspec.structs.replace(frame, storages=tuple(storages), tensors=tuple(tensors), ops=tuple(ops))


class _Piece(Document, frozen=True):
    """Part of a trace in transit between processes."""

    frame: Trace | None = None
    """The trace without the lists below."""
    storages: tuple[Storage, ...] = ()
    tensors: tuple[Tensor, ...] = ()
    ops: tuple[Op, ...] = ()


def upload_pieces(data: bytes, name: str, *, max_bytes: int) -> Iterator[bytes]:
    """Yield a checked trace in pieces that each decode in a few milliseconds; the counterpart of `parse_upload`."""
    if is_foreign_data(data, name):
        trace = import_contents(read_data(data, name, max_bytes), [name]).trace
    else:
        trace = parse_trace(data, name, max_bytes)
    yield encode_json(_Piece(frame=msgspec.structs.replace(trace, storages=(), tensors=(), ops=())))
    for begin in range(0, len(trace.storages), PARTS_AT_A_TIME):
        yield encode_json(_Piece(storages=trace.storages[begin : begin + PARTS_AT_A_TIME]))
    for begin in range(0, len(trace.tensors), PARTS_AT_A_TIME):
        yield encode_json(_Piece(tensors=trace.tensors[begin : begin + PARTS_AT_A_TIME]))
    for begin in range(0, len(trace.ops), PARTS_AT_A_TIME):
        yield encode_json(_Piece(ops=trace.ops[begin : begin + PARTS_AT_A_TIME]))
