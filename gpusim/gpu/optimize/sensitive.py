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

    Training steps are left alone: gradients depend on everything.
    """
    if step.loss is not None or _change(step, seed) >= TOLERANCE[dtype]:
        return True
    parameters = [parameter for parameter in step.module.parameters() if parameter.dim() > 1]
    with torch.no_grad():
        for parameter in parameters:
            enlarge(parameter, torch.Generator(device=parameter.device).manual_seed(seed))
    return _change(step, seed) >= TOLERANCE[dtype]


def _change(step: ModelStep, seed: int) -> float:
    """Return the largest relative change of a result with other inputs of the same distribution."""

    def other(tensor: torch.Tensor) -> torch.Tensor:
        shuffled = tensor.clone()
        if tensor.is_floating_point():
            shuffle(shuffled, torch.Generator(device=tensor.device).manual_seed(seed + 1))
        return shuffled

    def results(inputs: Any) -> list[torch.Tensor]:
        with torch.no_grad():
            returned = pytree.tree_leaves(step.module(*inputs))
        return [leaf.clone() for leaf in returned if isinstance(leaf, torch.Tensor)]

    given = results(step.inputs)
    others = results(pytree.tree_map_only(torch.Tensor, other, step.inputs))
    return largest_change(zip(given, others, strict=True))
