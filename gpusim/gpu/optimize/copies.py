"""Copies of a call's arguments and results, to and from a graph's memory: a kernel for many tensors of a type.

torch's kernel for lists of tensors gives each block 65,536 elements. So a few large tensors are copied faster alone: an
image of 150,528 elements by 6 us on an H200 (research/2026-11-28-copies.md).
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Final

import torch

#: Elements that a block of torch's kernel for lists copies.
BLOCK_ELEMENTS: Final = 65_536
#: Most large tensors of a type that are copied alone: each takes the host 5 to 7 us more than one in a list.
MOST_ALONE: Final = 2


class Copies:
    """Copier of tensors into fixed memory, given in the same order."""

    def __init__(self, memory: Sequence[torch.Tensor]) -> None:
        by_type: dict[torch.dtype, list[int]] = {}
        for place, tensor in enumerate(memory):
            by_type.setdefault(tensor.dtype, []).append(place)
        alone = {place for places in by_type.values() for place in _alone(places, memory)}
        self._alone = [(place, memory[place]) for place in sorted(alone)]
        listed = [[place for place in places if place not in alone] for places in by_type.values()]
        self._groups = [(places, [memory[place] for place in places]) for places in listed if places]

    def __call__(self, tensors: Sequence[torch.Tensor]) -> None:
        """Copy all; call it without gradient recording."""
        for place, target in self._alone:
            target.copy_(tensors[place], non_blocking=True)
        for places, memory in self._groups:
            torch._foreach_copy_(memory, [tensors[place] for place in places], non_blocking=True)


def _alone(places: Sequence[int], memory: Sequence[torch.Tensor]) -> Sequence[int]:
    """Return the places of one type's tensors that are copied alone."""
    if len(places) == 1:
        return places
    large = [place for place in places if memory[place].numel() > BLOCK_ELEMENTS]
    return large if len(large) <= MOST_ALONE else []


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
