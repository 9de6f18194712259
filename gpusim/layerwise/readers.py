"""Readers of a traced tensor and of its views, and concatenations that begin alike."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace

from gpusim.formats.trace import Trace
from gpusim.layerwise import op_rules as rules
from gpusim.layerwise.layers import Edge, Layer
from gpusim.layerwise.rule import tensors_in


class Readers:
    """The number of forward ops that read each tensor, or a view of it, before it is changed in place."""

    def __init__(self, trace: Trace) -> None:
        self._read = {index for index, each in enumerate(trace.tensors) if each.role == "output"}
        """Tensors that the forward pass reads, and results of the step."""
        root: dict[int, int] = {}
        version: Counter[int] = Counter()
        count: Counter[tuple[int, int]] = Counter()
        for op in trace.ops:
            if op.phase != "forward":
                continue
            tensors = tensors_in(op.args) + tensors_in(op.kwargs)
            self._read.update(tensors)
            if rules.base_name(op) in rules.VIEWS and not op.kernels:
                for output in op.outputs:
                    if output is not None and tensors:
                        root[output] = root.get(tensors[0], tensors[0])
                continue
            for base in {root.get(t, t) for t in tensors}:
                count[base, version[base]] += 1
            for tensor in op.writes:
                version[root.get(tensor, tensor)] += 1
        # A tensor that is written in place after its creation has new readers after each change.
        self._root, self._most = root, Counter[int]()
        for (base, _), number in count.items():
            self._most[base] = max(self._most[base], number)
        self._beyond: set[int] = set()
        """Tensors of which an op with a result of several elements depends."""
        for op in reversed(trace.ops):
            if op.phase == "forward":
                made = [t for t in (*op.outputs, *op.writes) if t is not None]
                of_classes = rules.base_name(op) in rules.OF_CLASSES  # one of each sample is a loss, too
                if (any(trace.tensors[t].shape for t in made) and not of_classes) or not self._beyond.isdisjoint(made):
                    self._beyond.update(tensors_in(op.args) + tensors_in(op.kwargs))

    def of(self, tensor: int) -> int:
        """Return the number of readers of the tensor of which this one is a view."""
        return self._most[self._root.get(tensor, tensor)]

    def is_for_backward(self, tensor: int | None) -> bool:
        """Whether the forward pass makes a tensor that it does not read, and that is no result of the step."""
        return tensor is not None and tensor not in self._read

    def ends_as_number(self, tensor: int) -> bool:
        """Whether a result is part of the step's loss: the forward pass makes nothing of it but numbers."""
        return tensor not in self._beyond


def share_concatenations(layers: Sequence[Layer]) -> tuple[Layer, ...]:
    """Let concatenations that begin with the inputs of an earlier one use its result instead.

    The values are the same, and a network whose layers concatenate all earlier ones (DenseNet) then reduces.
    """
    seen: dict[tuple[object, ...], int] = {}
    result: list[Layer] = []
    for index, layer in enumerate(layers):
        if layer.kind == "concat":
            sources = tuple((edge.source, edge.origin, edge.extents) for edge in layer.inputs)
            for length in range(len(sources) - 1, 0, -1):
                earlier = seen.get(sources[:length])
                if earlier is not None and result[earlier].output[0::2] == layer.output[0::2]:
                    merged = Edge(earlier, result[earlier].output, layer.inputs[0].needs)
                    layer = replace(layer, inputs=(merged, *layer.inputs[length:]))
                    break
            seen[sources] = index
        result.append(layer)
    return tuple(result)
