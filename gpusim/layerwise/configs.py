"""Configurations: the number of parts in each dimension of a layer, and the GPU of each part.

Source: Jia et al. 2018, section 4, table 1. Each part belongs to one GPU; with fewer parts than GPUs, the other GPUs
have none of the layer. Parts are assigned to GPUs 0, 1, ... with channels varying fastest, then width, height and
samples: parts of one sample are on neighbours, so only samples are split across nodes where possible. Parts may be
unequal: the first ones then have one more.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property, lru_cache
from math import prod
from typing import Final

import numpy as np

from gpusim.errors import OptionError
from gpusim.layerwise.layers import DIMS, Extents, Ints, Layer
from gpusim.text import shortened, visible
from gpusim.units import counted

#: From the slowest to the fastest varying dimension, as indices of `DIMS`: n, h, w, c.
RUNNING: Final = (0, 2, 3, 1)


@dataclass(frozen=True, order=True)
class Config:
    """Number of parts of a layer in each dimension. `replicated`: every GPU computes the whole layer."""

    n: int = 1
    c: int = 1
    h: int = 1
    w: int = 1
    replicated: bool = False

    def __hash__(self) -> int:
        return self._hash

    @cached_property
    def _hash(self) -> int:
        """Hash, computed once: tables of costs look configurations up very often."""
        return hash((self.n, self.c, self.h, self.w, self.replicated))

    @cached_property
    def degrees(self) -> tuple[int, int, int, int]:
        """Number of parts in the order of `DIMS`."""
        return self.n, self.c, self.h, self.w

    @cached_property
    def parts(self) -> int:
        """Number of GPUs with a part (1 for a replicated layer)."""
        return prod(self.degrees)

    def computing(self, gpus: int) -> int:
        """Return the number of GPUs, of all, that compute some of the layer."""
        return gpus if self.replicated else self.parts

    @property
    def replicas(self) -> int:
        """Number of GPUs that hold the same part of the weights."""
        return self.n * self.h * self.w

    def __str__(self) -> str:
        if self.replicated:
            return "on every GPU"
        return ", ".join(f"{dim}={degree}" for dim, degree in zip(DIMS, self.degrees, strict=True) if degree > 1) or "1"


REPLICATED: Final = Config(replicated=True)


@lru_cache(maxsize=4096)
def configs_of(output: Extents, splits: str, channel_unit: int, gpus: int) -> tuple[Config, ...]:
    """Return all configurations of a layer on `gpus` GPUs, fewest parts first.

    Each degree and their product divide the number of GPUs. Samples and channels are split evenly, in whole heads or
    groups; height and width may be split unevenly.
    """
    if not splits:
        return (REPLICATED,)
    divisors = [d for d in range(1, gpus + 1) if gpus % d == 0]
    options = []
    for dim, extent in zip(DIMS, output, strict=True):
        if dim not in splits:
            options.append([1])
        elif dim == "n":
            options.append([d for d in divisors if extent % d == 0])
        elif dim == "c":
            options.append([d for d in divisors if (extent // channel_unit) % d == 0])
        else:
            options.append([d for d in divisors if d <= extent])
    return tuple(
        sorted(
            (
                Config(n, c, h, w)
                for n in options[0]
                for c in options[1]
                for h in options[2]
                for w in options[3]
                if gpus % (n * c * h * w) == 0
            ),
            key=lambda config: (config.parts, config),
        )
    )


def layer_configs(layer: Layer, gpus: int) -> tuple[Config, ...]:
    """Return `configs_of` a layer of the whole batch."""
    return configs_of(layer.output, layer.splits, layer.channel_unit, gpus)


def check_config(layer: Layer, config: Config, gpus: int) -> Config:
    """Return the configuration if it is valid for the layer. Raises `OptionError` with layer, dimension and extent."""
    where = f"layer '{shortened(visible(layer.name))}'"
    if config.replicated:
        return config
    for dim, degree, extent in zip(DIMS, config.degrees, layer.output, strict=True):
        if degree < 1:
            raise OptionError(f"{where}: {dim}={degree}; a degree is 1 or more")
        if degree == 1:
            continue
        if dim not in layer.splits:
            allowed = ", ".join(layer.splits) or "no dimension: it has no rule, and every GPU computes it"
            raise OptionError(f"{where}: {dim}={degree}, but a {layer.kind} layer is split by {allowed}")
        if dim == "n" and extent % degree:
            raise OptionError(f"{where}: n={degree} does not divide its {counted(extent, 'sample')}")
        if dim == "c" and (extent // layer.channel_unit) % degree:
            units = counted(extent // layer.channel_unit, "channel" if layer.channel_unit == 1 else "group")
            of = "" if layer.channel_unit == 1 else f" of {counted(layer.channel_unit, 'channel')}"
            raise OptionError(f"{where}: c={degree} does not divide its {units}{of}")
        if degree > extent:
            raise OptionError(f"{where}: {dim}={degree}, of {counted(extent, 'row' if dim == 'h' else 'column')}")
    if gpus % config.parts:
        raise OptionError(f"{where}: {config} makes {config.parts} parts, which do not divide {counted(gpus, 'GPU')}")
    return config


def interval(extent: int, degree: int | Ints, part: Ints) -> tuple[Ints, Ints]:
    """Return [low, high) of part `part` of `degree`; the first `extent % degree` parts have one more."""
    size, more = extent // degree, extent % degree
    low = part * size + np.minimum(part, more)
    return low, low + size + (part < more)


def coordinates(config: Config, devices: Ints) -> Ints:
    """Index of each device's part in each dimension of `DIMS`, one row per device; -1 without a part."""
    parts = np.full((len(devices), 4), -1, np.int64)
    if config.replicated:
        parts[:] = 0
        return parts
    rest = devices.copy()
    for place in reversed(RUNNING):
        degree = config.degrees[place]
        parts[:, place] = rest % degree
        rest //= degree
    parts[devices >= config.parts] = -1
    return parts


