"""Operands of traced operators for the executor: inputs of a layer, and fixed tensors independent of the batch."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from math import prod
from typing import Final

from gpusim.formats.trace import Op, Trace
from gpusim.layerwise import op_rules as rules
from gpusim.layerwise.frames import Frame, Row
from gpusim.layerwise.layers import Extents, LayerOp
from gpusim.layerwise.rule import tensors_in
from gpusim.notebook import ShortRepr

#: Most elements of a fixed tensor, and most operators that make one: a mask of 4,096 positions, a few steps.
MOST_ELEMENTS: Final = 2**24
MOST_OPERATORS: Final = 256


class CannotRunError(Exception):
    """The executor has no operation for an operator; the text is the reason."""


def is_creation(op: Op) -> bool:
    """Whether an operator takes only the type of its tensor: its result does not depend on the batch."""
    return rules.base_name(op) in rules.CREATIONS


@dataclass(frozen=True, slots=True, repr=False, eq=False)
class Fixed(ShortRepr):
    """A tensor made of parameters and constants alone, such as a mask, and the operators of the trace that make it."""

    trace: Trace
    tensor: int
    ops: tuple[int, ...]
    """In the order of the trace."""
    parameters: tuple[int, ...]
    """Tensors of its parameters."""
    repeated: bool = False
    """Whether its first dimension repeats one sample's values for each sample of the batch."""


@dataclass(frozen=True, slots=True, repr=False, eq=False)
class Call(ShortRepr):
    """A call of a traced operator, with what it takes in place of traced tensors."""

    trace: Trace
    op: Op
    inputs: Mapping[int, tuple[int, tuple[Row, ...]]]
    """Tensor -> number of the layer's input, and its rows."""
    fixed: Mapping[int, Fixed]
    steps: Mapping[int, Extents]
    """Distance of the elements of inputs that are every other one."""


def calls_of(op: LayerOp) -> tuple[Call | Fixed, ...]:
    """Return what an operation takes from the trace."""
    call, fixed = op.options.get("call"), op.options.get("fixed")
    return (*((call, *call.fixed.values()) if call is not None else ()), *((fixed,) if fixed is not None else ()))


def own_parameters(op: LayerOp) -> tuple[tuple[Trace, int], ...]:
    """Return the parameters that an operation takes as they are in the trace: the trace, and the tensor there."""
    return tuple((fixed.trace, t) for fixed in calls_of(op) if isinstance(fixed, Fixed) for t in fixed.parameters)


@dataclass(frozen=True, slots=True)
class Operands:
    """An operator with what it takes: tensor -> number of the layer's input and meaning of its dimensions."""

    trace: Trace
    op: Op
    name: str
    place: int
    """Index of the operator in the trace."""
    inputs: Mapping[int, tuple[int, Frame]]
    steps: Mapping[int, Extents]
    """Distance of the elements of inputs that are every other one of their layer's output."""
    depends: Callable[[int], bool]
    """Whether a tensor depends on the batch."""

    def fixed(self, tensor: int) -> Fixed:
        """Return how a tensor is made. Raises `CannotRunError` if it depends on the batch or on chance."""
        trace = self.trace
        stores, chosen, leaves = {trace.tensors[tensor].storage}, [], set()
        for index in range(self.place - 1, -1, -1):
            op = trace.ops[index]
            made = {trace.tensors[t].storage for t in (*op.writes, *op.outputs) if t is not None}
            if op.phase != "forward" or not made & stores:
                continue
            taken = [] if is_creation(op) else tensors_in(op.args) + tensors_in(op.kwargs)
            if op.cut or op.other_gradient:
                raise CannotRunError(f"{self.name} takes a second tensor with other gradients than its parameters'")
            if op.random or any(map(self.depends, taken)):
                raise CannotRunError(f"{self.name} takes a second tensor that depends on the batch or on chance")
            stores |= made | {trace.tensors[t].storage for t in taken}
            chosen.append(index)
        for index, each in enumerate(trace.tensors):
            if each.storage in stores and each.role in ("input", "target"):
                raise CannotRunError(f"{self.name} takes a second tensor of the batch")
            if each.storage in stores and each.role == "parameter":
                leaves.add(index)
        made_here = [trace.tensors[t] for index in chosen for t in trace.ops[index].outputs if t is not None]
        if len(chosen) > MOST_OPERATORS or any(prod(each.shape) > MOST_ELEMENTS for each in made_here):
            raise CannotRunError(f"{self.name} takes a constant that is too large to make again")
        return Fixed(trace, tensor, tuple(reversed(chosen)), tuple(sorted(leaves)))
