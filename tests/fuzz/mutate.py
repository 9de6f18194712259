"""Mutations of documents: single values, whole parts, and bytes of the resulting file."""

from __future__ import annotations

import copy
import functools
import gzip
import json
import random
from collections.abc import Callable
from typing import Any

from tests.fuzz.bases import fresh
from tests.fuzz.values import OPERATORS, Raw, anything, number, text
from tests.support.bombs import repeated_gzip

Path = tuple[str | int, ...]
#: Longest list that a mutation makes; longer ones are covered by the bombs.
MANY = 20_000
MIB = 2**20
#: Shares of cases whose file is mutated as bytes only, and both as values and bytes.
BYTES, BOTH = 0.2, 0.05
ZIPPED = 0.15


def paths(document: Any, prefix: Path = ()) -> list[Path]:
    """Return the path of every value in a document except the document itself."""
    found: list[Path] = []
    items: Any = ()
    if isinstance(document, dict):
        items = document.items()
    elif isinstance(document, list):
        items = enumerate(document)
    for key, value in items:
        found.append((*prefix, key))
        found += paths(value, (*prefix, key))
    return found


def get(document: Any, path: Path) -> Any:
    return functools.reduce(lambda value, key: value[key], path, document)


def put(document: Any, path: Path, value: Any) -> None:
    get(document, path[:-1])[path[-1]] = value


def change(document: Any, other: Any, rng: random.Random) -> str:
    """Change one thing in `document`, in place, and describe it; `other` is a valid document to take parts from."""
    places = paths(document)
    if not places:
        return "nothing to change"
    path = rng.choice(places)
    if rng.random() < 0.3:  # fields with a meaning of their own more often than the many similar ones
        name = rng.choice(sorted({str(p[-1]) for p in places}))
        path = rng.choice([p for p in places if str(p[-1]) == name])
    how = rng.choice(_CHANGES)
    try:
        return f"{how.__name__} {'.'.join(map(str, path))}{how(document, path, other, rng) or ''}"
    except (KeyError, IndexError, TypeError, ValueError, AttributeError, OverflowError):
        return f"{how.__name__}: not possible"


def _value(document: Any, path: Path, other: Any, rng: random.Random) -> str:
    """Replace a value by one of the same kind at an edge."""
    old = get(document, path)
    new = text(rng) if isinstance(old, str) else number(rng) if isinstance(old, int | float) else anything(rng)
    put(document, path, new)
    return f" = {_short(new)}"


def _type(document: Any, path: Path, other: Any, rng: random.Random) -> str:
    new = anything(rng)
    put(document, path, new)
    return f" = {_short(new)}"


def _legal(document: Any, path: Path, other: Any, rng: random.Random) -> str:
    """Replace a number by one of the same kind that most fields accept."""
    old = get(document, path)
    kind = type(old) if isinstance(old, int | float) and not isinstance(old, bool) else None
    new = (
        kind(10 ** rng.uniform(0, rng.choice((1, 3, 6, 9))))
        if kind
        else not old
        if isinstance(old, bool)
        else text(rng)
    )
    put(document, path, new)
    return f" = {_short(new)}"


def _scale(document: Any, path: Path, other: Any, rng: random.Random) -> str:
    factor = 10.0 ** rng.randint(-6, 12)
    old = get(document, path)
    put(document, path, type(old)(old * factor))
    return f" x {factor:g}"


def _near(document: Any, path: Path, other: Any, rng: random.Random) -> None:
    """Redirect a reference: another index, itself, one past the end."""
    old = get(document, path)
    put(document, path, old + rng.choice((-1, 1, 2, 5, -old, 10 - old)))


def _drop(document: Any, path: Path, other: Any, rng: random.Random) -> None:
    del get(document, path[:-1])[path[-1]]


def _unknown(document: Any, path: Path, other: Any, rng: random.Random) -> None:
    place = get(document, path)
    place = place if isinstance(place, dict) else get(document, path[:-1])
    place[rng.choice(("unknown", "__class__", "schema", text(rng)))] = anything(rng)


def _repeat(document: Any, path: Path, other: Any, rng: random.Random) -> str:
    """Repeat an element once, or many times."""
    place = get(document, path[:-1])
    times = rng.choice((1, 1, 2, 10, 100, 1000 if len(str(place)) < 500 else 10))
    place[path[-1] : path[-1]] = [copy.deepcopy(get(document, path)) for _ in range(times)]  # type: ignore[misc]
    return f" {times} times"


def _key_twice(document: Any, path: Path, other: Any, rng: random.Random) -> None:
    place = get(document, path[:-1])
    place[Raw(str(path[-1]))] = anything(rng)


