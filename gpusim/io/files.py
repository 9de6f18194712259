"""Strict reading and atomic writing of gpusim's JSON documents.

Reading never runs code from a file and raises a `FileError` with file, JSON path and value for a broken one. Writing
uses a temporary file next to the target, so a full disk or an interrupt leaves no half-written output.
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
from collections.abc import Callable, Collection
from pathlib import Path
from typing import Annotated, Any, TypeVar, cast

import msgspec
from msgspec import Meta

from gpusim.errors import FileError, OutputError
from gpusim.io import file_limits
from gpusim.io.decoding import convert, decode_json
from gpusim.io.decompression import decompress
from gpusim.io.file_limits import MAX_INTEGER
from gpusim.io.known_formats import AGAIN, LOOKED_AT_BYTES, known_format, unknown_format
from gpusim.io.opening import TooLargeError, UnreadableError, open_to_write, read_limited
from gpusim.io.packed import read_packed
from gpusim.io.repeated import repeated_key_place
from gpusim.notebook import short_fields
from gpusim.text import short_value
from gpusim.units import format_bytes

DocumentT = TypeVar("DocumentT")

Count = Annotated[int, Meta(ge=0, le=MAX_INTEGER)]
Positive = Annotated[int, Meta(ge=1, le=MAX_INTEGER)]
Nanoseconds = Annotated[int, Meta(ge=0, le=MAX_INTEGER)]
#: Time of something that ran: above 0, since other times are divided by it.
PositiveNanoseconds = Annotated[int, Meta(ge=1, le=MAX_INTEGER)]
StorageBytes = Annotated[int, Meta(ge=0, le=file_limits.MAX_STORAGE_BYTES)]

_MSGSPEC_PATH = re.compile(r"^(?P<problem>.*?)(?: - at `(?P<key>key in )?(?P<path>\$[^`]*)`)?$", re.DOTALL)
_PATH_STEP = re.compile(r"\.([^.\[\]]+)|\[(\d+)\]")
_TEMPORARY = ".gpusim-writes-"


class Document(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True, gc=False):
    """Base class of everything in a file: unknown fields are refused; subclasses repeat `frozen` and add `kw_only`.

    A file cannot contain reference cycles, so the garbage collector need not track millions of objects (`gc`).
    """

    def __repr__(self) -> str:
        return short_fields(self)


class _SchemaOnly(msgspec.Struct):
    schema: str


def read_document(
    path: Path, kind: type[DocumentT], schema: str, error: type[FileError], older: Collection[str] = ()
) -> DocumentT:
    """Read a `.json` or `.json.gz` document of type `kind`, with a `schema` field equal to `schema`.

    Documents of `older` versions are also read if `kind` allows them, and are returned with this version.
    Raises `error` for a missing, truncated, wrongly gzipped, non-JSON or ill-typed file, or another schema version, and
    for a key that an object has twice in a file small enough to be written by hand.
    """
    data = read_bytes(path, error)
    document = decode_document(data, kind, schema, str(path), error, older)
    place = repeated_key_place(data) if len(data) <= file_limits.BY_HAND_BYTES else None
    if place is not None:
        raise error(str(path), "the object has this key twice", place=place)
    return document


def read_toml(path: Path, kind: type[DocumentT], error: type[FileError]) -> DocumentT:
    """Read a TOML file of type `kind`. Raises `error` with file, place and reason."""
    data = _read(path, error, file_limits.MAX_TOML_BYTES)
    try:
        document = tomllib.loads(data.decode("utf-8"))
    except (ValueError, RecursionError) as cause:  # TOMLDecodeError, UnicodeDecodeError, numbers of 5,000 digits
        raise error(str(path), _known_in_place_of_toml(data, path.name) or f"is not valid TOML: {cause}") from cause
    try:
        place = _nul_place(document)
        if place is not None:
            raise error(str(path), "a text holds the character NUL, which no name can have", place=place)
        converted: DocumentT = convert(document, kind)
        return converted
    except RecursionError as cause:
        raise error(str(path), "is nested too deeply") from cause
    except msgspec.ValidationError as cause:
        match = _MSGSPEC_PATH.match(str(cause))
        assert match is not None
        place = match["path"] or "$"
        problem = _with_value(_short_name(match["problem"]), _value_in(document, place))
        raise error(str(path), problem, place=place) from cause


def _known_in_place_of_toml(data: bytes, name: str) -> str:
    """Return what a file that is no TOML is, and what to do; empty if unknown, or if it is a damaged TOML file."""
    with contextlib.suppress(zlib.error):
        data = zlib.decompressobj(wbits=31).decompress(data, LOOKED_AT_BYTES)
    return known_format(data, "" if name.lower().endswith(".toml") else name, "a TOML file")


def read_bytes(path: Path, error: type[FileError]) -> bytes:
    """Read a file, decompressed if it is gzip, within the limits on documents."""
    return decompress(read_file(path, error), str(path), error)


def read_file(path: Path, error: type[FileError]) -> bytes:
    """Read a file as it is, within the limit on size; a missing file is read from the archive of its folder."""
    packed = read_packed(path, file_limits.MAX_DOCUMENT_BYTES, error)
    return _read(path, error, file_limits.MAX_DOCUMENT_BYTES) if packed is None else packed


def _read(path: Path, error: type[FileError], max_bytes: int) -> bytes:
    try:
        return read_limited(path, max_bytes, file_limits.MAX_STREAM_BYTES)
    except TooLargeError as cause:
        raise error(str(path), f"is larger than {format_bytes(cause.args[0])}") from cause
    except UnreadableError as cause:
        raise error(str(path), str(cause)) from cause
    except OSError as cause:
        raise error(str(path), f"cannot be read: {cause.strerror or cause}") from cause
    except ValueError as cause:  # a NUL in the name
        raise error(str(path), f"cannot be read: {cause}") from cause


def document_schema(path: Path, error: type[FileError]) -> str:
    """Return the `schema` field of a JSON document, or an empty text. Raises `error` if the file is not JSON."""
    try:
        found: _SchemaOnly = decode_json(read_bytes(path, error), _SchemaOnly)
        return found.schema
    except msgspec.ValidationError:
        return ""
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as cause:
        raise error(str(path), f"is not valid JSON: {cause}") from cause


def decode_document(
    data: bytes, kind: type[DocumentT], schema: str, name: str, error: type[FileError], older: Collection[str] = ()
) -> DocumentT:
    """Decode JSON bytes as `kind`; see `read_document`."""
    try:
        document: DocumentT = decode_json(data, kind)
    except msgspec.ValidationError as cause:
        _check_schema(data, schema, name, error, older)  # a file of another kind has more than one problem
        problem, place = _explain(str(cause), data)
        raise error(name, problem, place=place) from cause
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as cause:
        raise error(name, known_format(data, name, schema) or _no_json(data, schema, cause)) from cause
    if getattr(document, "schema", schema) == schema:
        return document
    _check_schema(data, schema, name, error, older)
    newest: Any = msgspec.structs.replace(cast(msgspec.Struct, document), schema=schema)
    return cast(DocumentT, newest)


def _check_schema(data: bytes, schema: str, name: str, error: type[FileError], older: Collection[str]) -> None:
    """Raise `error`, with the recognised format, if a JSON text is no document of this schema."""
    try:
        actual = decode_json(data, _SchemaOnly).schema
    except msgspec.ValidationError as cause:
        unknown = f"is not a {schema} document: no text field 'schema' at its top level; {unknown_format(schema)}"
        raise error(name, known_format(data, name, schema) or unknown) from cause
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as cause:
        raise error(name, known_format(data, name, schema) or _no_json(data, schema, cause)) from cause
    if actual == schema or actual in older:
        return
    if other := known_format(data, name, schema):
        raise error(name, other, place="$.schema")
    read = " and ".join(f"'{version}'" for version in (*older, schema))
    problem = f"unknown schema version '{short_value(actual)}' (this gpusim reads {read})"
    raise error(name, problem, place="$.schema")


def _no_json(data: bytes, schema: str, cause: Exception) -> str:
    """Return why an unrecognised text is refused."""
    if not data.strip():
        return f"is empty but for white space: {AGAIN}"
    what_to_do = AGAIN if "truncated" in str(cause) else unknown_format(schema)
    return f"is not valid JSON: {cause}; {what_to_do}"


def encode_json(document: Any) -> bytes:
    """Return canonical JSON bytes of a Struct or plain value: equal values give equal bytes."""
    return msgspec.json.encode(document, order="deterministic")


def write_document(path: Path, document: Any, *, indent: int | None = None) -> None:
    """Write a document as JSON, gzipped if the name ends in `.gz`, atomically. Raises `OutputError`."""
    data = msgspec.json.encode(document)
    if indent is not None:
        data = msgspec.json.format(data, indent=indent)
    write_bytes(path, compress(data) if path.name.endswith(".gz") else data + b"\n")


def compress(data: bytes) -> bytes:
    """Gzip without time stamp and name, so that equal documents give equal files."""
    packer = zlib.compressobj(level=9, wbits=31)
    return packer.compress(data) + packer.flush()


def write_bytes(path: Path, data: bytes) -> None:
    """Write `data` to `path` atomically: to a temporary file next to it, then a rename. Raises `OutputError`.

    A replaced file passes its permissions on. A device or pipe is written directly, since a rename would replace it by
    a file. Temporary files of killed processes in the folder are removed.
    """
    try:
        if os.path.exists(path) and not os.path.isfile(path):
            with open_to_write(path) as output:
                output.write(data)
            return
        _remove_leftovers(path.parent)
        handle, temporary = _make_temporary(path.parent)
        try:
            with os.fdopen(handle, "wb") as file:
                file.write(data)
                file.flush()
                os.fsync(handle)
                os.fchmod(handle, _mode_of(path))
                os.replace(temporary, path)
        except BaseException:
            with contextlib.suppress(OSError):
                os.unlink(temporary)
            raise
    except OSError as cause:
        raise OutputError(str(path), f"cannot be written: {cause.strerror or cause}") from cause


def make_folder(folder: Path, content: str) -> None:
    """Make a folder for `content`, with its parents. Raises `OutputError`."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as cause:
        raise OutputError(str(folder), f"no folder for the {content}: {cause.strerror or cause}") from cause