def boxes(output: Extents, config: Config, devices: Ints) -> tuple[Ints, Ints]:
    """Low and high corner of each device's part of a layer's output, one row per device; empty without a part."""
    parts = coordinates(config, devices)
    low, high = np.zeros_like(parts), np.zeros_like(parts)
    active = parts[:, 0] >= 0
    for place, extent in enumerate(output):
        first, last = interval(extent, config.degrees[place], parts[:, place])
        low[:, place], high[:, place] = np.where(active, first, 0), np.where(active, last, 0)
    return low, high


def needed(layer: Layer, number: int, low: Ints, high: Ints) -> tuple[Ints, Ints]:
    """Return the box of input `number`, halos included, that parts [low, high) of a layer's output need.

    The box is one of the source's output, which the input may be a part of.
    """
    edge = layer.inputs[number]
    first, last = np.zeros_like(low), np.zeros_like(high)
    for place, need in enumerate(edge.needs):
        begin, end = need.interval(low[..., place], high[..., place], edge.extents[place], layer.output[place])
        first[..., place], last[..., place] = begin + edge.origin[place], end + edge.origin[place]
    empty = (high <= low).any(axis=-1, keepdims=True)
    return np.where(empty, 0, first), np.where(empty, 0, last)


def volume(low: Ints, high: Ints) -> Ints:
    """Return the number of elements of each box."""
    sizes: Ints = np.maximum(high - low, 0).prod(axis=-1)
    return sizes


def largest_share(output: Extents, config: Config) -> Extents:
    """Extents of the largest part, on GPU 0."""
    n, c, h, w = (-(-extent // degree) for extent, degree in zip(output, config.degrees, strict=True))
    return n, c, h, w


def same_weights(config: Config, gpus: Iterable[int]) -> dict[int, list[int]]:
    """Return part of the channels -> the given GPUs that hold its weights."""
    devices = np.array(list(gpus), np.int64)
    groups: dict[int, list[int]] = {}
    for device, part in zip(devices, coordinates(config, devices), strict=True):
        if part[0] >= 0:
            groups.setdefault(int(part[1]), []).append(int(device))
    return groups
