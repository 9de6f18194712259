"""Buckets in which a plan's gradients are summed during the backward pass, as in DistributedDataParallel.

The simulation and the execution of a plan take them from here; weights that several layers use are summed apart. All
ranks derive the same buckets in the same order from a plan, so ranks that compute different layers start the sums that
they share in the same order.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from gpusim.layerwise.configs import Config
from gpusim.layerwise.layers import Layer, LayerGraph
from gpusim.units import MIB

#: Most bytes of the last bucket, if there are others: nothing hides its sum. DistributedDataParallel's first bucket has
#: as many, so that the sums begin early.
LAST_BUCKET_BYTES: Final = MIB


#: Most bytes that GPUs sum by reading each other's gradients. On four H200s a gather of four times as many and a kernel
#: take less time than NCCL's sum up to here, and more at 1 MiB (research/2026-11-27-four-gpus.md).
SHARED_SUM_BYTES: Final = MIB // 4


@dataclass(frozen=True, slots=True)
class Bucket:
    """Layers of one configuration, in the order of the backward pass, whose gradients are summed together."""

    config: Config
    layers: tuple[int, ...]
    bytes: int
    """Bytes of the gradients on one GPU."""
    copied_bytes: int
    """Bytes that are copied into one tensor for their sum."""
    full: bool
    """Whether it is summed after its last layer; else after the backward pass."""


def gradient_buckets(graph: LayerGraph, choice: tuple[Config, ...], bucket_bytes: int) -> tuple[Bucket, ...]:
    """Return the buckets of a plan in the order of their sums: a bucket is full at `bucket_bytes` or more.

    It is full earlier if all gradients of its configuration that are still to come fit the last bucket. Gradients of a
    bucket are copied into one tensor, except those that would fill one by themselves (`is_alone`).
    """
    done: list[Bucket] = []
    open_buckets: dict[Config, tuple[tuple[int, ...], int, int]] = {}
    summed = [
        index
        for index in reversed(range(len(graph)))
        if _own_bytes(graph.layers[index], choice[index])
        and not choice[index].replicated
        and choice[index].replicas > 1
    ]
    to_come: dict[Config, int] = {}
    for index in summed:
        to_come[choice[index]] = to_come.get(choice[index], 0) + _own_bytes(graph.layers[index], choice[index])
    for index in summed:
        layer, config = graph.layers[index], choice[index]
        layers, size, copied = open_buckets.get(config, ((), 0, 0))
        own = _own_bytes(layer, config)
        to_come[config] -= own
        layers, size, copied = (*layers, index), size + own, copied + (0 if is_alone(own, bucket_bytes) else own)
        open_buckets[config] = layers, size, copied
        if size >= bucket_bytes or size > LAST_BUCKET_BYTES >= to_come[config] > 0:
            del open_buckets[config]
            done.append(Bucket(config, layers, size, copied, full=True))
    return (*done, *(Bucket(config, *parts, full=False) for config, parts in open_buckets.items()))


def _own_bytes(layer: Layer, config: Config) -> int:
    return -(-(layer.weight_elements - layer.tied_elements) // config.c) * layer.element_bytes


def sums_by_reading(bucket: Bucket, gpus: int) -> bool:
    """Whether GPUs with shared memory sum a bucket by reading: all of them, little, and when no exchange uses it."""
    everyone = bucket.config.c == 1 and bucket.config.parts == gpus
    return everyone and not bucket.full and bucket.bytes <= SHARED_SUM_BYTES


def is_alone(gradient_bytes: int, bucket_bytes: int) -> bool:
    """Whether a gradient is summed in place: it fills a bucket, so two copies would cost more than another sum."""
    return gradient_bytes >= bucket_bytes
