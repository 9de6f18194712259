"""Parameters that several layers use: their values, and sums of their gradients over all ranks and layers."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from gpusim.gpu.layerwise.operations import parameters_of
from gpusim.gpu.layerwise.state import LayerState
from gpusim.gpu.layerwise.transport import Transport
from gpusim.layerwise.layers import LayerGraph
from gpusim.layerwise.tied import Tied, tied_parameters


def whole_parameters(
    graph: LayerGraph, index: int, generator: torch.Generator, seed: int, dtype: torch.dtype
) -> list[dict[str, torch.Tensor]]:
    """Return a layer's whole parameters by operation; those of an earlier layer have its values."""
    layer = graph.layers[index]
    named = parameters_of(layer, generator, dtype)
    for first in {tie.layer for tie in layer.tied}:
        values = parameters_of(graph.layers[first], generator_of(first, seed), dtype)
        for tie in layer.tied:
            if tie.layer == first:
                named[tie.op][tie.name] = values[tie.layer_op][tie.name]
    return named


def generator_of(index: int, seed: int, device: torch.device | None = None) -> torch.Generator:
    """Return the generator of a layer's parameters and dropout mask, by default on the CPU."""
    return torch.Generator(device or "cpu").manual_seed(seed * 100_003 + index)


class TiedSums:
    """The sums of the gradients of parameters that several layers use."""

    def __init__(self, graph: LayerGraph, states: Sequence[LayerState], transport: Transport, gpus: int) -> None:
        self._states, self._transport, self._everyone = states, transport, tuple(range(gpus))
        self._tied = tied_parameters(graph)
        self._apart = {(layer, op, each.name) for each in self._tied for layer, op in each.uses}

    def is_apart(self, layer: int, op: int, name: str) -> bool:
        """Whether a parameter is summed here."""
        return (layer, op, name) in self._apart

    def begin(self, layer: int, like: torch.Tensor) -> None:
        """Begin the sums of parameters of which this layer is the first; all ranks call it."""
        for each in self._tied:
            if each.first == layer:
                self._begin(each, like)

    def _begin(self, tied: Tied, like: torch.Tensor) -> None:
        mine = [self._states[layer].parameters[op][tied.name] for layer, op in tied.uses if self._counts(layer)]
        gradients = [parameter.grad.flatten() for parameter in mine if parameter.grad is not None]
        total = gradients[0].clone() if gradients else like.new_zeros(tied.elements)
        for gradient in gradients[1:]:
            total += gradient
        self._transport.begin_sum(total, self._everyone)
        for layer, op in tied.uses:
            if self._states[layer].active:
                parameter = self._states[layer].parameters[op][tied.name]
                parameter.grad = total.view_as(parameter)

    def _counts(self, layer: int) -> bool:
        """Whether this rank's gradient is part of the sum: of a layer that every rank computes, one's is."""
        state = self._states[layer]
        return state.active and (not state.config.replicated or self._transport.rank == 0)
