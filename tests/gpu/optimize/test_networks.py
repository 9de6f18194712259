"""Networks that are each hard in their own way, optimized: views, changes in place, shared weights, indices."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch.utils import _pytree as pytree

from gpusim.gpu.capture.capture import build_step
from gpusim.gpu.capture.options import CaptureOptions
from gpusim.gpu.optimize.callable import OptimizedStep
from gpusim.gpu.optimize.peers import tensors_of, user_step
from tests.support.networks import BATCH, CPU, NETWORKS, spec
from tests.support.optimizing import close, fast, same_states


def made(name: str, mode: Any) -> Any:
    return build_step(CaptureOptions(spec=spec(name), mode=mode, batch=BATCH, dtype="fp32"), CPU)


def batches(step: Any) -> list[tuple[Any, ...]]:
    """Return the step's batch, and others of the same kind."""

    def other(tensor: torch.Tensor) -> torch.Tensor:
        return tensor.flip(0) * 0.5 if tensor.is_floating_point() else tensor.flip(0)

    given = tensors_of(step)
    return [given, pytree.tree_map_only(torch.Tensor, other, given), given]


def same(one: Any, other: Any) -> None:
    for found, wanted in zip(pytree.tree_leaves(one), pytree.tree_leaves(other), strict=True):
        if isinstance(wanted, torch.Tensor):
            close(found, wanted)
        else:
            assert found == wanted


@pytest.mark.parametrize("name", NETWORKS)
def test_training(name: str) -> None:
    step = made(name, "train")
    mine, theirs = copy.deepcopy(step.module), copy.deepcopy(step.module)
    optimized = fast(user_step(step, mine, mine), tensors_of(step))
    assert isinstance(optimized, OptimizedStep)
    eager = user_step(step, theirs, theirs)
    for number, batch in enumerate(batches(step)):
        ours, others = (pytree.tree_map_only(torch.Tensor, torch.clone, batch) for _ in range(2))
        torch.manual_seed(number)
        found = optimized(*ours)
        torch.manual_seed(number)
        same(found, eager(*others))
        same(ours, others)  # the optimized step changes its inputs as the step does
    same_states(mine.state_dict(), theirs.state_dict())


@pytest.mark.parametrize("name", NETWORKS)
def test_inference(name: str) -> None:
    step = made(name, "infer")
    theirs = copy.deepcopy(step.module)
    optimized = fast(step.module, step.inputs)
    assert isinstance(optimized, OptimizedStep)
    with torch.no_grad():
        for number, batch in enumerate(batches(step)):
            ours, others = (pytree.tree_map_only(torch.Tensor, torch.clone, batch) for _ in range(2))
            torch.manual_seed(number)  # one of them drops out at inference, too
            found = optimized(*ours)
            torch.manual_seed(number)
            same(found, theirs(*others))
            same(ours, others)
    same_states(step.module.state_dict(), theirs.state_dict())
