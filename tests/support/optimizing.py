"""Small networks and training loops for the tests of `gpusim.optimize`, in a schedule's order or on a GPU."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F  # noqa: N812  (torch's own habit)

from gpusim.gpu.optimize.callable import OptimizedStep
from gpusim.gpu.optimize.executors import CpuExecutor
from gpusim.gpu.optimize.front import optimize
from gpusim.gpu.reach.search import MOST_PARTS

Batch = tuple[torch.Tensor, torch.Tensor]
FEATURES, CLASSES = 6, 5


class Net(nn.Module):
    """Two branches, batch norm and dropout."""

    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__()
        self.left, self.right = nn.Linear(FEATURES, 8), nn.Linear(FEATURES, 8)
        self.norm, self.drop, self.head = nn.BatchNorm1d(8), nn.Dropout(dropout), nn.Linear(8, CLASSES)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.drop(self.norm(self.left(x).relu() + self.right(x).sigmoid())))


def net(dropout: float = 0.0, seed: int = 0) -> Net:
    torch.manual_seed(seed)
    return Net(dropout)


def batches(count: int, size: int = 4, seed: int = 1, device: str = "cpu") -> list[Batch]:
    generator = torch.Generator().manual_seed(seed)
    drawn = [
        (torch.randn(size, FEATURES, generator=generator), torch.randint(0, CLASSES, (size,), generator=generator))
        for _ in range(count)
    ]
    return [(x.to(device), y.to(device)) for x, y in drawn]


def hidden(*values: Any) -> list[Any]:
    """Return a list that begins with these, too long for gpusim to look into."""
    return [*values, *[None] * MOST_PARTS]


def tick(ticks: list[Any]) -> int:
    """Return the next number of a hidden counter."""
    ticks[0] += 1
    return int(ticks[0])


def fast(target: Any, inputs: Any, **options: Any) -> Any:
    """Run `gpusim.optimize` with a short search, without a GPU unless another executor is given."""
    return optimize(target, inputs, **{"executor": CpuExecutor(), "streams": 3, "budget_s": 0.02, **options})


def warned(make: Callable[[], Any]) -> tuple[Any, str]:
    """Return the result of a call and its one warning, which names the line of the caller."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        result = make()
    assert len(caught) == 1, [str(each.message) for each in caught]
    text = str(caught[0].message)
    assert "\n" not in text
    assert text.startswith("gpusim.optimize: ")
    assert caught[0].filename == make.__code__.co_filename, "the warning names the user's line"  # type: ignore[attr-defined]
    return result, text


def modes_of(step: OptimizedStep) -> set[str]:
    """Return the modes in which a step was captured."""
    return {variant.captured.options.mode for variant in step._variants.values() if variant is not None}


def eager_step(model: nn.Module, optimizer: torch.optim.Optimizer) -> Callable[..., torch.Tensor]:
    """Return a step as a user writes it."""

    def step(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        optimizer.zero_grad()
        loss = F.cross_entropy(model(x), y)
        loss.backward()
        optimizer.step()
        return loss.detach()

    return step


class Twins:
    """A model trained by the optimized step, and a copy trained eagerly."""

    def __init__(
        self,
        make: Callable[[Iterator[nn.Parameter]], torch.optim.Optimizer],
        dropout: float = 0.0,
        device: str = "cpu",
        **options: Any,
    ) -> None:
        self.model = net(dropout).to(device)
        self.other = copy.deepcopy(self.model)
        self.optimizer, self.other_optimizer = make(self.model.parameters()), make(self.other.parameters())
        example = batches(1, device=device)[0]
        self.fast = fast(self.model, example, loss=F.cross_entropy, optimizer=self.optimizer, **options)
        self.eager = eager_step(self.other, self.other_optimizer)

    def train(self, data: list[Batch], seed: int = 7) -> None:
        """Run steps of both from the same random state; the losses must agree."""
        for number, (x, y) in enumerate(data):
            torch.manual_seed(seed + number)
            loss = self.fast(x, y)
            torch.manual_seed(seed + number)
            close(loss, self.eager(x, y))

    def check(self) -> None:
        """Check that parameters, buffers, gradients and optimizer states agree."""
        same_states(self.model.state_dict(), self.other.state_dict())
        for one, other in zip(self.model.parameters(), self.other.parameters(), strict=True):
            close(one.grad, other.grad)
        mine, theirs = self.optimizer.state_dict(), self.other_optimizer.state_dict()
        assert mine["param_groups"] == theirs["param_groups"]
        assert mine["state"].keys() == theirs["state"].keys()
        for key, state in theirs["state"].items():
            same_states(mine["state"][key], state)


def same_states(one: dict[str, Any], other: dict[str, Any]) -> None:
    """Check that names are the same, and tensors equal except for rounding."""
    assert one.keys() == other.keys()
    for key, value in other.items():
        if isinstance(value, torch.Tensor):
            assert one[key].device == value.device, key
            close(one[key], value)
        else:
            assert one[key] == value, key


def close(one: torch.Tensor | None, other: torch.Tensor | None) -> None:
    assert one is not None
    assert other is not None
    torch.testing.assert_close(one.detach(), other.detach(), rtol=1e-4, atol=1e-5)


def sgd(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.1, momentum=0.9)


def captures(step: OptimizedStep) -> list[int]:
    """Count the captures of a step from now on, in a list that grows."""
    made: list[int] = []
    make = step._make

    def counted(*given: Any) -> Any:
        made.append(1)
        return make(*given)

    step._make = counted
    return made
