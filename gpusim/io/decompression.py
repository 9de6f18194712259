"""Decompression of a file, within limits on its size and on the memory of its values."""

from __future__ import annotations

import codecs
import zlib

from gpusim.errors import FileError
from gpusim.io import file_limits
from gpusim.io.known_formats import AGAIN, UTF16_STARTS, not_gzip
from gpusim.units import MIB, format_bytes

_GZIP_MAGIC = b"\x1f\x8b"
_PIECE_BYTES = MIB
_MAX_MEMBERS = 64
_NO_MARKS = bytes(set(range(256)) - set(b'"[{,:'))


def decompress(data: bytes, name: str, error: type[FileError], max_bytes: int | None = None) -> bytes:
    """Return the text of a document in UTF-8, gunzipped if it starts with gzip's magic; `name` is for messages.

    Raises `error` for more than `max_bytes` (default: `MAX_DOCUMENT_BYTES`) of text, and for a text whose values need
    far more memory than the file's size explains (`gpusim.io.file_limits`). Neither check allocates that memory.
    """
    if not data:
        raise error(name, f"is empty: {AGAIN}")
    text = _gunzip(data, name, error, max_bytes) if data.startswith(_GZIP_MAGIC) else data
    if text is data and name.endswith(".gz"):
        raise error(name, not_gzip(data))
    text = _as_utf8(text, name, error)
    allowed = max(file_limits.FREE_VALUES_BYTES, file_limits.MAX_VALUES_PER_BYTE * len(data))
    allowed = min(allowed, file_limits.MAX_VALUES_BYTES)
    # Below the worst case, `{},{},{},...`, a small text need not be counted.
    if len(text) * (file_limits.OBJECT_BYTES + file_limits.NUMBER_BYTES) > 3 * allowed:
        needed = values_bytes(text, allowed)
        if needed > allowed:
            problem = f"its values need more than {format_bytes(allowed)} of memory"
            raise error(name, f"{problem}, the limit for a file of {format_bytes(len(data))}")
    return text


def _gunzip(data: bytes, name: str, error: type[FileError], max_bytes: int | None) -> bytes:
    limit = file_limits.MAX_DOCUMENT_BYTES if max_bytes is None else max_bytes
    expanded = max(file_limits.FREE_EXPANSION_BYTES, file_limits.MAX_EXPANSION * len(data))
    most = min(limit, expanded)
    texts: list[bytes] = []
    size, rest = 0, memoryview(data)
    while rest:  # a gzip file is one member or several; zeros may follow
        if texts and not rest.tobytes().strip(b"\0"):
            break
        if len(texts) == _MAX_MEMBERS:  # each member costs a copy of the bytes after it
            raise error(name, f"has more than {_MAX_MEMBERS} gzip members")
        stream = zlib.decompressobj(wbits=31)
        try:
            # A length of 0 would mean no limit. One byte beyond the limit shows that the text goes on.
            text = stream.decompress(rest, most - size + 1)
        except zlib.error as cause:
            where = "bytes after its gzip data are no gzip" if texts else "is damaged gzip"
            raise error(name, f"{where}: {cause}") from cause
        texts.append(text)
        size += len(text)
        if size > most:
            break
        if not stream.eof:
            raise error(name, f"is truncated gzip: the data ends before the gzip trailer; {AGAIN}")
        rest = rest[len(rest) - len(stream.unused_data) :]
    if size <= most:
        return texts[0] if len(texts) == 1 else b"".join(texts)
    if limit <= expanded:
        raise error(name, f"is larger than {limit} bytes when decompressed")
    times = f"{file_limits.MAX_EXPANSION} times its {format_bytes(len(data))}"
    raise error(name, f"is larger than {format_bytes(expanded)} when decompressed, which is more than {times}")


def _as_utf8(text: bytes, name: str, error: type[FileError]) -> bytes:
    """Return a text without its byte order mark, in UTF-8; Windows' shell writes UTF-16."""
    if text.startswith(codecs.BOM_UTF8):
        return text[len(codecs.BOM_UTF8) :]
    if not text.startswith(UTF16_STARTS):
        return text
    try:
        return text.decode("utf-16").encode()
    except UnicodeError as cause:
        raise error(name, f"starts as UTF-16 but is not: {cause.args[-1]}; {AGAIN}") from cause


def values_bytes(text: bytes, enough: int) -> int:
    """Return an upper estimate of the memory of a JSON text's values, in bytes; counting stops above `enough`.

    It counts brackets, commas and texts outside of texts, 1 MiB at a time: 0.2 s for 100 MB.
    """
    import numpy as np  # small documents do not need it

    start = inside = quotes_in_all = keys = values = 0
    size_bytes = 0
    while start < len(text) and size_bytes <= enough:
        end = start + _PIECE_BYTES
        piece = text[start:end]
        while piece.endswith(b"\\") and end < len(text):  # do not split an escaped quote
            piece += text[end : end + 1]
            end += 1
        start = end
        if b"\\" in piece:
            piece = piece.replace(b"\\\\", b"").replace(b'\\"', b"")
        marks = np.frombuffer(piece.translate(None, _NO_MARKS), np.uint8)
        if not len(marks):
            continue
        quotes = marks == ord('"')
        within = (np.cumsum(quotes, dtype=np.uint8) + np.uint8(inside)) & 1
        inside = int(within[-1])
        outside = marks[(within | quotes) == 0].tobytes()
        values += file_limits.OBJECT_BYTES * outside.count(b"{")
        values += file_limits.LIST_BYTES * outside.count(b"[")
        values += file_limits.NUMBER_BYTES * outside.count(b",")
        quotes_in_all += int(np.count_nonzero(quotes))
        keys += outside.count(b":")
        # Keys of objects do not count: equal keys share one text.
        size_bytes = values + file_limits.TEXT_BYTES * max(0, quotes_in_all // 2 - keys)
    return size_bytes
