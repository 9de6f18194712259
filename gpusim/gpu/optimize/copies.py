"""Copies of a call's arguments and results, to and from a graph's memory: a kernel for all tensors of a type."""

from __future__ import annotations

from collections.abc import Sequence

import torch


class Copies:
    """Copier of tensors into fixed memory, given in the same order."""

    def __init__(self, memory: Sequence[torch.Tensor]) -> None:
        by_type: dict[torch.dtype, list[int]] = {}
        for place, tensor in enumerate(memory):
            by_type.setdefault(tensor.dtype, []).append(place)
        self._groups = [(places, [memory[place] for place in places]) for places in by_type.values()]

    def __call__(self, tensors: Sequence[torch.Tensor]) -> None:
        """Copy all; call it without gradient recording."""
        for places, memory in self._groups:
            torch._foreach_copy_(memory, [tensors[place] for place in places], non_blocking=True)


def fresh(tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Copy tensors to memory of their own, laid out alike; call it where no gradients are recorded."""
    if len(tensors) == 1:
        return [tensors[0].clone()]
    made = [torch.empty_like(tensor) for tensor in tensors]
    Copies(made)(tensors)
    return made
