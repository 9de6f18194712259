"""Dense mixtures of experts: every token goes through all experts, which a softmax weighs."""

from __future__ import annotations

import torch
from torch import nn
from torch.nn import functional


class Experts(nn.Module):
    """Equal two-layer perceptrons side by side, weighed by a router."""

    def __init__(self, width: int, hidden: int, experts: int) -> None:
        super().__init__()
        self.router = nn.Linear(width, experts)
        self.up = nn.ModuleList(nn.Linear(width, hidden) for _ in range(experts))
        self.down = nn.ModuleList(nn.Linear(hidden, width) for _ in range(experts))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[batch, tokens, width] to the same shape."""
        weights = torch.softmax(self.router(x), dim=-1)
        outputs = [down(functional.silu(up(x))) for up, down in zip(self.up, self.down, strict=True)]
        return sum(weights[..., i : i + 1] * output for i, output in enumerate(outputs))


class Mixture(nn.Module):
    """Attention and experts by turns."""

    def __init__(self, width: int, hidden: int, experts: int, layers: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norms = nn.ModuleList(nn.LayerNorm(width) for _ in range(2 * layers))
        self.qkv = nn.ModuleList(nn.Linear(width, 3 * width) for _ in range(layers))
        self.out = nn.ModuleList(nn.Linear(width, width) for _ in range(layers))
        self.experts = nn.ModuleList(Experts(width, hidden, experts) for _ in range(layers))
        self.head = nn.Linear(width, 1000)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[batch, tokens, width] to [batch, classes]."""
        batch, tokens, width = x.shape
        for layer, (qkv, out, experts) in enumerate(zip(self.qkv, self.out, self.experts, strict=True)):
            parts = qkv(self.norms[2 * layer](x)).view(batch, tokens, 3, self.heads, width // self.heads)
            query, key, value = parts.permute(2, 0, 3, 1, 4).unbind(0)
            attended = functional.scaled_dot_product_attention(query, key, value)
            x = x + out(attended.transpose(1, 2).reshape(batch, tokens, width))
            x = x + experts(self.norms[2 * layer + 1](x))
        return self.head(x.mean(dim=1))


def experts_small(batch: int) -> tuple[nn.Module, torch.Tensor]:
    """3 layers of 8 experts, 384 wide, 96 tokens."""
    return Mixture(384, 1024, 8, 3, 6), torch.randn(batch, 96, 384)


def experts_medium(batch: int) -> tuple[nn.Module, torch.Tensor]:
    """4 layers of 6 experts, 512 wide, 128 tokens."""
    return Mixture(512, 1408, 6, 4, 8), torch.randn(batch, 128, 512)


def experts_large(batch: int) -> tuple[nn.Module, torch.Tensor]:
    """4 layers of 12 experts, 640 wide, 160 tokens."""
    return Mixture(640, 1792, 12, 4, 10), torch.randn(batch, 160, 640)
