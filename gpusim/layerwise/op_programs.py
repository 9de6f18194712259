"""Traced operators as operations for the executor (`LayerOp`).

`CannotRunError` says why an operator has none: its layer keeps its times but cannot be executed.
"""

from __future__ import annotations

from dataclasses import replace
from math import prod
from typing import Any, Final

import msgspec

from gpusim.formats.trace import Op, Trace
from gpusim.layerwise import op_rules as rules
from gpusim.layerwise.attention_programs import attention, attention_of_samples
from gpusim.layerwise.frames import Frame
from gpusim.layerwise.image_programs import convolution, pool, shuffle, upsampling
from gpusim.layerwise.image_rules import SHUFFLES
from gpusim.layerwise.layers import DIMS, Input, Layer, LayerOp, pointwise
from gpusim.layerwise.norm_programs import normalisation
from gpusim.layerwise.operands import Call, CannotRunError, Fixed, Operands
from gpusim.layerwise.random_programs import dropout_of
from gpusim.layerwise.rule import parameters_of, tensors_in
from gpusim.layerwise.table_programs import embedding, embedding_bag

_NORM_TRAINING, _NORM_EPSILON = 5, 7
_LOSS_WEIGHT, _LOSS_REDUCTION = 2, 3
#: Pointwise functions that are run by their name in `torch.ops.aten`: all but those of random or copied tensors.
FUNCTIONS: Final = rules.POINTWISE - rules.names(
    "clone copy _to_copy fill bernoulli dropout native_dropout rrelu empty_like rand_like randn_like"
)
#: Operators of a layer's value and a number or a fixed tensor.
ARITHMETIC: Final = ("add", "sub", "mul", "div", "masked_fill", "_prelu_kernel")
#: Those that have operations of their own, with a weight for each channel.
BY_CHANNEL: Final = {"add": "channel_bias", "mul": "channel_scale", "_prelu_kernel": "prelu"}
#: Operators that are run on tensors laid out as they were traced, each sample by itself.
LAID_OUT: Final = FUNCTIONS | rules.names(
    "_softmax _safe_softmax _log_softmax bmm mean sum cat stack roll flip constant_pad_nd cumsum amax amin all any "
    "prod logsumexp std var tril triu glu mm addmm linalg_vector_norm clone convolution _adaptive_avg_pool2d "
    "_adaptive_avg_pool3d adaptive_max_pool2d adaptive_max_pool3d avg_pool3d max_pool3d_with_indices channel_shuffle"
)


def first_program(operands: Operands, layer: Layer, frame: Frame | None) -> tuple[LayerOp, ...]:
    """Return the operations of a new layer's first operator; `frame` is that of its result. Raises `CannotRunError`."""
    trace, op, name = operands.trace, operands.op, operands.name
    if operands.steps and layer.kind not in ("by_sample", "other"):
        raise CannotRunError(f"a view before its {name} takes every other element of a layer's output")
    if layer.kind == "convolution":
        return convolution(trace, op)
    if layer.kind == "linear":
        return _linear(operands, layer, frame)
    if layer.kind == "upsampling":
        return upsampling(op, name, layer)
    if layer.kind in SHUFFLES:
        return shuffle(op, name)
    if layer.kind == "pool":
        return pool(op, name, layer)
    if layer.kind == "concat":
        return (LayerOp("concat"),)
    if layer.kind == "add":
        return (_pointwise(operands),)
    if layer.kind == "batch_norm":
        return _batch_norm(op)
    if layer.kind == "loss" and name == "_log_softmax":
        return _loss(operands, layer)
    if layer.kind == "loss" and name in rules.TOTALS and not op.kwargs:
        return (LayerOp("total", {"mean": name == "mean"}),)
    if layer.kind in ("layer_norm", "rms_norm", "group_norm"):
        return normalisation(operands, layer)
    if layer.kind == "embedding":
        return embedding(operands, layer)
    if layer.kind == "embedding_bag":
        return embedding_bag(operands, layer)
    if layer.kind == "attention":
        return attention(operands, layer)
    if name in rules.BAGS:
        raise CannotRunError("its bags do not have as many rows for each sample")
    if name in rules.ATTENTION and layer.kind == "by_sample" and frame is not None and not operands.steps:
        return attention_of_samples(operands, frame)
    if layer.kind in ("by_sample", "other"):
        return _laid_out(operands, frame)
    if layer.kind == name:
        return following_program(operands, frame)
    raise CannotRunError(f"nothing runs its {name}")


