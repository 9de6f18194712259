"""Rules of operators on images and sequences: convolutions, transposed ones, pools, and maps made larger."""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from typing import Any, Final

from gpusim.formats.trace import Op, Trace
from gpusim.layerwise import op_rules as rules
from gpusim.layerwise.frames import Frame, image
from gpusim.layerwise.layers import ALL, SAME, SCALE, Need
from gpusim.layerwise.rule import Inputs, Rule, second_factor, tensors_in

#: Arguments of `aten.convolution`: stride, padding, dilation, transposed, groups; of a pool: kernel, stride, padding;
#: of an upsampling: whether corners are aligned.
_STRIDE, _PADDING, _DILATION, _TRANSPOSED, _GROUPS = 3, 4, 5, 6, 8
_KERNEL, _POOL_STRIDE, _POOL_PADDING, _POOL_DILATION = 1, 2, 3, 4
_CORNERS = 2
#: Neighbours on each side that an element of a larger map needs.
UPSAMPLINGS: Final = {"upsample_nearest2d": 0, "upsample_bilinear2d": 1}
#: Pools to a given size.
ADAPTIVE_POOLS: Final = ("_adaptive_avg_pool2d", "adaptive_max_pool2d")
#: Operators that turn channels into pixels, and pixels into channels.
SHUFFLES: Final = ("pixel_shuffle", "pixel_unshuffle")
IMAGE: Final = ("n", "c", "h", "w")
#: Channels before positions: as a convolution of one dimension takes them, and a pool, after a view.
SEQUENCE: Final = ("n", "c", "h")
_SEQUENCE_OF_POOL: Final = ("n", "c", "", "h")


def of_image(trace: Trace, op: Op, name: str, first: Frame, shape: Sequence[int], inputs: Inputs) -> Rule | None:
    """Return the rule of an operator on images; None for another one."""
    if name in rules.CONVOLUTIONS and second_factor(op, name) not in {tensor for tensor, _ in inputs}:
        return _convolution(trace, op, shape)
    if name in rules.WINDOWS:
        return _pool(op, shape)
    if name in UPSAMPLINGS:
        return _upsampling(op, name, first, shape)
    if name in SHUFFLES:
        return _shuffle(op, name, shape)
    if name in ADAPTIVE_POOLS:
        alike = tuple(shape[2:]) == first.extents[2:]
        needs = (SAME, SAME, *((SAME, SAME) if alike else (ALL, ALL)))
        return Rule("pool", "nchw" if alike else "nc", image(shape), prod(first.extents), (needs,))
    if name == "mean" and _is_global_pool(op):
        rows = tuple(row if place < 2 else () for place, row in enumerate(first.rows))[: len(shape)]
        return Rule("pool", "nc", Frame(rows), prod(first.extents), ((SAME, SAME, ALL, ALL),))
    return None


def of_sequence(trace: Trace, op: Op, name: str, first: Frame, shape: Sequence[int], inputs: Inputs) -> Rule | None:
    """Return the rule of an operator on channels by positions; None for another one."""
    if name in rules.CONVOLUTIONS and second_factor(op, name) not in {tensor for tensor, _ in inputs}:
        return _convolution_of_sequence(trace, op, shape) if first.is_rows_of(*SEQUENCE) else None
    if not first.is_rows_of(*_SEQUENCE_OF_POOL):
        return None
    if name in rules.WINDOWS:
        row, positions = _windows(op)
        frame = Frame((*image(shape).rows[:2], (), (("h", shape[3]),)))
        return Rule("pool", "nch", frame, prod(shape) * positions.kernel, ((SAME, SAME, positions, row),))
    if name == "mean" and _is_global_pool(op):
        rows = (*first.rows[:2], (), ())[: len(shape)]
        return Rule("pool", "nc", Frame(rows), prod(first.extents), ((SAME, SAME, ALL, ALL),))
    return None


def _convolution_of_sequence(trace: Trace, op: Op, shape: Sequence[int]) -> Rule | None:
    """Return the rule of a convolution of one dimension; None for a transposed one."""
    weight = trace.tensors[tensors_in(op.args[1])[0]].shape
    if len(weight) != 3 or len(shape) != 3 or op.args[_TRANSPOSED]:
        return None
    groups = int(op.args[_GROUPS])
    positions = Need("window", weight[2], *(_at(op.args[each], 0) for each in (_STRIDE, _PADDING, _DILATION)))
    needs = (SAME, ALL if groups == 1 else SCALE, positions, SAME)
    frame = Frame(tuple(((letter, size),) for letter, size in zip("nch", shape, strict=True)))
    flops, unit = 2 * prod(shape) * prod(weight[1:]), shape[1] // groups if groups > 1 else 1
    return Rule("convolution", "nch", frame, flops, (needs,), unit)


