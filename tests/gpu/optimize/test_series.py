"""Steps that take values from iterators, generators and queues stay as they are; others are captured."""

from __future__ import annotations

import copy
import itertools
import queue
from collections import deque
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F  # noqa: N812  (torch's own habit)
from torch.utils.data import DataLoader

from gpusim.gpu.optimize.callable import OptimizedStep
from tests.support.optimizing import batches, captures, fast, hidden, net, tick

SERIES: dict[str, Callable[[], Callable[[], float]]] = {
    "cycle": lambda: partial(next, itertools.cycle([1.0])),
    "generator": lambda: partial(next, (1.0 for _ in range(99))),
    "iterator": lambda: iter([1.0] * 99).__next__,
    "map": lambda: partial(next, map(float, [1] * 99)),
    "queue": lambda: filled(queue.SimpleQueue()).get,
    "loader": lambda: partial(next, iter(DataLoader([1.0] * 99))),
    "deque": lambda: partial(next, iter(deque([1.0] * 99))),
    "chain": lambda: partial(next, itertools.chain([1.0] * 99, [2.0])),
    "zip in enumerate": lambda: partial(_first_of_next, enumerate(zip([1.0] * 99, [1] * 99, strict=True))),
}


def _first_of_next(series: Any) -> float:
    return float(next(series)[1][0])


def filled(series: Any) -> Any:
    for _ in range(99):
        series.put(1.0)
    return series


@pytest.mark.parametrize("kind", SERIES)
def test_what_yields_its_values_once_each_is_named_at_the_first_run(kind: str) -> None:
    """A captured step would repeat the value of its capture: here the same for a long time."""
    take = SERIES[kind]()
    asked: list[float] = hidden(0)

    def step(x: torch.Tensor) -> torch.Tensor:
        tick(asked)
        return x * take()

    with pytest.warns(UserWarning, match="takes values from"):
        assert fast(step, batches(1)[0][0]) is step
    assert asked[0] == 1, "at the first run it is known"


class Trainer:
    """Has an iterator of batches, which its training step does not use."""

    def __init__(self) -> None:
        self.model = net()
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1)
        self.data = iter(batches(9))
        self.spare = itertools.chain(self.model.parameters())

    def step(self) -> torch.Tensor:
        return self.train_step(*next(self.data))

    def __len__(self) -> int:
        return len(list(self.data))

    def train_step(self, x: torch.Tensor, y: torch.Tensor | None = None) -> dict[str, torch.Tensor]:
        if y is None:
            x, y = next(self.data)
        self.optimizer.zero_grad()
        loss = F.cross_entropy(self.model(x), y)
        if getattr(self, "regularizer", None) is not None:
            loss = loss + self.regularizer(self.model)
        loss.backward()
        self.optimizer.step()
        return {"loss": loss.detach()}


def test_a_trainer_whose_step_takes_no_batch_itself_is_captured_once() -> None:
    """Names of its other methods, and what its loop notes of each step, are no reason for another capture."""
    trainer = Trainer()
    step = fast(trainer.train_step, batches(1)[0])
    assert isinstance(step, OptimizedStep)
    made = captures(step)
    for x, y in batches(3):
        vars(trainer)["loss"] = float(step(x, y)["loss"])
    assert made == []
    assert len(list(trainer.data)) == 9
    trainer.regularizer = lambda model: sum(p.square().sum() for p in model.parameters())
    twin = copy.deepcopy(trainer.model)
    step(*batches(1)[0])
    assert made == [1]
    assert not same(twin, trainer.model)


def same(one: nn.Module, other: nn.Module) -> bool:
    return all(map(torch.equal, one.parameters(), other.parameters()))
