"""Traced lookups in tables of parameters as operations for the executor."""

from __future__ import annotations

from gpusim.layerwise.layers import BATCH, Layer, LayerOp
from gpusim.layerwise.operands import CannotRunError, Operands
from gpusim.layerwise.rule import parameters_of, tensors_in


def embedding(operands: Operands, layer: Layer) -> tuple[LayerOp, ...]:
    """Rows of a table of parameters, which the batch chooses."""
    op, trace = operands.op, operands.trace
    table, chosen = tensors_in(op.args[0]), tensors_in(op.args[1])
    if not parameters_of(trace, table[0]) or chosen[0] not in operands.inputs or layer.inputs[0].source != BATCH:
        raise CannotRunError("its table is no parameter, or a layer chooses its rows")
    padding, *other = (*op.args[2:], -1) if len(op.args) < 3 else op.args[2:]
    if len(operands.inputs[chosen[0]][1].rows) != 2 or padding != -1 or any(other):
        raise CannotRunError("nothing runs its embedding with these arguments")
    rows, features = trace.tensors[table[0]].shape
    return (LayerOp("embedding", {"table": (rows, features)}),)
