"""Traced scaled dot-product attention as an operation for the executor."""

from __future__ import annotations

from math import prod
from typing import Any, Final

from gpusim.layerwise.frames import Frame
from gpusim.layerwise.layers import Layer, LayerOp
from gpusim.layerwise.operands import CannotRunError, Operands
from gpusim.layerwise.rule import tensors_in

#: Places of mask, dropout and causality among the arguments of each operator (torch 2.6 to 2.13).
_PLACES: Final = {
    "_scaled_dot_product_efficient_attention": (3, 5, 6),
    "_scaled_dot_product_cudnn_attention": (3, 5, 6),
    "_scaled_dot_product_flash_attention": (None, 3, 4),
    "scaled_dot_product_attention": (3, 4, 5),
}


def attention(operands: Operands, layer: Layer) -> tuple[LayerOp, ...]:
    """Return the operation of attention with heads in the channels. Raises `CannotRunError`."""
    options, shapes = _checked(operands)
    options["heads"] = layer.output[1] // layer.channel_unit
    if shapes[0][3] != shapes[2][3] or len({shape[1] for shape in shapes}) > 1:
        raise CannotRunError("its attention has queries with another width or number of heads than keys and values")
    return (LayerOp("attention", options),)


def attention_of_samples(operands: Operands, result: Frame) -> tuple[LayerOp, ...]:
    """Return the operation of attention with any meaning of its dimensions, each sample by itself, as of windows.

    Raises `CannotRunError`.
    """
    options, _ = _checked(operands)
    rows = {number: frame.rows for number, frame in operands.inputs.values()}
    options |= {"rows": tuple(rows[number] for number in options["inputs"]), "result": result.rows}
    return (LayerOp("attention_of_samples", options),)


def _checked(operands: Operands) -> tuple[dict[str, Any], list[tuple[int, ...]]]:
    """Return the options of attention, and the shapes of queries, keys and values. Raises `CannotRunError`."""
    op, trace = operands.op, operands.trace
    mask_at, dropout_at, causal_at = _PLACES[operands.name]
    query, key, value = (tensors_in(argument) for argument in op.args[:3])
    if any(len(each) != 1 or each[0] not in operands.inputs for each in (query, key, value)):
        raise CannotRunError("its attention has a query, key or value that no layer makes")
    shapes = [trace.tensors[each[0]].shape for each in (query, key, value)]
    if float(_argument(op.args, dropout_at, 0.0)):
        raise CannotRunError("its attention has dropout")
    options: dict[str, Any] = {
        "causal": bool(_argument(op.args, causal_at, False)),
        "scale": None if op.kwargs.get("scale") is None else float(op.kwargs["scale"]),
        "inputs": tuple(operands.inputs[each[0]][0] for each in (query, key, value)),
    }
    mask = _argument(op.args, mask_at, None)
    if mask is None:
        mask = op.kwargs.get("attn_mask")
    if mask is not None:
        ((tensor),) = tensors_in(mask)
        each = trace.tensors[tensor]
        leading = (*[1] * (4 - len(each.shape)), *each.shape)
        stride = (*[0] * (4 - len(each.shape)), *each.stride)
        if len(each.shape) > 4 or (leading[0] > 1 and stride[0]):
            raise CannotRunError("its attention has a mask that differs between samples")
        if prod(leading[1:]) > prod(shapes[0][1:3]) * shapes[1][2]:
            raise CannotRunError("its attention has a mask of other dimensions")
        options["fixed"] = operands.fixed(tensor)
    return options, shapes


def _argument(args: tuple[Any, ...], place: int | None, default: Any) -> Any:
    return args[place] if place is not None and len(args) > place else default
