"""One token through a gated decoder with cached keys and values: many small products, and weights are the traffic."""

from __future__ import annotations

import torch
from torch import nn
from torch.nn import functional


class Layer(nn.Module):
    """Grouped-query attention over a cache of fixed length, and a gated perceptron."""

    def __init__(self, width: int, heads: int, groups: int, hidden: int, past: int) -> None:
        super().__init__()
        self.heads, self.groups, self.size = heads, groups, width // heads
        self.norm1, self.norm2 = nn.RMSNorm(width), nn.RMSNorm(width)
        self.query = nn.Linear(width, width, bias=False)
        self.key = nn.Linear(width, groups * self.size, bias=False)
        self.value = nn.Linear(width, groups * self.size, bias=False)
        self.out = nn.Linear(width, width, bias=False)
        self.gate = nn.Linear(width, hidden, bias=False)
        self.up = nn.Linear(width, hidden, bias=False)
        self.down = nn.Linear(hidden, width, bias=False)

    def forward(self, x: torch.Tensor, keys: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
        """[batch, 1, width] with caches [batch, groups, past, size] to [batch, 1, width]."""
        batch = x.shape[0]
        normed = self.norm1(x)
        query = self.query(normed).view(batch, 1, self.heads, self.size).transpose(1, 2)
        key = self.key(normed).view(batch, 1, self.groups, self.size).transpose(1, 2)
        value = self.value(normed).view(batch, 1, self.groups, self.size).transpose(1, 2)
        repeats = self.heads // self.groups
        keys = torch.cat([keys, key], dim=2).repeat_interleave(repeats, dim=1)
        values = torch.cat([values, value], dim=2).repeat_interleave(repeats, dim=1)
        attended = functional.scaled_dot_product_attention(query, keys, values)
        x = x + self.out(attended.transpose(1, 2).reshape(batch, 1, -1))
        normed = self.norm2(x)
        return x + self.down(functional.silu(self.gate(normed)) * self.up(normed))


class Decoder(nn.Module):
    """Layers, a final norm and the vocabulary's scores."""

    def __init__(self, width: int, heads: int, groups: int, hidden: int, layers: int, past: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Layer(width, heads, groups, hidden, past) for _ in range(layers))
        self.norm = nn.RMSNorm(width)
        self.scores = nn.Linear(width, 16384, bias=False)

    def forward(self, x: torch.Tensor, keys: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
        """[batch, 1, width] and caches [layers, batch, groups, past, size] to [batch, vocabulary]."""
        for layer, k, v in zip(self.layers, keys, values, strict=True):
            x = layer(x, k, v)
        return self.scores(self.norm(x))[:, 0]


def _step(batch: int, width: int, heads: int, groups: int, hidden: int, layers: int, past: int):
    cache = (layers, batch, groups, past, width // heads)
    inputs = (torch.randn(batch, 1, width), torch.randn(cache), torch.randn(cache))
    return Decoder(width, heads, groups, hidden, layers, past), inputs


def decoder_small(batch: int) -> tuple[nn.Module, tuple[torch.Tensor, ...]]:
    """8 layers, 1024 wide, 512 cached tokens."""
    return _step(batch, 1024, 16, 4, 2816, 8, 512)


def decoder_medium(batch: int) -> tuple[nn.Module, tuple[torch.Tensor, ...]]:
    """10 layers, 1536 wide, 768 cached tokens."""
    return _step(batch, 1536, 12, 4, 4096, 10, 768)


def decoder_large(batch: int) -> tuple[nn.Module, tuple[torch.Tensor, ...]]:
    """12 layers, 2048 wide, 1024 cached tokens."""
    return _step(batch, 2048, 16, 8, 5632, 12, 1024)
