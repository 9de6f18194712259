"""Masks of dropout: those of one device, cut for a share, and those of a layer that every rank computes."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch.nn import functional

from gpusim.layerwise.configs import Config
from gpusim.layerwise.layers import DIMS, Layer, LayerOp

Masks = dict[int, torch.Tensor]
"""Number of an operation -> its mask: 1 where an element is kept, else 0."""


def whole_masks(layer: Layer, generator: torch.Generator) -> Masks:
    """Draw the masks of a whole layer from a generator on the CPU."""
    return {
        number: (torch.rand(_extents(op, layer.output), generator=generator) >= op.options["p"])
        for number, op in _drops(layer)
    }


def part_of(mask: torch.Tensor, low: Sequence[int], high: Sequence[int]) -> torch.Tensor:
    """Return a share's part of a mask, which may be the same along a dimension."""
    return mask[
        tuple(
            slice(int(a), int(b)) if size > 1 else slice(None) for a, b, size in zip(low, high, mask.shape, strict=True)
        )
    ]


def same_masks(layer: Layer, generator: torch.Generator, dtype: torch.dtype) -> Masks:
    """Draw the masks of a layer that every rank computes, from a generator that all ranks have in the same state."""
    return {
        number: torch.empty(_extents(op, layer.output), device=generator.device, dtype=dtype).bernoulli_(
            1 - op.options["p"], generator=generator
        )
        for number, op in _drops(layer)
    }


def draws_same_masks(layer: Layer, config: Config, gpus: int) -> bool:
    """Whether several ranks compute the whole layer, and it has a dropout."""
    return config.replicated and gpus > 1 and bool(_drops(layer))


def dropped(op: LayerOp, value: torch.Tensor, mask: torch.Tensor | None) -> torch.Tensor:
    """Return a share after dropout, with a mask of its own if none is given."""
    p = op.options["p"]
    if mask is None and len(op.options.get("drawn", DIMS)) == len(DIMS):
        return functional.dropout(value, p)
    if mask is None:
        mask = (torch.rand(_extents(op, value.shape), device=value.device) >= p).to(value.dtype)
    return value * mask / (1 - p or 1.0)  # with p = 1 the mask is zero


def _drops(layer: Layer) -> list[tuple[int, LayerOp]]:
    return [(number, op) for number, op in enumerate(layer.ops) if op.kind == "dropout"]


def _extents(op: LayerOp, sizes: Sequence[int]) -> list[int]:
    """Return the extents of a mask of a layer, or of a share, of these sizes."""
    drawn = op.options.get("drawn", DIMS)
    return [size if dim in drawn else 1 for dim, size in zip(DIMS, sizes, strict=True)]
