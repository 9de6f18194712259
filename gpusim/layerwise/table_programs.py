"""Traced lookups in tables of parameters as operations for the executor."""

from __future__ import annotations

from typing import Any, Final

from gpusim.layerwise.layers import BATCH, Layer, LayerOp
from gpusim.layerwise.operands import CannotRunError, Operands
from gpusim.layerwise.rule import parameters_of, tensors_in

#: What is made of the rows of a bag, by number.
_MODES: Final = ("sum", "mean", "max")


def embedding(operands: Operands, layer: Layer) -> tuple[LayerOp, ...]:
    """Rows of a table of parameters, which the batch chooses."""
    op, trace = operands.op, operands.trace
    table, chosen = tensors_in(op.args[0]), tensors_in(op.args[1])
    if not parameters_of(trace, table[0]) or chosen[0] not in operands.inputs or layer.inputs[0].source != BATCH:
        raise CannotRunError("its table is no parameter, or a layer chooses its rows")
    padding, *other = (*op.args[2:], -1) if len(op.args) < 3 else op.args[2:]
    if len(operands.inputs[chosen[0]][1].rows) > 2 or any(other):
        raise CannotRunError("nothing runs its embedding with these arguments")
    rows, features = trace.tensors[table[0]].shape
    return (LayerOp("embedding", {"table": (rows, features), "padding": _row(padding)}),)


def embedding_bag(operands: Operands, layer: Layer) -> tuple[LayerOp, ...]:
    """The sum, mean or maximum of rows of a table of parameters, which the batch chooses."""
    op, trace = operands.op, operands.trace
    table, chosen = tensors_in(op.args[0]), tensors_in(op.args[1])
    if not parameters_of(trace, table[0]) or chosen[0] not in operands.inputs or layer.inputs[0].source != BATCH:
        raise CannotRunError("its table is no parameter, or a layer chooses its rows")
    defaults: tuple[Any, ...] = (False, 0, False, None, False, -1)
    by_frequency, mode, sparse, weights, last, padding = (*op.args[3:], *defaults[len(op.args) - 3 :])
    if by_frequency or sparse or weights is not None or last or not 0 <= int(mode) < len(_MODES):
        raise CannotRunError("nothing runs its embedding bag with these arguments")
    rows, features = trace.tensors[table[0]].shape
    options = {"table": (rows, features), "padding": _row(padding), "mode": _MODES[int(mode)]}
    return (LayerOp("embedding_bag", options),)


def _row(padding: int) -> int | None:
    """Return the row without a gradient; None if there is none."""
    return None if padding < 0 else int(padding)