def takes_channels_first(trace: Trace, op: Op) -> list[int]:
    """Return the tensor of which a convolution of one dimension knows that channels come before positions."""
    if rules.base_name(op) not in rules.CONVOLUTIONS or len(trace.tensors[tensors_in(op.args[1])[0]].shape) != 3:
        return []
    return tensors_in(op.args[0])


def _convolution(trace: Trace, op: Op, shape: Sequence[int]) -> Rule | None:
    """Return the rule of a convolution; None if it is not two-dimensional."""
    weight = trace.tensors[tensors_in(op.args[1])[0]].shape
    if len(weight) != 4 or len(shape) != 4:
        return None
    groups = int(op.args[_GROUPS])
    if op.args[_TRANSPOSED]:
        return _transposed(op, weight, shape, groups)
    height, width = (
        Need("window", weight[2 + d], _at(op.args[_STRIDE], d), _at(op.args[_PADDING], d), _at(op.args[_DILATION], d))
        for d in (0, 1)
    )
    needs = (SAME, ALL if groups == 1 else SCALE, height, width)
    unit = shape[1] // groups if groups > 1 else 1
    return Rule("convolution", "nchw", image(shape), 2 * prod(shape) * prod(weight[1:]), (needs,), unit)


def _transposed(op: Op, weight: Sequence[int], shape: Sequence[int], groups: int) -> Rule:
    """Return the rule of a transposed convolution, whose weight has the output's channels second.

    A dimension in which kernels leave gaps is not split, and neither are the channels of several groups.
    """
    needs = [
        Need("spread", weight[2 + d], _at(op.args[_STRIDE], d), _at(op.args[_PADDING], d), _at(op.args[_DILATION], d))
        for d in (0, 1)
    ]
    dense = [need.kernel >= max(need.stride, need.padding + 1) and need.dilation == 1 for need in needs]
    height, width = (need if whole else ALL for need, whole in zip(needs, dense, strict=True))
    splits = "".join(x for x, valid in zip("nchw", (True, groups == 1, *dense), strict=True) if valid)
    flops = 2 * prod(shape) * weight[0] // groups * -(-prod(weight[2:]) // prod(need.stride for need in needs))
    return Rule("convolution", splits, image(shape), flops, ((SAME, ALL, height, width),))


def _upsampling(op: Op, name: str, first: Frame, shape: Sequence[int]) -> Rule:
    """Return the rule of a larger map; height and width are split if they grow by whole factors, in place."""
    aligned = name != "upsample_nearest2d" and op.args[_CORNERS] is not False
    height, width = (
        ALL if aligned or size % have else Need("scale", offset=UPSAMPLINGS[name])
        for size, have in zip(shape[2:], first.extents[2:], strict=True)
    )
    splits = "nc" + "".join(x for x, need in (("h", height), ("w", width)) if need != ALL)
    return Rule("upsampling", splits, image(shape), prod(shape), ((SAME, SAME, height, width),))


def _shuffle(op: Op, name: str, shape: Sequence[int]) -> Rule:
    """Return the rule of a pixel shuffle: its factor of rows and columns are the channels around one pixel."""
    factor = int(op.args[1])
    if name == "pixel_shuffle":
        return Rule(name, "nchw", image(shape), 0, ((SAME, SCALE, SCALE, SCALE),))
    window = Need("window", factor, factor)
    return Rule(name, "nchw", image(shape), 0, ((SAME, SCALE, window, window),), factor**2)


def _pool(op: Op, shape: Sequence[int]) -> Rule:
    height, width = _windows(op)
    return Rule(
        "pool", "nchw", image(shape), prod(shape) * height.kernel * width.kernel, ((SAME, SAME, height, width),)
    )


def _windows(op: Op) -> tuple[Need, Need]:
    """Return what a pool needs of the last two dimensions."""
    kernel = op.args[_KERNEL]
    stride = op.args[_POOL_STRIDE] if len(op.args) > _POOL_STRIDE and op.args[_POOL_STRIDE] else kernel
    padding = op.args[_POOL_PADDING] if len(op.args) > _POOL_PADDING else (0, 0)
    dilation: Any = (1, 1)
    if rules.base_name(op).startswith("max") and len(op.args) > _POOL_DILATION:
        dilation = op.args[_POOL_DILATION]
    first, second = (Need("window", _at(kernel, d), _at(stride, d), _at(padding, d), _at(dilation, d)) for d in (0, 1))
    return first, second


def _at(value: Any, place: int) -> int:
    if isinstance(value, int):
        return value
    return int(value[place] if len(value) > place else value[0])


def _is_global_pool(op: Op) -> bool:
    dims = op.args[1] if len(op.args) > 1 else None
    return isinstance(dims, list | tuple) and sorted(int(d) % 4 for d in dims) == [2, 3]
