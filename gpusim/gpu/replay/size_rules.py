"""Checks of sizes that operators trust: weights against the image, gradients against results, tensors of lists.

Shapes are those that the trace declares; replay checks results against them (`gpusim.gpu.replay.execute`). Needs no
torch.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from gpusim.formats.arguments import TENSOR
from gpusim.formats.trace import Op, Tensor, Trace
from gpusim.gpu.replay.saved_facts import ALIKE, FUSED_LISTS, LEADING, PER_CHANNEL


def size_problem(trace: Trace, op: Op) -> str:
    """Return why weights, statistics, gradients or dimensions do not fit the image, or ""."""
    image = tensor_at(trace, op, 0)
    for place in PER_CHANNEL.get(op.target, ()):
        tensor = tensor_at(trace, op, place)
        if tensor is not None and (image is None or len(image.shape) < 2 or tensor.shape != image.shape[1:2]):
            return f"argument {place} does not have one number per channel"
    if op.target == "aten.native_group_norm.default":
        counts = op.args[3:6]
        whole = [count for count in counts if isinstance(count, int)]
        if image is None or len(whole) != 3 or math.prod(whole) != math.prod(image.shape) or min(whole) < 0:
            return "its numbers of samples, channels and places are not those of the image"
    if op.target in LEADING:
        other, last = tensor_at(trace, op, 1), LEADING[op.target]
        if image is None or other is None or image.shape[:-last] != other.shape[:-last]:
            return "the gradient has other samples or channels than the image"
    if op.target in ALIKE:
        other = tensor_at(trace, op, 1)
        if image is None or other is None or image.shape != other.shape:
            return "the gradient has another shape than the result"
    if op.target == "aten.unfold_backward.default" and (image is None or image.shape != _unfolded(op)):
        return "the gradient has another shape than the windows"
    if op.target.startswith("aten._upsample_") and "_aa" in op.target and not _scales_fit(op, image):
        return "its scales are not those of the sizes"
    if op.target == "aten.grid_sampler_2d_backward.default":
        of, grid = tensor_at(trace, op, 1), tensor_at(trace, op, 2)
        if image is None or of is None or grid is None or image.shape != (*of.shape[:2], *grid.shape[1:3]):
            return "the gradient has another shape than the samples"
    return _transform_problem(trace, op) if op.target.startswith("aten._fft_") else ""


def _transform_problem(trace: Trace, op: Op) -> str:
    """Check that a Fourier transform has existing dimensions, and goes back to its argument's length."""
    image, dims = tensor_at(trace, op, 0), op.args[1] if len(op.args) > 1 else ()
    rank = 0 if image is None else len(image.shape)
    if image is None or not dims or not isinstance(dims, list | tuple) or not all(isinstance(d, int) for d in dims):
        return "it has no dimensions"
    if any(not -rank <= d < rank for d in dims) or len({d % rank for d in dims}) != len(dims):
        return "its dimensions are not those of the tensor"
    if len(op.args) < 4 or op.args[2] not in (0, 1, 2) or any(image.shape[d] < 1 for d in dims):
        return "its sizes or its scaling are missing"
    if op.target == "aten._fft_c2r.default":
        length = op.args[3]
        if not isinstance(length, int) or length < 1 or image.shape[dims[-1]] != length // 2 + 1:
            return "the length of its result does not fit the tensor"
    return ""


def lists_problem(trace: Trace, op: Op) -> str:
    """Check that an optimizer kernel's lists have one length and the same shapes, and that scalars are single
    numbers.
    """
    name = op.target.split(".")[1]
    lists = [value if isinstance(value, list | tuple) else () for value in op.args]
    single = [*op.kwargs.values(), *(value for value in op.args if isinstance(value, dict))]
    if len(lists) != FUSED_LISTS[name]:
        return "it has other lists of tensors"
    if name != "_fused_sgd_":
        single += lists[-1]  # steps
    may_lack = (name == "_fused_sgd_" and op.kwargs.get("momentum") == 0) or op.kwargs.get("amsgrad") is False
    given = [value for value in lists if value or not may_lack]
    if len({len(value) for value in given}) > 1 or len(lists) - len(given) > 1:
        return "its lists are not of one length"
    problem = _together(trace, given if name == "_fused_sgd_" else given[:-1])
    if problem:
        return problem
    for value in single:
        tensor = tensor_of(trace, value)
        if tensor is not None and math.prod(tensor.shape) != 1:
            return "a scalar tensor has several elements"
    return ""


