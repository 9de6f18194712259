"""Dropout that is traced as several operators: a mask of its own, and a product with it."""

from __future__ import annotations

from dataclasses import replace
from typing import Final

from gpusim.layerwise import op_rules as rules
from gpusim.layerwise.frames import Frame
from gpusim.layerwise.layers import DIMS, Layer, LayerOp
from gpusim.layerwise.operands import CannotRunError, Operands

#: Names of operators that make a tensor without elements, and targets of those that make it a mask.
_NEW: Final = ("empty", "new_empty")
_HALF: Final = 0.5
"""Share of ones that `bernoulli_` draws if none is given."""
_SCALED: Final = (
    ["aten.bernoulli_.float", "aten.div_.Scalar"],
    ["aten.bernoulli_.float", "aten.div_.Tensor"],
)


def dropout_of(operands: Operands, tensor: int, frame: Frame) -> LayerOp | None:
    """Return dropout by a mask that a value with `frame` is multiplied with; None if the tensor is no such mask.

    A mask may drop whole channels, or samples: it is drawn for some dimensions. Raises `CannotRunError` for one that
    samples share, or that has a part of a dimension.
    """
    trace = operands.trace
    mask = trace.tensors[tensor]
    made = [
        op
        for op in trace.ops[: operands.place]
        if any(trace.tensors[t].storage == mask.storage for t in (*op.writes, *op.outputs) if t is not None)
    ]
    if len(made) != 3 or [op.target for op in made[1:]] not in _SCALED or not rules.base_name(made[0]).startswith(_NEW):
        return None
    kept = made[1].args[1] if len(made[1].args) > 1 else _HALF
    scale = made[2].args[1]
    if not isinstance(kept, int | float) or kept != scale or len(mask.shape) != len(frame.rows):
        return None
    whole = [size > 1 or all(each == 1 for _, each in row) for size, row in zip(mask.shape, frame.rows, strict=True)]
    atoms = [(letter, each) for row, each in zip(frame.rows, whole, strict=True) for letter, size in row if size > 1]
    drawn = {letter for letter, each in atoms if each}
    if drawn & {letter for letter, each in atoms if not each}:
        raise CannotRunError("its dropout has a mask with a part of a dimension")
    if mask.shape[0] == 1 and frame.extents[0] > 1:
        raise CannotRunError("its dropout has a mask that all samples share")
    letters = "".join(x for x, size in zip(DIMS, frame.extents, strict=True) if x == "n" or x in drawn or size == 1)
    return LayerOp("dropout", {"p": 1 - float(kept), "drawn": letters})


def with_random_splits(layer: Layer) -> Layer:
    """Return a layer split by those dimensions alone for which its masks are drawn: parts of others would share one."""
    drawn = [op.options.get("drawn", DIMS) for op in layer.ops if op.kind == "dropout"]
    return replace(layer, splits="".join(x for x in layer.splits if all(x in each for each in drawn)))
