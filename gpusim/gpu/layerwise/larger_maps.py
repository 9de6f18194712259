"""Shares of maps that are larger than their inputs: upsampling, transposed convolutions, shuffles of pixels.

A share's input begins before what it needs, so that its output is cut from a larger one.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch.nn import functional

from gpusim.layerwise.layers import Layer, LayerOp

Interval = tuple[int, int]


def upsampled(op: LayerOp, value: torch.Tensor, layer: Layer, box: Sequence[Interval]) -> torch.Tensor:
    """Return a share of a larger map; `box` is the share in the layer."""
    words = op.options["words"]
    begins = [_begin(layer, dimension, box) for dimension in (2, 3)]
    sizes, wholes = layer.output[2:], layer.inputs[0].extents[2:]
    size = [have * each // whole for have, each, whole in zip(value.shape[2:], sizes, wholes, strict=True)]
    larger = functional.interpolate(value, size=size, **words)
    for dimension, begin, each, whole in zip((2, 3), begins, sizes, wholes, strict=True):
        low, high = box[dimension]
        larger = larger.narrow(dimension, low - begin * each // whole, high - low)
    return larger


def transposed_convolution(
    op: LayerOp, value: torch.Tensor, named: dict[str, torch.Tensor], layer: Layer, box: Sequence[Interval]
) -> torch.Tensor:
    """Return a share of a transposed convolution; `box` is the share in the layer."""
    options, bias = op.options, named.get("bias")
    groups, dilation = options["groups"], options["dilation"]
    made = functional.conv_transpose2d(value, named["weight"], None, options["stride"], 0, 0, groups, dilation)
    for dimension, stride, padding in zip((2, 3), options["stride"], options["padding"], strict=True):
        low, high = box[dimension]
        first = low + padding - _begin(layer, dimension, box) * stride
        missing = first + high - low - made.shape[dimension]
        if missing > 0:  # rows and columns beyond the last kernel
            made = functional.pad(made, (0, missing) if dimension == 3 else (0, 0, 0, missing))
        made = made.narrow(dimension, first, high - low)
    return made if bias is None else made + bias[:, None, None]


def shuffled(op: LayerOp, value: torch.Tensor, layer: Layer, box: Sequence[Interval]) -> torch.Tensor:
    """Return a share of a map made of channels, or of channels made of a map; `box` is the share in the layer."""
    factor = op.options["factor"]
    if op.kind == "pixel_unshuffle":
        return functional.pixel_unshuffle(value, factor)
    larger = functional.pixel_shuffle(value, factor)
    for dimension in (2, 3):
        low, high = box[dimension]
        larger = larger.narrow(dimension, low - _begin(layer, dimension, box) * factor, high - low)
    return larger


def without_padding(op: LayerOp, average: torch.Tensor, layer: Layer, box: Sequence[Interval]) -> torch.Tensor:
    """Return averages over windows without the padding that they count; `box` is the share in the layer."""
    for dimension in (2, 3):
        kernel, stride, padding = (op.options[x][dimension - 2] for x in ("kernel", "stride", "padding"))
        first = torch.arange(*box[dimension], device=average.device) * stride - padding
        inside = (first + kernel).clamp(max=layer.inputs[0].extents[dimension]) - first.clamp(min=0)
        factor = (kernel / inside).to(average.dtype)
        average = average * (factor[:, None] if dimension == 2 else factor)
    return average


def _begin(layer: Layer, dimension: int, box: Sequence[Interval]) -> int:
    """Return the first row or column of a share's input."""
    edge, (low, high) = layer.inputs[0], box[dimension]
    if (low, high) == (0, layer.output[dimension]):
        return 0
    need = edge.needs[dimension].padded(low, high, edge.extents[dimension], layer.output[dimension])
    return max(0, int(need[0]))
