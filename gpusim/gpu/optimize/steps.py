"""The user's module, model with loss and optimizer, or function, as a step on fixed inputs."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils import _pytree as pytree

from gpusim.errors import CaptureError
from gpusim.formats.trace import Dtype, Mode
from gpusim.gpu.capture.in_memory import function_step, model_step, options_of
from gpusim.gpu.capture.options import CaptureOptions
from gpusim.gpu.capture.user_step import UserStep


@dataclass(frozen=True)
class Given:
    """Arguments of `gpusim.optimize`."""

    target: Any
    """A module, or a step function."""
    loss: Callable[..., torch.Tensor] | None
    optimizer: torch.optim.Optimizer | None

    @property
    def is_module(self) -> bool:
        """Whether it is a model, not a function."""
        return isinstance(self.target, torch.nn.Module)

    @property
    def trains(self) -> bool:
        """Whether it is a model to be trained."""
        return self.is_module and (self.loss is not None or self.optimizer is not None)

    def split(self, args: Sequence[Any]) -> tuple[tuple[Any, ...], tuple[Any, ...]]:
        """Split arguments into those of the model and of the loss: `(inputs, targets)`, each one tensor or a tuple of
        them.
        """
        if not self.trains or self.loss is None:
            return tuple(args), ()
        if len(args) < 2:
            raise CaptureError(f"a step with a loss takes (inputs, targets), not {len(args)} argument(s)")
        *inputs, targets = args
        given = inputs[0] if len(inputs) == 1 and isinstance(inputs[0], tuple) else tuple(inputs)
        return tuple(given), targets if isinstance(targets, tuple) else (targets,)

    def step(self, args: Sequence[Any], kwargs: dict[str, Any], device: torch.device) -> UserStep:
        """Return one step on these very arguments. Raises `CaptureError`."""
        if not self.is_module:
            return function_step(self.target, tuple(args), device, kwargs=kwargs)
        inputs, targets = self.split(args)
        return model_step(
            self.target, inputs, device, targets=targets, loss=self.loss, optimizer=self.optimizer, kwargs=kwargs
        )

    def eager(self, args: Sequence[Any], kwargs: dict[str, Any], device: torch.device) -> Any:
        """Run one step by the user's own code."""
        if not self.trains:
            return self.target(*args, **kwargs)
        return self.step(args, kwargs, device).run()

    def options(self, step: UserStep, seed: int) -> CaptureOptions:
        """Return the options of a capture."""
        trains = self.trains or bool(step.optimizers)
        mode: Mode = "train" if trains else "infer"
        spec = f"{type(self.target).__module__}.{type(self.target).__qualname__}"
        return options_of(step, spec, mode, dtype_of(list(step.parameters().values()), step.device), False, seed, False)


def dtype_of(tensors: Sequence[torch.Tensor], device: torch.device) -> Dtype:
    """Return the precision of products under the user's current settings."""
    kinds = {tensor.dtype for tensor in tensors}
    if torch.bfloat16 in kinds:
        return "bf16"
    allowed = torch.backends.cuda.matmul.allow_tf32 or torch.backends.cudnn.allow_tf32
    return "tf32" if device.type == "cuda" and allowed else "fp32"


def fixed_copies(args: Sequence[Any], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Copy each tensor among the arguments, to memory with a fixed place."""

    def copy(tensor: torch.Tensor) -> torch.Tensor:
        return tensor.detach().clone(memory_format=torch.preserve_format)

    return pytree.tree_map_only(torch.Tensor, copy, (tuple(args), dict(kwargs)))
