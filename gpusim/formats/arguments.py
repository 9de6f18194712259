"""Walk and check the encoded operator arguments of a trace, without torch.

Plain JSON stands for itself (null, true, 3, 0.5, "mean", lists). Everything else is an object with one key:
`{"tensor": 12}`, `{"float": "inf"}`, `{"dtype": "float32"}`, `{"device": "cuda"}`, `{"layout": "strided"}`,
`{"memory_format": "channels_last"}`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from gpusim.text import shortened

TENSOR = "tensor"
CHOICES = {
    "float": ("inf", "-inf", "nan"),
    "device": ("cuda", "cpu"),
    "layout": ("strided",),
    "memory_format": ("contiguous_format", "channels_last", "channels_last_3d", "preserve_format"),
}
#: Limit on nested lists. Operators need two levels; far deeper nesting would exhaust Python's stack.
MAX_DEPTH = 32
TAGS = frozenset({TENSOR, "float", "dtype", "device", "layout", "memory_format"})


def tensor_refs(value: Any) -> Iterator[int]:
    """Yield the indices of the tensors in an encoded argument, or in a list or dict of them, in order."""
    if isinstance(value, dict):
        if len(value) == 1 and isinstance(value.get(TENSOR), int):
            yield value[TENSOR]
        else:
            for part in value.values():
                yield from tensor_refs(part)
    elif isinstance(value, list | tuple):
        for part in value:
            yield from tensor_refs(part)


def renumbered(value: Any, places: Mapping[int, int]) -> Any:
    """Return an encoded argument (or list of arguments) with its tensor indices mapped through `places`."""
    if isinstance(value, dict) and TENSOR in value:
        return {TENSOR: places[value[TENSOR]]}
    return [renumbered(part, places) for part in value] if isinstance(value, list | tuple) else value


def count_values(values: Any, depth: int = MAX_DEPTH) -> int:
    """Count the values in a list or dict of arguments, nested lists included to `depth`; an object counts as one."""
    parts = values.values() if isinstance(values, dict) else values
    count = len(values)
    for part in parts:
        if (kind := type(part)) is not dict and depth and (kind is list or kind is tuple):
            count += count_values(part, depth - 1)
    return count


def problem_with(value: Any, depth: int = MAX_DEPTH) -> str | None:
    """Return a message for an invalid encoded argument, or None if it is valid."""
    if isinstance(value, dict):
        if len(value) != 1 or next(iter(value)) not in TAGS:
            return f"an encoded argument has one key of {', '.join(sorted(TAGS))}, found {_as_said(value)}"
        tag, inner = next(iter(value.items()))
        if tag == TENSOR and (not isinstance(inner, int) or isinstance(inner, bool) or inner < 0):
            return f"a tensor reference is an index, found {_as_said(inner)}"
        if tag != TENSOR and not isinstance(inner, str):
            return f"a {tag} is a text, found {_as_said(inner)}"
        if tag in CHOICES and inner not in CHOICES[tag]:
            return f"a {tag} is one of {', '.join(CHOICES[tag])}, found {_as_said(inner)}"
        return None
    if isinstance(value, list | tuple):
        if not depth:
            return f"lists are nested more than {MAX_DEPTH} deep"
        return next((problem for part in value if (problem := problem_with(part, depth - 1))), None)
    return None


def _as_said(value: Any) -> str:
    """Return a value as shown in messages: shortened, and lists without their elements, which may nest deep."""
    if isinstance(value, dict):
        return f"the keys {shortened(repr(sorted(map(str, value))))}" if value else "no key"
    return "a list" if isinstance(value, list | tuple) else shortened(repr(value))
