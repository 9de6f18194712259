"""The share of a layer computed by one GPU: its extents, and the resulting work and bytes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod

import numpy as np

from gpusim.layerwise.configs import Config, boxes, largest_share, needed, volume
from gpusim.layerwise.layers import Edge, Extents, Layer, Need


@dataclass(frozen=True, slots=True)
class Share:
    """Extents of a part of a layer's output, and elements of all inputs that it needs, halos included."""

    output: Extents
    input_elements: int


@dataclass(frozen=True, slots=True)
class PassWork:
    """Arithmetic operations and memory traffic of one pass over a share."""

    flops: float
    bytes: float


def shares_of(layer: Layer, config: Config, gpus: Sequence[int]) -> list[Share]:
    """Return the shares of GPUs in a layer; all extents are 0 for a GPU without a part."""
    low, high = boxes(layer.output, config, np.array(gpus))
    elements = sum(volume(*needed(layer, number, low, high)) for number in range(len(layer.inputs)))
    sizes = np.broadcast_to(elements, len(gpus)).tolist()
    return [Share((n, c, h, w), size) for (n, c, h, w), size in zip((high - low).tolist(), sizes, strict=True)]


def whole(layer: Layer) -> Share:
    """Return all of a layer, on one GPU."""
    return Share(layer.output, sum(prod(edge.extents) for edge in layer.inputs))


def busiest_share(layer: Layer, config: Config) -> Share:
    """Return the largest part, with the largest halos.

    The first part is the largest, with a halo on one side; inner parts have two halos. They differ by at most one row,
    so this combines both.
    """
    output = largest_share(layer.output, config)
    elements = sum(_most_needed(layer, edge, config, output) for edge in layer.inputs)
    return Share(output, elements)


def _most_needed(layer: Layer, edge: Edge, config: Config, output: Extents) -> int:
    """Return the most elements of one input that a part needs."""
    product = 1
    for place, need in enumerate(edge.needs):
        extent, degree, whole_output = edge.extents[place], config.degrees[place], layer.output[place]
        if degree == 1 or need.rule == "all":
            product *= extent
            continue
        length = _length(need, 0, output[place], extent, whole_output)
        if need.rule == "window":
            smallest = whole_output // degree
            length = max(length, _length(need, whole_output - smallest, whole_output, extent, whole_output))
            if degree > 2:
                inner = (output[place] - 1) * need.stride + need.dilation * (need.kernel - 1) + 1
                length = max(length, min(extent, inner))
        elif need.rule in ("spread", "scale"):  # more between two others than at an edge
            size, smallest = output[place], whole_output // degree
            ends = [(whole_output - smallest, whole_output), *([(size, 2 * size)] if degree > 2 else [])]
            length = max(length, *(_length(need, low, high, extent, whole_output) for low, high in ends))
        product *= length
    return product


def _length(need: Need, low: int, high: int, extent: int, output_extent: int) -> int:
    first, last = need.padded(low, high, extent, output_extent)
    return max(0, min(last, extent) - max(first, 0))


def forward_work(layer: Layer, share: Share) -> PassWork:
    """Work of the forward pass: inputs and weights are read once, outputs written once."""
    part = prod(share.output) / prod(layer.output)
    weights = (layer.weight_elements + layer.frozen_elements) * share.output[1] / layer.output[1]
    moved = share.input_elements + weights + prod(share.output)
    return PassWork(layer.flops * part, moved * layer.element_bytes)


def backward_work(layer: Layer, share: Share) -> PassWork:
    """Work of the backward pass: as much arithmetic for the input's gradient and for the weights' gradient, each.

    Inputs and outputs are read and the gradients of both are read or written; weights are read, their gradient written.
    """
    part = prod(share.output) / prod(layer.output)
    weights = (2 * layer.weight_elements + layer.frozen_elements) * share.output[1] / layer.output[1]
    passes = int(layer.input_gradient) + (layer.weight_elements > 0)
    moved = 2 * share.input_elements + weights + 2 * prod(share.output)
    return PassWork(layer.flops * part * max(1, passes), moved * layer.element_bytes)


def weight_elements(layer: Layer, share: Share) -> int:
    """Return the number of trained weights in the share: those of its channels."""
    return -(-layer.weight_elements * share.output[1] // layer.output[1])


def frozen_elements(layer: Layer, share: Share) -> int:
    """Return the number of weights in the share that the step does not train."""
    return -(-layer.frozen_elements * share.output[1] // layer.output[1])
