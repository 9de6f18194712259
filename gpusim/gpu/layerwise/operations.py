"""The operations of a whole layer or of a share, on tensors of four dimensions (n, c, h, w).

The input of a split map already has its halo and padding, so its window operations add none.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.nn import functional

from gpusim.errors import OptionError
from gpusim.gpu.layerwise.dropout import dropped
from gpusim.gpu.layerwise.laid_out import (
    as_traced,
    attention,
    attention_of_samples,
    features_to_channels,
    parameter_name,
    run_laid_out,
    with_fixed,
)
from gpusim.gpu.layerwise.larger_maps import shuffled, transposed_convolution, upsampled, without_padding
from gpusim.layerwise.image_rules import SHUFFLES
from gpusim.layerwise.layers import NORMS, Input, Layer, LayerOp
from gpusim.layerwise.operands import own_parameters

#: Sums a tensor differentiably over the parts with shared statistics.
SharedSum = Callable[[torch.Tensor], torch.Tensor]

#: Epsilon of BatchNorm and LayerNorm: torch's defaults.
EPSILON = 1e-5


@dataclass(frozen=True)
class Surroundings:
    """Context of a share: its part of the channels and samples, shared sums, and dropout masks."""

    channels: tuple[int, int]
    """First and last channel of the layer's output."""
    samples: tuple[int, int]
    batch: int
    """Samples in all parts together."""
    shared_sum: SharedSum | None = None
    """None if no other part shares statistics with this one."""
    targets: torch.Tensor | None = None
    masks: Mapping[int, torch.Tensor] = field(default_factory=dict)
    """The share's parts of dropout masks by operation; without one, each share draws its own."""
    rows: tuple[int, int] | None = None
    """First and last row of the layer's output; None for all."""
    columns: tuple[int, int] | None = None

    def box(self, layer: Layer) -> tuple[tuple[int, int], ...]:
        """Return the share's interval in each dimension."""
        rows, columns = self.rows or (0, layer.output[2]), self.columns or (0, layer.output[3])
        return self.samples, self.channels, rows, columns


@dataclass(frozen=True)
class Parameter:
    """A whole parameter: its shape, channels first, and the spread of its values."""

    shape: tuple[int, ...]
    scale: float
    mean: float = 0.0
    channels_at: int | None = 0
    """The dimension split with the layer's channels; None if every rank has the whole parameter."""

    def share(self, channels: int) -> tuple[int, ...]:
        """Return the shape of the part for this many of the layer's channels."""
        return tuple(channels if place == self.channels_at else size for place, size in enumerate(self.shape))

    def part(self, value: torch.Tensor, first: int, last: int) -> torch.Tensor:
        """Return the part of a whole parameter, or of its gradient, for some of the layer's channels."""
        return value if self.channels_at is None else value.narrow(self.channels_at, first, last - first)


