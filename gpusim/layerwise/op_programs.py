"""Traced operators as operations for the executor (`LayerOp`); None if unsupported.

A layer with an unsupported operator keeps its times but cannot be executed.
"""

from __future__ import annotations

from typing import Any, Final

from gpusim.formats.trace import Op, Trace
from gpusim.layerwise import op_rules as rules
from gpusim.layerwise.frames import Frame
from gpusim.layerwise.layer_rules import parameters_of
from gpusim.layerwise.layers import Layer, LayerOp

_NORM_TRAINING, _NORM_EPSILON = 5, 7
_LAYER_NORM_SHAPE, _LAYER_NORM_EPSILON = 1, 4
_LOSS_WEIGHT, _LOSS_REDUCTION = 2, 3
#: Functions of one tensor, by their name in `torch.nn.functional`.
ACTIVATIONS: Final = ("relu", "gelu", "silu", "sigmoid", "tanh", "hardswish", "hardsigmoid")


def first_program(trace: Trace, op: Op, name: str, layer: Layer) -> tuple[LayerOp, ...]:
    """Return the operations of a new layer's first operator; empty if unsupported."""
    if layer.kind == "convolution":
        return _convolution(trace, op)
    if layer.kind == "linear":
        return _linear(trace, op, layer)
    if layer.kind == "pool":
        return _pool(op, name, layer)
    if layer.kind == "concat":
        return (LayerOp("concat"),)
    if layer.kind == "add" and name in ("add", "mul") and not op.kwargs and len(layer.inputs) == 2:
        return (LayerOp("add" if name == "add" else "multiply"),)
    if layer.kind == "batch_norm":
        return _batch_norm(op)
    if layer.kind == "loss" and name == "_log_softmax":
        return (LayerOp("loss"),)
    if layer.kind == "layer_norm":
        return _layer_norm(op, layer)
    return following_program(trace, op, name, None) if layer.kind == name else ()


def following_program(trace: Trace, op: Op, name: str, frame: Frame | None) -> tuple[LayerOp, ...]:
    """Return the operations of an operator that is part of a layer; `frame` is that of its input."""
    if name in ACTIVATIONS:
        return (LayerOp(name, dict(op.kwargs)),) if len(op.args) == 1 else ()
    if name == "clone":
        return (LayerOp("identity"),)
    if name == "native_dropout":
        return (LayerOp("dropout", {"p": float(op.args[1])}),)
    if name in rules.BATCH_NORMS:
        return _batch_norm(op)
    if name == "mul" and _is_channel_scale(trace, op, frame):
        return (LayerOp("channel_scale"),)
    return ()


def loss_program(op: Op, name: str) -> tuple[LayerOp, ...] | None:
    """Return the operations of an operator on a loss, none for a part of mean cross entropy; None if unsupported."""
    if name == "nll_loss_forward":
        return () if op.args[_LOSS_WEIGHT] is None and op.args[_LOSS_REDUCTION] == 1 else None
    factor = op.args[1] if name == "mul" and len(op.args) == 2 else None
    if not isinstance(factor, int | float):
        return None
    return () if factor == 1 else (LayerOp("scale", {"factor": float(factor)}),)


def _convolution(trace: Trace, op: Op) -> tuple[LayerOp, ...]:
    weight = trace.tensors[op.args[1]["tensor"]].shape
    groups = int(op.args[8])
    options = {
        "kernel": (weight[2], weight[3]),
        "stride": _pair(op.args[3]),
        "padding": _pair(op.args[4]),
        "dilation": _pair(op.args[5]),
        "groups": groups,
        "bias": op.args[2] is not None,
        "channels": (weight[1] * groups, weight[0]),
    }
    return (LayerOp("convolution", options),)


def _linear(trace: Trace, op: Op, layer: Layer) -> tuple[LayerOp, ...]:
    edge = layer.inputs[0]
    flat = tuple(need.rule for need in edge.needs[2:]) != ("same", "same")
    features = edge.extents[1] * (edge.extents[2] * edge.extents[3] if flat else 1)
    options = {"channels": (features, layer.output[1]), "bias": rules.base_name(op) == "addmm"}
    return (*([LayerOp("flatten")] if flat else []), LayerOp("linear", options))


def _pool(op: Op, name: str, layer: Layer) -> tuple[LayerOp, ...]:
    if name == "mean" or (name == "_adaptive_avg_pool2d" and layer.output[2:] == (1, 1)):
        return (LayerOp("global_pool"),)
    if name == "_adaptive_avg_pool2d" and layer.output == layer.inputs[0].extents:
        return (LayerOp("identity"),)
    if name == "_adaptive_avg_pool2d":
        return (LayerOp("adaptive_pool", {"output": layer.output[2:]}),)
    if name not in rules.WINDOWS:
        return ()
    average = name == "avg_pool2d"
    windows = layer.inputs[0].needs[2:]
    if any(need.dilation != 1 for need in windows) or (
        average and any(argument is not True for argument in op.args[5:6])
    ):
        return ()
    ceil = len(op.args) > (4 if average else 5) and bool(op.args[4 if average else 5])
    options = {
        "kernel": tuple(need.kernel for need in windows),
        "stride": tuple(need.stride for need in windows),
        "padding": tuple(need.padding for need in windows),
        "average": average,
        "ceil": ceil,
    }
    return () if average and ceil else (LayerOp("pool", options),)


def _batch_norm(op: Op) -> tuple[LayerOp, ...]:
    trains = len(op.args) > _NORM_EPSILON and op.args[_NORM_TRAINING] is True
    return (LayerOp("batch_norm", {"epsilon": float(op.args[_NORM_EPSILON])}),) if trains else ()


def _layer_norm(op: Op, layer: Layer) -> tuple[LayerOp, ...]:
    """LayerNorm over the channels, with weight and bias."""
    over, weights = list(op.args[_LAYER_NORM_SHAPE]), op.args[_LAYER_NORM_SHAPE + 1 : _LAYER_NORM_EPSILON]
    if over != [layer.output[1]] or "c" in layer.splits or any(each is None for each in weights):
        return ()
    return (LayerOp("layer_norm", {"epsilon": float(op.args[_LAYER_NORM_EPSILON])}),)


def _is_channel_scale(trace: Trace, op: Op, frame: Frame | None) -> bool:
    """Whether one factor is a parameter with a value for each channel, as ConvNeXt's layer scale is."""
    factors = [argument["tensor"] for argument in op.args if isinstance(argument, dict) and "tensor" in argument]
    scales = [tensor for tensor in factors if parameters_of(trace, tensor)]
    if frame is None or len(factors) != 2 or len(scales) != 1:
        return False
    shape, rank = trace.tensors[scales[0]].shape, len(frame.rows)
    wide = [place for place, size in enumerate(shape) if size > 1]
    return len(wide) == 1 and frame.rows[rank - len(shape) + wide[0]] == (("c", shape[wide[0]]),)


def _pair(value: Any) -> tuple[int, int]:
    if isinstance(value, int):
        return value, value
    return int(value[0]), int(value[-1])
