"""Plans that follow a rule instead of a search: data parallelism, model parallelism, "one weird trick".

Source of the rules: Jia et al. 2018, section 6; Krizhevsky, "One weird trick for parallelizing convolutional neural
networks", 2014. A dimension that cannot be split into as many parts is split into the most that divide it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

from gpusim.layerwise.configs import Config, layer_configs
from gpusim.layerwise.layers import Layer, LayerGraph

Choice = tuple[Config, ...]


def data_parallel(graph: LayerGraph, gpus: int) -> Choice:
    """Split every layer by samples."""
    return tuple(_most(layer, gpus, "n") for layer in graph.layers)


def model_parallel(graph: LayerGraph, gpus: int) -> Choice:
    """Split the weights of every layer over all GPUs; layers that cannot split channels are split by samples."""
    return tuple(_most(layer, gpus, "c" if "c" in layer.splits else "n") for layer in graph.layers)


def one_weird_trick(graph: LayerGraph, gpus: int) -> Choice:
    """Split fully connected layers by channels, all others by samples."""
    return tuple(_most(layer, gpus, "c" if layer.kind == "linear" else "n") for layer in graph.layers)


#: Name of the searched plan in results.
SEARCHED: Final = "layer"
#: Name in results -> plan.
FIXED_PLANS: Final[dict[str, Callable[[LayerGraph, int], Choice]]] = {
    "data": data_parallel,
    "model": model_parallel,
    "owt": one_weird_trick,
}


def _most(layer: Layer, gpus: int, dim: str) -> Config:
    """Return the configuration with the most parts in one dimension and one part in all others."""
    options = [c for c in layer_configs(layer, gpus) if c.replicated or getattr(c, dim) == c.parts]
    return max(options, key=lambda config: config.parts)
