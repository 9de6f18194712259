"""What a rule says of a traced operator as a layer, and the tensors that operators take."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

from gpusim.formats.trace import Op, Trace
from gpusim.layerwise import op_rules as rules
from gpusim.layerwise.frames import Frame
from gpusim.layerwise.layers import Need

Needs = tuple[Need, Need, Need, Need]
Inputs = Sequence[tuple[int, Frame | None]]
"""Tensors produced by layers (or the batch), with the meaning of their dimensions."""


@dataclass(frozen=True, slots=True)
class Rule:
    """An operator's properties as a layer; None in `needs`: a sample needs all of the same sample."""

    kind: str
    splits: str
    frame: Frame | None
    flops: int
    needs: tuple[Needs | None, ...] = ()
    channel_unit: int = 1

    def __post_init__(self) -> None:
        if self.channel_unit < 1:
            raise ValueError("more groups than channels")


def second_factor(op: Op, name: str) -> int | None:
    """Return the right factor of a product, or the weight of a convolution: each sample needs all of it."""
    place = {"addmm": 2}.get(name, 1)
    if name not in rules.LINEAR | rules.CONVOLUTIONS or len(op.args) <= place:
        return None
    return next(iter(tensors_in(op.args[place])), None)


def tensors_in(value: Any) -> list[int]:
    """Return the tensors among encoded arguments, in order."""
    if isinstance(value, dict):
        if set(value) == {"tensor"}:
            return [int(value["tensor"])]
        return [t for each in value.values() for t in tensors_in(each)]
    if isinstance(value, list | tuple):
        return [t for each in value for t in tensors_in(each)]
    return []


def parameters_of(trace: Trace, tensor: int) -> set[int]:
    """Return the parameter that a tensor is, or is a view of."""
    storage = trace.tensors[tensor].storage
    return {i for i, t in enumerate(trace.tensors) if t.storage == storage and t.role == "parameter"}


def fits(trace: Trace, tensor: int, frame: Frame) -> bool:
    """Whether a frame fits a tensor's shape."""
    return tuple(prod(size for _, size in row) for row in frame.rows) == tuple(trace.tensors[tensor].shape)
