"""Kernels that pack and unpack the pieces of an exchange on one GPU, as a rank launches them: their memory traffic.

A piece that is not in one piece of memory is copied before it is sent, and after it is received; a buffer with padding
is filled first. Gradients of a source that come from several GPUs are added, to zeros at first; a single one that
covers the whole is taken as it is.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import prod

from gpusim.layerwise.gathers import in_one_piece
from gpusim.layerwise.layers import Extents, Layer
from gpusim.layerwise.pieces import Box, EdgePieces


@dataclass(frozen=True, slots=True)
class Packing:
    """Bytes that each kernel reads and writes, before and after an exchange."""

    before: tuple[int, ...] = ()
    after: tuple[int, ...] = ()


def packing(
    edge: EdgePieces, source: Layer, part: Extents, element_bytes: int, *, direct: bool = False
) -> tuple[Packing, Packing]:
    """Return the kernels of the exchange of an input, and of that of its gradient; `part` is the GPU's of `source`.

    With `direct`, the time of an exchange includes its copies of pieces.
    """
    if edge.gathered is not None:
        copied = () if direct or in_one_piece(source, edge.gathered) else (2 * prod(source.output) * element_bytes,)
        return Packing(after=copied), Packing(before=() if edge.own is not None else copied)
    sends, receives = ((), ()) if direct else (edge.sends, edge.receives)
    strided_sends = tuple(2 * _bytes(box, element_bytes) for _, box in sends if not _in_one_piece(box, part))
    strided = tuple(2 * _bytes(box, element_bytes) for _, box in receives if not _in_one_piece(box, edge.shape))
    own = () if edge.own is None else (2 * _bytes(edge.own[1], element_bytes),)
    filled = () if edge.is_full else (prod(edge.shape) * element_bytes,)
    boxes = [*([] if edge.own is None else [edge.own[0]]), *(box for _, box in edge.sends)]
    return Packing(filled + strided_sends, own + strided), Packing(strided, _sums(boxes, part, element_bytes))


def _sums(boxes: list[Box], part: Extents, element_bytes: int) -> tuple[int, ...]:
    """Return the kernels that add gradients of boxes of a part."""
    whole = prod(part) * element_bytes
    if not boxes or not whole:
        return ()
    is_whole = _bytes(boxes[0], element_bytes) == whole
    if is_whole and len(boxes) == 1:
        return ()
    added = tuple(3 * _bytes(box, element_bytes) for box in boxes[is_whole:])
    return (2 * whole if is_whole else whole, *added)  # a copy of the first one, or zeros


def _lengths(box: Box) -> list[int]:
    return [each.stop - each.start for each in box]


def _bytes(box: Box, element_bytes: int) -> int:
    return prod(_lengths(box)) * element_bytes


def _in_one_piece(box: Box, shape: Extents) -> bool:
    """Whether a box of a tensor is contiguous in memory: whole in all dimensions behind one, and one long before it."""
    lengths = _lengths(box)
    partial = [place for place, (length, size) in enumerate(zip(lengths, shape, strict=True)) if length < size]
    return not partial or all(length == 1 for length in lengths[: partial[-1]])
