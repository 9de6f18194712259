"""A transformer encoder whose attention is products and a softmax, so that every attention matrix is a tensor."""

from __future__ import annotations

import math

import torch
from torch import nn
from torch.nn import functional


class Block(nn.Module):
    """Post-norm attention and a two-layer perceptron, with biases, as BERT has them; no dropout."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.query, self.key, self.value = (nn.Linear(width, width) for _ in range(3))
        self.out = nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[batch, tokens, width] to the same shape."""
        batch, tokens, width = x.shape
        query, key, value = (
            layer(x).view(batch, tokens, self.heads, width // self.heads).transpose(1, 2)
            for layer in (self.query, self.key, self.value)
        )
        scores = query @ key.transpose(2, 3) / math.sqrt(width // self.heads)
        attended = functional.softmax(scores, dim=-1) @ value
        x = self.norm1(x + self.out(attended.transpose(1, 2).reshape(batch, tokens, width)))
        return self.norm2(x + self.down(functional.gelu(self.up(x))))


class Encoder(nn.Module):
    """Token and position embeddings, blocks, and a classifier of the first token."""

    def __init__(self, width: int, heads: int, layers: int, tokens: int) -> None:
        super().__init__()
        self.embed = nn.Embedding(8192, width)
        self.position = nn.Parameter(torch.randn(tokens, width) * 0.02)
        self.blocks = nn.Sequential(*(Block(width, heads) for _ in range(layers)))
        self.classify = nn.Linear(width, 100)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """[batch, tokens] to [batch, classes]."""
        return self.classify(self.blocks(self.embed(tokens) + self.position)[:, 0])


def encoder_12(batch: int) -> tuple[nn.Module, torch.Tensor]:
    """12 layers, 768 wide, 12 heads, 256 tokens."""
    return Encoder(768, 12, 12, 256), torch.randint(0, 8192, (batch, 256))
