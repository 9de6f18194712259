"""One trunk with several heads: dense predictions and classes from shared features."""

from __future__ import annotations

import torch
from torch import nn


def _conv(inputs: int, outputs: int, stride: int = 1) -> nn.Sequential:
    return nn.Sequential(nn.Conv2d(inputs, outputs, 3, stride, 1), nn.BatchNorm2d(outputs), nn.ReLU())


class Heads(nn.Module):
    """A convolutional trunk; heads of two convolutions and a pooled or a dense output."""

    def __init__(self, width: int, depth: int, heads: int) -> None:
        super().__init__()
        layers = [_conv(3, width, 2)]
        for level in range(3):
            layers.append(_conv(width << level, width << (level + 1), 2))
            layers += [_conv(width << (level + 1), width << (level + 1)) for _ in range(depth)]
        self.trunk = nn.Sequential(*layers)
        self.heads = nn.ModuleList(
            nn.Sequential(_conv(width * 8, width * 2), _conv(width * 2, width * 2), nn.Conv2d(width * 2, 8 + i, 1))
            for i in range(heads)
        )

    def forward(self, x: torch.Tensor) -> list[torch.Tensor]:
        """[batch, 3, h, w] to a map of each head."""
        shared = self.trunk(x)
        return [head(shared) for head in self.heads]


def heads_small(batch: int) -> tuple[nn.Module, torch.Tensor]:
    """5 heads on a trunk of 7 layers, 192 x 192."""
    return Heads(24, 1, 5), torch.randn(batch, 3, 192, 192)


def heads_medium(batch: int) -> tuple[nn.Module, torch.Tensor]:
    """7 heads on a trunk of 10 layers, 168 x 152."""
    return Heads(32, 2, 7), torch.randn(batch, 3, 168, 152)


def heads_large(batch: int) -> tuple[nn.Module, torch.Tensor]:
    """9 heads on a trunk of 13 layers, 256 x 256."""
    return Heads(40, 3, 9), torch.randn(batch, 3, 256, 256)
