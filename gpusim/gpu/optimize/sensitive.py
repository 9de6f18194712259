"""Weights that let a fresh model's outputs show what was computed: `gpusim.gpu.replay.sensitivity` for a model."""

from __future__ import annotations

from typing import Any

import torch
from torch.utils import _pytree as pytree

from gpusim.formats.trace import Dtype
from gpusim.gpu.capture.models import ModelStep
from gpusim.gpu.replay.compare import TOLERANCE
from gpusim.gpu.replay.sensitivity import enlarge, largest_change, shuffle


def make_sensitive(step: ModelStep, dtype: Dtype, seed: int) -> bool:
    """Return whether the results of an inference step depend on its inputs; weights too small for that are enlarged.

    Where that does not help, weights stay. Training steps are left alone: gradients depend on everything.
    """
    if step.loss is not None or _change(step, seed) >= TOLERANCE[dtype]:
        return True
    parameters = [parameter for parameter in step.module.parameters() if parameter.dim() > 1]
    generators: dict[torch.device, torch.Generator] = {}
    with torch.no_grad():
        before = [parameter.clone() for parameter in parameters]
        for parameter in parameters:
            device = parameter.device
            if device not in generators:
                generators[device] = torch.Generator(device=device).manual_seed(seed)
            enlarge(parameter, generators[device])
        if _change(step, seed) >= TOLERANCE[dtype]:
            return True
        for parameter, value in zip(parameters, before, strict=True):
            parameter.copy_(value)
    return False


def _change(step: ModelStep, seed: int) -> float:
    """Return the largest relative change of a result with other inputs of the same distribution."""

    def other(tensor: torch.Tensor) -> torch.Tensor:
        shuffled = tensor.clone()
        if not _is_ascending(tensor):
            shuffle(shuffled, torch.Generator(device=tensor.device).manual_seed(seed + 1))
        return shuffled

    def results(inputs: Any) -> list[torch.Tensor]:
        with torch.no_grad():
            returned = pytree.tree_leaves(step.module(*inputs))
        return [leaf.clone() for leaf in returned if isinstance(leaf, torch.Tensor)]

    given = results(step.inputs)
    others = results(pytree.tree_map_only(torch.Tensor, other, step.inputs))
    return largest_change(zip(given, others, strict=True))


def _is_ascending(tensor: torch.Tensor) -> bool:
    """Whether integers ascend, as where the bags of a table begin: in another order they may mean nothing."""
    if tensor.is_floating_point() or tensor.is_complex() or tensor.numel() < 2:
        return False
    values = tensor.reshape(-1)
    return bool((values[1:] >= values[:-1]).all())
