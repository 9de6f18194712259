"""Ranks that share statistics, weights, or parts of the channels with a rank."""

from __future__ import annotations

import numpy as np

from gpusim.defaults import BatchNorm
from gpusim.gpu.layerwise.operations import parameter_shapes
from gpusim.gpu.layerwise.transport import Groups
from gpusim.layerwise.configs import Config, coordinates
from gpusim.layerwise.fixed_plans import Choice
from gpusim.layerwise.layers import Layer, LayerGraph


def sharing(
    layer: Layer, config: Config, gpus: int, batch_norm: BatchNorm, rank: int
) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Return the ranks that share statistics with a rank and those that hold the same weights, both including it."""
    if config.replicated:
        return (rank,), (rank,)
    devices = np.arange(gpus)
    parts = coordinates(config, devices)
    mine = parts[rank]
    if mine[0] < 0:
        return (), ()
    same_channels = (parts[:, 0] >= 0) & (parts[:, 1] == mine[1])
    together = same_channels & ((parts[:, 0] == mine[0]) | (batch_norm == "synchronised"))
    return tuple(map(int, devices[together])), tuple(map(int, devices[same_channels]))


def across_channels(config: Config, gpus: int, rank: int) -> tuple[int, ...]:
    """Return the ranks with the channels of a rank's part of samples, height and width, itself included."""
    if config.replicated or config.c == 1:
        return (rank,)
    devices = np.arange(gpus)
    parts = coordinates(config, devices)
    if parts[rank, 0] < 0:
        return ()
    others = (parts[:, [0, 2, 3]] == parts[rank, [0, 2, 3]]).all(axis=1)
    return tuple(map(int, devices[others]))


def groups_of(graph: LayerGraph, choice: Choice, gpus: int, batch_norm: BatchNorm) -> Groups:
    """Return all groups of ranks that a plan needs."""
    together, weights = {tuple(range(gpus))}, set()
    for layer, config in zip(graph.layers, choice, strict=True):
        has_whole = any(each.channels_at is None for named in parameter_shapes(layer) for each in named.values())
        for rank in range(gpus):
            statistics, same_weights = sharing(layer, config, gpus, batch_norm, rank)
            if has_whole:
                together.add(across_channels(config, gpus, rank))
            if layer.statistics:
                together.add(statistics)
            if layer.weight_elements:
                weights.add(same_weights)
    if any(layer.tied for layer in graph.layers):
        weights.add(tuple(range(gpus)))
    return Groups(*(frozenset(ranks for ranks in groups if len(ranks) > 1) for groups in (together, weights)))
