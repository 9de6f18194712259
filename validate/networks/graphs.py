"""Relational graph networks: messages along each kind of edge by gather and scatter-add, kinds side by side."""

from __future__ import annotations

import torch
from torch import nn
from torch.nn import functional


class Relational(nn.Module):
    """A layer with one product a relation."""

    def __init__(self, width: int, relations: int) -> None:
        super().__init__()
        self.own = nn.Linear(width, width)
        self.relations = nn.ModuleList(nn.Linear(width, width, bias=False) for _ in range(relations))

    def forward(self, x: torch.Tensor, edges: list[torch.Tensor]) -> torch.Tensor:
        """[nodes, width] and [2, edges] of each relation to [nodes, width]."""
        total = self.own(x)
        for layer, (source, target) in zip(self.relations, edges, strict=True):
            messages = layer(x).index_select(0, source)
            total = total + torch.zeros_like(total).index_add(0, target, messages)
        return functional.relu(total)


class GraphNetwork(nn.Module):
    """Layers with residuals, and scores of nodes."""

    def __init__(self, width: int, relations: int, layers: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Relational(width, relations) for _ in range(layers))
        self.norms = nn.ModuleList(nn.LayerNorm(width) for _ in range(layers))
        self.score = nn.Linear(width, 16)

    def forward(self, x: torch.Tensor, *edges: torch.Tensor) -> torch.Tensor:
        """[nodes, width] and the edges to [nodes, classes]."""
        for layer, norm in zip(self.layers, self.norms, strict=True):
            x = x + layer(norm(x), [tuple(each.unbind(0)) for each in edges])
        return self.score(x)


def _graph(batch: int, nodes: int, edges: int, width: int, relations: int, layers: int):
    """`batch` graphs of that size as one graph without edges between them."""
    each = [
        torch.cat([torch.randint(0, nodes, (2, edges)) + i * nodes for i in range(batch)], dim=1)
        for _ in range(relations)
    ]
    return GraphNetwork(width, relations, layers), (torch.randn(batch * nodes, width), *each)


def graphs_small(batch: int) -> tuple[nn.Module, tuple[torch.Tensor, ...]]:
    """4 relations, 3 layers, graphs of 200 nodes, 128 wide."""
    return _graph(batch, 200, 800, 128, 4, 3)


def graphs_medium(batch: int) -> tuple[nn.Module, tuple[torch.Tensor, ...]]:
    """6 relations, 3 layers, graphs of 320 nodes, 192 wide."""
    return _graph(batch, 320, 1600, 192, 6, 3)


def graphs_large(batch: int) -> tuple[nn.Module, tuple[torch.Tensor, ...]]:
    """8 relations, 4 layers, graphs of 500 nodes, 256 wide."""
    return _graph(batch, 500, 3000, 256, 8, 4)
