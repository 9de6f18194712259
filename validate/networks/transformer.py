"""Transformer encoders with separate projections of queries, keys and values: three small products side by side."""

from __future__ import annotations

import torch
from torch import nn
from torch.nn import functional


class Block(nn.Module):
    """Pre-norm attention and a two-layer perceptron."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.query, self.key, self.value = (nn.Linear(width, width) for _ in range(3))
        self.out = nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[batch, tokens, width] to the same shape."""
        batch, tokens, width = x.shape
        normed = self.norm1(x)
        query, key, value = (
            layer(normed).view(batch, tokens, self.heads, width // self.heads).transpose(1, 2)
            for layer in (self.query, self.key, self.value)
        )
        attended = functional.scaled_dot_product_attention(query, key, value)
        x = x + self.out(attended.transpose(1, 2).reshape(batch, tokens, width))
        return x + self.down(functional.gelu(self.up(self.norm2(x))))


class Encoder(nn.Module):
    """Token and position embeddings, blocks, and a classifier of the mean token."""

    def __init__(self, width: int, heads: int, layers: int, tokens: int) -> None:
        super().__init__()
        self.embed = nn.Embedding(8192, width)
        self.position = nn.Parameter(torch.randn(tokens, width) * 0.02)
        self.blocks = nn.Sequential(*(Block(width, heads) for _ in range(layers)))
        self.norm = nn.LayerNorm(width)
        self.classify = nn.Linear(width, 100)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """[batch, tokens] to [batch, classes]."""
        return self.classify(self.norm(self.blocks(self.embed(tokens) + self.position)).mean(dim=1))


def transformer_small(batch: int) -> tuple[nn.Module, torch.Tensor]:
    """6 layers, 512 wide, 128 tokens."""
    return Encoder(512, 8, 6, 128), torch.randint(0, 8192, (batch, 128))


def transformer_large(batch: int) -> tuple[nn.Module, torch.Tensor]:
    """12 layers, 768 wide, 192 tokens."""
    return Encoder(768, 12, 12, 192), torch.randint(0, 8192, (batch, 192))
