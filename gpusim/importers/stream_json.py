"""Large JSON files read piecewise: the events of one long array, and the few values next to it.

The file is read some MiB at a time, and each run of whole events is decoded at once: up to the apparent last border
between two events, or, where that does not decode, up to the border that brackets outside of strings show, found with
numpy. Memory does not grow with the file.
"""

from __future__ import annotations

import codecs
import re
import zlib
from collections.abc import Callable, Collection, Iterator
from itertools import chain
from typing import IO, Any, Final, TypeVar

import msgspec
import numpy as np

from gpusim.importers.model import ImportFileError
from gpusim.io import file_limits
from gpusim.io.decoding import decoder_of
from gpusim.io.known_formats import AGAIN, UTF16_STARTS
from gpusim.units import MIB, format_bytes

Value = TypeVar("Value")

PIECE_BYTES: Final = 4 * MIB
#: Largest event or other value. The largest seen has 0.3 MiB.
MAX_EVENT_BYTES: Final = 32 * MIB
MAX_DEPTH: Final = 256
#: Most places checked for a border between two events, and most white space in one.
MAX_BORDERS, MAX_BORDER_BYTES = 256, 64
#: Most apparent borders of a file that may prove wrong.
MAX_WRONG_GUESSES: Final = 64
GZIP_START: Final = b"\x1f\x8b"
#: Most gzip members: more than a tool writes to one file. Each costs a copy of a piece.
MAX_GZIP_MEMBERS: Final = 4096

Progress = Callable[[float], None]


def unpacked(
    file: IO[bytes],
    size_bytes: int,
    name: str,
    report: Progress | None = None,
    max_bytes: int = file_limits.MAX_DOCUMENT_BYTES,
) -> Iterator[bytes]:
    """Yield the text of an open file or archive member in pieces, decompressed where it is gzip.

    `size_bytes` is its packed size. More than `max_bytes` of text, or far more than the packed size explains, is an
    error.
    """
    data = file.read(PIECE_BYTES)
    if not data:
        raise ImportFileError(name, f"is empty: {AGAIN}")
    packed = data.startswith(GZIP_START)
    in_all = max(1, size_bytes)
    limit = max_bytes
    if packed:
        limit = min(limit, max(file_limits.FREE_EXPANSION_BYTES, file_limits.MAX_EXPANSION * in_all))
    unpack = zlib.decompressobj(wbits=31)
    taken = given = 0
    members = 1
    try:
        while data:
            taken += len(data)
            if report is not None:
                report(min(1.0, taken / in_all))
            while data:
                text, data = (unpack.decompress(data, PIECE_BYTES), unpack.unconsumed_tail) if packed else (data, b"")
                given += len(text)
                if given > limit:
                    raise ImportFileError(name, f"is larger than {format_bytes(limit)} of text")
                if text:
                    yield text
                if packed and unpack.eof:  # another member may follow, or zeros
                    data = unpack.unused_data.lstrip(b"\0")
                    if data:
                        members += 1
                        if members > MAX_GZIP_MEMBERS:
                            raise ImportFileError(name, f"has more than {MAX_GZIP_MEMBERS} gzip members")
                        unpack = zlib.decompressobj(wbits=31)
            data = file.read(PIECE_BYTES)
            if packed and unpack.eof and data.strip(b"\0"):
                members += 1
                unpack = zlib.decompressobj(wbits=31)
    except zlib.error as cause:
        where = "bytes after its gzip data are no gzip" if members > 1 else "is damaged gzip"
        raise ImportFileError(name, f"{where}: {cause}") from cause
    if packed and not unpack.eof:
        raise ImportFileError(name, f"is truncated gzip: the data ends before the gzip trailer; {AGAIN}")


def as_utf8(pieces: Iterator[bytes]) -> Iterator[bytes]:
    """Convert pieces of a text to UTF-8 from UTF-16 with a byte order mark, which Windows' shell writes."""
    first = next(pieces, b"")
    if not first.startswith(UTF16_STARTS):
        yield first
        yield from pieces
        return
    decoder = codecs.getincrementaldecoder("utf-16")("replace")
    for piece in chain((first,), pieces):
        yield decoder.decode(piece).encode("utf-8", "replace")


