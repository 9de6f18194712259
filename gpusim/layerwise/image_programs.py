"""Traced operators on images as operations for the executor."""

from __future__ import annotations

from typing import Any

from gpusim.formats.trace import Op, Trace
from gpusim.layerwise import op_rules as rules
from gpusim.layerwise.image_rules import ADAPTIVE_POOLS
from gpusim.layerwise.layers import Layer, LayerOp
from gpusim.layerwise.operands import CannotRunError


def convolution(trace: Trace, op: Op) -> tuple[LayerOp, ...]:
    """A convolution; positions of a sequence are rows."""
    weight = trace.tensors[op.args[1]["tensor"]].shape
    groups, transposed = int(op.args[8]), bool(op.args[6])
    of_sequence = len(weight) == 3
    options = {
        "kernel": (weight[2], 1) if of_sequence else (weight[2], weight[3]),
        "stride": (_pair(op.args[3])[0], 1) if of_sequence else _pair(op.args[3]),
        "padding": (_pair(op.args[4])[0], 0) if of_sequence else _pair(op.args[4]),
        "dilation": (_pair(op.args[5])[0], 1) if of_sequence else _pair(op.args[5]),
        "groups": groups,
        "sequence": of_sequence,
        "bias": op.args[2] is not None,
        "channels": (weight[0], weight[1] * groups) if transposed else (weight[1] * groups, weight[0]),
    }
    return (LayerOp("transposed_convolution" if transposed else "convolution", options),)


def upsampling(op: Op, name: str, layer: Layer) -> tuple[LayerOp, ...]:
    """A larger map; of one that grows by whole factors in place, a part is made of a part of the input."""
    words: dict[str, Any] = {"mode": name.removeprefix("upsample_").removesuffix("2d")}
    if words["mode"] != "nearest":
        words["align_corners"] = bool(op.args[2])
    scales = op.args[2 if words["mode"] == "nearest" else 3 :]
    sizes, before = layer.output[2:], layer.inputs[0].extents[2:]
    for scale, size, have in zip(scales, sizes, before, strict=False):
        if scale is not None and abs(float(scale) * have - size) > 1e-6 * size:
            raise CannotRunError(f"its {name} has a scale that is not the ratio of its sizes")
    return (LayerOp("upsampling", {"words": words, "size": sizes}),)


def shuffle(op: Op, name: str) -> tuple[LayerOp, ...]:
    """Channels that become pixels, or pixels that become channels."""
    return (LayerOp(name, {"factor": int(op.args[1])}),)


def pool(op: Op, name: str, layer: Layer) -> tuple[LayerOp, ...]:
    if name == "mean" or (name == "_adaptive_avg_pool2d" and layer.output[2:] == (1, 1)):
        return (LayerOp("global_pool"),)
    if name == "_adaptive_avg_pool2d" and layer.output == layer.inputs[0].extents:
        return (LayerOp("identity"),)
    if name in ADAPTIVE_POOLS:
        average = name == "_adaptive_avg_pool2d"
        return (LayerOp("adaptive_pool", {"output": layer.output[2:], "average": average}),)
    if name not in rules.WINDOWS:
        raise CannotRunError(f"nothing runs its {name}")
    average = name == "avg_pool2d"
    windows = layer.inputs[0].needs[2:]
    ceil = len(op.args) > (4 if average else 5) and bool(op.args[4 if average else 5])
    if any(need.dilation != 1 for need in windows):
        raise CannotRunError(f"nothing runs its {name} with a dilation")
    if average and (ceil or op.args[6:7] not in ((), (None,))):
        raise CannotRunError(f"nothing runs its {name} that rounds up or has a divisor of its own")
    options = {
        "kernel": tuple(need.kernel for need in windows),
        "stride": tuple(need.stride for need in windows),
        "padding": tuple(need.padding for need in windows),
        "average": average,
        "ceil": ceil,
        "counts_padding": not average or op.args[5:6] in ((), (True,)),
    }
    return (LayerOp("pool", options),)


def _pair(value: Any) -> tuple[int, int]:
    if isinstance(value, int):
        return value, value
    return int(value[0]), int(value[-1])
