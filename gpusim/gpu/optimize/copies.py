"""Copies of a call's arguments into the fixed memory of a graph: one kernel for all tensors of a type, not one each."""

from __future__ import annotations

from collections.abc import Sequence

import torch


class Copies:
    """Copies tensors into fixed memory, given in the same order."""

    def __init__(self, memory: Sequence[torch.Tensor]) -> None:
        by_type: dict[torch.dtype, list[int]] = {}
        for place, tensor in enumerate(memory):
            by_type.setdefault(tensor.dtype, []).append(place)
        self._groups = [(places, [memory[place] for place in places]) for places in by_type.values()]

    def __call__(self, tensors: Sequence[torch.Tensor]) -> None:
        """Copy all; call it where no gradients are recorded."""
        for places, memory in self._groups:
            torch._foreach_copy_(memory, [tensors[place] for place in places], non_blocking=True)