def _deep(document: Any, path: Path, other: Any, rng: random.Random) -> str:
    depth = rng.choice((1, 5, 100, 600, 5000, 100_000))
    left, right = rng.choice((("[", "]"), ('{"a":', "}"), ("[[],", "]")))
    put(document, path, Raw(left * depth + "1" + right * depth))
    return f" {depth} deep"


def _many(document: Any, path: Path, other: Any, rng: random.Random) -> str:
    count, piece = rng.choice((100, 3000, MANY)), rng.choice(("0", "[]", "{}", '"a"', "null", "1.5", '{"tensor":0}'))
    put(document, path, Raw("[" + ",".join([piece] * count) + "]"))
    return f" {count} x {piece}"


def _exchange(document: Any, path: Path, other: Any, rng: random.Random) -> str:
    there = rng.choice(paths(document))
    one, two = copy.deepcopy(get(document, path)), copy.deepcopy(get(document, there))
    put(document, path, two)
    put(document, there, one)
    return f" and {'.'.join(map(str, there))}"


def _transplant(document: Any, path: Path, other: Any, rng: random.Random) -> None:
    """Copy the same field of another valid document."""
    alike = [there for there in paths(other) if there[-1] == path[-1]]
    put(document, path, copy.deepcopy(get(other, rng.choice(alike or paths(other)))))


def _shuffle(document: Any, path: Path, other: Any, rng: random.Random) -> None:
    rng.shuffle(get(document, path[:-1]))


def _operator(document: Any, path: Path, other: Any, rng: random.Random) -> str:
    ops = document["ops"]
    target = rng.choice(OPERATORS)
    rng.choice(ops)["target"] = target
    return f" {target[:60]!r}"


_CHANGES: tuple[Callable[[Any, Path, Any, random.Random], str | None], ...] = (
    _value, _value, _value, _value, _legal, _legal, _legal, _legal, _legal, _type, _type, _scale, _near, _near,
    _drop, _unknown, _repeat, _key_twice,
    _deep, _many, _exchange, _transplant, _transplant, _shuffle, _operator,
)  # fmt: skip


def _short(value: Any) -> str:
    return repr(value.text if isinstance(value, Raw) else value)[:60]


# --- Files ---


def to_json(document: Any) -> bytes:
    """Write JSON of a document that may hold `Raw` pieces, also as keys, which are then repeated."""
    pieces: list[str] = []

    def plain(value: Any) -> Any:
        if isinstance(value, Raw):
            pieces.append(value.text)
            return f"\ue000{len(pieces) - 1}\ue001"
        if isinstance(value, dict):
            return {(f"\ue002{k.text}" if isinstance(k, Raw) else k): plain(v) for k, v in value.items()}
        return [plain(v) for v in value] if isinstance(value, list) else value

    done = json.dumps(plain(document), ensure_ascii=False).replace("\ue002", "")
    for index, piece in enumerate(pieces):
        done = done.replace(f'"\ue000{index}\ue001"', piece)
    return done.encode("utf-8", "surrogatepass")


def to_toml(document: dict[str, Any]) -> bytes:
    """Write TOML of a dictionary of values, of lists, and of lists of dictionaries."""
    tables: list[str] = []
    lines: list[str] = []
    for key, value in document.items():
        rows = value if isinstance(value, list) and value and all(isinstance(row, dict) for row in value) else None
        name = key.text if isinstance(key, Raw) else _toml_key(key)
        if rows is None:
            lines.append(f"{name} = {_toml(value)}")
            continue
        for row in rows:
            tables += [f"[[{name}]]", *(f"{_toml_key(k)} = {_toml(v)}" for k, v in row.items())]
    return "\n".join([*lines, *tables, ""]).encode("utf-8", "surrogatepass")


def _toml_key(key: Any) -> str:
    words = key.text if isinstance(key, Raw) else str(key)
    return words if words.isidentifier() and words.isascii() else _toml(words)


def _toml(value: Any) -> str:
    if isinstance(value, Raw):
        return {"NaN": "nan", "Infinity": "inf", "-Infinity": "-inf"}.get(value.text, value.text)
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, list):
        return f"[{', '.join(map(_toml, value))}]"
    if isinstance(value, dict):
        return "{" + ", ".join(f"{_toml_key(k)} = {_toml(v)}" for k, v in value.items()) + "}"
    if isinstance(value, str):
        return json.dumps(value).replace("\x7f", "\\u007F")
    return '""' if value is None else repr(value)


def change_bytes(data: bytes, name: str, rng: random.Random) -> tuple[bytes, str]:
    """Mutate the file's bytes, and describe the change."""
    how = rng.choice(_BYTE_CHANGES)
    return how(data, name, rng), how.__name__