def following_program(operands: Operands, frame: Frame | None) -> tuple[LayerOp, ...]:
    """Return the operations of an operator that is part of a layer; `frame` is that of its input.

    Raises `CannotRunError`.
    """
    op, name = operands.op, operands.name
    if operands.steps:
        raise CannotRunError(f"a view before its {name} takes every other element of a layer's output")
    if name == "addcmul" and frame is not None and any(t not in operands.inputs for t in tensors_in(op.args)):
        return _scaled_and_added(operands, frame)
    if name in FUNCTIONS and name not in ARITHMETIC:
        return (_pointwise(operands),)
    if name == "clone" or rules.same_elements(operands.trace, op, name):
        return (LayerOp("identity"),)
    if name == "native_dropout":
        return (LayerOp("dropout", {"p": float(op.args[1])}),)
    if name in rules.BATCH_NORMS:
        return _batch_norm(op)
    if name in ARITHMETIC and frame is not None and not op.kwargs:
        return _arithmetic(operands, frame)
    raise CannotRunError(f"nothing runs its {name}")


def _check_result(operands: Operands) -> None:
    """Raise `CannotRunError` unless a layer can pass the result on, as numbers of the step's type."""
    dtypes = [operands.trace.tensors[tensor].dtype for tensor in operands.op.outputs if tensor is not None]
    if not dtypes or (dtypes[0] != "bool" and "float" not in dtypes[0]):
        raise CannotRunError(f"its {operands.name} results in {dtypes[0] if dtypes else 'nothing'}")


def _pointwise(operands: Operands) -> LayerOp:
    """A pointwise function of inputs of the layer and numbers."""
    op, name = operands.op, operands.name
    _check_result(operands)
    arguments: list[Any] = []
    for value in op.args:
        tensors = tensors_in(value)
        if len(tensors) == 1 and tensors[0] in operands.inputs:
            arguments.append(Input(operands.inputs[tensors[0]][0], operands.trace.tensors[tensors[0]].dtype))
        elif isinstance(value, int | float | str | None):
            arguments.append(value)
        else:
            raise CannotRunError(f"nothing runs its {name} with these arguments")
    if name not in FUNCTIONS or not all(isinstance(value, int | float | str | None) for value in op.kwargs.values()):
        raise CannotRunError(f"nothing runs its {name} with these arguments")
    return pointwise(name, *arguments, **op.kwargs)


def loss_program(op: Op, name: str) -> tuple[LayerOp, ...] | None:
    """Return the operations of an operator on a loss, none for a part of mean cross entropy; None if unsupported."""
    if name == "nll_loss_forward":
        return () if op.args[_LOSS_WEIGHT] is None and op.args[_LOSS_REDUCTION] == 1 else None
    factor = op.args[1] if name == "mul" and len(op.args) == 2 else None
    if not isinstance(factor, int | float):
        return None
    return () if factor == 1 else (LayerOp("scale", {"factor": float(factor)}),)


def _linear(operands: Operands, layer: Layer, result: Frame | None) -> tuple[LayerOp, ...]:
    """A product with a parameter, over the channels, over a flattened map, or over several dimensions in one."""
    op, name = operands.op, operands.name
    if op.kwargs or result is None:
        raise CannotRunError(f"nothing runs its {name} with these arguments")
    bias = {"addmm": op.args[0], "linear": op.args[2] if len(op.args) > 2 else None}.get(name)
    added = tensors_in(bias)[0] if bias is not None else None
    after: tuple[LayerOp, ...] = ()
    if added is not None and not parameters_of(operands.trace, added):  # made of several, such as one for queries alone
        _check_broadcast(operands.trace.tensors[added].shape, result)
        after = (LayerOp("with_fixed", {"function": "add", "rows": result.rows, "fixed": operands.fixed(added)}),)
    _, frame = operands.inputs[tensors_in(op.args[1 if name == "addmm" else 0])[0]]
    positions = set(frame.letters(0))
    features = tuple((letter, size) for letter, size in frame.rows[1] if size > 1)
    has_bias = added is not None and not after
    options = {"channels": (prod(size for _, size in features), layer.output[1]), "bias": has_bias}
    order = [DIMS.index(letter) for letter, _ in features]
    if positions == {"n"} and order == sorted(order):
        return (LayerOp("flatten"), LayerOp("linear", options), *after)
    if set(order) <= {1}:
        return (LayerOp("linear", options), *after)
    return (LayerOp("features", {"features": features}), LayerOp("linear", options), *after)


