"""The layer graph: layers with their shapes, weights, and what each needs of the layers before it.

A layer's output has four extents: samples `n`, channels `c`, height `h`, width `w`. A matrix has `n` and `c`; a
sequence has its positions in `h` and its features in `c`; attention has its heads in `c`. What has no such dimension
has 1.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from math import prod
from typing import Any, Final, Literal, TypeVar

import numpy as np
import numpy.typing as npt

from gpusim.errors import OptionError
from gpusim.notebook import ShortRepr, html_table, short_name, short_repr
from gpusim.units import counted

Extents = tuple[int, int, int, int]
Ints = npt.NDArray[np.int64]
IntOrInts = TypeVar("IntOrInts", int, Ints)
Dim = Literal["n", "c", "h", "w"]

#: The order of extents everywhere.
DIMS: Final[tuple[Dim, ...]] = ("n", "c", "h", "w")
#: Limit on the numbers of a window: their products with extents of as many elements fit 64 bits.
MAX_WINDOW: Final = 2**31 - 1
#: The source of an edge from the batch: each GPU loads the part that it needs.
BATCH: Final = -1
#: Kinds of layers whose channels have their own weights, which a split of channels splits.
WITH_CHANNEL_WEIGHTS: Final = ("convolution", "linear")
#: Kinds of operations with one weight.
WITH_WEIGHT: Final = ("convolution", "transposed_convolution", "linear", "embedding", "embedding_bag")
#: Kinds of operations that normalise, with a weight and a bias for each channel unless `parameters` says which.
NORMS: Final = ("batch_norm", "layer_norm", "rms_norm", "group_norm")
#: Kinds of operations that only lay out their input differently.
VIEWS: Final = ("flatten", "features", "identity")


@dataclass(frozen=True, slots=True)
class Need:
    """The interval of an input's dimension that an interval of the output's dimension needs."""

    rule: Literal["same", "all", "window", "spread", "shift", "scale"] = "same"
    """`same`: the same; `all`: everything; `window`: a kernel slides over it; `spread`: each of its elements adds a
    kernel to the output (a transposed convolution); `shift`: less `offset` (concatenation); `scale`: a dimension of
    another length runs in step (a flattened map, a larger one), and `offset` neighbours on each side."""
    kernel: int = 1
    stride: int = 1
    padding: int = 0
    dilation: int = 1
    offset: int = 0

    def __post_init__(self) -> None:
        if max(map(abs, (self.kernel, self.stride, self.padding, self.dilation, self.offset))) > MAX_WINDOW:
            raise ValueError("a window beyond any tensor")

    def interval(self, low: Ints, high: Ints, extent: int, output_extent: int) -> tuple[Ints, Ints]:
        """Return the interval [low, high) of the input, within its `extent`; empty if `low >= high`."""
        wanted_low, wanted_high = self.padded(low, high, extent, output_extent)
        empty = low >= high
        # Four times as fast as `np.clip` on so few numbers.
        first, last = (np.minimum(np.maximum(each, 0), extent) for each in (wanted_low, wanted_high))
        return np.where(empty, 0, first), np.where(empty, 0, np.maximum(first, last))

    def padded(self, low: IntOrInts, high: IntOrInts, extent: int, output_extent: int) -> tuple[IntOrInts, IntOrInts]:
        """Return the interval before clipping to the input: anything outside is padding."""
        if self.rule == "all":
            return low * 0, high * 0 + extent
        if self.rule == "window":
            reach = self.dilation * (self.kernel - 1) + 1
            return low * self.stride - self.padding, (high - 1) * self.stride - self.padding + reach
        if self.rule == "spread":
            reach = self.dilation * (self.kernel - 1)
            first, last = -((reach - self.padding - low) // self.stride), (high - 1 + self.padding) // self.stride + 1
            # What is beyond the last element's kernel needs none, and is given one.
            return np.minimum(first, extent - 1), np.maximum(last, 1)
        if self.rule == "shift":
            return low - self.offset, high - self.offset
        if self.rule == "scale":
            return low * extent // output_extent - self.offset, -(-high * extent // output_extent) + self.offset
        return low, high


SAME: Final = Need()
ALL: Final = Need("all")
SCALE: Final = Need("scale")


@dataclass(frozen=True, slots=True, repr=False)
class Edge(ShortRepr):
    """An input of a layer: its source layer (or `BATCH`), extents, and the part needed."""

    source: int
    extents: Extents
    needs: tuple[Need, Need, Need, Need] = (SAME, SAME, SAME, SAME)
    origin: Extents = (0, 0, 0, 0)
    """First element of the source's output that belongs to this input, where it takes a part of it."""
    cut: bool = False
    """Whether the step computes no gradient of this input, as of a `detach`."""


@dataclass(frozen=True, slots=True, repr=False)
class LayerOp(ShortRepr):
    """One operation of a layer for the executor: `convolution` with its stride, `relu`, `batch_norm` ..."""

    kind: str
    options: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class TiedTo:
    """A parameter of a layer's operation that is one of an earlier layer's operation."""

    op: int
    name: str
    layer: int
    layer_op: int


@dataclass(frozen=True, slots=True)
class Input:
    """An argument of a pointwise function that is an input of the layer."""

    number: int
    dtype: str = "float32"
    """As traced: layers pass truth values on as numbers of the step's type."""


