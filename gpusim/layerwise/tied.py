"""Parameters that several layers use, such as a table that is the matrix of the classifier, too.

Each GPU holds such a parameter whole, so the layers that use it do not split channels. Its gradient is summed over all
GPUs once the first of these layers is differentiated, the last one in the backward pass.
"""

from __future__ import annotations

from collections.abc import Sequence, Set
from dataclasses import dataclass
from math import prod

from gpusim.formats.trace import Trace
from gpusim.layerwise.layers import NORMS, Layer, LayerGraph, LayerOp, TiedTo
from gpusim.layerwise.weight_regions import Region


@dataclass(frozen=True, slots=True)
class Tied:
    """A parameter with its uses, as layer and operation, the first layer first."""

    name: str
    elements: int
    uses: tuple[tuple[int, int], ...]

    @property
    def first(self) -> int:
        """The layer after whose backward pass its gradient is complete."""
        return self.uses[0][0]


def tied_parameters(graph: LayerGraph) -> tuple[Tied, ...]:
    """Return the parameters that several layers of a graph use, those that are complete first at the beginning."""
    uses: dict[tuple[int, int, str], list[tuple[int, int]]] = {}
    for index, layer in enumerate(graph.layers):
        for tie in layer.tied:
            uses.setdefault((tie.layer, tie.layer_op, tie.name), []).append((index, tie.op))
    return tuple(
        Tied(name, prod(_shape(graph.layers[layer].ops[op], name) or ()), ((layer, op), *others))
        for (layer, op, name), others in sorted(uses.items(), reverse=True)
    )


def ties(
    trace: Trace, layers: Sequence[Layer], regions: Sequence[Set[Region]], number: int, other: int
) -> tuple[TiedTo, ...]:
    """Return how a layer's parameters are those of an earlier one; nothing if not each is one operation's, whole."""
    shared = {each for each in regions[number] if any(each[0] == theirs[0] for theirs in regions[other])}
    whole = {(t.storage, t.offset, t.offset + prod(t.shape)): t for t in trace.tensors if t.role == "parameter"}
    found = []
    for region in sorted(shared):
        parameter = whole.get(region)
        if parameter is None or region not in regions[other]:
            return ()
        name = (parameter.name or "").rpartition(".")[2]
        mine, theirs = (
            [(place, shape) for place, op in enumerate(layers[each].ops) if (shape := _shape(op, name)) is not None]
            for each in (number, other)
        )
        if len(mine) != 1 or len(theirs) != 1 or not mine[0][1] == theirs[0][1] == tuple(parameter.shape):
            return ()
        found.append(TiedTo(mine[0][0], name, other, theirs[0][0]))
    return tuple(found)


def _shape(op: LayerOp, name: str) -> tuple[int, ...] | None:
    """Return the shape of a parameter of an operation; None if it has none of this name, or if that is not known."""
    options = op.options
    if op.kind in NORMS and name in options.get("parameters", ("weight", "bias")):
        return ()  # the layer's channels: one more parameter of this name
    if name == "bias" and options.get("bias"):
        return (options["channels"][1],)
    if name == "weight" and op.kind == "linear":
        return options["channels"][::-1]  # type: ignore[no-any-return]
    if name == "weight" and op.kind == "convolution":
        before, channels = options["channels"]
        return channels, before // options["groups"], *options["kernel"][: 1 if options.get("sequence") else 2]
    if name == "weight" and op.kind == "embedding":
        return tuple(options["table"])
    return None
