"""Operator arguments to and from the JSON encoding that `gpusim.trace.values` describes."""

from __future__ import annotations

import math
from collections.abc import Callable, Container, Sequence
from typing import Any

import torch

from gpusim.errors import CaptureError, OperatorError


def encode(value: Any, tensor_id: Callable[[torch.Tensor], int]) -> Any:
    """An operator argument as plain JSON; tensors become references. Raises `CaptureError` for what has no encoding."""
    if value is None or isinstance(value, bool | int | str):
        return value
    if isinstance(value, float):
        return value if math.isfinite(value) else {"float": str(value)}
    if isinstance(value, torch.Tensor):
        return {"tensor": tensor_id(value)}
    if isinstance(value, list | tuple):
        return [encode(part, tensor_id) for part in value]
    if isinstance(value, torch.dtype):
        return {"dtype": str(value).removeprefix("torch.")}
    if isinstance(value, torch.device):
        return {"device": value.type}
    if isinstance(value, torch.layout):
        return {"layout": str(value).removeprefix("torch.")}
    if isinstance(value, torch.memory_format):
        return {"memory_format": str(value).removeprefix("torch.")}
    if isinstance(value, torch.SymInt | torch.SymFloat):
        raise CaptureError("the step has sizes that depend on data; gpusim captures steps of fixed shape")
    raise CaptureError(f"an operator argument of type {type(value).__name__} has no encoding in a trace")


def decode(
    value: Any, tensors: Sequence[torch.Tensor | None], device: torch.device, without: Container[int] = ()
) -> Any:
    """The argument that `encode` encoded; device arguments become `device`, the tensors `without` None."""
    if isinstance(value, list | tuple):
        return [decode(part, tensors, device, without) for part in value]
    if not isinstance(value, dict):
        return value
    tag, inner = next(iter(value.items()))
    if tag == "tensor":
        if inner in without:
            return None
        tensor = tensors[inner]
        assert tensor is not None, f"tensor {inner} is not alive"
        return tensor
    if tag == "float":
        return float(inner)
    if tag == "device":
        return device if inner == "cuda" else torch.device(inner)
    kind = {"dtype": torch.dtype, "layout": torch.layout, "memory_format": torch.memory_format}[tag]
    found = getattr(torch, str(inner), None)
    if not isinstance(found, kind):
        raise OperatorError(f"unknown {tag} '{inner}' in an operator argument")
    return found
