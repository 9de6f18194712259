"""The operations of a whole layer or of a share, on tensors of four dimensions (n, c, h, w).

The input of a split map already has its halo and padding, so its window operations add none.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.nn import functional

from gpusim.errors import OptionError
from gpusim.layerwise.layers import Layer, LayerOp
from gpusim.layerwise.op_programs import ACTIVATIONS

#: Sums a tensor differentiably over the parts with shared statistics.
SharedSum = Callable[[torch.Tensor], torch.Tensor]

#: Epsilon of BatchNorm and LayerNorm: torch's defaults.
EPSILON = 1e-5


@dataclass(frozen=True)
class Surroundings:
    """Context of a share: its part of the channels and samples, shared sums, and a dropout mask."""

    channels: tuple[int, int]
    """First and last channel of the layer's output."""
    samples: tuple[int, int]
    batch: int
    """Samples in all parts together."""
    shared_sum: SharedSum | None = None
    """None if no other part shares statistics with this one."""
    targets: torch.Tensor | None = None
    mask: torch.Tensor | None = None
    """The share's part of a dropout mask; None for torch's own dropout."""


@dataclass(frozen=True)
class Parameter:
    """A whole parameter: its shape, channels first, and the spread of its values."""

    shape: tuple[int, ...]
    scale: float
    mean: float = 0.0


