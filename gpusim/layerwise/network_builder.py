"""Layer graphs built by hand, for networks without a trace."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from math import prod

from gpusim.errors import OptionError
from gpusim.layerwise.layers import (
    ALL,
    BATCH,
    SAME,
    SCALE,
    Edge,
    Extents,
    Input,
    Layer,
    LayerGraph,
    LayerOp,
    Need,
    check_graph,
    pointwise,
)


class NetworkBuilder:
    """Builder of a layer graph, layer by layer; each method returns the new layer's index.

    `batch` is the batch of one GPU. Layers without a given name are named by kind and number.
    """

    def __init__(self, name: str, batch: int, element_bytes: int = 4) -> None:
        self.name, self.batch, self.element_bytes = name, batch, element_bytes
        self._layers: list[Layer] = []

    def graph(self, training: bool = True) -> LayerGraph:
        """Return the finished graph. Raises `OptionError`."""
        graph = LayerGraph(self.name, self.batch, tuple(self._layers), training)
        check_graph(graph)
        return graph

    def extents(self, layer: int) -> Extents:
        """Return the extents of a layer's output."""
        return self._layers[layer].output

    def convolution(
        self,
        source: int | tuple[int, int, int],
        channels: int,
        kernel: int | tuple[int, int],
        *,
        stride: int = 1,
        padding: int | tuple[int, int] = 0,
        groups: int = 1,
        bias: bool = False,
        norm: bool = False,
        relu: bool = False,
        name: str = "",
    ) -> int:
        """Add a convolution, optionally followed by BatchNorm and ReLU; `source` is a layer or the batch's (c, h, w).

        Raises `OptionError` if the output would be empty.
        """
        index, extents = self._source(source)
        kernels, paddings = _pair(kernel), _pair(padding)
        height, width = (_windows(extents[2 + d], kernels[d], stride, paddings[d]) for d in (0, 1))
        output = (self.batch, channels, height, width)
        across = extents[1] // groups
        taps = kernels[0] * kernels[1]
        needs = (
            SAME,
            ALL if groups == 1 else SCALE,
            Need("window", kernels[0], stride, paddings[0]),
            Need("window", kernels[1], stride, paddings[1]),
        )
        options = {"kernel": kernels, "stride": stride, "padding": paddings, "groups": groups, "bias": bias}
        ops = [LayerOp("convolution", {**options, "channels": (extents[1], channels)})]
        weights = channels * across * taps + (channels if bias else 0)
        if norm:
            ops.append(LayerOp("batch_norm"))
        if relu:
            ops.append(pointwise("relu", Input(0)))
        return self._add(
            Layer(
                name=name or f"convolution{len(self._layers)}",
                kind="convolution",
                output=output,
                inputs=(Edge(index, extents, needs),),
                splits="nchw",
                channel_unit=channels // groups if groups > 1 else 1,
                weight_elements=weights + (2 * channels if norm else 0),
                statistics=2 * channels if norm else 0,
                flops=2 * prod(output) * across * taps,
                kept_elements=prod(output) * (1 + norm),
                input_gradient=index != BATCH,
                ops=tuple(ops),
            )
        )

    def pool(
        self, source: int, kernel: int, *, stride: int = 0, padding: int = 0, average: bool = False, name: str = ""
    ) -> int:
        """Add max or average pooling over windows; the stride defaults to the kernel."""
        index, extents = self._source(source)
        stride = stride or kernel
        height, width = (_windows(extents[d], kernel, stride, padding) for d in (2, 3))
        window = Need("window", kernel, stride, padding)
        options = {"kernel": kernel, "stride": stride, "padding": padding, "average": average}
        output = (self.batch, extents[1], height, width)
        return self._add(
            Layer(
                name=name or f"pool{len(self._layers)}",
                kind="pool",
                output=output,
                inputs=(Edge(index, extents, (SAME, SAME, window, window)),),
                splits="nchw",
                flops=prod(output) * kernel * kernel,
                kept_elements=prod(output),
                ops=(LayerOp("pool", options),),
            )
        )

    def global_pool(self, source: int, name: str = "") -> int:
        """Add an average over each map."""
        index, extents = self._source(source)
        output = (self.batch, extents[1], 1, 1)
        return self._add(
            Layer(
                name=name or f"pool{len(self._layers)}",
                kind="pool",
                output=output,
                inputs=(Edge(index, extents, (SAME, SAME, ALL, ALL)),),
                splits="nc",
                flops=prod(extents),
                kept_elements=prod(output),
                ops=(LayerOp("global_pool"),),
            )
        )

    def flatten(self, source: int, name: str = "") -> int:
        """Flatten maps into one row of features per sample."""
        index, extents = self._source(source)
        output = (self.batch, prod(extents[1:]), 1, 1)
        return self._add(
            Layer(
                name=name or f"flatten{len(self._layers)}",
                kind="flatten",
                output=output,
                inputs=(Edge(index, extents, (SAME, SCALE, ALL, ALL)),),
                splits="nc",
                channel_unit=extents[2] * extents[3],
                ops=(LayerOp("flatten"),),
            )
        )

    def linear(
        self,
        source: int | tuple[int, int, int],
        features: int,
        *,
        bias: bool = True,
        relu: bool = False,
        dropout: float = 0.0,
        name: str = "",
    ) -> int:
        """Add a fully connected layer over the channels, at each position of a sequence."""
        index, extents = self._source(source)
        output = (self.batch, features, extents[2], extents[3])
        ops = [LayerOp("linear", {"channels": (extents[1], features), "bias": bias})]
        ops += [pointwise("relu", Input(0))] if relu else []
        ops += [LayerOp("dropout", {"p": dropout})] if dropout else []
        return self._add(
            Layer(
                name=name or f"linear{len(self._layers)}",
                kind="linear",
                output=output,
                inputs=(Edge(index, extents, (SAME, ALL, SAME, SAME)),),
                splits="nch" if extents[2] > 1 else "nc",
                weight_elements=features * extents[1] + (features if bias else 0),
                flops=2 * prod(output) * extents[1],
                kept_elements=prod(output) * (1 + bool(dropout)),
                input_gradient=index != BATCH,
                ops=tuple(ops),
            )
        )

    def layer_norm(self, source: int, name: str = "") -> int:
        """Add a LayerNorm over the channels of each position, which prevents splits of channels."""
        index, extents = self._source(source)
        return self._pointwise("layer_norm", (index,), extents, "nh" if extents[2] > 1 else "n", 2 * extents[1], name)

    def relu(self, source: int, name: str = "") -> int:
        """Add a separate ReLU."""
        index, extents = self._source(source)
        return self._pointwise("relu", (index,), extents, "nchw", 0, name)

    def gelu(self, source: int, name: str = "") -> int:
        """Add a separate GELU."""
        index, extents = self._source(source)
        return self._pointwise("gelu", (index,), extents, "nchw", 0, name)

    def batch_norm(self, source: int, *, relu: bool = False, name: str = "") -> int:
        """Add a separate BatchNorm, optionally followed by a ReLU."""
        index, extents = self._source(source)
        added = self._pointwise("batch_norm", (index,), extents, "nchw", 2 * extents[1], name)
        ops = (LayerOp("batch_norm"), *([pointwise("relu", Input(0))] if relu else []))
        self._layers[added] = replace(self._layers[added], statistics=2 * extents[1], ops=ops)
        return added

    def add(self, sources: Sequence[int], *, relu: bool = False, name: str = "") -> int:
        """Add the sum of layers of one shape. Raises `OptionError` if shapes differ."""
        extents = self.extents(sources[0])
        if any(self.extents(source) != extents for source in sources):
            raise OptionError(f"add of layers of different shapes: {[self.extents(source) for source in sources]}")
        added = self._pointwise("add", tuple(sources), extents, "nchw", 0, name)
        if relu:
            self._layers[added] = replace(self._layers[added], ops=(LayerOp("add"), pointwise("relu", Input(0))))
        return added

    def concat(self, sources: Sequence[int], name: str = "") -> int:
        """Concatenate the channels of several layers."""
        edges, channels = [], 0
        for source in sources:
            extents = self.extents(source)
            edges.append(Edge(source, extents, (SAME, Need("shift", offset=channels), SAME, SAME)))
            channels += extents[1]
        first = self.extents(sources[0])
        output = (self.batch, channels, first[2], first[3])
        return self._add(
            Layer(
                name=name or f"concat{len(self._layers)}",
                kind="concat",
                output=output,
                inputs=tuple(edges),
                splits="nchw",
                kept_elements=prod(output),
                ops=(LayerOp("concat"),),
            )
        )

    def attention(self, query: int, key: int, value: int, heads: int, name: str = "") -> int:
        """Add scaled dot-product attention; channels split by heads, positions by queries, as each needs all keys."""
        extents = self.extents(query)
        keys = self.extents(key)
        whole = (SAME, SAME, ALL, SAME)
        return self._add(
            Layer(
                name=name or f"attention{len(self._layers)}",
                kind="attention",
                output=extents,
                inputs=(Edge(query, extents), Edge(key, keys, whole), Edge(value, keys, whole)),
                splits="nch",
                channel_unit=extents[1] // heads,
                flops=4 * extents[0] * extents[1] * extents[2] * keys[2],
                kept_elements=prod(extents) + extents[0] * heads * extents[2],
                ops=(LayerOp("attention", {"heads": heads}),),
            )
        )

    def loss(self, source: int, name: str = "loss") -> int:
        """Add softmax and cross entropy, averaged over the batch."""
        index, extents = self._source(source)
        return self._pointwise("loss", (index,), extents, "n", 0, name)

    def _pointwise(
        self, kind: str, sources: tuple[int, ...], extents: Extents, splits: str, weights: int, name: str
    ) -> int:
        return self._add(
            Layer(
                name=name or f"{kind}{len(self._layers)}",
                kind=kind,
                output=extents,
                inputs=tuple(Edge(source, extents) for source in sources),
                splits=splits,
                weight_elements=weights,
                flops=prod(extents) * max(1, len(sources)),
                kept_elements=prod(extents),
                ops=(pointwise(kind, Input(0)) if kind == "gelu" else LayerOp(kind),),
            )
        )

    def _source(self, source: int | tuple[int, int, int]) -> tuple[int, Extents]:
        if isinstance(source, tuple):
            return BATCH, (self.batch, *source)
        return source, self.extents(source)

    def _add(self, layer: Layer) -> int:
        self._layers.append(replace(layer, element_bytes=self.element_bytes, path=layer.path or layer.name))
        return len(self._layers) - 1


def _pair(value: int | tuple[int, int]) -> tuple[int, int]:
    return (value, value) if isinstance(value, int) else value


def _windows(extent: int, kernel: int, stride: int, padding: int) -> int:
    """Return the number of positions of a window. Raises `OptionError` if it does not fit."""
    count = (extent + 2 * padding - kernel) // stride + 1
    if count < 1:
        raise OptionError(f"a window of {kernel} does not fit into {extent} with a padding of {padding}")
    return count
