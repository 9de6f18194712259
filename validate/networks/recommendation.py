"""Recommendation models: many embedding tables, a perceptron of the dense features, products of all pairs."""

from __future__ import annotations

import torch
from torch import nn
from torch.nn import functional


class Recommender(nn.Module):
    """DLRM's form: tables of embedding bags, pairwise products, a perceptron on top."""

    def __init__(self, tables: int, rows: int, width: int, dense: int) -> None:
        super().__init__()
        self.tables = nn.ModuleList(nn.EmbeddingBag(rows, width, mode="sum") for _ in range(tables))
        self.bottom = nn.Sequential(nn.Linear(dense, 256), nn.ReLU(), nn.Linear(256, width), nn.ReLU())
        pairs = (tables + 1) * tables // 2
        self.top = nn.Sequential(nn.Linear(pairs + width, 512), nn.ReLU(), nn.Linear(512, 256), nn.ReLU())
        self.score = nn.Linear(256, 1)
        self.register_buffer("pairs", torch.tril_indices(tables + 1, tables + 1, -1), persistent=False)

    def forward(self, dense: torch.Tensor, *bags: torch.Tensor) -> torch.Tensor:
        """[batch, dense] floats and a [batch, ids] of each table to [batch] scores."""
        bottom = self.bottom(dense)
        features = torch.stack([bottom, *(table(ids) for table, ids in zip(self.tables, bags, strict=True))], dim=1)
        products = (features @ features.mT)[:, self.pairs[0], self.pairs[1]]
        return self.score(self.top(torch.cat([bottom, products], dim=1)))[:, 0]


def _click_loss(scores: torch.Tensor) -> torch.Tensor:
    return functional.binary_cross_entropy_with_logits(scores, torch.full_like(scores, 0.25))


def recommendation_small(batch: int):
    """16 tables of 20,000 rows, 32 wide."""
    ids = tuple(torch.randint(0, 20_000, (batch, 4)) for _ in range(16))
    return Recommender(16, 20_000, 32, 13), (torch.randn(batch, 13), *ids), _click_loss


def recommendation_medium(batch: int):
    """20 tables of 30,000 rows, 48 wide."""
    ids = tuple(torch.randint(0, 30_000, (batch, 6)) for _ in range(20))
    return Recommender(20, 30_000, 48, 13), (torch.randn(batch, 13), *ids), _click_loss


def recommendation_large(batch: int):
    """26 tables of 50,000 rows, 64 wide."""
    ids = tuple(torch.randint(0, 50_000, (batch, 8)) for _ in range(26))
    return Recommender(26, 50_000, 64, 13), (torch.randn(batch, 13), *ids), _click_loss