def check_writable(path: Path) -> None:
    """Raise `OutputError` before long work if `path` could not be written afterwards."""
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
    """Create a file in a folder, locked while it is open; the length of its name does not depend on the output."""
    while True:
        temporary = os.path.join(folder, f"{_TEMPORARY}{secrets.token_hex(8)}")
        handle = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        with contextlib.suppress(OSError):  # no locks on this file system, so leftovers are not removed either
            fcntl.flock(handle, fcntl.LOCK_EX)
        if os.fstat(handle).st_nlink:
            return handle, temporary
        os.close(handle)  # removed as a leftover before it was locked


def _remove_leftovers(folder: Path) -> None:
    """Remove temporary files of ended processes, whose locks the system has released."""
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


def _mode_of(path: Path) -> int:
    """Return the permissions of the file at a path, or those of a new one."""
    with contextlib.suppress(FileNotFoundError):
        found = os.lstat(path).st_mode
        if stat.S_ISREG(found):
            return stat.S_IMODE(found) & 0o777
    return 0o666 & ~_umask()


def _umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask


def _explain(message: str, data: bytes) -> tuple[str, str]:
    """Split msgspec's message into problem and JSON path, and add the value at that path."""
    match = _MSGSPEC_PATH.match(message)
    if match is None or match["path"] is None:
        return _short_name(message), "$"
    return _with_value(_short_name(match["problem"]), _value_at(data, match["path"])), match["path"]


