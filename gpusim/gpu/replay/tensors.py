"""Tensor helpers that recording and replay share."""

from __future__ import annotations

from typing import Any

import torch


def flat_results(result: Any) -> list[Any]:
    """Flatten a call's results: one entry per tensor (or None or number), in order."""
    if isinstance(result, list | tuple):
        return [part for item in result for part in flat_results(item)]
    return [] if result is None and not isinstance(result, torch.Tensor) else [result]


def lies_in_storage(tensor: torch.Tensor) -> bool:
    """Whether all elements of a tensor lie in its memory."""
    if tensor.layout != torch.strided or min(tensor.stride(), default=0) < 0 or tensor.storage_offset() < 0:
        return False
    if not tensor.numel():
        return True
    last = tensor.storage_offset() + sum((n - 1) * d for n, d in zip(tensor.shape, tensor.stride(), strict=True))
    return (last + 1) * tensor.element_size() <= tensor.untyped_storage().nbytes()


def copy_sharing(tensors: dict[int, torch.Tensor]) -> dict[int, torch.Tensor]:
    """Copy tensors with their strides; tensors of one storage share a storage again."""
    memory: dict[int, torch.UntypedStorage] = {}
    result = {}
    for index, tensor in tensors.items():
        storage = tensor.untyped_storage()
        if storage._cdata not in memory:
            memory[storage._cdata] = storage.clone()
        copy = torch.empty(0, dtype=tensor.dtype, device=tensor.device)
        copy.set_(memory[storage._cdata], tensor.storage_offset(), tensor.shape, tensor.stride())
        result[index] = copy
    return result