def parameter_shapes(layer: Layer) -> list[dict[str, Parameter]]:
    """Return the parameters of each operation of a layer."""
    parameters = []
    for op in layer.ops:
        named: dict[str, Parameter] = {}
        if op.kind == "convolution":
            before, channels = op.options["channels"]
            shape = (channels, before // op.options["groups"], *op.options["kernel"])
            named["weight"] = Parameter(shape, math.sqrt(2 / math.prod(shape[1:])))
        elif op.kind == "linear":
            before, channels = op.options["channels"]
            named["weight"] = Parameter((channels, before), math.sqrt(1 / before))
        if op.options.get("bias"):
            named["bias"] = Parameter((op.options["channels"][1],), 0.1)
        if op.kind in ("batch_norm", "layer_norm", "channel_scale"):
            named["weight"] = Parameter((layer.output[1],), 0.1, 1.0)
        if op.kind in ("batch_norm", "layer_norm"):
            named["bias"] = Parameter((layer.output[1],), 0.1)
        parameters.append(named)
    return parameters


def parameters_of(layer: Layer, generator: torch.Generator, dtype: torch.dtype) -> list[dict[str, torch.Tensor]]:
    """Return whole parameters with random values from a generator on the CPU."""

    def values(each: Parameter) -> torch.Tensor:
        drawn = torch.randn(each.shape, generator=generator, dtype=torch.float64)
        return (each.mean + each.scale * drawn).to(dtype)

    return [{name: values(each) for name, each in named.items()} for named in parameter_shapes(layer)]


def run_layer(
    layer: Layer,
    inputs: Sequence[torch.Tensor],
    parameters: Sequence[dict[str, torch.Tensor]],
    where: Surroundings,
    *,
    padded: tuple[bool, bool] = (False, False),
) -> torch.Tensor:
    """Compute a layer's output; `padded` says whether inputs already have halo and padding in height and width.

    Raises `OptionError` for an unsupported operation.
    """
    value: Any = inputs
    for op, named in zip(layer.ops, parameters, strict=True):
        value = _run(layer, op, value, named, where, padded)
    if isinstance(value, torch.Tensor):
        return value
    raise OptionError(f"layer '{layer.name}' has no operations to run: only its times are known")


def _run(
    layer: Layer,
    op: LayerOp,
    value: Any,
    named: dict[str, torch.Tensor],
    where: Surroundings,
    padded: tuple[bool, bool],
) -> torch.Tensor:
    first = value if isinstance(value, torch.Tensor) else value[0] if value else None
    kind, options = op.kind, op.options
    if kind == "concat":
        parts = [part for part in value if part.shape[1]]
        return torch.cat(parts, dim=1)
    if kind == "add":
        total: torch.Tensor = value[0]
        for other in value[1:]:
            total = total + other
        return total
    if kind == "multiply":
        product: torch.Tensor = value[0] * value[1]
        return product
    if kind == "attention":
        return _attention(value, options["heads"], layer.output[1])
    assert first is not None
    if kind == "convolution":
        groups = options["groups"] * named["weight"].shape[0] // options["channels"][1]
        padding = _left_to_add(options["padding"], padded)
        dilation = options.get("dilation", 1)
        return functional.conv2d(
            first, named["weight"], named.get("bias"), options["stride"], padding, dilation, max(1, groups)
        )
    if kind == "linear":
        return _linear(first, named["weight"], named.get("bias"))
    if kind == "pool":
        padding = _left_to_add(options["padding"], padded)
        if options["average"]:
            return functional.avg_pool2d(first, options["kernel"], options["stride"], padding)
        ceil = bool(options.get("ceil"))
        return functional.max_pool2d(first, options["kernel"], options["stride"], padding, ceil_mode=ceil)
    if kind == "global_pool":
        return first.mean(dim=(2, 3), keepdim=True)
    if kind == "adaptive_pool":
        return functional.adaptive_avg_pool2d(first, options["output"])
    if kind == "flatten":
        return first.reshape(first.shape[0], -1, 1, 1)
    if kind == "batch_norm":
        return _batch_norm(first, named["weight"], named["bias"], where, options.get("epsilon", EPSILON))
    if kind == "layer_norm":
        rows = first.permute(0, 2, 3, 1)
        epsilon = options.get("epsilon", EPSILON)
        normed = functional.layer_norm(rows, rows.shape[-1:], named["weight"], named["bias"], epsilon)
        return normed.permute(0, 3, 1, 2)
    if kind in ACTIVATIONS:
        activated: torch.Tensor = getattr(functional, kind)(first, **options)
        return activated
    if kind == "channel_scale":
        return first * named["weight"][:, None, None]
    if kind == "identity":
        return first
    if kind == "scale":
        return first * float(options["factor"])
    if kind == "dropout":
        if where.mask is None:
            return functional.dropout(first, options["p"])
        return first * where.mask / (1 - options["p"])
    if kind == "loss":
        assert where.targets is not None
        logits = first.flatten(1)
        return functional.cross_entropy(logits, where.targets, reduction="sum") / where.batch
    raise OptionError(f"layer '{layer.name}': nothing runs a {kind}")


def _left_to_add(padding: int | tuple[int, int], padded: tuple[bool, bool]) -> tuple[int, int]:
    """Return the padding that the input still lacks."""
    height, width = (padding, padding) if isinstance(padding, int) else padding
    return 0 if padded[0] else height, 0 if padded[1] else width


def _linear(value: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    if value.shape[2] == value.shape[3] == 1:
        return functional.linear(value.flatten(1), weight, bias)[:, :, None, None]
    return functional.linear(value.permute(0, 2, 3, 1), weight, bias).permute(0, 3, 1, 2)


def _attention(inputs: Sequence[torch.Tensor], heads: int, channels: int) -> torch.Tensor:
    """Attention with heads in the channels and positions in the height."""
    width = channels // heads
    query, key, value = (x.reshape(x.shape[0], -1, width, x.shape[2]).transpose(2, 3) for x in inputs)
    mixed = functional.scaled_dot_product_attention(query, key, value)
    return mixed.transpose(2, 3).reshape(inputs[0].shape)


def _batch_norm(
    value: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor, where: Surroundings, epsilon: float
) -> torch.Tensor:
    """BatchNorm, with torch's kernel for statistics of this part alone, else with shared sums."""
    if where.shared_sum is None:
        return functional.batch_norm(value, None, None, weight, bias, training=True, eps=epsilon)
    count = torch.full((1,), float(value.numel() // value.shape[1]), dtype=value.dtype, device=value.device)
    sums = where.shared_sum(torch.cat([value.sum(dim=(0, 2, 3)), value.square().sum(dim=(0, 2, 3)), count]))
    channels = value.shape[1]
    mean = sums[:channels] / sums[-1]
    variance = sums[channels:-1] / sums[-1] - mean.square()
    scale = weight * torch.rsqrt(variance + epsilon)
    return value * scale[:, None, None] + (bias - mean * scale)[:, None, None]


class SharedSums(torch.autograd.Function):
    """Sum over ranks; its gradient is the sum of the ranks' gradients."""

    @staticmethod
    def forward(ctx: Any, value: torch.Tensor, reduce: Callable[[torch.Tensor], None]) -> torch.Tensor:
        """Sum a copy over ranks."""
        ctx.reduce = reduce
        total = value.clone()
        reduce(total)
        return total

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        """Sum the gradients over ranks."""
        total = gradient.clone()
        ctx.reduce(total)
        return total, None
