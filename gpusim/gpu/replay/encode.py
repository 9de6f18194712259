"""Conversion of operator arguments to and from the JSON encoding of `gpusim.formats.arguments`."""

from __future__ import annotations

import math
from collections.abc import Callable, Container, Mapping, Sequence
from typing import Any

import torch

from gpusim.errors import CaptureError, OperatorError, ReplayError
from gpusim.gpu.device import is_another_gpu

#: torch's value of each dtype name in a trace; no other name from a file is looked up in torch.
DTYPES: dict[str, torch.dtype] = {
    "bool": torch.bool,
    "uint8": torch.uint8,
    "int8": torch.int8,
    "int16": torch.int16,
    "int32": torch.int32,
    "int64": torch.int64,
    "uint16": torch.uint16,
    "uint32": torch.uint32,
    "uint64": torch.uint64,
    "float16": torch.float16,
    "bfloat16": torch.bfloat16,
    "float32": torch.float32,
    "float64": torch.float64,
    "complex64": torch.complex64,
    "complex128": torch.complex128,
    "float8_e4m3fn": torch.float8_e4m3fn,
    "float8_e5m2": torch.float8_e5m2,
}
_NAMED: dict[str, dict[str, Any]] = {
    "dtype": DTYPES,
    "layout": {"strided": torch.strided},
    "memory_format": {
        "contiguous_format": torch.contiguous_format,
        "channels_last": torch.channels_last,
        "channels_last_3d": torch.channels_last_3d,
        "preserve_format": torch.preserve_format,
    },
}


def encode(value: Any, tensor_id: Callable[[torch.Tensor], int], device: torch.device) -> Any:
    """Encode an operator argument as plain JSON; tensors become references, the step's device `cuda`.

    Raises `CaptureError` for a value without encoding, and for another device.
    """
    if value is None or isinstance(value, bool | int | str):
        return value
    if isinstance(value, float):
        return value if math.isfinite(value) else {"float": str(value)}
    if isinstance(value, torch.Tensor):
        return {"tensor": tensor_id(value)}
    if isinstance(value, list | tuple):
        return [encode(part, tensor_id, device) for part in value]
    if isinstance(value, torch.dtype):
        return {"dtype": str(value).removeprefix("torch.")}
    if isinstance(value, torch.device):
        if value.type != device.type or is_another_gpu(value, device):
            raise CaptureError(f"the step computes on {value}, too; all of it must be on the same GPU")
        return {"device": "cuda"}
    if isinstance(value, torch.layout):
        return {"layout": str(value).removeprefix("torch.")}
    if isinstance(value, torch.memory_format):
        return {"memory_format": str(value).removeprefix("torch.")}
    if isinstance(value, torch.SymInt | torch.SymFloat):
        raise CaptureError("the step has sizes that depend on data; gpusim captures steps of fixed shape")
    raise CaptureError(f"an operator argument of type {type(value).__name__} has no encoding in a trace")


def decode(
    value: Any,
    tensors: Sequence[torch.Tensor | None] | Mapping[int, torch.Tensor | None],
    device: torch.device,
    without: Container[int] = (),
) -> Any:
    """Decode an argument; the step's device becomes `device`, the tensors `without` become None.

    Raises `OperatorError` for a value that no captured step has, and `ReplayError` for an absent tensor.
    """
    if isinstance(value, list | tuple):
        return [decode(part, tensors, device, without) for part in value]
    if not isinstance(value, dict):
        return value
    tag, inner = next(iter(value.items()))
    if tag == "tensor":
        if inner in without:
            return None
        tensor = tensors[inner]
        if not isinstance(tensor, torch.Tensor):
            raise ReplayError(f"tensor {inner} is missing when an op takes it")
        return tensor
    if tag == "float" and inner in ("inf", "-inf", "nan"):
        return float(inner)
    if tag == "device" and inner == "cuda":
        return device
    if tag in _NAMED and isinstance(inner, str) and inner in _NAMED[tag]:
        return _NAMED[tag][inner]
    raise OperatorError(f"unknown {tag} {str(inner)[:80]!r} in an operator argument")
