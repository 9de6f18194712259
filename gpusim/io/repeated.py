"""Keys that a JSON object has twice: JSON decoders keep the last value without a word."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any


class _Repeated(list[tuple[str, Any]]):
    """Members of an object in which a key occurs more than once."""


def repeated_key_place(data: bytes) -> str | None:
    """Return the path of the first key that an object of a valid JSON text has twice, or None."""
    any_repeated = False

    def members(pairs: list[tuple[str, Any]]) -> dict[str, Any] | _Repeated:
        nonlocal any_repeated
        found = dict(pairs)
        if len(found) == len(pairs):
            return found
        any_repeated = True
        return _Repeated(pairs)

    document = json.loads(data.decode(), object_pairs_hook=members, parse_int=str, parse_float=str)
    # Few documents have such a key, and to look for its place takes longer than to decode one.
    return next(_places(document, "$"), None) if any_repeated else None


def _places(value: Any, place: str) -> Iterator[str]:
    if isinstance(value, list) and not isinstance(value, _Repeated):
        for index, part in enumerate(value):
            yield from _places(part, f"{place}[{index}]")
        return
    seen: set[str] = set()
    members = value if isinstance(value, _Repeated) else value.items() if isinstance(value, dict) else ()
    for key, part in members:
        if key in seen:
            yield f"{place}.{key}"
        seen.add(key)
        yield from _places(part, f"{place}.{key}")
