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
    copied_bytes: int
    """Bytes that are copied into one tensor for their sum, and back."""
    full: bool
    """Whether it is summed after its last layer; else after the backward pass."""


def gradient_buckets(graph: LayerGraph, choice: tuple[Config, ...], bucket_bytes: int) -> tuple[Bucket, ...]:
    """Return the buckets of a plan in the order of their sums: a bucket is full at `bucket_bytes` or more.

    Gradients of a bucket are copied into one tensor, except those that would fill one by themselves (`is_alone`).
    """
    done: list[Bucket] = []
    open_buckets: dict[Config, tuple[tuple[int, ...], int, int]] = {}
    for index in reversed(range(len(graph))):
        layer, config = graph.layers[index], choice[index]
        if not layer.weight_elements or config.replicated or config.replicas < 2:
            continue
        layers, size, copied = open_buckets.get(config, ((), 0, 0))
        own = -(-layer.weight_elements // config.c) * layer.element_bytes
        layers, size, copied = (*layers, index), size + own, copied + (0 if is_alone(own, bucket_bytes) else own)
        open_buckets[config] = layers, size, copied
        if size >= bucket_bytes:
            del open_buckets[config]
            done.append(Bucket(config, layers, size, copied, full=True))
    return (*done, *(Bucket(config, *parts, full=False) for config, parts in open_buckets.items()))


def is_alone(gradient_bytes: int, bucket_bytes: int) -> bool:
    """Whether a gradient is summed in place: it fills a bucket, so two copies would cost more than another sum."""
    return gradient_bytes >= bucket_bytes