def _batch_norm(op: Op) -> tuple[LayerOp, ...]:
    if len(op.args) > _NORM_EPSILON and op.args[_NORM_TRAINING] is True:
        return (LayerOp("batch_norm", {"epsilon": float(op.args[_NORM_EPSILON])}),)
    raise CannotRunError("its BatchNorm uses running statistics")


def _loss(operands: Operands, layer: Layer) -> tuple[LayerOp, ...]:
    _, frame = operands.inputs[tensors_in(operands.op.args[0])[0]]
    dimension = int(operands.op.args[1]) % max(1, len(frame.rows))
    by_channels = "n" in frame.letters(0) and frame.letters(dimension) == "c"
    if layer.inputs[0].extents != layer.output or not by_channels:
        raise CannotRunError("its classes are not the channels")
    return (LayerOp("loss"),)


def _arithmetic(operands: Operands, frame: Frame) -> tuple[LayerOp, ...]:
    """A layer's value with a number, or with a fixed tensor that is broadcast to it."""
    op, name = operands.op, operands.name
    first, second = op.args[0], op.args[1]
    if isinstance(second, int | float) and name in ("mul", "div") and not (name == "div" and second == 0):
        return (LayerOp("scale", {"factor": float(second) if name == "mul" else 1 / float(second)}),)
    options: dict[str, Any] = {"function": name, "rows": frame.rows}
    if isinstance(second, int | float) and name in ("add", "sub"):
        return (LayerOp("with_number", {**options, "number": second}),)
    if name == "mul" and (other := _other(operands)) is not None:
        dropout = dropout_of(operands, other, frame)
        if dropout is not None:
            return (dropout,)
    mine = [number for number, each in enumerate((first, second)) if set(tensors_in(each)) & set(operands.inputs)]
    count = 3 if name == "masked_fill" else 2
    if len(mine) != 1 or len(op.args) != count or (mine == [1] and name not in ("add", "mul")):
        raise CannotRunError(f"nothing runs its {name} with these arguments")
    other = next(iter(tensors_in((first, second)[1 - mine[0]])), None)
    if other is None:
        raise CannotRunError(f"nothing runs its {name} with these arguments")
    if name in BY_CHANNEL and _is_by_channel(operands.trace, other, frame):
        return (LayerOp(BY_CHANNEL[name]),)
    _check_broadcast(operands.trace.tensors[other].shape, frame)
    if name == "masked_fill":
        options["number"] = _number(op.args[2])
    return (LayerOp("with_fixed", {**options, "fixed": operands.fixed(other)}),)


def _other(operands: Operands) -> int | None:
    """Return the one tensor of an operator that no layer makes."""
    others = [tensor for tensor in tensors_in(operands.op.args) if tensor not in operands.inputs]
    return others[0] if len(others) == 1 else None


def _scaled_and_added(operands: Operands, frame: Frame) -> tuple[LayerOp, ...]:
    """A fixed tensor plus a layer's value times another one, as layers that scale and shift channels do."""
    added, *factors = (tensors_in(each) for each in operands.op.args[:3])
    mine = [each for each in factors if set(each) <= set(operands.inputs)]
    if operands.op.kwargs.get("value", 1) != 1 or len(mine) != 1 or set(added) & set(operands.inputs):
        raise CannotRunError("nothing runs its addcmul with these arguments")
    (factor,) = (each for each in factors if each is not mine[0])
    ops = []
    for function, (tensor,) in (("mul", factor), ("add", added)):
        _check_broadcast(operands.trace.tensors[tensor].shape, frame)
        ops.append(LayerOp("with_fixed", {"function": function, "rows": frame.rows, "fixed": operands.fixed(tensor)}))
    return tuple(ops)


