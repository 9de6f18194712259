"""A plan as placements of torch's DTensor and as a plan for `parallelize_module`, with notes on what they cannot
express.

No torch is needed: placements are text, `Shard(0)` and `Replicate()`, in the order of the mesh's dimensions. A mesh has
one dimension for each prime factor of the number of GPUs, so it can express a split by any of its factors.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from gpusim.layerwise.configs import Config
from gpusim.layerwise.fixed_plans import Choice
from gpusim.layerwise.layers import Layer, LayerGraph

#: Dimension of an output tensor by letter: of an image, or of rows of features.
_TENSOR_DIMS: Final = {"n": 0, "c": 1, "h": 2, "w": 3}
#: Splits from the slowest to the fastest varying dimension, as GPUs are numbered.
_ORDER: Final = ("n", "h", "w", "c")


@dataclass(frozen=True, slots=True)
class Placed:
    """Placements of one layer's output and weights; empty if DTensor cannot express them."""

    layer: str
    path: str
    output: tuple[str, ...]
    weights: tuple[str, ...]
    cannot: str
    """Reason why DTensor cannot express it; empty if it can."""


@dataclass(frozen=True, slots=True)
class Exported:
    """Placements of all layers, and the plan for `parallelize_module`."""

    mesh: tuple[int, ...]
    layers: tuple[Placed, ...]
    parallelize_plan: dict[str, str]
    """Module path -> `ColwiseParallel()`: fully connected layers split by channels on all GPUs."""
    cannot: tuple[str, ...]


def export_dtensor(graph: LayerGraph, choice: Choice, gpus: int) -> Exported:
    """Return the placements of a plan."""
    mesh = tuple(_primes(gpus)) or (1,)
    placed = tuple(_placed(layer, config, mesh, gpus) for layer, config in zip(graph.layers, choice, strict=True))
    styles = {
        layer.path: "ColwiseParallel()"
        for layer, config in zip(graph.layers, choice, strict=True)
        if layer.kind == "linear" and layer.path and config.c == config.parts == gpus > 1
    }
    return Exported(mesh, placed, styles, tuple(f"{each.layer}: {each.cannot}" for each in placed if each.cannot))


def _placed(layer: Layer, config: Config, mesh: tuple[int, ...], gpus: int) -> Placed:
    everywhere = tuple("Replicate()" for _ in mesh)
    cannot = _cannot(layer, config, gpus)
    if cannot:
        return Placed(layer.name, layer.path, (), (), cannot)
    if config.replicated or config.parts == 1:
        return Placed(layer.name, layer.path, everywhere, everywhere if layer.has_weights else (), "")
    letters = _letters(config, mesh)
    output = tuple(f"Shard({_TENSOR_DIMS[letter]})" for letter in letters)
    weights = tuple("Shard(0)" if letter == "c" else "Replicate()" for letter in letters)
    return Placed(layer.name, layer.path, output, weights if layer.has_weights else (), "")


def _letters(config: Config, mesh: tuple[int, ...]) -> list[str]:
    """Return the tensor dimension that each dimension of the mesh splits."""
    letters: list[str] = []
    for letter in _ORDER:
        letters += [letter] * len(_primes(getattr(config, letter)))
    assert len(letters) == len(mesh)
    return letters


def _cannot(layer: Layer, config: Config, gpus: int) -> str:
    """Return the reason why DTensor cannot express a configuration; empty if it can."""
    if config.replicated:
        return ""
    if 1 < config.parts < gpus:
        return f"only {config.parts} of {gpus} GPUs have a part; a mesh has all of them"
    if config.parts == 1 < gpus:
        return f"one of {gpus} GPUs computes it; DTensor would compute it on all"
    needs = [need for edge in layer.inputs for need in edge.needs]
    windows = layer.kind == "upsampling" or any(need.kernel > 1 for need in needs)
    if windows and (config.h > 1 or config.w > 1):
        return "height and width of a window operation are split: DTensor exchanges no halos there"
    if layer.kind == "convolution" and config.c > 1:
        return "output channels of a convolution are split: DTensor replicates its weights"
    if layer.kind == "group_norm" and config.c > 1:
        return "channels of a group norm are split: DTensor replicates them"
    if layer.statistics and config.parts > 1:
        return "BatchNorm: DTensor has no statistics of a part of the batch; use SyncBatchNorm"
    uneven = [d for d, e in (("h", layer.output[2]), ("w", layer.output[3])) if e % getattr(config, d)]
    if uneven:
        return f"{uneven[0]} is split unevenly in another way: DTensor's first parts are full, its last one smaller"
    if _primes(gpus) != [r for letter in _ORDER for r in _primes(getattr(config, letter))]:
        return f"{config} is no product of the mesh's dimensions in their order"
    return ""


def _primes(number: int) -> list[int]:
    """Prime factors, the smallest first."""
    factors, factor = [], 2
    while number > 1:
        while number % factor == 0:
            factors.append(factor)
            number //= factor
        factor += 1
    return factors
