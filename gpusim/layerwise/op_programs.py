"""Traced operators as operations for the executor (`LayerOp`); None if unsupported.

A layer with an unsupported operator keeps its times but cannot be executed.
"""

from __future__ import annotations

from typing import Any

from gpusim.formats.trace import Op, Trace
from gpusim.layerwise import op_rules as rules
from gpusim.layerwise.layers import Layer, LayerOp

_NORM_TRAINING, _NORM_EPSILON = 5, 7
_LOSS_WEIGHT, _LOSS_REDUCTION = 2, 3


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
    if layer.kind == "add" and name == "add" and not op.kwargs and len(layer.inputs) == 2:
        return (LayerOp("add"),)
    if layer.kind == "batch_norm":
        return _batch_norm(op)
    if layer.kind == "loss" and name == "_log_softmax":
        return (LayerOp("loss"),)
    return following_program(op, name, layer) if name in ("relu", "gelu", "native_dropout") else ()


def following_program(op: Op, name: str, layer: Layer) -> tuple[LayerOp, ...]:
    """Return the operations of an operator that is part of a layer."""
    if name in ("relu", "gelu"):
        return (LayerOp(name),)
    if name == "native_dropout":
        return (LayerOp("dropout", {"p": float(op.args[1])}),)
    if name in rules.BATCH_NORMS:
        return _batch_norm(op)
    return ()


def is_part_of_loss(op: Op, name: str) -> bool:
    """Return whether the mean cross entropy that the executor computes already includes an operator."""
    if name == "nll_loss_forward":
        return op.args[_LOSS_WEIGHT] is None and op.args[_LOSS_REDUCTION] == 1
    return name == "mul" and len(op.args) > 1 and op.args[1] == 1.0


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


def _pair(value: Any) -> tuple[int, int]:
    if isinstance(value, int):
        return value, value
    return int(value[0]), int(value[-1])
