"""Copies of a call's arguments and results, to and from a graph's memory: a kernel for all tensors of a type."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

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


def share_memory(tensors: Sequence[torch.Tensor]) -> bool:
    """Whether the address ranges of two tensors overlap."""
    ranges = sorted(map(_range, tensors))
    return any(end > begin for (_, end), (begin, _) in pairwise(ranges))


def _range(tensor: torch.Tensor) -> tuple[int, int]:
    begin = tensor.data_ptr()
    if not tensor.numel():
        return begin, begin
    last = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return begin, begin + (last + 1) * tensor.element_size()