def _number(value: Any) -> float:
    if isinstance(value, int | float):
        return float(value)
    if isinstance(value, dict) and set(value) == {"float"}:
        return float(value["float"])
    raise CannotRunError("it fills with a tensor")


def _check_broadcast(shape: tuple[int, ...], frame: Frame) -> None:
    """Raise `CannotRunError` unless a fixed tensor can be broadcast, and is the same for all samples."""
    rows = frame.rows[len(frame.rows) - len(shape) :]
    sizes = [prod(size for _, size in row) for row in rows]
    by_sample = any(size > 1 and letter == "n" for row, size in zip(rows, shape, strict=True) for letter, _ in row)
    if len(shape) > len(frame.rows) or by_sample or any(a not in (1, b) for a, b in zip(shape, sizes, strict=True)):
        raise CannotRunError("it takes a fixed tensor that differs between samples or has other dimensions")


def _is_by_channel(trace: Trace, tensor: int, frame: Frame) -> bool:
    """Whether a tensor is a parameter with a value for each channel, as ConvNeXt's layer scale is."""
    if not parameters_of(trace, tensor):
        return False
    shape, rank = trace.tensors[tensor].shape, len(frame.rows)
    wide = [place for place, size in enumerate(shape) if size > 1]
    whole = len(wide) == 1 and frame.extents[1] == shape[wide[0]]
    return whole and frame.rows[rank - len(shape) + wide[0]] == (("c", shape[wide[0]]),)


def _laid_out(operands: Operands, frame: Frame | None) -> tuple[LayerOp, ...]:
    """An operator on tensors as they were traced: its inputs are laid out for it, and its result is put in order."""
    op, name = operands.op, operands.name
    results = [number for number, each in enumerate(op.outputs) if each is not None]
    taken = dict.fromkeys(tensors_in(op.args) + tensors_in(op.kwargs))
    in_place = any(tensor in op.writes for tensor in taken)
    if name not in LAID_OUT or frame is None or not results or (in_place and name not in ARITHMETIC) or op.random:
        raise CannotRunError(f"nothing runs its {name}")
    _check_result(operands)
    mixes = rules.touches_samples(op, name, max(len(each.rows) for _, each in operands.inputs.values()))
    if mixes or (name in rules.LINEAR and len(operands.inputs) > 1):
        raise CannotRunError(f"its {name} mixes samples")
    layouts = {tensor: (number, each.rows) for tensor, (number, each) in operands.inputs.items()}
    every = [frame.rows, *(rows for _, rows in layouts.values())]
    if any(all(letter != "n" for row in rows for letter, _ in row) for rows in every):
        raise CannotRunError("a view before it leaves no dimension of samples")
    fixed = {tensor: _fixed_operand(operands, tensor) for tensor in taken if tensor not in operands.inputs}
    if in_place:
        op = msgspec.structs.replace(op, target=op.target.replace("_.", ".", 1), writes=())
    call = Call(operands.trace, op, layouts, fixed, operands.steps)
    return (LayerOp("laid_out", {"operator": op.target, "call": call, "result": results[0], "rows": frame.rows}),)


def _fixed_operand(operands: Operands, tensor: int) -> Fixed:
    """Return a fixed operand of an operator on tensors as they were traced: the same for all samples."""
    fixed, name, op_args = operands.fixed(tensor), operands.name, operands.op.args
    each = operands.trace.tensors[tensor]
    if name in rules.CONVOLUTIONS:  # its weights
        return fixed
    if name in rules.LINEAR and (tensor in tensors_in(op_args[-1]) or len(each.shape) < 2 or each.shape[0] == 1):
        return fixed
    rank = max(len(frame.rows) for _, frame in operands.inputs.values())
    repeated = len(each.shape) == rank and (each.shape[0] == 1 or each.stride[0] == 0)
    by_samples = all({letter for letter, _ in frame.rows[0]} == {"n"} for _, frame in operands.inputs.values())
    if name in ("cat", "stack") and repeated and by_samples:
        return replace(fixed, repeated=True)
    if name in ARITHMETIC and (len(each.shape) < rank or each.shape[0] == 1):
        return fixed
    raise CannotRunError(f"nothing runs its {name} with a tensor that the batch does not make")