def pointwise(function: str, *arguments: Input | float | str | None, **words: float | str | None) -> LayerOp:
    """Return an operation that calls a pointwise function of `torch.ops.aten`."""
    return LayerOp("pointwise", {"function": function, "arguments": arguments, "words": words})


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class Layer(ShortRepr):
    """One layer: an operation and the pointwise ones behind it, which are split alike.

    Sizes are those of the whole graph's batch. Weights and `statistics` are split with the channels.
    """

    name: str
    """Unique in the graph."""
    kind: str
    """Kind of the first operation: `convolution`, `linear`, `pool`, `concat`, `add`, `attention`, `loss`, `other`
    ...
    """
    output: Extents
    inputs: tuple[Edge, ...]
    splits: str = "n"
    """Dimensions that may be split: some of `nchw`. Empty without a rule: every GPU computes the whole layer."""
    channel_unit: int = 1
    """Channels that stay together: those of a head or group."""
    weight_elements: int = 0
    frozen_elements: int = 0
    """Elements of weights that the step does not train: their gradients are neither computed nor summed."""
    tied_elements: int = 0
    """Elements of its trained weights that later layers use, too (`gpusim.layerwise.tied`)."""
    tied: tuple[TiedTo, ...] = ()
    """Weights that are an earlier layer's, and count there."""
    statistics: int = 0
    """Elements of statistics over the batch (BatchNorm: a mean and a variance for each channel)."""
    flops: int = 0
    """Arithmetic operations of the forward pass."""
    kept_elements: int = 0
    """Elements stored by the forward pass for the backward pass."""
    element_bytes: int = 4
    input_gradient: bool = True
    """Whether the backward pass computes the gradient of its input; false for the first layer."""
    path: str = ""
    """Module path, such as `layer1.0.conv1`."""
    ops: tuple[LayerOp, ...] = ()
    """Operations for the executor; empty if only its times are known."""
    obstacle: str = ""
    """Why the executor cannot run it; empty if it can, or if nothing is known of its operations."""
    forward: tuple[int, ...] = ()
    """Ops of the trace in its forward pass."""
    backward: tuple[int, ...] = ()
    """Ops of the trace in its backward pass."""

    @property
    def has_weights(self) -> bool:
        """Whether it has weights, trained or not."""
        return self.weight_elements + self.frozen_elements > 0

    @property
    def product(self) -> int | None:
        """Index of the operation that begins a layer with a product with weights, whose gradients nothing before needs:
        they can be computed after the input's. None if there is none.
        """
        place = next((number for number, op in enumerate(self.ops) if op.kind not in VIEWS), None)
        if place is None or self.ops[place].kind not in WITH_CHANNEL_WEIGHTS or len(self.inputs) != 1:
            return None
        return place if self.input_gradient else None

    @property
    def repeats(self) -> bool:
        """Whether GPUs that all run the layer get the same: it draws no numbers, as far as its operations are known."""
        return bool(self.ops) and all(op.kind != "dropout" for op in self.ops)

    @property
    def weight_bytes(self) -> int:
        return self.weight_elements * self.element_bytes

    @property
    def output_bytes(self) -> int:
        return prod(self.output) * self.element_bytes


@dataclass(frozen=True, slots=True, repr=False)
class LayerGraph:
    """Layers in topological order, for the batch of one GPU (`batch` samples)."""

    name: str
    batch: int
    layers: tuple[Layer, ...]
    training: bool = True
    notes: tuple[str, ...] = ()
    """Layers that could not be split, and reasons; shown with every result."""

    def __len__(self) -> int:
        return len(self.layers)

    @property
    def weight_bytes(self) -> int:
        """Bytes of all weights."""
        return sum(layer.weight_bytes for layer in self.layers)

    def for_gpus(self, gpus: int) -> LayerGraph:
        """Return the graph for `gpus` times the samples: the batch of that many GPUs together."""
        return replace(self, layers=tuple(_scaled(layer, gpus) for layer in self.layers))

    def consumers(self) -> tuple[tuple[tuple[int, int], ...], ...]:
        """Return the (layer, number of its input) pairs that use each layer's output."""
        users: list[list[tuple[int, int]]] = [[] for _ in self.layers]
        for index, layer in enumerate(self.layers):
            for number, edge in enumerate(layer.inputs):
                if edge.source != BATCH:
                    users[edge.source].append((index, number))
        return tuple(tuple(pairs) for pairs in users)

    def __repr__(self) -> str:
        return short_repr("LayerGraph", f"{short_name(self.name)}: {counted(len(self), 'layer')}, batch {self.batch}")

    def _repr_html_(self) -> str:
        rows = [(layer.name, layer.kind, "x".join(map(str, layer.output)), layer.splits) for layer in self.layers]
        return html_table(f"Layers of {self.name}", ("layer", "kind", "output", "splits"), rows)


def check_graph(graph: LayerGraph) -> None:
    """Raise `OptionError` for a graph without layers, an edge that points forward, or a duplicate name."""
    if not graph.layers:
        raise OptionError(f"'{graph.name}' has no layers")
    names: set[str] = set()
    for index, layer in enumerate(graph.layers):
        if layer.name in names:
            raise OptionError(f"layer '{layer.name}' comes twice in '{graph.name}'")
        names.add(layer.name)
        if min(layer.output) < 1:
            raise OptionError(f"layer '{layer.name}' has no output: {layer.output}")
        for edge in layer.inputs:
            if not BATCH <= edge.source < index:
                raise OptionError(f"layer '{layer.name}' takes layer {edge.source}, which does not come before it")


def _scaled(layer: Layer, factor: int) -> Layer:
    """Return a layer with `factor` times the samples; one without a rule over samples keeps its shape."""
    return replace(
        layer,
        output=_more(layer.output, factor),
        inputs=tuple(replace(edge, extents=_more(edge.extents, factor)) for edge in layer.inputs),
        flops=layer.flops * factor,
        kept_elements=layer.kept_elements * factor,
    )


def _more(extents: Extents, factor: int) -> Extents:
    return (extents[0] * factor, *extents[1:])
