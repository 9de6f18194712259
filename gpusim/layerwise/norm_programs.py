"""Traced normalisations as operations for the executor."""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from typing import Any, Final

from gpusim.layerwise.layers import Layer, LayerOp
from gpusim.layerwise.norm_rules import OVER_LAST
from gpusim.layerwise.operands import CannotRunError, Operands
from gpusim.layerwise.rule import tensors_in

#: Places of weight, bias and epsilon.
_PLACES: Final = {
    "native_layer_norm": (2, 3, 4),
    "_fused_rms_norm": (2, None, 3),
    "native_group_norm": (1, 2, 7),
}
_BIAS_OF_BATCH_NORM: Final = 2
_OF_BATCH_NORM: Final = (1, _BIAS_OF_BATCH_NORM, 7)
_OVER, _TRAINING = 1, 5


def normalisation(operands: Operands, layer: Layer) -> tuple[LayerOp, ...]:
    """Return the operation of a normalisation of each sample. Raises `CannotRunError`."""
    op, name = operands.op, operands.name
    weight_at, bias_at, epsilon_at = _PLACES.get(name, _OF_BATCH_NORM)
    if name in OVER_LAST and (list(op.args[_OVER]) != [layer.output[1]] or "c" in layer.splits):
        raise CannotRunError(f"its {layer.kind} is not over the channels alone")
    if name not in _PLACES and op.args[_TRAINING] is not True:
        raise CannotRunError("its instance norm uses running statistics")
    given = [named for named, place in (("weight", weight_at), ("bias", bias_at)) if _has(op.args, place)]
    if name not in _PLACES:
        _check_repeated(operands, op.args[weight_at], layer)
        _check_repeated(operands, op.args[_BIAS_OF_BATCH_NORM], layer)
    epsilon = op.args[epsilon_at] if len(op.args) > epsilon_at else None
    options: dict[str, Any] = {"parameters": tuple(given), "epsilon": None if epsilon is None else float(epsilon)}
    if layer.kind == "group_norm":
        options["groups"] = layer.output[1] // layer.channel_unit
    return (LayerOp(layer.kind, options),)


def _has(args: Sequence[Any], place: int | None) -> bool:
    return place is not None and len(args) > place and args[place] is not None


def _check_repeated(operands: Operands, argument: Any, layer: Layer) -> None:
    """Raise `CannotRunError` unless a weight of an instance norm is a parameter, repeated for each sample."""
    for tensor in tensors_in(argument):
        fixed = operands.fixed(tensor)
        names = [operands.trace.ops[index].target for index in fixed.ops]
        whole = [prod(operands.trace.tensors[t].shape) for t in fixed.parameters]
        if names != ["aten.repeat.default"] or whole != [layer.output[1]]:
            raise CannotRunError("its instance norm has other weights than one for each channel")
