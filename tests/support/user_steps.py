"""Steps of a user's own, captured on the CPU as on the GPU, but for times and profiles."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F  # noqa: N812  (torch's own habit)

from gpusim.errors import CaptureError
from gpusim.formats.trace import Mode, Trace
from gpusim.gpu.capture.calls import JointGraph
from gpusim.gpu.capture.in_memory import model_step, options_of
from gpusim.gpu.capture.rebuild import Rebuilt, rebuild
from gpusim.gpu.capture.user_step import Untouched, UserStep, record_step
from gpusim.gpu.replay.execute import InitialState, Runner
from gpusim.trace.check import check_trace
from tests.support.helpers import with_kernels
from tests.support.networks import CPU

CLASSES = 5


def captured(step: UserStep, mode: Mode = "train", dtype: Any = "fp32") -> Rebuilt:
    """Capture a step as a trace, checked against the model's own."""
    options = options_of(step, "tests.x", mode, dtype, False, 0, False)
    with Untouched(step).around() as untouched:
        graph = record_step(step, untouched, 0)
        found = rebuild(step, graph, options, CPU)
    check_trace(with_kernels(found.trace), "t")
    return found


def listened(step: UserStep) -> JointGraph:
    with Untouched(step).around() as untouched:
        return record_step(step, untouched, 0)


def refused(step: UserStep) -> str:
    with pytest.raises(CaptureError) as caught:
        captured(step)
    text = str(caught.value)
    assert "\n" not in text
    return text


class Net(nn.Module):
    def __init__(self, dropout: float = 0.0, norm: bool = True) -> None:
        super().__init__()
        self.first = nn.Linear(6, 8)
        self.norm = nn.BatchNorm1d(8) if norm else nn.Identity()
        self.drop = nn.Dropout(dropout)
        self.second = nn.Linear(8, CLASSES, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.second(self.drop(self.norm(self.first(x).relu())))


def net(seed: int = 0, **options: Any) -> Net:
    torch.manual_seed(seed)
    return Net(**options)


def batch() -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    return torch.randn(4, 6, generator=generator), torch.randint(0, CLASSES, (4,), generator=generator)


def train_step(model: nn.Module, optimizer: torch.optim.Optimizer | None, **options: Any) -> UserStep:
    x, y = batch()
    return model_step(model, (x,), CPU, targets=(y,), loss=F.cross_entropy, optimizer=optimizer, **options)


def states_after(found: Rebuilt, steps: int) -> dict[str, torch.Tensor]:
    """Return parameters and buffers after `steps` runs of the trace alone."""
    trace = found.trace
    runner = Runner(trace, CPU)
    runner.bind(InitialState.copy_of(found.recorded.initial).tensors)
    for _ in range(steps):
        runner.run_in_order()
    return {t.name: runner.tensors[i] for i, t in enumerate(trace.tensors) if t.role in ("parameter", "buffer")}  # type: ignore[misc]


def eager_states(model: nn.Module, optimizer: torch.optim.Optimizer, steps: int) -> dict[str, torch.Tensor]:
    """Return parameters and buffers of a copy after `steps` steps of its own."""
    model, optimizer = copy.deepcopy((model, optimizer))
    x, y = batch()
    for _ in range(steps):
        optimizer.zero_grad()
        F.cross_entropy(model(x), y).backward()
        optimizer.step()
    return {**dict(model.named_parameters()), **dict(model.named_buffers())}


def ops_of(trace: Trace, target: str) -> list[int]:
    return [index for index, op in enumerate(trace.ops) if op.target.startswith(f"aten.{target}")]


class Trainer:
    """A user's own training loop, with its objects as attributes."""

    def __init__(self, **options: Any) -> None:
        self.model = net(**options)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1, momentum=0.9)
        self.seen = 0

    def step(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        self.optimizer.zero_grad()
        loss = F.cross_entropy(self.model(x), y)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.optimizer.step()
        return loss

    def accumulate(self, x: torch.Tensor, y: torch.Tensor) -> None:
        for part in (slice(0, 2), slice(2, 4)):
            (F.cross_entropy(self.model(x[part]), y[part]) / 2).backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
