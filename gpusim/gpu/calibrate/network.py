"""The network for the calibration of contention: branches of many shapes, unlike any network in use.

It keeps real networks out of most of the fit: predictions for networks that nothing was fitted on are evidence.
"""

from __future__ import annotations

import torch
from torch import nn

IMAGE_SIZE = 192


class ConvUnit(nn.Module):
    """Convolution, batch norm, ReLU."""

    def __init__(self, inputs: int, outputs: int, kernel: int, stride: int = 1, groups: int = 1) -> None:
        super().__init__()
        self.conv = nn.Conv2d(inputs, outputs, kernel, stride, kernel // 2, groups=groups, bias=False)
        self.norm = nn.BatchNorm2d(outputs)
        self.act = nn.ReLU(inplace=True)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.act(self.norm(self.conv(x)))
        return out


class Fan(nn.Module):
    """Branches of different depth and kernel, concatenated: `widths` are the channels of each."""

    def __init__(self, inputs: int, widths: tuple[int, int, int, int, int]) -> None:
        super().__init__()
        a, b, c, d, e = widths
        self.point = ConvUnit(inputs, a, 1)
        self.square = nn.Sequential(ConvUnit(inputs, b // 2, 1), ConvUnit(b // 2, b, 3))
        self.wide = nn.Sequential(ConvUnit(inputs, c // 2, 1), ConvUnit(c // 2, c, 5))
        self.deep = nn.Sequential(ConvUnit(inputs, d, 1), ConvUnit(d, d, 3), ConvUnit(d, d, 3), ConvUnit(d, d, 1))
        self.pooled = nn.Sequential(nn.AvgPool2d(3, 1, 1), ConvUnit(inputs, e, 1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.cat([self.point(x), self.square(x), self.wide(x), self.deep(x), self.pooled(x)], 1)


class Sum(nn.Module):
    """Three parallel paths and the identity, added."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.bottleneck = nn.Sequential(ConvUnit(channels, channels // 4, 1), ConvUnit(channels // 4, channels, 3))
        self.grouped = ConvUnit(channels, channels, 3, groups=8)
        self.point = ConvUnit(channels, channels, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = x + self.bottleneck(x) + self.grouped(x) + self.point(x)
        return out


class BranchingNet(nn.Module):
    """Stem, three stages of fans and sums at falling resolution, classifier."""

    def __init__(self, classes: int = 100) -> None:
        super().__init__()
        self.stem = nn.Sequential(ConvUnit(3, 32, 5, 2), nn.MaxPool2d(3, 2, 1), ConvUnit(32, 96, 3))
        self.stages = nn.Sequential(
            Fan(96, (32, 64, 32, 32, 32)),
            Sum(192),
            nn.MaxPool2d(3, 2, 1),
            Fan(192, (96, 128, 64, 48, 48)),
            Fan(384, (64, 160, 96, 96, 96)),
            Sum(512),
            nn.MaxPool2d(3, 2, 1),
            Fan(512, (128, 256, 128, 128, 128)),
            Fan(768, (256, 192, 64, 160, 96)),
        )
        self.head = nn.Linear(768, classes)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.head(self.stages(self.stem(x)).mean((2, 3)))
        return out


def branching(batch: int) -> tuple[nn.Module, torch.Tensor]:
    """Return the network and a batch, for `gpusim capture gpusim/gpu/calibrate/network.py:branching`."""
    return BranchingNet(), torch.randn(batch, 3, IMAGE_SIZE, IMAGE_SIZE)
