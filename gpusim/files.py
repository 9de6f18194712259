"""Reading and writing the JSON documents of gpusim: strict in, all or nothing out.

Reading never runs anything from a file and answers every broken one with a `FileError` that
names file, JSON path and value. Writing goes through a temporary file beside the target, so that
a full disk or an interrupt leaves no half-written output.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import re
import secrets
import stat
import tomllib
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any, TypeVar

import msgspec
from msgspec import Meta

from gpusim import file_limits
from gpusim.errors import FileError, OutputError
from gpusim.file_limits import MAX_INTEGER
from gpusim.formats_known import known_format
from gpusim.units import MIB, format_bytes

DocumentT = TypeVar("DocumentT")

Count = Annotated[int, Meta(ge=0, le=MAX_INTEGER)]
Positive = Annotated[int, Meta(ge=1, le=MAX_INTEGER)]
Nanoseconds = Annotated[int, Meta(ge=0, le=MAX_INTEGER)]
#: Of what has been run: it took some time, and others are divided by it.
PositiveNanoseconds = Annotated[int, Meta(ge=1, le=MAX_INTEGER)]
StorageBytes = Annotated[int, Meta(ge=0, le=file_limits.MAX_STORAGE_BYTES)]

_GZIP_MAGIC = b"\x1f\x8b"
_MSGSPEC_PATH = re.compile(r"^(?P<problem>.*?)(?: - at `(?P<key>key in )?(?P<path>\$[^`]*)`)?$", re.DOTALL)
_PATH_STEP = re.compile(r"\.([^.\[\]]+)|\[(\d+)\]")
_PIECE_BYTES = MIB
_MAX_MEMBERS = 64
_TEMPORARY = ".gpusim-writes-"
_NO_MARKS = bytes(set(range(256)) - set(b'"[{,:'))


class Document(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """Base of everything in a file: unknown fields refused; subclasses repeat frozen, add `kw_only`."""


class _SchemaOnly(msgspec.Struct):
    schema: str


def read_document(path: Path, kind: type[DocumentT], schema: str, error: type[FileError]) -> DocumentT:
    """Read a `.json` or `.json.gz` document of type `kind` whose `schema` field must equal `schema`.

    Raises `error` for a missing, truncated, wrongly gzipped, non-JSON or ill-typed file, or another schema version.
    """
    return decode_document(read_bytes(path, error), kind, schema, str(path), error)


def read_toml(path: Path, kind: type[DocumentT], error: type[FileError]) -> DocumentT:
    """Read a TOML file of type `kind`. Raises `error` with file, place and what is wrong."""
    data = _read(path, error, file_limits.MAX_TOML_BYTES)
    try:
        document = tomllib.loads(data.decode("utf-8"))
    except (ValueError, RecursionError) as cause:  # TOMLDecodeError, UnicodeDecodeError, numbers of 5,000 digits
        raise error(str(path), f"is not valid TOML: {cause}") from cause
    place = _nul_place(document)
    if place is not None:
        raise error(str(path), "a text holds the character NUL, which no name can have", place=place)
    try:
        return msgspec.convert(document, kind)
    except msgspec.ValidationError as cause:
        match = _MSGSPEC_PATH.match(str(cause))
        assert match is not None
        place = match["path"] or "$"
        raise error(str(path), _with_value(match["problem"], _value_in(document, place)), place=place) from cause


def read_bytes(path: Path, error: type[FileError]) -> bytes:
    """The file's content, decompressed where it is gzip, within the limits on documents."""
    return decompress(read_file(path, error), str(path), error)


def read_file(path: Path, error: type[FileError]) -> bytes:
    """The file's content as it is, within the limit on size."""
    return _read(path, error, file_limits.MAX_DOCUMENT_BYTES)


def _read(path: Path, error: type[FileError], max_bytes: int) -> bytes:
    try:
        with path.open("rb") as file:
            info = os.fstat(file.fileno())
            limit = max_bytes if stat.S_ISREG(info.st_mode) else min(max_bytes, file_limits.MAX_STREAM_BYTES)
            # The size is known beforehand, and a file may grow while it is read.
            data = b"" if info.st_size > limit else file.read(limit + 1)
    except OSError as cause:
        raise error(str(path), f"cannot be read: {cause.strerror or cause}") from cause
    except ValueError as cause:  # a NUL in the name
        raise error(str(path), f"cannot be read: {cause}") from cause
    if info.st_size > limit or len(data) > limit:
        raise error(str(path), f"is larger than {format_bytes(limit)}")
    return data