class EventFile:
    """A JSON object with one long array of events, or the array alone.

    `events` yields lists of decoded events; `rest` has the object's other values once all events are read.
    """

    def __init__(
        self,
        pieces: Iterator[bytes],
        name: str,
        key: str,
        kind: type[Value],
        wanted: Collection[str],
        exact: bool = False,
    ) -> None:
        self.pieces = pieces
        self.name = name
        self.key = key
        self.wanted = wanted
        """Names of the other values to keep in `rest`."""
        self.rest: dict[str, Any] = {}
        self.mended = False
        """Whether parts were invalid JSON and read leniently: `nan`, `inf`, control characters, other encodings."""
        # Exact mode keeps decimal numbers as text: times in us since 1970 have more digits than a double.
        self._decoder = decoder_of(list[kind], numbers_as_text=exact)  # type: ignore[valid-type]

    def events(self) -> Iterator[list[Any]]:
        """Yield events in the file's order, some thousand at a time. Raises `ImportFileError`."""
        depth = 0
        inside = 0  # whether within a string
        kept = b""  # the item that has not ended
        top = b""
        key = ""
        in_events = False
        ended = False
        scanned = 0  # scanned part of what is kept
        guesses = MAX_WRONG_GUESSES
        for piece in chain(self.pieces, (b"",)):
            data = kept + piece
            if in_events and guesses and (cut := _border(data, scanned)) > 0:
                events = self._guessed(data[:cut])
                if events is not None:
                    yield events
                    kept, scanned = data[cut + 1 :], 0
                    depth, inside = 2 if top == b"{" else 1, 0
                    continue
                guesses -= 1
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
                        raise ImportFileError(self.name, "is not valid JSON: it does not begin with an object or list")
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
            scanned = len(kept)
            if len(kept) > MAX_EVENT_BYTES:
                raise ImportFileError(self.name, f"has one value larger than {format_bytes(MAX_EVENT_BYTES)}")
        if top == b"[" and in_events and depth == 1 and not inside:  # the format permits an unclosed list of events
            yield from self._decode(kept)
        elif depth or inside or not top:
            raise ImportFileError(self.name, "is not valid JSON: it ends within a value, as if cut off")

    def _guessed(self, text: bytes) -> list[Any] | None:
        """Decode the events of a text; None where it does not end at the end of an event."""
        try:
            events: list[Any] = self._decoder.decode(b"[" + text + b"]")
            return events
        except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
            return None

    def _decode(self, text: bytes) -> Iterator[list[Any]]:
        if not text.strip():
            return
        text = b"[" + text.strip(b", \r\n\t") + b"]"
        try:
            try:
                yield self._decoder.decode(text)
            except msgspec.ValidationError:
                raise
            except (msgspec.DecodeError, UnicodeDecodeError):
                events = self._decoder.decode(_mended(text))
                self.mended = True
                yield events
        except msgspec.ValidationError as cause:
            problem, _, place = str(cause).partition(" - at ")
            raise ImportFileError(self.name, f"an event of '{self.key}' is malformed: {problem} {place}") from cause
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as cause:
            raise ImportFileError(self.name, f"is not valid JSON in '{self.key}': {cause}") from cause

    def _text(self, text: bytes) -> str:
        try:
            return msgspec.json.decode(text.strip(b", \r\n\t"), type=str)
        except (msgspec.MsgspecError, UnicodeDecodeError) as cause:
            raise ImportFileError(self.name, "is not valid JSON: a key is not text") from cause

    def _keep(self, key: str, text: bytes) -> None:
        if key not in self.wanted or not text.strip():
            return
        try:
            self.rest[key] = msgspec.json.decode(text)
        except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as cause:
            raise ImportFileError(self.name, f"is not valid JSON at '{key[:40]}': {cause}") from cause


_NO_CONTROLS: Final = bytes.maketrans(bytes(range(32)), b" " * 32)
#: printf's text for numbers that JSON lacks, and Kineto's former text for a device without a name.
_NO_NUMBER: Final = re.compile(rb"([:\[,]\s*)(?:[-+]?(?:nan|inf(?:inity)?)|N/A)(?=\s*[,}\]])", re.IGNORECASE)
_ESCAPE: Final = re.compile(rb'\\(["\\/bfnrt]|u[0-9a-fA-F]{4})?')
_OTHER: Final = 0
_CHANGE = np.zeros(256, np.int8)
_CHANGE[[ord("{"), ord("[")]] = 1
_CHANGE[[ord("}"), ord("]")]] = -1
_KEPT = np.zeros(256, bool)
_KEPT[[ord(mark) for mark in '{}[],:"']] = True


def _border(data: bytes, scanned: int) -> int:
    """Return the place of the apparent last comma between two objects after the first `scanned` bytes; 0 without
    one.
    """
    at = len(data)
    for _ in range(MAX_BORDERS):
        at = data.rfind(b"{", scanned, at)
        if at <= 0:
            return 0
        before = data[max(0, at - MAX_BORDER_BYTES) : at].rstrip()
        if before.endswith(b",") and before[:-1].rstrip().endswith(b"}"):
            return data.rindex(b",", 0, at)
    return 0


def _mended(text: bytes) -> bytes:
    """Repair text like the lenient readers of Python and JavaScript: invalid parts become null, a space or `\ufffd`."""
    text = text.decode("utf-8", "replace").encode().translate(_NO_CONTROLS)
    text = _NO_NUMBER.sub(rb"\1null", text)
    return _ESCAPE.sub(lambda match: match[0] if match[1] else b"\\\\", text)


def _marks(text: bytes, inside: int) -> tuple[tuple[Any, Any], int]:
    """Return places and values of the marks outside of strings, and whether the text ends inside a string."""
    if b"\\" in text:
        text = text.replace(b"\\\\", b"__").replace(b'\\"', b"__")
    values = np.frombuffer(text, np.uint8)
    places = np.flatnonzero(_KEPT[values])
    marks = values[places]
    quotes = marks == ord('"')
    within = (np.cumsum(quotes, dtype=np.uint32) + inside) & 1
    outside = (within == 0) & ~quotes
    return (places[outside], marks[outside]), int(within[-1]) if len(within) else inside
