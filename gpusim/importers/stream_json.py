"""Large JSON files a piece at a time: the events of one long array, and the few values beside it.

Brackets outside of texts are found with numpy, some MiB at a time, and each run of whole events is decoded at once.
Memory does not grow with the file.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Collection, Iterator
from pathlib import Path
from typing import Any, Final, TypeVar

import msgspec
import numpy as np

from gpusim import file_limits
from gpusim.importers.model import ImportFileError
from gpusim.units import MIB, format_bytes

Value = TypeVar("Value")

PIECE_BYTES: Final = 4 * MIB
#: One event, or one value beside the events. The largest seen has 0.3 MiB.
MAX_EVENT_BYTES: Final = 32 * MIB
MAX_DEPTH: Final = 256

Progress = Callable[[float], None]


def text_pieces(path: Path, name: str, report: Progress | None = None) -> Iterator[bytes]:
    """A file's text in pieces, decompressed where it is gzip, within the limits on size and expansion."""
    limit = file_limits.MAX_DOCUMENT_BYTES
    try:
        with path.open("rb") as file:
            in_all = max(1, path.stat().st_size)
            first = file.read(PIECE_BYTES)
            if not first:
                raise ImportFileError(name, "is empty")
            packed = first.startswith(b"\x1f\x8b")
            unpack = zlib.decompressobj(wbits=31)
            taken = given = 0
            data = first
            while data:
                taken += len(data)
                if report is not None:
                    report(min(1.0, taken / in_all))
                while data:
                    if packed:
                        text = unpack.decompress(data, PIECE_BYTES)
                        data = unpack.unconsumed_tail
                    else:
                        text, data = data, b""
                    given += len(text)
                    expanded = max(file_limits.FREE_EXPANSION_BYTES, file_limits.MAX_EXPANSION * in_all)
                    if given > min(limit, expanded if packed else limit):
                        raise ImportFileError(name, f"is larger than {format_bytes(min(limit, expanded))} of text")
                    if text:
                        yield text
                    if packed and unpack.eof:
                        return
                data = file.read(PIECE_BYTES)
            if packed:
                raise ImportFileError(name, "is truncated gzip: the data ends before the gzip trailer")
    except zlib.error as cause:
        raise ImportFileError(name, f"is damaged gzip: {cause}") from cause
    except OSError as cause:
        raise ImportFileError(name, f"cannot be read: {cause.strerror or cause}") from cause
    except ValueError as cause:  # a NUL in the name
        raise ImportFileError(name, f"cannot be read: {cause}") from cause


