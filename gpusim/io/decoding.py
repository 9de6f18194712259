"""JSON to typed values, also by several threads at once.

At its first use for a class, msgspec describes the class, and stores the description before its parts are filled in.
A second thread that decodes meanwhile reads an empty part, and the process dies (msgspec 0.22). Here one thread at a
time makes descriptions, before anything is decoded.
"""

from __future__ import annotations

import threading
from functools import cache
from typing import Any, Final

import msgspec

_DESCRIBING: Final = threading.Lock()


def decode_json(data: bytes | msgspec.Raw, kind: Any) -> Any:
    """Decode a JSON text as a type. Raises msgspec's errors."""
    return decoder_of(kind).decode(data)


def decoder_of(kind: Any, *, numbers_as_text: bool = False) -> msgspec.json.Decoder[Any]:
    """Return the decoder of a type; with `numbers_as_text`, decimal numbers keep all digits."""
    with _DESCRIBING:
        return _made(kind, numbers_as_text)


def convert(value: Any, kind: Any) -> Any:
    """Convert plain values to a type. Raises `msgspec.ValidationError`."""
    decoder_of(kind)
    return msgspec.convert(value, kind)


@cache
def _made(kind: Any, numbers_as_text: bool) -> msgspec.json.Decoder[Any]:
    return msgspec.json.Decoder(kind, float_hook=str if numbers_as_text else None)
