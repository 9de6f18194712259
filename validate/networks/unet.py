"""Diffusion U-Nets: residual blocks with a time embedding, attention at the bottom, long skips."""

from __future__ import annotations

import torch
from torch import nn
from torch.nn import functional


class Residual(nn.Module):
    """Two convolutions; the time embedding is added between them."""

    def __init__(self, inputs: int, outputs: int, time: int) -> None:
        super().__init__()
        self.norm1, self.conv1 = nn.GroupNorm(8, inputs), nn.Conv2d(inputs, outputs, 3, padding=1)
        self.norm2, self.conv2 = nn.GroupNorm(8, outputs), nn.Conv2d(outputs, outputs, 3, padding=1)
        self.time = nn.Linear(time, outputs)
        self.skip = nn.Conv2d(inputs, outputs, 1) if inputs != outputs else nn.Identity()

    def forward(self, x: torch.Tensor, embedded: torch.Tensor) -> torch.Tensor:
        """[batch, inputs, h, w] to [batch, outputs, h, w]."""
        y = self.conv1(functional.silu(self.norm1(x)))
        y = y + self.time(functional.silu(embedded))[:, :, None, None]
        return self.skip(x) + self.conv2(functional.silu(self.norm2(y)))


class Attention(nn.Module):
    """One head of attention over all pixels."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.GroupNorm(8, width)
        self.query, self.key, self.value, self.out = (nn.Conv2d(width, width, 1) for _ in range(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[batch, width, h, w] to the same shape."""
        normed = self.norm(x)
        query, key, value = (layer(normed).flatten(2).mT for layer in (self.query, self.key, self.value))
        return x + self.out(functional.scaled_dot_product_attention(query, key, value).mT.reshape(x.shape))


class UNet(nn.Module):
    """Down, attention in the middle, up with skips."""

    def __init__(self, width: int, levels: tuple[int, ...]) -> None:
        super().__init__()
        time = 4 * width
        self.frequencies = nn.Parameter(torch.exp(torch.linspace(0, 6, width // 2)), requires_grad=False)
        self.time = nn.Sequential(nn.Linear(width, time), nn.SiLU(), nn.Linear(time, time))
        self.first = nn.Conv2d(4, width, 3, padding=1)
        sizes = [width * level for level in levels]
        self.down = nn.ModuleList(Residual(a, b, time) for a, b in zip([width, *sizes], sizes, strict=False))
        self.shrink = nn.ModuleList(nn.Conv2d(size, size, 3, stride=2, padding=1) for size in sizes)
        self.middle = nn.ModuleList(Residual(sizes[-1], sizes[-1], time) for _ in range(2))
        self.attention = Attention(sizes[-1])
        upward = list(reversed(sizes))
        self.up = nn.ModuleList(
            Residual(2 * size, following, time) for size, following in zip(upward, [*upward[1:], width], strict=True)
        )
        self.last = nn.Conv2d(width, 4, 3, padding=1)

    def forward(self, x: torch.Tensor, step: torch.Tensor) -> torch.Tensor:
        """[batch, 4, h, w] and [batch] times to [batch, 4, h, w]."""
        angles = step[:, None] * self.frequencies
        embedded = self.time(torch.cat([angles.sin(), angles.cos()], dim=1))
        x = self.first(x)
        skips = []
        for block, shrink in zip(self.down, self.shrink, strict=True):
            x = block(x, embedded)
            skips.append(x)
            x = shrink(x)
        x = self.middle[1](self.attention(self.middle[0](x, embedded)), embedded)
        for block in self.up:
            x = functional.interpolate(x, scale_factor=2.0, mode="nearest")
            x = block(torch.cat([x, skips.pop()], dim=1), embedded)
        return self.last(x)


def unet_small(batch: int) -> tuple[nn.Module, tuple[torch.Tensor, ...]]:
    """64 channels, 32 x 32."""
    return UNet(64, (1, 2, 4)), (torch.randn(batch, 4, 32, 32), torch.rand(batch))


def unet_medium(batch: int) -> tuple[nn.Module, tuple[torch.Tensor, ...]]:
    """96 channels, 48 x 48."""
    return UNet(96, (1, 2, 3)), (torch.randn(batch, 4, 48, 48), torch.rand(batch))


def unet_large(batch: int) -> tuple[nn.Module, tuple[torch.Tensor, ...]]:
    """128 channels, 64 x 64."""
    return UNet(128, (1, 2, 3, 4)), (torch.randn(batch, 4, 64, 64), torch.rand(batch))
