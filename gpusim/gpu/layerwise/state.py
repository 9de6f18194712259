"""What a rank holds of one layer: its part, parameters, input buffers, output, and gradients."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch

from gpusim.gpu.layerwise.dropout import Masks
from gpusim.layerwise.configs import Config
from gpusim.layerwise.layers import Layer
from gpusim.layerwise.pieces import Box, EdgePieces


@dataclass
class LayerState:
    """The state of one layer on this rank."""

    layer: Layer
    config: Config
    low: tuple[int, ...]
    high: tuple[int, ...]
    parameters: list[dict[str, torch.Tensor]]
    edges: list[EdgePieces]
    statistics: tuple[int, ...]
    """Ranks that share statistics with this one, itself included."""
    weights: tuple[int, ...]
    """Ranks that hold the same weights, itself included."""
    channels: tuple[int, ...]
    """Ranks with the other channels of its part, itself included."""
    whole: list[torch.Tensor] = field(default_factory=list)
    """Parameters that are not split with the channels."""
    masks: Masks = field(default_factory=dict)
    """Parts of one device's masks of dropout, by operation."""
    buffers: list[torch.Tensor] = field(default_factory=list)
    output: torch.Tensor | None = None
    products: list[torch.Tensor] = field(default_factory=list)
    """The result of the layer's product, if the gradients of its weights are computed late."""
    gradient: torch.Tensor | None = None
    owns_gradient: bool = False
    """Whether nothing else holds the memory of `gradient`."""
    input_gradients: list[torch.Tensor | None] = field(default_factory=list)

    @property
    def active(self) -> bool:
        """Whether the rank has a part of the layer."""
        return all(h > low for low, h in zip(self.low, self.high, strict=True))

    @property
    def late(self) -> bool:
        """Whether the gradients of its weights are computed while that of its input is on its way."""
        if self.layer.product is None or self.config.replicated:
            return False
        (edge,) = self.edges
        return edge.gathered is not None or bool(edge.sends or edge.receives)

    def add(self, gradient: torch.Tensor) -> None:
        """Add a gradient of the whole output to those from its other users."""
        self.owns_gradient = self.gradient is not None
        self.gradient = gradient if self.gradient is None else self.gradient + gradient

    def add_part(self, gradient: torch.Tensor, box: Box, *, owned: bool) -> None:
        """Add the gradient of a box of the output; `owned` says that nothing else holds its memory."""
        assert self.output is not None
        if self.gradient is None and gradient.shape == self.output.shape:
            self.gradient, self.owns_gradient = gradient, owned
            return
        self.writable_gradient()[box] += gradient

    def writable_gradient(self) -> torch.Tensor:
        """Return the gradient of the whole output, zero if there is none so far, in memory that nothing else holds."""
        if self.gradient is None or not self.owns_gradient:
            assert self.output is not None
            self.gradient = torch.zeros_like(self.output) if self.gradient is None else self.gradient.clone()
            self.owns_gradient = True
        return self.gradient