def parameter_shapes(layer: Layer) -> list[dict[str, Parameter]]:
    """Return the parameters of each operation of a layer."""
    parameters = []
    for op in layer.ops:
        named: dict[str, Parameter] = {}
        if op.kind == "convolution":
            before, channels = op.options["channels"]
            shape = (channels, before // op.options["groups"], *op.options["kernel"])
            named["weight"] = Parameter(shape, math.sqrt(2 / math.prod(shape[1:])))
        elif op.kind == "transposed_convolution":
            before, channels = op.options["channels"]
            shape = (before, channels // op.options["groups"], *op.options["kernel"])
            split_at = 1 if op.options["groups"] == 1 else None
            named["weight"] = Parameter(shape, math.sqrt(2 / before), channels_at=split_at)
        elif op.kind == "linear":
            before, channels = op.options["channels"]
            named["weight"] = Parameter((channels, before), math.sqrt(1 / before))
        if op.options.get("bias"):
            named["bias"] = Parameter((op.options["channels"][1],), 0.1)
        of_norm = op.options.get("parameters", ("weight", "bias")) if op.kind in NORMS else ()
        if "weight" in of_norm or op.kind == "channel_scale":
            named["weight"] = Parameter((layer.output[1],), 0.1, 1.0)
        if op.kind == "prelu":
            named["weight"] = Parameter((layer.output[1],), 0.1, 0.25)
        if "bias" in of_norm or op.kind == "channel_bias":
            named["bias"] = Parameter((layer.output[1],), 0.1)
        if op.kind in ("embedding", "embedding_bag"):
            named["weight"] = Parameter(op.options["table"], 1.0, channels_at=1)
        for trace, tensor in own_parameters(op):
            shape = trace.tensors[tensor].shape
            scale = math.sqrt(1 / shape[-1]) if len(shape) > 1 else 0.1
            named[parameter_name(trace, tensor)] = Parameter(shape, scale, channels_at=None)
        parameters.append(named)
    return parameters


def parameters_of(layer: Layer, generator: torch.Generator, dtype: torch.dtype) -> list[dict[str, torch.Tensor]]:
    """Return whole parameters with random values from a generator on the CPU."""

    def values(each: Parameter) -> torch.Tensor:
        # In single precision torch draws several numbers at once: five times as fast for the 138 million of VGG-16.
        drawn = torch.randn(each.shape, generator=generator, dtype=torch.float32)
        return drawn.mul_(each.scale).add_(each.mean).to(dtype)

    return [{name: values(each) for name, each in named.items()} for named in parameter_shapes(layer)]


def run_layer(
    layer: Layer,
    inputs: Sequence[torch.Tensor],
    parameters: Sequence[dict[str, torch.Tensor]],
    where: Surroundings,
    *,
    padded: tuple[bool, bool] = (False, False),
    products: list[torch.Tensor] | None = None,
) -> torch.Tensor:
    """Compute a layer's output; `padded` says whether inputs already have halo and padding in height and width.

    `products` is given the result of the layer's `product`.

    Raises `OptionError` for an unsupported operation.
    """
    value: Any = inputs
    for number, (op, named) in enumerate(zip(layer.ops, parameters, strict=True)):
        if op.kind == "dropout":
            value = dropped(op, value if isinstance(value, torch.Tensor) else value[0], where.masks.get(number))
        else:
            value = _run(layer, op, value, named, where, padded)
        if products is not None and number == layer.product:
            products.append(value)
    if isinstance(value, torch.Tensor):
        return value if value.is_floating_point() or not inputs else value.to(inputs[0].dtype)
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
    if kind == "pointwise":
        return _pointwise(layer, op, [value] if isinstance(value, torch.Tensor) else value)
    if kind == "attention":
        return attention(op, value, named, layer, where.box(layer))
    if kind == "attention_of_samples":
        return attention_of_samples(op, value, named)
    if kind == "laid_out":
        return run_laid_out(op, value if not isinstance(value, torch.Tensor) else [value], named)
    assert first is not None
    if kind == "convolution":
        return _convolution(op, first, named, padded)
    if kind == "transposed_convolution":
        return transposed_convolution(op, first, named, layer, where.box(layer))
    if kind == "upsampling":
        return upsampled(op, first, layer, where.box(layer))
    if kind == "linear":
        return _linear(first, named["weight"], named.get("bias"))
    if kind == "pool":
        padding = _left_to_add(options["padding"], padded)
        if options["average"]:
            average = functional.avg_pool2d(first, options["kernel"], options["stride"], padding)
            return (
                average
                if options.get("counts_padding", True)
                else without_padding(op, average, layer, where.box(layer))
            )
        ceil = bool(options.get("ceil"))
        return functional.max_pool2d(first, options["kernel"], options["stride"], padding, ceil_mode=ceil)
    if kind == "global_pool":
        return first.mean(dim=(2, 3), keepdim=True)
    if kind == "adaptive_pool":
        if options["average"]:
            return functional.adaptive_avg_pool2d(first, options["output"])
        return functional.adaptive_max_pool2d(first, options["output"])
    if kind in SHUFFLES:
        return shuffled(op, first, layer, where.box(layer))
    if kind == "features":
        return features_to_channels(first, options["features"])
    if kind == "flatten":
        return first.reshape(first.shape[0], -1, 1, 1)
    if kind == "batch_norm":
        return _batch_norm(first, named["weight"], named["bias"], where, options.get("epsilon", EPSILON))
    if kind in ("layer_norm", "rms_norm"):
        rows = first.permute(0, 2, 3, 1)
        over, weight = rows.shape[-1:], named.get("weight")
        if kind == "rms_norm":
            normed = functional.rms_norm(rows, over, weight, options["epsilon"])
        else:
            normed = functional.layer_norm(rows, over, weight, named.get("bias"), options.get("epsilon", EPSILON))
        return normed.permute(0, 3, 1, 2)
    if kind == "group_norm":
        groups = options["groups"] * first.shape[1] // layer.output[1]
        return functional.group_norm(first, groups, named.get("weight"), named.get("bias"), options["epsilon"])
    if kind == "prelu":
        return torch.where(first > 0, first, first * named["weight"][:, None, None])
    if kind == "channel_scale":
        return first * named["weight"][:, None, None]
    if kind == "channel_bias":
        return first + named["bias"][:, None, None]
    if kind in ("with_number", "with_fixed"):
        return with_fixed(op, first, named, where.box(layer))
    if kind == "embedding":
        found = functional.embedding(first[:, 0, :, 0].long(), named["weight"], options.get("padding"))
        return found.transpose(1, 2)[..., None]
    if kind == "embedding_bag":
        chosen, mode, padding = first[:, 0, :, 0].long(), options["mode"], options["padding"]
        return functional.embedding_bag(chosen, named["weight"], mode=mode, padding_idx=padding)[:, :, None, None]
    if kind == "identity":
        return first
    if kind == "scale":
        return first * float(options["factor"])
    if kind == "total":
        return first.sum() / (where.batch * first[0].numel() if options["mean"] else 1)
    if kind == "loss":
        assert where.targets is not None
        targets = where.targets.reshape(first.shape[0], *first.shape[2:])
        losses = functional.cross_entropy(first, targets, reduction="sum")
        return losses / (where.batch * first.shape[2] * first.shape[3])
    raise OptionError(f"layer '{layer.name}': nothing runs a {kind}")


def _convolution(
    op: LayerOp, value: torch.Tensor, named: dict[str, torch.Tensor], padded: tuple[bool, bool]
) -> torch.Tensor:
    """A share of a convolution; positions of a sequence are taken as columns of one row, as torch does."""
    options, weight, bias = op.options, named["weight"], named.get("bias")
    groups = max(1, options["groups"] * weight.shape[0] // options["channels"][1])
    stride, padding = options["stride"], _left_to_add(options["padding"], padded)
    dilation = options.get("dilation", 1)
    if not options.get("sequence"):
        return functional.conv2d(value, weight, bias, stride, padding, dilation, groups)
    row, pairs = value.transpose(2, 3), (stride, padding, dilation)
    turned = [each if isinstance(each, int) else each[::-1] for each in pairs]
    return functional.conv2d(row, weight.transpose(2, 3), bias, *turned, groups).transpose(2, 3)


def _pointwise(layer: Layer, op: LayerOp, given: Sequence[torch.Tensor]) -> torch.Tensor:
    """Call a pointwise function. Raises `OptionError` if it refuses the arguments that a trace has."""
    function: str = op.options["function"]
    arguments = [
        as_traced(given[each.number], each.dtype) if isinstance(each, Input) else each
        for each in op.options["arguments"]
    ]
    try:
        result: torch.Tensor = getattr(torch.ops.aten, function)(*arguments, **op.options["words"])
    except torch.cuda.OutOfMemoryError:
        raise
    except (RuntimeError, TypeError, ValueError, OverflowError) as cause:
        reason = str(cause).partition("\n")[0]
        raise OptionError(f"layer '{layer.name}' cannot be run: its {function} failed: {reason}") from cause
    return result


def _left_to_add(padding: int | tuple[int, int], padded: tuple[bool, bool]) -> tuple[int, int]:
    """Return the padding that the input still lacks."""
    height, width = (padding, padding) if isinstance(padding, int) else padding
    return 0 if padded[0] else height, 0 if padded[1] else width


def _linear(value: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    if value.shape[2] == value.shape[3] == 1:
        return functional.linear(value.flatten(1), weight, bias)[:, :, None, None]
    return functional.linear(value.permute(0, 2, 3, 1), weight, bias).permute(0, 3, 1, 2)


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
