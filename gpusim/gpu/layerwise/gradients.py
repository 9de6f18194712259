"""Gradients of a layer by torch's autograd, kept with its parameters without needless copies."""

from __future__ import annotations

from collections.abc import Sequence

import torch


def gradients_of(
    output: torch.Tensor,
    gradient: torch.Tensor,
    buffers: Sequence[torch.Tensor],
    others: Sequence[torch.Tensor],
    *,
    keep_graph: bool = False,
) -> tuple[list[torch.Tensor | None], list[torch.Tensor | None]]:
    """Return the gradients of buffers and of other tensors; None for those that need none.

    `backward()` would copy a gradient that two inputs share, as those of a sum do.
    """
    leaves = [each for each in (*buffers, *others) if each.requires_grad]
    if not leaves or not output.requires_grad:
        return [None] * len(buffers), [None] * len(others)
    results = torch.autograd.grad([output], leaves, [gradient], allow_unused=True, retain_graph=keep_graph)
    of = {id(leaf): result for leaf, result in zip(leaves, results, strict=True)}
    return [of.get(id(buffer)) for buffer in buffers], [of.get(id(other)) for other in others]


def keep(
    parameters: Sequence[torch.Tensor],
    gradients: Sequence[torch.Tensor | None],
    others: Sequence[torch.Tensor | None],
) -> None:
    """Keep gradients with their parameters; copies of those with memory of `others`, as they are summed in place."""
    shared = {each.untyped_storage().data_ptr() for each in others if each is not None}
    for parameter, gradient in zip(parameters, gradients, strict=True):
        if gradient is None:
            continue
        place = gradient.untyped_storage().data_ptr()
        parameter.grad = gradient.clone() if place in shared else gradient
        shared.add(place)