def fused_step_problem(trace: Trace, index: int, op: Op) -> str:
    """Check the lists of the ops that a fused step of SGD replaces."""
    for variant in op.variants:
        chain = [trace.ops[place] for place in sorted((index, *variant.covers)) if place < len(trace.ops)]
        if variant.settings.composition != "fused" or not chain or not chain[0].target.startswith("aten._foreach"):
            continue
        lists = [each.args[place] for each, place in zip(chain, (0, 1, 0), strict=False) if len(each.args) > place]
        if len(lists) != 3 or not all(isinstance(each, list | tuple) for each in lists):
            return f"variant '{variant.name}' is not a step of SGD"
        problem = _together(trace, lists)
        if problem:
            return f"variant '{variant.name}': {problem}"
    return ""


def _together(trace: Trace, lists: Sequence[Sequence[Any]]) -> str:
    """Check that tensors at one place of each list have one shape and type and no gaps: the kernel indexes them
    as one.
    """
    if len({len(value) for value in lists}) > 1:
        return "its lists are not of one length"
    for together in zip(*lists, strict=True):
        tensors = [tensor_of(trace, value) for value in together]
        kinds = {(t.shape, t.dtype, is_dense(t.shape, t.stride)) for t in tensors if t is not None}
        if None in tensors or len(kinds) != 1 or not next(iter(kinds))[2]:
            return "its lists hold tensors of other shapes or types, or with gaps"
    return ""


def tensor_at(trace: Trace, op: Op, place: int) -> Tensor | None:
    """Return the tensor at this argument position; None where there is none."""
    return tensor_of(trace, op.args[place] if place < len(op.args) else None)


def tensor_of(trace: Trace, value: Any) -> Tensor | None:
    """Return the tensor that an encoded argument refers to; None for another argument."""
    return trace.tensors[value[TENSOR]] if isinstance(value, dict) and TENSOR in value else None


def _unfolded(op: Op) -> tuple[int, ...] | None:
    """Return the shape of the result of `unfold`, from the arguments of its backward."""
    sizes, dim, size, step = op.args[1:5] if len(op.args) == 5 else ((), 0, 0, 0)
    whole = isinstance(sizes, list | tuple) and all(isinstance(each, int) for each in (*sizes, dim, size, step))
    if not whole or not sizes or not -len(sizes) <= dim < len(sizes) or step < 1 or not 0 <= size <= sizes[dim]:
        return None
    shape = list(sizes)
    shape[dim] = (sizes[dim] - size) // step + 1
    return (*shape, size)


def _scales_fit(op: Op, image: Tensor | None) -> bool:
    """Whether a resampling's scales, where given, match its input and output sizes."""
    backward = "_backward" in op.target
    before = op.args[2] if backward and len(op.args) > 2 else image.shape if image is not None else ()
    after, scales = op.args[1] if len(op.args) > 1 else (), op.args[4 if backward else 3 :]
    if not isinstance(before, list | tuple) or not isinstance(after, list | tuple) or len(before) - len(after) != 2:
        return False
    return all(
        scale is None
        or (isinstance(scale, int | float) and isinstance(n, int) and isinstance(m, int) and m <= n * scale < m + 1)
        for scale, n, m in zip(scales, before[2:], after, strict=False)
    )


def is_dense(shape: Sequence[int], stride: Sequence[int]) -> bool:
    """Whether a tensor's elements fill its stretch of memory, each once; true without elements."""
    if 0 in shape:
        return True
    expected = 1
    for step, size in sorted((d, s) for s, d in zip(shape, stride, strict=True) if s != 1):
        if step != expected:
            return False
        expected *= size
    return True