def decompress(data: bytes, name: str, error: type[FileError], max_bytes: int | None = None) -> bytes:
    """The text of a document, gunzipped where it starts with gzip's magic number; `name` is for messages.

    More than `max_bytes` (`MAX_DOCUMENT_BYTES` by default) of it is an error, and so is a text that takes far more
    memory than the file's size explains (`gpusim.file_limits`). Neither is found out by taking that memory.
    """
    if not data:
        raise error(name, "is empty")
    text = _gunzip(data, name, error, max_bytes) if data.startswith(_GZIP_MAGIC) else data
    if text is data and name.endswith(".gz"):
        raise error(name, f"is named .gz but is not gzip (it starts with {data[:4]!r})")
    allowed = max(file_limits.FREE_VALUES_BYTES, file_limits.MAX_VALUES_PER_BYTE * len(data))
    allowed = min(allowed, file_limits.MAX_VALUES_BYTES)
    # The worst text, `{},{},{},...`, is not reached: no need to count in a small one.
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
        if len(texts) == _MAX_MEMBERS:  # each costs a copy of the bytes after it
            raise error(name, f"has more than {_MAX_MEMBERS} gzip members")
        stream = zlib.decompressobj(wbits=31)
        try:
            # A length of 0 would be no limit. One byte more than the limit says that the text goes on.
            text = stream.decompress(rest, most - size + 1)
        except zlib.error as cause:
            where = "bytes after its gzip data are no gzip" if texts else "is damaged gzip"
            raise error(name, f"{where}: {cause}") from cause
        texts.append(text)
        size += len(text)
        if size > most:
            break
        if not stream.eof:
            raise error(name, "is truncated gzip: the data ends before the gzip trailer")
        rest = rest[len(rest) - len(stream.unused_data) :]
    if size <= most:
        return texts[0] if len(texts) == 1 else b"".join(texts)
    if limit <= expanded:
        raise error(name, f"is larger than {limit} bytes when decompressed")
    times = f"{file_limits.MAX_EXPANSION} times its {format_bytes(len(data))}"
    raise error(name, f"is larger than {format_bytes(expanded)} when decompressed, which is more than {times}")