class EventFile:
    """A JSON object with one long array of events, or such an array itself.

    `events` yields lists of decoded events; `rest` has the other values of the object once they are read through.
    """

    def __init__(
        self, pieces: Iterator[bytes], name: str, key: str, kind: type[Value], wanted: Collection[str]
    ) -> None:
        self.pieces = pieces
        self.name = name
        self.key = key
        self.wanted = wanted
        """Names of the other values that `rest` is to hold."""
        self.rest: dict[str, Any] = {}
        self._decoder = msgspec.json.Decoder(list[kind])  # type: ignore[valid-type]

    def events(self) -> Iterator[list[Any]]:
        """Events in the file's order, some thousand at a time. Raises `ImportFileError`."""
        depth = 0
        inside = 0  # within a text
        kept = b""  # of an item that has not ended
        top = b""
        key = ""
        in_events = False
        ended = False
        for piece in self.pieces:
            data = kept + piece
            scanned = len(kept)
            while data.endswith(b"\\"):
                more = next(self.pieces, b"")
                data += more
                if not more or len(data) > MAX_EVENT_BYTES:
                    break
            marks, inside = _marks(data[scanned:], inside)
            begin = 0
            last = -1
            levels = depth + np.cumsum(_CHANGE[marks[1]], dtype=np.int64)
            if len(levels):
                if int(levels.max()) > MAX_DEPTH:
                    raise ImportFileError(self.name, f"is nested deeper than {MAX_DEPTH} levels")
                depth_before, depth = depth, int(levels[-1])
            else:
                depth_before = depth
            outer = np.flatnonzero((levels <= 2) & (marks[1] != _OTHER))
            level_before = np.concatenate(([depth_before], levels[:-1])) if len(levels) else levels
            for at in outer.tolist():
                place = int(marks[0][at]) + scanned
                mark = int(marks[1][at])
                now, was = int(levels[at]), int(level_before[at])
                if now < 0 or (ended and mark in b"{["):
                    raise ImportFileError(self.name, "is not valid JSON: brackets do not match")
                if not top:
                    if mark not in b"{[":
                        raise ImportFileError(self.name, "is not valid JSON: it begins with no object or list")
                    top = bytes([mark])
                    begin = place + 1
                    if top == b"[":
                        in_events, last = True, begin
                    continue
                level = 2 if top == b"{" else 1
                if in_events:
                    if mark == 44 and now == level:  # a comma between events
                        last = place
                    elif mark == 93 and was == level:  # the end of the events
                        yield from self._decode(data[begin:place])
                        in_events, begin = False, place + 1
                        ended = top == b"["
                    continue
                if was == 1 and mark == 58:
                    key = self._text(data[begin:place])
                    begin = place + 1
                elif was == 1 and mark == 91 and now == 2 and key == self.key:
                    in_events, begin, last = True, place + 1, -1
                elif mark == 44 and now == 1:
                    self._keep(key, data[begin:place])
                    key, begin = "", place + 1
                elif mark == 125 and was == 1:
                    self._keep(key, data[begin:place])
                    key, begin, ended = "", place + 1, True
            if in_events and last > begin:
                yield from self._decode(data[begin:last])
                begin = last + 1
            kept = data[begin:]
            if len(kept) > MAX_EVENT_BYTES:
                raise ImportFileError(self.name, f"has one value larger than {format_bytes(MAX_EVENT_BYTES)}")
        if depth or inside or not top:
            raise ImportFileError(self.name, "is not valid JSON: it ends within a value")

    def _decode(self, text: bytes) -> Iterator[list[Any]]:
        if not text.strip():
            return
        try:
            yield self._decoder.decode(b"[" + text.strip(b", \r\n\t") + b"]")
        except msgspec.ValidationError as cause:
            problem, _, place = str(cause).partition(" - at ")
            raise ImportFileError(self.name, f"an event of '{self.key}' is malformed: {problem} {place}") from cause
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as cause:
            raise ImportFileError(self.name, f"is not valid JSON in '{self.key}': {cause}") from cause

    def _text(self, text: bytes) -> str:
        try:
            return msgspec.json.decode(text.strip(b", \r\n\t"), type=str)
        except (msgspec.MsgspecError, UnicodeDecodeError) as cause:
            raise ImportFileError(self.name, "is not valid JSON: a key is no text") from cause

    def _keep(self, key: str, text: bytes) -> None:
        if key not in self.wanted or not text.strip():
            return
        try:
            self.rest[key] = msgspec.json.decode(text)
        except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as cause:
            raise ImportFileError(self.name, f"is not valid JSON at '{key[:40]}': {cause}") from cause


_OTHER: Final = 0
_CHANGE = np.zeros(256, np.int8)
_CHANGE[[ord("{"), ord("[")]] = 1
_CHANGE[[ord("}"), ord("]")]] = -1
_KEPT = np.zeros(256, bool)
_KEPT[[ord(mark) for mark in '{}[],:"']] = True


def _marks(text: bytes, inside: int) -> tuple[tuple[Any, Any], int]:
    """Places and values of the marks outside of texts, and whether the text ends inside of one."""
    if b"\\" in text:
        text = text.replace(b"\\\\", b"__").replace(b'\\"', b"__")
    values = np.frombuffer(text, np.uint8)
    places = np.flatnonzero(_KEPT[values])
    found = values[places]
    quotes = found == ord('"')
    within = (np.cumsum(quotes, dtype=np.uint32) + inside) & 1
    outside = (within == 0) & ~quotes
    return (places[outside], found[outside]), int(within[-1]) if len(within) else inside
