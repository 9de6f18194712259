"""The reference for plans: the same network on one device, without shares, buffers or exchanges.

It has the operations and parameters of `gpusim.gpu.layerwise.operations` in common with the execution of plans; a test
compares this network with torch's modules.
"""

from __future__ import annotations

import torch

from gpusim.gpu.layerwise.batch import Data
from gpusim.gpu.layerwise.dropout import whole_masks
from gpusim.gpu.layerwise.operations import Surroundings, parameters_of, run_layer
from gpusim.gpu.layerwise.tied import generator_of
from gpusim.layerwise.layers import BATCH, Edge, LayerGraph


def taken(value: torch.Tensor, edge: Edge) -> torch.Tensor:
    """Return the part of a layer's output, or of the batch, that an input is."""
    n, c, h, w = (slice(low, low + size) for low, size in zip(edge.origin, edge.extents, strict=True))
    part = value[n, c, h, w]
    return part.detach() if edge.cut else part


def run_on_one_device(
    graph: LayerGraph, data: Data, *, dtype: torch.dtype, seed: int, device: torch.device
) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """Return the loss, and the gradients of all parameters by layer, operation and name, by torch's autograd."""
    values: list[torch.Tensor] = []
    parameters: dict[str, torch.Tensor] = {}
    loss = torch.zeros((), device=device, dtype=dtype)
    for index, layer in enumerate(graph.layers):
        generator = generator_of(index, seed)
        named = [
            {k: v.to(device).requires_grad_(True) for k, v in each.items()}
            for each in parameters_of(layer, generator, dtype)
        ]
        for tie in layer.tied:
            name = graph.layers[tie.layer].name
            named[tie.op][tie.name] = parameters[f"{name}/{tie.layer_op}/{tie.name}"]
        for number, each in enumerate(named):
            parameters |= {f"{layer.name}/{number}/{k}": v for k, v in each.items()}
        masks = {number: mask.to(device, dtype) for number, mask in whole_masks(layer, generator).items()}
        inputs = [taken(data.inputs if edge.source == BATCH else values[edge.source], edge) for edge in layer.inputs]
        where = Surroundings((0, layer.output[1]), (0, layer.output[0]), layer.output[0], None, data.targets, masks)
        values.append(run_layer(layer, inputs, named, where))
        if layer.kind == "loss":
            loss = loss + values[-1]
    loss.backward()
    return loss.detach(), {name: p.grad for name, p in parameters.items() if p.grad is not None}