def _flip(data: bytes, name: str, rng: random.Random) -> bytes:
    changed = bytearray(data)
    for _ in range(rng.choice((1, 1, 2, 8, 64))):
        if changed:
            changed[rng.randrange(len(changed))] ^= 1 << rng.randrange(8)
    return bytes(changed)


def _truncate(data: bytes, name: str, rng: random.Random) -> bytes:
    return data[: rng.randrange(len(data) + 1)]


def _insert(data: bytes, name: str, rng: random.Random) -> bytes:
    at = rng.randrange(len(data) + 1)
    return (
        data[:at]
        + rng.choice((b"\x00", b"\xff", b"\xed\xa0\x80", b"\x1b[2J", b"\xef\xbb\xbf", b'"', b"]", b",,"))
        + data[at:]
    )


def _cut_out(data: bytes, name: str, rng: random.Random) -> bytes:
    start, stop = sorted((rng.randrange(len(data) + 1), rng.randrange(len(data) + 1)))
    return data[:start] + data[stop:]


def _twice(data: bytes, name: str, rng: random.Random) -> bytes:
    return data + data


def _marked(data: bytes, name: str, rng: random.Random) -> bytes:
    """Change the encoding, or its mark."""
    return rng.choice(
        (
            lambda: b"\xef\xbb\xbf" + data,
            lambda: data.decode("utf-8", "replace").encode("utf-16"),
            lambda: data.decode("utf-8", "replace").encode("utf-32-le"),
            lambda: b"\xff\xfe" + data,
            lambda: b"\x00" * 16 + data,
            lambda: data.decode("utf-8", "replace").encode("latin-1", "replace"),
        )
    )()


def _other_content(data: bytes, name: str, rng: random.Random) -> bytes:
    return rng.choice(
        (
            b"",
            b"null",
            b"[]",
            b"{}",
            b'"a"',
            b"1",
            b"\x1f\x8b",
            b"\x00",
            b"PK\x03\x04",
            b"SQLite format 3\x00",
            b"<html>",
        )
    )


def _zipped(data: bytes, name: str, rng: random.Random) -> bytes:
    """Return gzip that is valid, broken, followed by other bytes, or of several members."""
    whole = gzip.compress(data, 1)
    return rng.choice(
        (
            lambda: whole,
            lambda: whole[:-4],
            lambda: whole[: len(whole) // 2],
            lambda: _flip(whole, name, rng),
            lambda: whole + b"garbage",
            lambda: whole + gzip.compress(data, 1),
            lambda: gzip.compress(whole, 1),
            lambda: whole[:10],
            lambda: gzip.compress(b"", 1),
        )
    )()


def _bomb(data: bytes, name: str, rng: random.Random) -> bytes:
    return bomb(rng.choice(BOMBS), rng.choice((20, 200, 700)))


_BYTE_CHANGES: tuple[Callable[[bytes, str, random.Random], bytes], ...] = (
    *(_flip, _truncate, _insert, _cut_out, _twice, _marked, _other_content, _zipped) * 12,
    _bomb,
)

BOMBS = (b" ", b"[],", b"[", b"0,", b'"a",', b"\x00", b'{"a":1},')


@functools.lru_cache(maxsize=4)
def bomb(piece: bytes, mib: int) -> bytes:
    """Return gzip of a trace's beginning and `mib` MiB of one piece in an operator's arguments."""
    head = b'{"schema":"gpusim-trace/1","ops":[{"name":"a","target":"b","args":['
    return repeated_gzip(head, piece * (MIB // len(piece)), mib, b"0]}]}")


# --- Whole files ---


def changed(
    document: Any, other: Any, rng: random.Random, encode: Callable[[Any], bytes] = to_json
) -> tuple[bytes, str]:
    """Return the bytes of a document with 1 to 4 changes, and their description."""
    said: list[str] = []
    draw = rng.random()
    document = fresh(document)
    if draw >= BYTES - BOTH:
        for _ in range(rng.choice((1, 1, 1, 2, 2, 3, 4))):
            said.append(change(document, other, rng))
    data = encode(document)
    if draw < BYTES:
        data, how = change_bytes(data, "", rng)
        said.append(how)
    return data, "; ".join(said)


def named(stem: str, data: bytes, rng: random.Random) -> tuple[str, bytes]:
    """Name the file; some are compressed, and some have a misleading name."""
    draw = rng.random()
    if draw < ZIPPED:
        return f"{stem}.json.gz", gzip.compress(data, 1)
    return (f"{stem}.json.gz", data) if draw < ZIPPED + 0.01 else (f"{stem}.json", data)
