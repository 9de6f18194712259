"""The user's optimizer in a step that is recorded once and replayed many times.

A CUDA graph cannot read the step count from the host. Optimizers of torch that can count on the GPU (`capturable`) do
so during the capture; for others, values that depend on the count keep their value of the captured step.
"""

from __future__ import annotations

import importlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch.optim import Optimizer

from gpusim.errors import CaptureError

#: Optimizers that a trace cannot hold, with the reason.
REFUSED = {
    "LBFGS": "it calls the model a number of times that depends on the loss",
    "Adafactor": "its steps depend on norms that it reads from the GPU",
    "SparseAdam": "its gradients are sparse",
}


def refuse(optimizer: Any) -> None:
    """Raise `CaptureError` for an object that is not a torch optimizer, and for the optimizers in `REFUSED`."""
    if not isinstance(optimizer, Optimizer):
        raise CaptureError(f"optimizer: expected a torch.optim.Optimizer, got {type(optimizer).__name__}")
    for kind in type(optimizer).__mro__:
        if kind.__name__ in REFUSED and kind.__module__.startswith("torch.optim"):
            raise CaptureError(f"optimizer {type(optimizer).__name__} cannot be captured: {REFUSED[kind.__name__]}")


def name_of(optimizers: Sequence[Optimizer]) -> str | None:
    """Return the optimizers' names as in a trace, joined with " + "."""
    return " + ".join(dict.fromkeys(type(optimizer).__name__ for optimizer in optimizers)) or None


def named_states(optimizers: Sequence[Optimizer], names: dict[int, str]) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the state tensors of optimizers, such as `exp_avg.layer.weight`; `names` has parameter names by id."""
    for number, optimizer in enumerate(optimizers):
        mark = f"{number}." if number else ""
        for place, group in enumerate(optimizer.param_groups):
            for key, value in group.items():
                if isinstance(value, torch.Tensor):
                    yield f"{mark}{key}.group{place}", value
        for place, (parameter, state) in enumerate(optimizer.state.items()):
            for key, value in state.items():
                if isinstance(value, torch.Tensor):
                    yield f"{mark}{key}.{names.get(id(parameter), str(place))}", value


def counted_by_host(optimizers: Sequence[Optimizer]) -> list[torch.Tensor]:
    """Return step counts and rates in host memory, of optimizers that do not count on the GPU."""
    counts: list[torch.Tensor] = []
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            if group.get("capturable") or group.get("fused"):
                continue
            states = [optimizer.state[p] for p in group["params"] if p in optimizer.state]
            values = [value for each in (group, *states) for value in each.values()]
            counts += [v for v in values if isinstance(v, torch.Tensor) and v.dim() == 0 and v.device.type == "cpu"]
    return counts


@contextmanager
def counting_on(device: torch.device, optimizers: Sequence[Optimizer]) -> Iterator[None]:
    """Let optimizers count their steps on the device where they can; restore all of them afterwards."""
    before = [_Before(optimizer) for optimizer in optimizers]
    try:
        for optimizer in optimizers:
            for group in optimizer.param_groups:
                if "capturable" not in group or group.get("fused") or not _can_count(device):
                    continue
                group["capturable"] = True
                for parameter in group["params"]:
                    step = optimizer.state.get(parameter, {}).get("step")
                    if isinstance(step, torch.Tensor):
                        optimizer.state[parameter]["step"] = step.to(device)
        yield
    finally:
        for each in before:
            each.restore()


def _can_count(device: torch.device) -> bool:
    """Whether torch supports capturable optimizers on this device type."""
    asked = importlib.import_module("torch.optim.optimizer")
    return device.type in asked._get_capturable_supported_devices()


class _Before:
    """Saved options and states of an optimizer."""

    def __init__(self, optimizer: Optimizer) -> None:
        self.optimizer = optimizer
        self.groups = [dict(group) for group in optimizer.param_groups]
        self.states = {parameter: dict(state) for parameter, state in optimizer.state.items()}
        self.tensors = [
            (value, value.clone())
            for values in (*self.groups, *self.states.values())
            for value in values.values()
            if isinstance(value, torch.Tensor)
        ]

    def restore(self) -> None:
        with torch.no_grad():
            for tensor, copy in self.tensors:
                tensor.copy_(copy)
        for group, before in zip(self.optimizer.param_groups, self.groups, strict=True):
            group.clear()
            group.update(before)
        self.optimizer.state.clear()
        self.optimizer.state.update(self.states)
