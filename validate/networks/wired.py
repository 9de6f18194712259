"""Randomly wired networks: stages whose nodes are joined by a random graph (Xie et al., 2019), seeded."""

from __future__ import annotations

import random

import torch
from torch import nn
from torch.nn import functional


class Node(nn.Module):
    """A weighed sum of the inputs, ReLU, a separable convolution and batch norm."""

    def __init__(self, inputs: int, width: int) -> None:
        super().__init__()
        self.weights = nn.Parameter(torch.zeros(inputs))
        self.depthwise = nn.Conv2d(width, width, 3, padding=1, groups=width, bias=False)
        self.pointwise = nn.Conv2d(width, width, 1, bias=False)
        self.norm = nn.BatchNorm2d(width)

    def forward(self, inputs: list[torch.Tensor]) -> torch.Tensor:
        """Maps of one shape to one of that shape."""
        weights = torch.sigmoid(self.weights)
        total = sum(weights[i] * x for i, x in enumerate(inputs))
        return self.norm(self.pointwise(self.depthwise(functional.relu(total))))


class Stage(nn.Module):
    """Nodes of a small-world graph, each joined with earlier ones; the outputs of the last ones are averaged."""

    def __init__(self, nodes: int, width: int, rng: random.Random) -> None:
        super().__init__()
        self.sources: list[list[int]] = []
        for node in range(nodes):
            near = [node - distance for distance in (1, 2) if node - distance >= 0]
            rewired = [rng.randrange(node) if node and rng.random() < 0.75 else source for source in near]
            self.sources.append(sorted(set(rewired)))
        used = {source for sources in self.sources for source in sources}
        self.ends = [node for node in range(nodes) if node not in used]
        self.nodes = nn.ModuleList(Node(max(1, len(sources)), width) for sources in self.sources)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """A map to one of the same shape."""
        made: list[torch.Tensor] = []
        for node, sources in zip(self.nodes, self.sources, strict=True):
            made.append(node([made[source] for source in sources] or [x]))
        return sum(made[end] for end in self.ends) / len(self.ends)


class Wired(nn.Module):
    """A stem, three random stages, a classifier."""

    def __init__(self, nodes: int, width: int, seed: int) -> None:
        super().__init__()
        rng = random.Random(seed)
        self.stem = nn.Conv2d(3, width, 7, stride=4, padding=3, bias=False)
        self.stages = nn.ModuleList(Stage(nodes, width << i, rng) for i in range(3))
        self.widen = nn.ModuleList(nn.Conv2d(width << i, width << (i + 1), 1, stride=2) for i in range(2))
        self.classify = nn.Linear(width * 4, 100)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[batch, 3, h, w] to [batch, classes]."""
        x = self.stages[0](self.stem(x))
        for widen, stage in zip(self.widen, list(self.stages)[1:], strict=True):
            x = stage(widen(x))
        return self.classify(x.mean(dim=(2, 3)))


def wired_small(batch: int) -> tuple[nn.Module, torch.Tensor]:
    """3 stages of 12 nodes, 48 channels at first, 160 x 160."""
    return Wired(12, 48, 11), torch.randn(batch, 3, 160, 160)


def wired_large(batch: int) -> tuple[nn.Module, torch.Tensor]:
    """3 stages of 24 nodes, 78 channels at first, 224 x 224."""
    return Wired(24, 78, 23), torch.randn(batch, 3, 224, 224)
