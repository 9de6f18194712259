"""Views that take a part of a tensor: where the part begins in its layer's output."""

from __future__ import annotations

from math import prod
from typing import Any

from gpusim.formats.trace import Op, Trace
from gpusim.layerwise.frames import Frame
from gpusim.layerwise.layers import DIMS, Extents

WHOLE: Extents = (0, 0, 0, 0)
STEPS: Extents = (1, 1, 1, 1)


def part_origin(trace: Trace, op: Op, name: str, frame: Frame, output: int) -> Extents | None:
    """Return the origin of one result of a view in the viewed tensor, by letter; None if the part is scattered.

    `frame` is that of the viewed tensor. A part is an interval only if it is cut from the outermost dimension of its
    letter: heads 2 and 3 of four are one, the first half of the features of each head is none.
    """
    try:
        return _origin(trace, op, name, frame, output)
    except (IndexError, TypeError, ValueError):  # arguments that a captured view does not have
        return None


def _origin(trace: Trace, op: Op, name: str, frame: Frame, output: int) -> Extents | None:
    place = op.outputs.index(output)
    if name in ("select", "unbind"):
        dimension = _dimension(op, 1, frame)
        begin = _within(int(op.args[2]), frame, dimension) if name == "select" else place
        length = 1
    elif name == "slice":
        dimension = _dimension(op, 1, frame)
        size = _size(frame, dimension)
        first = op.args[2] if len(op.args) > 2 and op.args[2] is not None else 0
        begin = min(max(int(first) + (size if int(first) < 0 else 0), 0), size)
        length = trace.tensors[output].shape[dimension]
        if _step(op) != 1 and length > 1:
            return _of_dimension(frame, dimension, begin, length) if part_step(op, name, frame) != STEPS else None
    elif name in ("split", "split_with_sizes"):
        dimension = _dimension(op, 2, frame)
        before = [each for each in op.outputs[:place] if each is not None]
        begin = sum(trace.tensors[each].shape[dimension] for each in before)
        if len(before) < place:
            return None
        length = trace.tensors[output].shape[dimension]
    else:
        return WHOLE
    return _of_dimension(frame, dimension, begin, length)


def part_step(op: Op, name: str, frame: Frame) -> Extents:
    """Return the distance of the elements of a slice in the viewed tensor, by letter; 1 unless it takes every other."""
    if name != "slice" or _step(op) == 1:
        return STEPS
    dimension = _dimension(op, 1, frame)
    letters = frame.letters(dimension)
    inside = [letter for row in frame.rows[dimension + 1 :] for letter, size in row if size > 1]
    if len(letters) != 1 or letters in inside:
        return STEPS
    n, c, h, w = (_step(op) if letter == letters else 1 for letter in DIMS)
    return n, c, h, w


def _step(op: Op) -> int:
    return int(op.args[4]) if len(op.args) > 4 else 1


def spanned(extents: Extents, step: Extents) -> Extents:
    """Return the extents from the first to the last of elements at a distance."""
    n, c, h, w = ((extent - 1) * distance + 1 for extent, distance in zip(extents, step, strict=True))
    return n, c, h, w


def scaled(origin: Extents, by: Extents) -> Extents:
    """Return the product of two extents."""
    n, c, h, w = (a * b for a, b in zip(origin, by, strict=True))
    return n, c, h, w


def _of_dimension(frame: Frame, dimension: int, begin: int, length: int) -> Extents | None:
    """Return the origin of an interval of one dimension."""
    if length == _size(frame, dimension):
        return WHOLE
    letters = frame.letters(dimension)
    if len(letters) != 1:
        return None
    outer = prod(size for row in frame.rows[:dimension] for letter, size in row if letter == letters)
    inner = prod(size for row in frame.rows[dimension + 1 :] for letter, size in row if letter == letters)
    if outer != 1:
        return None
    origin = [0, 0, 0, 0]
    origin[DIMS.index(letters)] = begin * inner
    n, c, h, w = origin
    return n, c, h, w


def _dimension(op: Op, place: int, frame: Frame) -> int:
    """Return the dimension argument at a place; the first one without it."""
    value: Any = op.args[place] if len(op.args) > place else 0
    return int(value) % len(frame.rows)


def _size(frame: Frame, dimension: int) -> int:
    return prod(size for _, size in frame.rows[dimension])


def _within(index: int, frame: Frame, dimension: int) -> int:
    return index + (_size(frame, dimension) if index < 0 else 0)


def moved(origin: Extents, by: Extents) -> Extents:
    """Return the sum of two origins."""
    n, c, h, w = (a + b for a, b in zip(origin, by, strict=True))
    return n, c, h, w
