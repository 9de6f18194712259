"""Tensor helpers that recording and replay share."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import torch

from gpusim.gpu.replay.saved_facts import NEVER_THERE


def flat_results(result: Any) -> list[Any]:
    """Flatten a call's results: one entry per tensor (or None or number), in order."""
    if isinstance(result, list | tuple):
        return [part for item in result for part in flat_results(item)]
    return [] if result is None and not isinstance(result, torch.Tensor) else [result]


def placed_results(target: str, result: Any, count: int) -> list[Any] | None:
    """Return a call's results at the `count` places of its op's `outputs`; None where they do not fit.

    A place is a position in the operator's schema, with None for an absent result, and without those of `NEVER_THERE`.
    Ops recorded on real tensors omit absent results, so the present ones alone may fit.
    """
    never = NEVER_THERE.get(target, ())
    parts = result if isinstance(result, list | tuple) else [result]
    possible = [part for place, part in enumerate(parts) if place not in never]
    return next((fit for fit in (_leaves(parts), _leaves(possible), flat_results(result)) if len(fit) == count), None)


def _leaves(part: Any) -> list[Any]:
    return [leaf for inner in part for leaf in _leaves(inner)] if isinstance(part, list | tuple) else [part]


def equal_elements(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Whether two tensors of one shape have equal elements; NaN is equal to NaN."""
    if torch.equal(one, other):
        return True
    return one.shape == other.shape and bool(((one == other) | ((one != one) & (other != other))).all())


def lies_in_storage(tensor: torch.Tensor) -> bool:
    """Whether all elements of a tensor lie in its memory."""
    if tensor.layout != torch.strided or min(tensor.stride(), default=0) < 0 or tensor.storage_offset() < 0:
        return False
    if not tensor.numel():
        return True
    last = tensor.storage_offset() + sum((n - 1) * d for n, d in zip(tensor.shape, tensor.stride(), strict=True))
    return (last + 1) * tensor.element_size() <= tensor.untyped_storage().nbytes()


def restore_elements(tensor: torch.Tensor, copy: torch.Tensor) -> None:
    """Write a copy's elements back into its tensor, also into an expanded one, whose elements share memory."""
    for dim, (size, stride) in enumerate(zip(tensor.shape, tensor.stride(), strict=True)):
        if size > 1 and not stride:
            tensor, copy = tensor.narrow(dim, 0, 1), copy.narrow(dim, 0, 1)
    with torch.inference_mode() if tensor.is_inference() else nullcontext():
        tensor.copy_(copy)


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
