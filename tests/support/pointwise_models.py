"""Networks of pointwise functions and of operators that treat each sample by itself."""

from __future__ import annotations

import torch
from torch import nn
from torch.nn import functional

NETWORKS = ("pointwise", "by_sample", "pairs")


class Pointwise(nn.Module):
    """Functions of one layer, of numbers, and of two and three layers."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.two, self.three = (nn.Conv2d(3, 8, 3, padding=1) for _ in range(3))
        self.last = nn.Linear(8, 5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        one = functional.relu6(functional.leaky_relu(self.one(x), 0.2) + 0.5)
        two = 1 - functional.mish(self.two(x)).clamp(-0.4, 0.7)
        three = torch.erf(self.three(x)) ** 2
        mixed = torch.maximum(one, two) - torch.lerp(two, three, 0.25)
        gated = torch.addcmul(mixed, one, three, value=0.3)
        chosen = torch.where(gated > two, gated, two)
        return self.last(functional.celu(chosen).mean((2, 3)))


class BySample(nn.Module):
    """Operators along dimensions of one sample."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.two, self.last = nn.Linear(6, 8), nn.Linear(8, 8), nn.Linear(4, 5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.one(x)
        x = torch.flip(x, (1, -1)) * x.logsumexp(-1, keepdim=True)
        x = self.two(x) - x.amin(1, keepdim=True)
        return self.last(functional.glu(x.std(1, correction=0)))


def pointwise(batch: int) -> tuple[nn.Module, torch.Tensor]:
    return Pointwise(), torch.randn(batch, 3, 6, 6)


def by_sample(batch: int) -> tuple[nn.Module, torch.Tensor]:
    return BySample(), torch.randn(batch, 7, 6)


class Pairs(nn.Module):
    """A loss of the user's own, of two results."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.two = nn.Linear(6, 8), nn.Linear(6, 4)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return torch.tanh(self.one(x)), self.two(x)


def loss_of_pairs(pair: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
    return (pair[0] ** 2).mean() * 3 + (pair[1] - 1).abs().sum()


def pairs(batch: int) -> tuple[nn.Module, torch.Tensor, object]:
    return Pairs(), torch.randn(batch, 6), loss_of_pairs


class Centred(nn.Module):
    """The mean of all elements, which is no loss: layers behind it need it."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.last = nn.Linear(6, 8), nn.Linear(8, 5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.one(x)
        return self.last(x - x.mean() * 0.5)


def centred(batch: int) -> tuple[nn.Module, torch.Tensor]:
    return Centred(), torch.randn(batch, 6)


class Asked(nn.Module):
    """Two layers and a function between them that is asked for."""

    def __init__(self, between: object) -> None:
        super().__init__()
        self.one, self.last, self.between = nn.Linear(6, 8), nn.Linear(8, 4), between

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(self.between(self.one(x)))  # type: ignore[operator]


def frozen(batch: int) -> tuple[nn.Module, torch.Tensor]:
    model = Asked(torch.relu)
    model.one.requires_grad_(False)
    return model, torch.randn(batch, 6)


def transposed(batch: int) -> tuple[nn.Module, torch.Tensor, object]:
    classes = torch.arange(4)
    return Asked(torch.relu), torch.randn(4, 6), lambda y: functional.cross_entropy(y.t(), classes.to(y.device))


def over_samples(batch: int) -> tuple[nn.Module, torch.Tensor, object]:
    return Asked(torch.relu), torch.randn(batch, 6), lambda y: -functional.log_softmax(y, 0).mean()