def _short_name(problem: str) -> str:
    """Return msgspec's problem with the name in it shortened; the name is in backticks and may have any character."""
    before, tick, rest = problem.partition("`")
    name, last, after = rest.rpartition("`")
    return f"{before}`{short_value(name)}`{after}" if tick and last else problem


def _with_value(problem: str, value: Any) -> str:
    if value is None or isinstance(value, dict | list):
        return problem
    return f"{problem}, found {value[:80]!r}" if isinstance(value, str) else f"{problem}, found {value}"


def _value_at(data: bytes, path: str) -> Any:
    """Return the number or text at a `$.a[3].b` path; None for other values, wildcards, and missing paths.

    Only one list or object of the path is decoded at a time, and only its outer level.
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
        return None  # for example, a number that JSON allows and a float does not


def _value_in(document: Any, path: str) -> Any:
    """Return the value at a path in a decoded document, or None."""
    value = document
    try:
        for key, index in _PATH_STEP.findall(path):
            value = value[int(index)] if index else value[key]
    except (KeyError, IndexError, TypeError):
        return None
    return value


def _nul_place(value: Any, place: str = "$") -> str | None:
    """Return the path of the first text with a NUL in a decoded document, or None."""
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
    return next((nul_at for where, part in parts if (nul_at := _nul_place(part, where)) is not None), None)


Progress = Callable[[float, str], None]
"""Callback during long work, with the share done in [0, 1] and a few words."""
