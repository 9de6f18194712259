"""Transfers that are one collective: every GPU gathers the whole of a layer of which each has an equal part.

So it is before fully connected layers that split channels. The gradient returns by a reduce-scatter: each GPU has
a summand of all of it, and needs the sum of its part. So it is, too, before a layer that every GPU computes, whose
gradient every GPU has: nothing returns. The simulation and the execution of a plan ask the same function.
"""

from __future__ import annotations

from math import prod

from gpusim.layerwise.configs import Config
from gpusim.layerwise.layers import BATCH, Layer


def gathered_along(
    source: Layer, source_config: Config, user: Layer, number: int, user_config: Config, gpus: int
) -> int | None:
    """Return the dimension of `source` along which all GPUs gather it for an input of `user`; None if they do not."""
    edge = user.inputs[number]
    if edge.source == BATCH or source_config.replicated:
        return None
    split = [place for place, degree in enumerate(source_config.degrees) if degree > 1]
    if len(split) != 1 or source_config.parts != gpus or user_config.computing(gpus) != gpus:
        return None
    (place,) = split
    if source.output[place] % gpus or edge.extents != source.output:
        return None
    pairs = zip(user_config.degrees, edge.needs, strict=True)
    return place if all(degree == 1 or need.rule == "all" for degree, need in pairs) else None


def in_one_piece(source: Layer, place: int) -> bool:
    """Whether parts along a dimension are next to each other in memory, so that nothing is rearranged."""
    return prod(source.output[:place]) == 1
