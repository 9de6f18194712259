"""Bytes moved between two configurations: the elements of a layer's input that each GPU needs but does not hold.

Source: Jia et al. 2018, section 5.1 (t_X); volumes are those of intersections of boxes. The backward pass moves the
same boxes in the other direction and sums overlaps: a split of channels, which needs the whole input, gives partial
sums of its gradient, and a halo's gradient returns to the neighbour.

A box is a product of intervals, so an intersection is a product of lengths. The length in one dimension depends only on
its degree and stride over GPUs (`Axis`): a table of these is looked up for each pair of configurations.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import lru_cache
from math import prod
from typing import Final

import numpy as np
import numpy.typing as npt

from gpusim.layerwise.configs import RUNNING, Config, boxes, interval, needed, volume
from gpusim.layerwise.layers import BATCH, Extents, Ints, Layer, Need

Floats = npt.NDArray[np.float64]
Axis = tuple[int, int]
"""Degree of a dimension, and of how many GPUs in a row each has the same part of it."""

#: Up to this many GPUs all are evaluated, else the GPUs of this many nodes: the first half, then evenly spread. Parts
#: of a layer differ by at most one row, so the busiest of those is within that of the busiest of all.
ALL_GPUS: Final = 64
SAMPLED_NODES: Final = 4
#: Entries of a table computed at a time, so that they fit a core's cache.
_PIECE: Final = 1 << 15


@dataclass(frozen=True, slots=True)
class Transfer:
    """Elements moved over one edge in one direction, for each pair of configurations (rows: source; columns: user)."""

    busiest: Floats
    """Elements of the GPU that receives or sends most."""
    busiest_node: Floats
    """Elements of the node that receives most from other nodes or sends most to them."""
    gpus: Ints
    """Number of GPUs that take part."""


def sampled(gpus: int, gpus_per_node: int) -> Ints:
    """Return the GPUs whose boxes are evaluated, in whole nodes."""
    if gpus <= ALL_GPUS:
        return np.arange(gpus)
    nodes = -(-gpus // gpus_per_node)
    first = np.arange(min(nodes, SAMPLED_NODES // 2))
    spread = np.linspace(0, nodes - 1, SAMPLED_NODES).round().astype(np.int64)
    chosen = np.unique(np.concatenate([first, spread]))
    devices = (chosen[:, None] * gpus_per_node + np.arange(gpus_per_node)[None, :]).ravel()
    return devices[devices < gpus]


def transfers(
    source: Layer,
    source_configs: tuple[Config, ...],
    user: Layer,
    number: int,
    user_configs: tuple[Config, ...],
    gpus: int,
    gpus_per_node: int,
) -> Transfer:
    """Elements that each pair of configurations moves forward over input `number` of `user`."""
    devices, holders = _devices(gpus, gpus_per_node)
    own, need = _pairs_of_axes(source_configs), _pairs_of_axes(user_configs)
    has, uses = _active(source_configs, devices), _active(user_configs, devices)
    halves = [_lengths(source, user, number, half, own[half], need[half], gpus, gpus_per_node) for half in range(2)]
    rows, columns = [pairs.which[:, None] for pairs in own], [pairs.which[None] for pairs in need]
    wanted = halves[0].wanted[need[0].which] * halves[1].wanted[need[1].which] * uses
    sent = halves[0].sent[rows[0], columns[0]] * halves[1].sent[rows[1], columns[1]]
    copies = np.array([gpus if config.replicated else 1 for config in user_configs], np.int32)
    sent *= has[:, None] * copies[None, :, None]
    kept = halves[0].held[rows[0], columns[0], 0] * halves[1].held[rows[1], columns[1], 0]
    kept *= has[:, None] * uses[None]
    busiest = (np.maximum(wanted[None], sent) - kept).max(axis=-1)
    everywhere = np.array([config.replicated for config in source_configs])
    busiest[everywhere] = 0
    across = np.zeros_like(busiest)
    if gpus > gpus_per_node:
        there = _active(source_configs, holders.ravel()).reshape(len(source_configs), 1, *holders.shape)
        held = np.empty((len(source_configs), *uses.shape), kept.dtype)
        step = max(1, _PIECE // (len(uses) * holders.size))
        for start in range(0, len(held), step):
            some = slice(start, start + step)
            first = (halves[0].held[own[0].which[some]] * there[some])[:, need[0].which]
            np.einsum("abhd,abhd->abd", first, halves[1].held[rows[1][some], columns[1]], out=held[some])
        held *= uses[None]
        starts = np.flatnonzero(np.diff(devices // gpus_per_node, prepend=-1))
        inside = np.add.reduceat(held, starts, axis=-1)
        most = np.maximum(np.add.reduceat(wanted, starts, axis=-1)[None], np.add.reduceat(sent, starts, axis=-1))
        across = (most - inside).max(axis=-1)
        across[everywhere] = 0
    parts = np.maximum(_parts(source_configs, gpus)[:, None], _parts(user_configs, gpus)[None, :])
    return Transfer(busiest.astype(np.float64), across.astype(np.float64), parts)


def alike(source: Layer, user: Layer, number: int, gpus: int) -> tuple[Layer, Layer, int]:
    """Reduce two layers to the fewest channels with the same transfers; returns them and the volumes' factor.

    Channels divisible by any number of GPUs are split evenly, so volumes are proportional to them.
    """
    channels, users = source.output[1], user.output[1]
    edge = user.inputs[number]
    rule = edge.needs[1].rule
    whole = channels % gpus == 0 and source.channel_unit == 1 and edge.extents[1] == channels
    if not (whole and (rule == "all" or (rule == "same" and channels == users))):
        return source, user, 1
    fewer = users if rule == "all" else gpus
    taken = replace(edge, extents=_with_channels(edge.extents, gpus))
    inputs = tuple(taken if place == number else each for place, each in enumerate(user.inputs))
    user = replace(user, output=_with_channels(user.output, fewer), inputs=inputs)
    return replace(source, output=_with_channels(source.output, gpus)), user, channels // gpus


def _with_channels(extents: Extents, channels: int) -> Extents:
    n, _, h, w = extents
    return n, channels, h, w


def moved_elements(
    source: Layer, source_config: Config, user: Layer, number: int, user_config: Config, gpus: int
) -> int:
    """Elements that all GPUs receive over one edge in one direction."""
    if source_config.replicated or user.inputs[number].source == BATCH:
        return 0
    devices = np.arange(gpus)
    own_low, own_high = boxes(source.output, source_config, devices)
    low, high = needed(user, number, *boxes(user.output, user_config, devices))
    kept = volume(np.maximum(low, own_low), np.minimum(high, own_high))
    return int((volume(low, high) - kept).sum())


#: Dimensions in two halves: channels and width vary fastest, so few pairs of axes of each half occur together.
_HALVES: Final = ((1, 3), (2, 0))


@dataclass(frozen=True, slots=True)
class _Pairs:
    """Axes of two dimensions: the distinct pairs among some configurations, and the index of each configuration's
    pair.
    """

    axes: tuple[tuple[Axis, Axis], ...]
    which: Ints


@lru_cache(maxsize=256)
def _pairs_of_axes(configs: tuple[Config, ...]) -> tuple[_Pairs, _Pairs]:
    """Return the pairs of both halves."""
    by_half: list[list[tuple[Axis, Axis]]] = [[], []]
    for config in configs:
        stride, axes = 1, {}
        for place in reversed(RUNNING):
            axes[place] = (config.degrees[place], stride)
            stride *= config.degrees[place]
        for half, (first, second) in enumerate(_HALVES):
            by_half[half].append((axes[first], axes[second]))
    pairs = []
    for some in by_half:
        distinct = tuple(dict.fromkeys(some))
        pairs.append(_Pairs(distinct, np.array([distinct.index(pair) for pair in some])))
    return pairs[0], pairs[1]


@dataclass(frozen=True, slots=True)
class _Areas:
    """Areas in two dimensions, by pairs of axes of both layers (of the user's alone: `wanted`) and by device."""

    held: Ints
    """Overlap of the device's need with each holder's part, holder by holder."""
    sent: Ints
    """Overlap of the needs of all devices with its own part."""
    wanted: Ints
    """Area of the device's need."""


def _lengths(
    source: Layer, user: Layer, number: int, half: int, own: _Pairs, need: _Pairs, gpus: int, gpus_per_node: int
) -> _Areas:
    """Return the areas of one half."""
    kind = np.int32 if fits(source, user, number, gpus) else np.int64
    areas = []
    for number_in_half, place in enumerate(_HALVES[half]):
        edge, output = user.inputs[number], user.output[place]
        taken = _Taken(edge.needs[place], source.output[place], edge.extents[place], edge.origin[place])
        own_axes = [pair[number_in_half] for pair in own.axes]
        need_axes = [pair[number_in_half] for pair in need.axes]
        distinct, needed_axes = tuple(dict.fromkeys(own_axes)), tuple(dict.fromkeys(need_axes))
        along = _along(taken, output, distinct, needed_axes, gpus, gpus_per_node)
        rows = np.array([distinct.index(axis) for axis in own_axes])[:, None]
        columns = np.array([needed_axes.index(axis) for axis in need_axes])
        held, sent, wanted = (lengths.astype(kind) for lengths in (along.held, along.sent, along.wanted))
        areas.append((held[rows, columns], sent[rows, columns], wanted[columns]))
    one, other = areas
    return _Areas(*(length * across for length, across in zip(one, other, strict=True)))


@dataclass(frozen=True, slots=True)
class _Taken:
    """One dimension of an edge: what a user's interval needs of an input that may be a part of its source."""

    need: Need
    whole: int
    """Extent of the source."""
    extent: int
    origin: int

    def interval(self, low: Ints, high: Ints, output: int) -> tuple[Ints, Ints]:
        """Return the interval of the source that an interval of the user's output needs."""
        first, last = self.need.interval(low, high, self.extent, output)
        return first + self.origin, last + self.origin


@lru_cache(maxsize=32)
def _along(
    taken: _Taken,
    output: int,
    own_axes: tuple[Axis, ...],
    need_axes: tuple[Axis, ...],
    gpus: int,
    gpus_per_node: int,
) -> _Areas:
    """Return the lengths in one dimension; cached, as consecutive edges of a network agree in most dimensions."""
    devices, holders = _devices(gpus, gpus_per_node)
    ends = _intervals(taken.whole, own_axes, holders.ravel())
    held_low, held_high = (each.reshape(-1, *holders.shape) for each in ends)
    low, high = taken.interval(*_intervals(output, need_axes, devices), output)
    held = _overlap(held_low[:, None], held_high[:, None], low[None, :, None], high[None, :, None])
    sums = {}
    for degree in {degree for degree, _ in need_axes}:
        first, last = taken.interval(*interval(output, degree, np.arange(degree)), output)
        sums[degree] = _overlap(held_low[:, 0, :, None], held_high[:, 0, :, None], first, last).sum(axis=-1)
    return _Areas(held, np.stack([sums[degree] for degree, _ in need_axes], axis=1), high - low)


def _devices(gpus: int, gpus_per_node: int) -> tuple[Ints, Ints]:
    """Return the GPUs evaluated, each with the GPUs of its node, itself first; not needed on one node."""
    devices = sampled(gpus, gpus_per_node)
    in_node = np.arange(gpus_per_node if gpus > gpus_per_node else 1)[:, None]
    return devices, devices // gpus_per_node * gpus_per_node + (devices + in_node) % gpus_per_node


def fits(source: Layer, user: Layer, number: int, gpus: int) -> bool:
    """Whether volumes of one edge, and their total for all GPUs, fit 32 bits: half the memory to traverse."""
    windows = prod(max(1, -(-need.kernel // need.stride)) for need in user.inputs[number].needs)
    return prod(source.output) * windows * max(gpus, ALL_GPUS) < 2**31


def _intervals(extent: int, axes: tuple[Axis, ...], devices: Ints) -> tuple[Ints, Ints]:
    degrees, strides = np.array(axes).T[..., None]
    return interval(extent, degrees, devices[None] // strides % degrees)


def _overlap(low: Ints, high: Ints, other_low: Ints, other_high: Ints) -> Ints:
    overlap: Ints = np.maximum(np.minimum(high, other_high) - np.maximum(low, other_low), 0)
    return overlap


def _active(configs: tuple[Config, ...], devices: Ints) -> Ints:
    """Return 1 for devices with a part, else 0."""
    parts = np.array([np.iinfo(np.int64).max if config.replicated else config.parts for config in configs])
    return (devices[None, :] < parts[:, None]).astype(np.int32)


def _parts(configs: tuple[Config, ...], gpus: int) -> Ints:
    return np.array([config.computing(gpus) for config in configs])
