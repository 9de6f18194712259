"""Reading and writing the JSON documents of gpusim: strict in, all or nothing out.

Reading never runs anything from a file and answers every broken one with a `FileError` that
names file, JSON path and value. Writing goes through a temporary file beside the target, so that
a full disk or an interrupt leaves no half-written output.
"""

from __future__ import annotations

import contextlib
import os
import re
import tempfile
import tomllib
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any, TypeVar

import msgspec
from msgspec import Meta

from gpusim.errors import FileError, OutputError
from gpusim.formats_known import known_format
from gpusim.units import GIB

DocumentT = TypeVar("DocumentT")

#: Largest integer in a document: a century in ns, and more bytes than any machine has.
MAX_INTEGER = 2**62
Count = Annotated[int, Meta(ge=0, le=MAX_INTEGER)]
Positive = Annotated[int, Meta(ge=1, le=MAX_INTEGER)]
Nanoseconds = Annotated[int, Meta(ge=0, le=MAX_INTEGER)]

#: Largest document read, after decompression. Stops gzip bombs; a trace of a million kernels has about 400 MB.
MAX_DOCUMENT_BYTES = 2 * GIB

_GZIP_MAGIC = b"\x1f\x8b"
_MSGSPEC_PATH = re.compile(r"^(?P<problem>.*?)(?: - at `(?P<key>key in )?(?P<path>\$[^`]*)`)?$", re.DOTALL)
_PATH_STEP = re.compile(r"\.([^.\[\]]+)|\[(\d+)\]")


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
    try:
        document = tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as cause:
        raise error(str(path), f"cannot be read: {cause.strerror or cause}") from cause
    except (tomllib.TOMLDecodeError, UnicodeDecodeError, RecursionError) as cause:
        raise error(str(path), f"is not valid TOML: {cause}") from cause
    try:
        return msgspec.convert(document, kind)
    except msgspec.ValidationError as cause:
        match = _MSGSPEC_PATH.match(str(cause))
        assert match is not None
        raise error(str(path), match["problem"], place=match["path"] or "$") from cause


def read_bytes(path: Path, error: type[FileError]) -> bytes:
    """The file's content, decompressed where it is gzip."""
    try:
        data = path.read_bytes()
    except OSError as cause:
        raise error(str(path), f"cannot be read: {cause.strerror or cause}") from cause
    return decompress(data, str(path), error)


def decompress(data: bytes, name: str, error: type[FileError], max_bytes: int | None = None) -> bytes:
    """`data`, gunzipped where it starts with gzip's magic number; `name` is for messages and for the `.gz` check.

    More than `max_bytes` (`MAX_DOCUMENT_BYTES` by default) of it is an error.
    """
    if not data:
        raise error(name, "is empty")
    if not data.startswith(_GZIP_MAGIC):
        if name.endswith(".gz"):
            raise error(name, f"is named .gz but is not gzip (it starts with {data[:4]!r})")
        return data
    stream = zlib.decompressobj(wbits=31)
    limit = MAX_DOCUMENT_BYTES if max_bytes is None else max_bytes
    try:
        text = stream.decompress(data, limit)
    except zlib.error as cause:
        raise error(name, f"is damaged gzip: {cause}") from cause
    if not stream.eof:
        if stream.unconsumed_tail:
            raise error(name, f"is larger than {limit} bytes when decompressed")
        raise error(name, "is truncated gzip: the data ends before the gzip trailer")
    return text


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

    A device or a pipe is written to as it is: a rename would put a file in its place.
    """
    temporary: str | None = None
    try:
        if path.exists() and not path.is_file():
            path.write_bytes(data)
            return
        handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
        with os.fdopen(handle, "wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        os.chmod(temporary, 0o666 & ~_umask())
        os.replace(temporary, path)
    except OSError as cause:
        if temporary is not None:
            with contextlib.suppress(OSError):
                os.unlink(temporary)
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
    if not folder.is_dir():
        raise OutputError(str(path), f"cannot be written: there is no folder '{folder}'")
    if path.is_dir():
        raise OutputError(str(path), "cannot be written: it is a folder")
    if not os.access(folder, os.W_OK):
        raise OutputError(str(path), f"cannot be written: no permission in folder '{folder}'")


def _umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask


def _explain(message: str, data: bytes) -> tuple[str, str]:
    """Split msgspec's message into problem and JSON path, and add the value found there."""
    match = _MSGSPEC_PATH.match(message)
    if match is None or match["path"] is None:
        return message, "$"
    problem, path = match["problem"], match["path"]
    try:
        value = _value_at(msgspec.json.decode(data), path)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        value = None  # a number that JSON allows and a float does not, for one
    if value is not None and not isinstance(value, dict | list):
        problem = f"{problem}, found {str(value)[:80]!r}" if isinstance(value, str) else f"{problem}, found {value}"
    return problem, path


def _value_at(document: Any, path: str) -> Any:
    """The value that a `$.a[3].b` path names; None where the path has a wildcard or leads nowhere."""
    value = document
    for key, index in _PATH_STEP.findall(path):
        try:
            value = value[int(index)] if index else value[key]
        except (KeyError, IndexError, TypeError):
            return None
    return value


Progress = Callable[[float, str], None]
"""Called now and then during long work: share done in [0, 1] and a few words."""
