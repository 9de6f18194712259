"""Steps that run on Inductor's kernels, which on the CPU are C++, and eager twins to hold them to."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn

from gpusim.gpu.optimize.callable import OptimizedStep
from tests.support.optimizing import fast

Make = Callable[[Iterator[nn.Parameter]], torch.optim.Optimizer]
#: Fused kernels sum in another order; an optimizer that divides by small numbers amplifies that.
TOLERANCE = 5e-4


def sgd(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.05, momentum=0.9, weight_decay=1e-2)


def adam(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.Adam(parameters, lr=0.01)


def close(one: Any, other: Any) -> None:
    torch.testing.assert_close(one, other, rtol=TOLERANCE, atol=TOLERANCE)


def by_inductor(target: Any, inputs: Any, **options: Any) -> Any:
    """Return the optimized step with Inductor's kernels."""
    step = fast(target, inputs, **{"frontends": ("inductor",), **options})
    assert isinstance(step, OptimizedStep)
    assert step.gain is not None
    assert step.gain.frontend == "inductor"
    assert "kernels of Inductor" in step.gain.text
    return step


class Trained:
    """A model trained with Inductor's kernels, and its eager twin."""

    def __init__(self, model: nn.Module, make: Make, x: torch.Tensor, y: torch.Tensor, loss: Any) -> None:
        self.models = model, copy.deepcopy(model)
        self.optimizers = [make(each.parameters()) for each in self.models]
        self.loss = loss
        self.fast = by_inductor(model, (x, y), loss=loss, optimizer=self.optimizers[0])

    def eager(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        self.optimizers[1].zero_grad()
        loss: torch.Tensor = self.loss(self.models[1](x), y)
        loss.backward()
        self.optimizers[1].step()
        return loss.detach()

    def train(self, data: list[tuple[torch.Tensor, torch.Tensor]]) -> None:
        """Run steps of both from the same random state; loss, gradients and all state must agree after each."""
        for number, (x, y) in enumerate(data):
            torch.manual_seed(number)
            loss = self.fast(x, y)
            torch.manual_seed(number)
            close(loss, self.eager(x, y))
            for one, other in zip(*(each.parameters() for each in self.models), strict=True):
                close(one.grad, other.grad)
            close(*(each.state_dict() for each in self.models))
            close(*(each.state_dict()["state"] for each in self.optimizers))


def images(count: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
    torch.manual_seed(3)
    return [(torch.randn(4, 3, 12, 12), torch.randint(0, 4, (4,))) for _ in range(count)]


class Convolutions(nn.Module):
    """Concatenated branches of convolutions with batch norm; a bias in each of two that have equal gradients."""

    def __init__(self) -> None:
        super().__init__()
        self.one = nn.Sequential(nn.Conv2d(3, 6, 1, bias=False), nn.BatchNorm2d(6), nn.ReLU())
        self.two = nn.Sequential(nn.Conv2d(3, 6, 3, padding=1, bias=False), nn.BatchNorm2d(6), nn.ReLU())
        self.left, self.right = nn.Conv2d(12, 4, 1), nn.Conv2d(12, 4, 3, padding=1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        joined = torch.cat([self.one(x), self.two(x)], 1)
        return (self.left(joined) + self.right(joined)).mean((2, 3))


class Block(nn.Module):
    """A block of a transformer, with dropout, over embedded tokens."""

    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__()
        self.embed = nn.Embedding(11, 16)
        self.block = nn.TransformerEncoderLayer(16, 2, 32, dropout=dropout, batch_first=True)
        self.head = nn.Linear(16, 3)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.head(self.block(self.embed(tokens)).mean(1))