def values_bytes(text: bytes, enough: int) -> int:
    """Memory that the values of a JSON text take, about and at most; counting ends where it is over `enough`.

    Brackets, commas and texts are counted outside of texts, 1 MiB at a time: 0.2 s for 100 MB.
    """
    import numpy as np  # small documents do without

    start = inside = quotes_in_all = keys = values = 0
    found = 0
    while start < len(text) and found <= enough:
        end = start + _PIECE_BYTES
        piece = text[start:end]
        while piece.endswith(b"\\") and end < len(text):  # never cut an escaped quote in two
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
        # A key of an object is no value: it is one text for all objects that have it.
        found = values + file_limits.TEXT_BYTES * max(0, quotes_in_all // 2 - keys)
    return found


def document_schema(path: Path, error: type[FileError]) -> str:
    """The `schema` field of a JSON document, empty where it has none. Raises `error` where it is no JSON."""
    try:
        return msgspec.json.decode(read_bytes(path, error), type=_SchemaOnly).schema
    except msgspec.ValidationError:
        return ""
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as cause:
        raise error(str(path), f"is not valid JSON: {cause}") from cause


def decode_document(data: bytes, kind: type[DocumentT], schema: str, name: str, error: type[FileError]) -> DocumentT:
    """Decode JSON bytes as `kind`; see `read_document`."""
    try:
        found = msgspec.json.decode(data, type=_SchemaOnly).schema
    except msgspec.ValidationError as cause:
        other = known_format(data, name, schema)
        raise error(name, other or f"is not a {schema} document: no text field 'schema' at its top level") from cause
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as cause:
        raise error(name, known_format(data, name, schema) or f"is not valid JSON: {cause}") from cause
    if found != schema:
        if other := known_format(data, name, schema):
            raise error(name, other, place="$.schema")
        raise error(name, f"unknown schema version '{found}' (this gpusim reads '{schema}')", place="$.schema")
    try:
        return msgspec.json.decode(data, type=kind)
    except msgspec.ValidationError as cause:
        problem, place = _explain(str(cause), data)
        raise error(name, problem, place=place) from cause
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as cause:
        raise error(name, f"is not valid JSON: {cause}") from cause


def encode_json(document: Any) -> bytes:
    """Canonical JSON bytes of a Struct or plain value: same value, same bytes."""
    return msgspec.json.encode(document, order="deterministic")


def write_document(path: Path, document: Any, *, indent: int | None = None) -> None:
    """Write a document as JSON, gzipped where the name ends in `.gz`; atomic. Raises `OutputError`."""
    data = msgspec.json.encode(document)
    if indent is not None:
        data = msgspec.json.format(data, indent=indent)
    write_bytes(path, compress(data) if path.name.endswith(".gz") else data + b"\n")


def compress(data: bytes) -> bytes:
    """Gzip with no time stamp and no name, so that the same document gives the same file."""
    packer = zlib.compressobj(level=9, wbits=31)
    return packer.compress(data) + packer.flush()


def write_bytes(path: Path, data: bytes) -> None:
    """Write all of `data` to `path` or nothing: a temporary file beside it, then a rename. Raises `OutputError`.

    A device or a pipe is written to as it is: a rename would put a file in its place. Temporary files that killed
    processes left in the folder are removed.
    """
    try:
        if os.path.exists(path) and not os.path.isfile(path):
            path.write_bytes(data)
            return
        _remove_leftovers(path.parent)
        handle, temporary = _make_temporary(path.parent)
        try:
            with os.fdopen(handle, "wb") as file:
                file.write(data)
                file.flush()
                os.fsync(handle)
                os.fchmod(handle, 0o666 & ~_umask())
                os.replace(temporary, path)
        except BaseException:
            with contextlib.suppress(OSError):
                os.unlink(temporary)
            raise
    except OSError as cause:
        raise OutputError(str(path), f"cannot be written: {cause.strerror or cause}") from cause


def make_folder(folder: Path, what: str) -> None:
    """Make a folder for `what` and those above it. Raises `OutputError`."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as cause:
        raise OutputError(str(folder), f"no folder for the {what}: {cause.strerror or cause}") from cause


def check_writable(path: Path) -> None:
    """Fail early, before long work, where `path` could not be written later. Raises `OutputError`."""
    folder = path.parent
    try:
        if not folder.is_dir():
            raise OutputError(str(path), f"cannot be written: there is no folder '{folder}'")
        if path.is_dir():
            raise OutputError(str(path), "cannot be written: it is a folder")
        with contextlib.suppress(FileNotFoundError):
            os.stat(path)  # a name may be too long
    except (OSError, ValueError) as cause:  # ValueError: a NUL in the name
        raise OutputError(str(path), f"cannot be written: {getattr(cause, 'strerror', None) or cause}") from cause
    if not os.access(folder, os.W_OK):
        raise OutputError(str(path), f"cannot be written: no permission in folder '{folder}'")
    _remove_leftovers(folder)


def _make_temporary(folder: Path) -> tuple[int, str]:
    """A new file in a folder, locked for as long as it is open; its name is as long for any output."""
    while True:
        temporary = os.path.join(folder, f"{_TEMPORARY}{secrets.token_hex(8)}")
        handle = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        with contextlib.suppress(OSError):  # no locks on this file system: then nobody removes leftovers, either
            fcntl.flock(handle, fcntl.LOCK_EX)
        if os.fstat(handle).st_nlink:
            return handle, temporary
        os.close(handle)  # somebody took it for a leftover before it was locked


def _remove_leftovers(folder: Path) -> None:
    """Remove temporary files whose process is gone: the system has freed their locks."""
    with contextlib.suppress(OSError):
        for name in os.listdir(folder):
            if not name.startswith(_TEMPORARY):
                continue
            with contextlib.suppress(OSError):
                handle = os.open(folder / name, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
                try:
                    fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    os.unlink(folder / name)
                finally:
                    os.close(handle)


def _umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask


def _explain(message: str, data: bytes) -> tuple[str, str]:
    """Split msgspec's message into problem and JSON path, and add the value found there."""
    match = _MSGSPEC_PATH.match(message)
    if match is None or match["path"] is None:
        return message, "$"
    return _with_value(match["problem"], _value_at(data, match["path"])), match["path"]


def _with_value(problem: str, value: Any) -> str:
    if value is None or isinstance(value, dict | list):
        return problem
    return f"{problem}, found {value[:80]!r}" if isinstance(value, str) else f"{problem}, found {value}"


def _value_at(data: bytes, path: str) -> Any:
    """The number or text that a `$.a[3].b` path names; None for anything else, a wildcard, or where it leads nowhere.

    One list or object on the way is decoded at a time, and only its outside.
    """
    value: Any = data
    try:
        for key, index in _PATH_STEP.findall(path):
            if index:
                value = msgspec.json.decode(value, type=list[msgspec.Raw])[int(index)]
            else:
                value = msgspec.json.decode(value, type=dict[str, msgspec.Raw])[key]
        return msgspec.json.decode(value, type=int | float | str | bool)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError, KeyError, IndexError):
        return None  # a number that JSON allows and a float does not, for one


def _value_in(document: Any, path: str) -> Any:
    """The same in a document that is decoded."""
    value = document
    try:
        for key, index in _PATH_STEP.findall(path):
            value = value[int(index)] if index else value[key]
    except (KeyError, IndexError, TypeError):
        return None
    return value


def _nul_place(value: Any, place: str = "$") -> str | None:
    """Path of the first text with a NUL in a decoded document; None where there is none."""
    if isinstance(value, str):
        return place if "\0" in value else None
    if isinstance(value, dict):
        parts = [(f"{place}.{key}" if "\0" not in key else place, part) for key, part in value.items()]
        if any("\0" in key for key in value):
            return place
    elif isinstance(value, list):
        parts = [(f"{place}[{index}]", part) for index, part in enumerate(value)]
    else:
        return None
    return next((found for where, part in parts if (found := _nul_place(part, where)) is not None), None)


Progress = Callable[[float, str], None]
"""Called now and then during long work: share done in [0, 1] and a few words."""
