"""Merges: convolutions of one input as one larger convolution, a stage of IOS (its paper, section 4.2).

Filters are joined along the channels of the result; small filters are padded with zeros to the size of the largest, so
that the centres of all filters agree. Strides, dilations and types must agree, and groups and transposed convolutions
are left out. Filters must be constant in the step, as in inference, since they are joined once.

A variant with the composition `merged` belongs to the first of its convolutions and covers the others. It is no variant
for the search: launch orders that put a covered convolution, or what depends on it, first are illegal with it.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any, Final

from gpusim.formats.trace import Op, Trace, Variant
from gpusim.trace.dependencies import dependencies
from gpusim.trace.fusion import CoverRules

CONVOLUTION: Final = "aten.convolution.default"
#: Most convolutions of one input that are merged; those of Inception-v3 have four.
MOST_MERGED: Final = 4


def is_merge(variant: Variant) -> bool:
    """Return True for a variant that merges convolutions."""
    return variant.settings.composition == "merged"


def plain_variants(op: Op) -> int:
    """Return the number of an op's variants without merges, which come last."""
    return max((number for number, variant in enumerate(op.variants, 1) if not is_merge(variant)), default=0)


def mergeable(trace: Trace) -> dict[tuple[int, ...], str]:
    """Return the sets of convolutions that could be merged, each of two or more in recorded order, with a name.

    The name has the places of the covered ones among all that are alike, counted from 1.
    """
    alike: dict[Any, list[int]] = {}
    written = {trace.tensors[tensor].storage for op in trace.ops for tensor in op.writes}
    for index, op in enumerate(trace.ops):
        key = _alike(trace, op, written)
        if key is not None:
            alike.setdefault(key, []).append(index)
    if all(len(ops) == 1 for ops in alike.values()):
        return {}
    rules = CoverRules(trace, dependencies(trace))
    merges: dict[tuple[int, ...], str] = {}
    for ops in alike.values():
        for size in range(2, min(len(ops), MOST_MERGED) + 1):
            for chosen in itertools.combinations(ops, size):
                if rules.problem(chosen[0], chosen[1:], merge=True) is None:
                    merges[chosen] = "_".join(["merged", *(str(1 + ops.index(op)) for op in chosen[1:])])
    return merges


def merge_in(trace: Trace, ops: Sequence[int]) -> tuple[int, int] | None:
    """Return the op with a variant that merges exactly these ops, and the variant's number from 1, or None."""
    first, *others = sorted(ops)
    for number, variant in enumerate(trace.ops[first].variants, 1):
        if is_merge(variant) and list(variant.covers) == others:
            return first, number
    return None


def _alike(trace: Trace, op: Op, written: set[int]) -> Any:
    """Return what must agree among merged convolutions, or None for an op that cannot be merged."""
    if op.target != CONVOLUTION or op.kwargs or not op.kernels or op.args[6] or op.args[8] != 1:
        return None
    image, *parameters = (trace.tensors[part["tensor"]] for part in op.args[:3] if part is not None)
    weight = parameters[0]
    if any(each.init is None or each.storage in written for each in parameters) or len(weight.shape) != 4:
        return None
    sides, paddings, dilations = weight.shape[2:], op.args[4], op.args[5]
    centres = tuple(2 * pad - step * (side - 1) for side, pad, step in zip(sides, paddings, dilations, strict=True))
    types = (image.dtype, *(each.dtype for each in parameters[:1]))
    odd = tuple(side % 2 for side in sides)
    return op.args[0]["tensor"], tuple(op.args[3]), tuple(dilations), centres, odd, types
