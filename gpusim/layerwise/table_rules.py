"""Rules of lookups in tables of parameters."""

from __future__ import annotations

from collections.abc import Sequence
from math import prod

from gpusim.formats.trace import Op, Trace
from gpusim.layerwise.frames import Frame
from gpusim.layerwise.layers import ALL, SAME
from gpusim.layerwise.rule import Inputs, Rule, tensors_in


def embedding(frames: Sequence[Frame | None], shape: Sequence[int]) -> Rule | None:
    """Return the rule of a lookup of table rows: the frame of the indices, with features."""
    frame = frames[-1]
    if frame is None or len(shape) != len(frame.rows) + 1:
        return None
    rows = Frame((*frame.rows, (("c", shape[-1]),)))
    return Rule("embedding", "nch", rows, prod(shape), ((SAME, ALL, SAME, SAME),))


def embedding_bag(trace: Trace, op: Op, inputs: Inputs, shape: Sequence[int]) -> Rule | None:
    """Return the rule of sums or means of table rows, as many for each sample; None if their number varies."""
    first = inputs[0][1]
    if len(inputs) != 1 or first is None or len(first.rows) != 1 or len(shape) != 2:
        return None
    (row,) = first.rows
    chosen = prod(size for _, size in row)
    letters = [letter for letter, size in row if size > 1 or letter == "n"]
    if letters not in (["n"], ["n", "h"]) or chosen % shape[0] or first.extents[0] != shape[0]:
        return None
    offsets = tensors_in(op.args[2])
    if not any(_is_range(each, chosen, chosen // shape[0]) for each in trace.ops if set(offsets) <= set(each.outputs)):
        return None
    frame = Frame(((("n", shape[0]),), (("c", shape[1]),)))
    return Rule("embedding_bag", "nc", frame, chosen * shape[1], ((SAME, ALL, ALL, SAME),))


def _is_range(op: Op, end: int, step: int) -> bool:
    """Whether an operator makes the numbers from 0 to an end by equal steps."""
    return op.target == "aten.arange.start_step" and list(op.args) == [0, end, step]
