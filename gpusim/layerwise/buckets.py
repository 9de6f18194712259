"""Buckets in which a plan's gradients are summed during the backward pass, as in DistributedDataParallel.

The simulation and the execution of a plan take them from here. All ranks derive the same buckets in the same order from
a plan, so ranks that compute different layers start the sums that they share in the same order.
"""

from __future__ import annotations

from dataclasses import dataclass

from gpusim.layerwise.configs import Config
from gpusim.layerwise.layers import LayerGraph


@dataclass(frozen=True, slots=True)
class Bucket:
    """Layers of one configuration, in the order of the backward pass, whose gradients are summed together."""

    config: Config
    layers: tuple[int, ...]
    bytes: int
    """Bytes of the gradients on one GPU."""
    full: bool
    """Whether it is summed after its last layer; else after the backward pass."""


def gradient_buckets(graph: LayerGraph, choice: tuple[Config, ...], bucket_bytes: int) -> tuple[Bucket, ...]:
    """Return the buckets of a plan in the order of their sums: a bucket is full at `bucket_bytes` or more."""
    done: list[Bucket] = []
    open_buckets: dict[Config, tuple[tuple[int, ...], int]] = {}
    for index in reversed(range(len(graph))):
        layer, config = graph.layers[index], choice[index]
        if not layer.weight_elements or config.replicated or config.replicas < 2:
            continue
        layers, size = open_buckets.get(config, ((), 0))
        layers, size = (*layers, index), size + -(-layer.weight_elements // config.c) * layer.element_bytes
        open_buckets[config] = layers, size
        if size >= bucket_bytes:
            del open_buckets[config]
            done.append(Bucket(config, layers, size, full=True))
    return (*done, *(Bucket(config, layers, size, full=False) for config, (layers, size) in open_buckets.items()))
