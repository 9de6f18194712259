"""State-space networks: selective scans in chunks by matrix products (the form of Dao and Gu, 2024)."""

from __future__ import annotations

import torch
from torch import nn
from torch.nn import functional

CHUNK = 64


class Scan(nn.Module):
    """A gated selective scan: x, B, C and the step from separate projections."""

    def __init__(self, width: int, heads: int, state: int) -> None:
        super().__init__()
        self.heads, self.state, self.size = heads, state, 2 * width // heads
        self.norm = nn.LayerNorm(width)
        self.gate, self.inner = nn.Linear(width, 2 * width), nn.Linear(width, 2 * width)
        self.b, self.c, self.step = nn.Linear(width, state), nn.Linear(width, state), nn.Linear(width, heads)
        self.conv = nn.Conv1d(2 * width, 2 * width, 4, groups=2 * width, padding=3)
        self.decay = nn.Parameter(torch.zeros(heads))
        self.out = nn.Linear(2 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[batch, tokens, width] to the same shape; tokens are a multiple of `CHUNK`."""
        batch, tokens, _ = x.shape
        chunks = tokens // CHUNK
        normed = self.norm(x)
        inner = functional.silu(self.conv(self.inner(normed).mT)[..., :tokens].mT)
        step = functional.softplus(self.step(normed)).view(batch, chunks, CHUNK, self.heads)
        values = inner.view(batch, chunks, CHUNK, self.heads, self.size) * step[..., None]
        b = self.b(normed).view(batch, chunks, CHUNK, self.state)
        c = self.c(normed).view(batch, chunks, CHUNK, self.state)
        total = torch.cumsum(-step * torch.exp(self.decay), dim=2).permute(0, 1, 3, 2)  # [batch, chunks, heads, CHUNK]
        within = torch.exp((total[..., :, None] - total[..., None, :]).tril()).tril()
        scores = (c @ b.mT)[:, :, None] * within
        values = values.permute(0, 1, 3, 2, 4)
        inside = scores @ values
        left = torch.exp(total[..., -1:] - total)
        states = (b.mT[:, :, None] * left[..., None, :]) @ values  # [batch, chunks, heads, state, size]
        carried = [torch.zeros_like(states[:, 0])]
        for chunk in range(chunks - 1):
            carried.append(carried[-1] * torch.exp(total[:, chunk, :, -1])[..., None, None] + states[:, chunk])
        before = (c[:, :, None] @ torch.stack(carried, dim=1)) * torch.exp(total)[..., None]
        mixed = (inside + before).permute(0, 1, 3, 2, 4).reshape(batch, tokens, -1)
        return x + self.out(mixed * functional.silu(self.gate(normed)))


class StateSpace(nn.Module):
    """Scans and a classifier of the last token."""

    def __init__(self, width: int, heads: int, state: int, layers: int) -> None:
        super().__init__()
        self.layers = nn.Sequential(*(Scan(width, heads, state) for _ in range(layers)))
        self.classify = nn.Linear(width, 64)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[batch, tokens, width] to [batch, classes]."""
        return self.classify(self.layers(x)[:, -1])


def statespace_small(batch: int) -> tuple[nn.Module, torch.Tensor]:
    """4 layers, 256 wide, 256 tokens."""
    return StateSpace(256, 8, 32, 4), torch.randn(batch, 256, 256)


def statespace_large(batch: int) -> tuple[nn.Module, torch.Tensor]:
    """6 layers, 512 wide, 512 tokens."""
    return StateSpace(512, 16, 64, 6), torch.randn(batch, 512, 512)
