"""Views that are layers of their own: of what they give, no box of a layer's output is in order.

Other views are read where they are used. These put the elements of a sample in another order (a shuffle of channels),
take some that are not next to each other (the first half of each head, as rotary embeddings do), or repeat them. They
have no kernels, and are run on the tensors that they take, each sample by itself.
"""

from __future__ import annotations

from math import prod
from typing import Final

import msgspec

from gpusim.formats.trace import Op, Trace
from gpusim.layerwise import op_rules as rules
from gpusim.layerwise.frames import Frame
from gpusim.layerwise.layers import ALL, SAME, Extents, LayerOp
from gpusim.layerwise.operands import Call, CannotRunError
from gpusim.layerwise.rule import Rule

_PARTS: Final = rules.names("slice select split split_with_sizes unbind")


def frame_of_layer(trace: Trace, op: Op, name: str, frame: Frame, output: int) -> Frame | None:
    """Return the frame of one result of a view as a layer of its own; None if it is none.

    `frame` is that of the tensor viewed, whose first dimension must be that of samples, which the view leaves.
    """
    if not frame.rows or not frame.letters(0).startswith("n"):
        return None
    shape = trace.tensors[output].shape
    if name == "expand":
        return _expanded(frame, shape)
    if name not in rules.PERMUTATIONS and name not in _PARTS:
        return None
    return rules.view_frame(trace, op, name, frame, output) or _cut(frame, shape)


def rule_of_view(frame: Frame) -> Rule:
    """Return the rule of a view as a layer: a sample needs all of the same sample."""
    return Rule("by_sample", "n", frame, 0, ((SAME, ALL, ALL, ALL),))


def program_of_view(
    trace: Trace, op: Op, name: str, tensor: int, frame: Frame, steps: Extents, output: int, result: Frame
) -> tuple[LayerOp, ...]:
    """Return the operation of a view as a layer. `tensor` with `frame` is what it views, `result` its result's frame.

    Raises `CannotRunError`.
    """
    if all(letter != "n" for row in result.rows for letter, _ in row):
        raise CannotRunError(f"its {name} leaves no dimension of samples")
    if name == "expand":  # to as many samples as a share has
        op = msgspec.structs.replace(op, args=(op.args[0], [-1, *op.args[1][1:]], *op.args[2:]))
    call = Call(trace, op, {tensor: (0, frame.rows)}, {}, {tensor: steps})
    place = op.outputs.index(output)
    return (LayerOp("laid_out", {"operator": op.target, "call": call, "result": place, "rows": result.rows}),)


def _cut(frame: Frame, shape: tuple[int, ...]) -> Frame | None:
    """Return the frame of a part of a dimension of several letters: it gets the first that no other dimension has."""
    rows = list(frame.rows)
    if len(shape) != len(rows) or prod(size for _, size in rows[0]) != shape[0]:
        return None
    for place, size in enumerate(shape):
        if prod(each for _, each in rows[place]) != size:
            others = {letter for other, row in enumerate(rows) if other != place for letter, _ in row}
            mine = [letter for letter in "hwc" if letter in frame.letters(place)]
            rows[place] = ((([letter for letter in mine if letter not in others] or mine)[0], size),)
    return Frame(tuple(rows))


def _expanded(frame: Frame, shape: tuple[int, ...]) -> Frame | None:
    """Return the frame of a tensor whose dimensions of size 1 are repeated; None if new dimensions come first."""
    if len(shape) != len(frame.rows) or prod(size for _, size in frame.rows[0]) != shape[0]:
        return None
    letters = [set(frame.letters(place)) for place in range(len(shape))]
    free = [letter for letter in "hwc" if letter not in set().union(*letters)]
    rows = []
    for place, (row, size) in enumerate(zip(frame.rows, shape, strict=True)):
        if prod(each for _, each in row) == size:
            rows.append(row)
            continue
        around = set().union(*letters[1:place]) & set().union(
            *letters[place + 1 :]
        )  # of heads and their features: heads
        rows.append(((min(around) if around else free.pop(0) if free else "c", size),))
    return Frame(tuple(rows))
