"""A random batch for the layers of a network: its input, and the targets of its loss."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from gpusim.layerwise.layers import BATCH, LayerGraph


def make_inputs(graph: LayerGraph, generator: torch.Generator) -> torch.Tensor:
    """Make the input of the whole batch in single precision: random numbers, and rows of tables that look them up."""
    users = [(layer, edge) for layer in graph.layers for edge in layer.inputs if edge.source == BATCH]
    extents = [max(a + b for a, b in zip(*each, strict=True)) for each in _by_dimension(graph)]
    tables = [(edge, op.options["table"][0]) for layer, edge in users for op in layer.ops[:1] if "table" in op.options]
    if not tables:
        return torch.randn(extents, generator=generator, dtype=torch.float32)
    rows = torch.randint(0, min(size for _, size in tables), extents, generator=generator).float()
    if len(tables) == len(users):
        return rows
    made = torch.randn(extents, generator=generator, dtype=torch.float32)
    for edge, _ in tables:
        box = tuple(slice(low, low + size) for low, size in zip(edge.origin, edge.extents, strict=True))
        made[box] = rows[box]
    return made


def _by_dimension(graph: LayerGraph) -> list[tuple[tuple[int, ...], tuple[int, ...]]]:
    """Return the origins and the extents of all inputs from the batch, by dimension."""
    edges = [edge for layer in graph.layers for edge in layer.inputs if edge.source == BATCH]
    origins, extents = zip(*((edge.origin, edge.extents) for edge in edges), strict=True)
    return list(zip(zip(*origins, strict=True), zip(*extents, strict=True), strict=True))


def make_targets(graph: LayerGraph, generator: torch.Generator) -> torch.Tensor:
    """Make a class for each sample, or for each position of each sample."""
    with_classes = (layer for layer in graph.layers if any(op.kind == "loss" for op in layer.ops))
    loss = next(with_classes, graph.layers[-1])
    n, classes, h, w = loss.output
    return torch.randint(0, classes, (n, h, w) if h * w > 1 else (n,), generator=generator)


@dataclass(frozen=True)
class Data:
    """A whole batch: every rank makes the same one from a seed."""

    inputs: torch.Tensor
    targets: torch.Tensor


def make_data(graph: LayerGraph, seed: int, dtype: torch.dtype, device: torch.device) -> Data:
    """Make random inputs and targets for the layers of the whole batch."""
    generator = torch.Generator().manual_seed(seed)
    inputs = make_inputs(graph, generator).to(dtype)
    return Data(inputs.to(device), make_targets(graph, generator).to(device))
