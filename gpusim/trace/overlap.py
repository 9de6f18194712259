"""Overlap of tensors in one storage: slices of a buffer that several kernels write may share no element.

A dependency between two ops is about memory that both touch. Two tensors of one storage touch the same memory unless
they are provably disjoint: their byte ranges are disjoint, or they are slices of one tensor with disjoint ranges in one
of its dimensions.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import combinations, pairwise
from math import comb, prod
from typing import Final

from gpusim.formats.trace import Tensor, Trace
from gpusim.trace.element_sizes import DTYPE_BYTES

#: Storages with more tensors than this are one unit: comparing all pairs would be slow.
MAX_TENSORS: Final = 64
#: After this many compared pairs, which takes seconds, all further storages are one unit each.
MAX_PAIRS: Final = 1_000_000


def memory_units(trace: Trace) -> tuple[list[tuple[int, ...]], int]:
    """Return the memory units that each tensor touches, and the total number of units.

    Two tensors share a unit if they may share an element. Most storages are one unit with the storage's index. In ATen
    traces all are: there, a written part of a tensor is a view, and the steps that the engine was measured on waited
    for the whole.
    """
    units: list[tuple[int, ...]] = [(tensor.storage,) for tensor in trace.tensors]
    count = len(trace.storages)
    if trace.model.frontend != "inductor":
        return units, count
    left = MAX_PAIRS
    for indices in _written_in_parts(trace).values():
        left -= comb(len(indices), 2)
        if left < 0:
            break
        pairs = {pair: may_overlap(trace.tensors[pair[0]], trace.tensors[pair[1]]) for pair in combinations(indices, 2)}
        if all(pairs.values()):
            continue
        touched = {index: [count + place] for place, index in enumerate(indices)}
        count += len(indices)
        for (one, other), shared in pairs.items():
            if shared:
                touched[one].append(count)
                touched[other].append(count)
                count += 1
        for index, parts in touched.items():
            units[index] = tuple(parts)
    return units, count


def _written_in_parts(trace: Trace) -> dict[int, list[int]]:
    """Return the storages that ops write through more than one tensor, with the tensors that ops read or write."""
    written: dict[int, int] = {}
    several: set[int] = set()
    for op in trace.ops:
        for index in op.writes:
            storage = trace.tensors[index].storage
            if written.setdefault(storage, index) != index:
                several.add(storage)
    if not several:
        return {}
    touched: dict[int, list[int]] = {storage: [] for storage in several}
    for index in sorted({index for op in trace.ops for index in (*op.reads, *op.writes)}):
        storage = trace.tensors[index].storage
        if storage in several:
            touched[storage].append(index)
    return {storage: indices for storage, indices in touched.items() if len(indices) <= MAX_TENSORS}


def may_overlap(one: Tensor, other: Tensor) -> bool:
    """Return False only if two tensors of one storage certainly share no byte."""
    if not prod(one.shape) or not prod(other.shape):
        return False
    (begin, end), (other_begin, other_end) = _extent(one), _extent(other)
    if end <= other_begin or other_end <= begin:
        return False
    if DTYPE_BYTES[one.dtype] != DTYPE_BYTES[other.dtype]:
        return True
    return not _slices_apart(one, other)


def _extent(tensor: Tensor) -> tuple[int, int]:
    """Return the byte range of a tensor, end exclusive."""
    size = DTYPE_BYTES[tensor.dtype]
    last = tensor.offset + sum((n - 1) * d for n, d in zip(tensor.shape, tensor.stride, strict=True))
    return tensor.offset * size, (last + 1) * size


def _slices_apart(one: Tensor, other: Tensor) -> bool:
    """Return True if two tensors are slices of one array, with the same strides, that are disjoint in a dimension.

    With strides s_1 > s_2 > ... that each divide the one before, an address has a unique index in every dimension if
    index times stride stays below the stride before it. Both tensors are then boxes, which share no element if their
    ranges in one dimension are disjoint.
    """
    strides = sorted({*_moving(one), *_moving(other)}, reverse=True)
    if 0 in strides or any(larger % smaller for larger, smaller in pairwise(strides)):
        return False
    box, other_box = _box(one, strides), _box(other, strides)
    if box is None or other_box is None:
        return False
    return any(
        begin + size <= other_begin or other_begin + other_size <= begin
        for (begin, size), (other_begin, other_size) in zip(box, other_box, strict=True)
    )


def _moving(tensor: Tensor) -> list[int]:
    """Return the strides of the dimensions with more than one element."""
    return [stride for size, stride in zip(tensor.shape, tensor.stride, strict=True) if size > 1]


def _box(tensor: Tensor, strides: Sequence[int]) -> list[tuple[int, int]] | None:
    """Return first index and size of a tensor in each dimension of these strides, or None if it is no box."""
    sizes = dict.fromkeys(strides, 1)
    for size, stride in zip(tensor.shape, tensor.stride, strict=True):
        if size > 1:
            if sizes[stride] > 1:
                return None
            sizes[stride] = size
    box: list[tuple[int, int]] = []
    rest, before = tensor.offset, 0
    for stride in strides:
        begin, rest = divmod(rest, stride)
        if before and (begin + sizes[stride]) * stride > before:
            return None
        box.append((begin, sizes[stride]))
        before = stride
    # The remaining offset is below the smallest stride: it distinguishes columns of an array with a fixed last index.
    box.append((rest, 1))
    return box
