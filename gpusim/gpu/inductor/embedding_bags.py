"""Gradients of embedding bags as additions into zeros, as Inductor has them for plain embeddings.

ATen sorts the ids of a table first, by a dozen short kernels, which Inductor calls, too. Its own gradient of an
embedding is one kernel of atomic additions (`embedding_dense_backward` in `torch/_decomp/decompositions.py`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Final

import torch

_ATEN: Final = torch.ops.aten
_SUM, _MEAN = 0, 1


def with_embedding_bags(table: Mapping[Any, Callable[..., Any]]) -> dict[Any, Callable[..., Any]]:
    """Return a table of decompositions with that of the gradient of embedding bags.

    The order of additions varies from call to call where a batch has an id twice, so the gradient varies by rounding.
    """
    return {**table, _ATEN._embedding_bag_backward.default: gradient_of_table}


def gradient_of_table(
    grad: torch.Tensor,
    indices: torch.Tensor,
    offsets: torch.Tensor,
    offset2bag: torch.Tensor,
    bag_size: torch.Tensor,
    maximum_indices: torch.Tensor,
    num_weights: int,
    scale_grad_by_freq: bool,
    mode: int,
    sparse: bool,
    per_sample_weights: torch.Tensor | None,
    padding_idx: int = -1,
) -> Any:
    """Return the gradient of a table, [num_weights, width], or `NotImplemented` where ATen's operator is to stay.

    Arguments are those of `_embedding_bag_backward`. It stays for maxima, for gradients scaled by frequency, sparse
    ones and those of 16 bits, which ATen sums in 32, where each id's bag is not known, and where the user wants the
    same result in each call (`torch.use_deterministic_algorithms`).
    """
    known = offset2bag.numel() == indices.numel()
    plain = mode in (_SUM, _MEAN) and not scale_grad_by_freq and not sparse
    if not known or not plain or grad.dtype != torch.float32 or torch.are_deterministic_algorithms_enabled():
        return NotImplemented
    added = _ATEN.index_select.default(grad, 0, offset2bag)
    if mode == _MEAN:
        sizes = _ATEN.index_select.default(bag_size, 0, offset2bag)
        added = added / sizes.unsqueeze(1)
    if per_sample_weights is not None:
        added = added * per_sample_weights.unsqueeze(1)
    if padding_idx >= 0:
        added = torch.where((indices != padding_idx).unsqueeze(1), added, 0.0)
    zeros = grad.new_zeros((num_weights, grad.shape[1]))
    return _ATEN._unsafe_index_put.default(zeros, [indices], added, True)
