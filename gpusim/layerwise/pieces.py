"""Boxes that a rank sends and receives over one edge of a plan, in coordinates of its own tensors."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from gpusim.layerwise.configs import Config, boxes, needed, volume
from gpusim.layerwise.gathers import gathered_along
from gpusim.layerwise.layers import BATCH, Ints, Layer

Box = tuple[slice, slice, slice, slice]


@dataclass(frozen=True)
class EdgePieces:
    """One input of a layer on one rank. Its buffer holds the elements that the rank needs, padded in split
    dimensions.
    """

    shape: tuple[int, int, int, int]
    """Shape of the buffer; empty if the rank needs nothing."""
    own: tuple[Box, Box] | None
    """Box of the rank's own elements in its tensor, and in the buffer; None if their gradient comes by a scatter."""
    sends: tuple[tuple[int, Box], ...]
    """Peers, each with a box of the rank's tensor."""
    receives: tuple[tuple[int, Box], ...]
    """Peers, each with a box of the buffer."""
    interior: Box
    """Box of the buffer without padding."""
    batch_box: Box
    """`interior` in coordinates of the whole input, for edges from the batch."""
    is_own: bool
    """Whether the buffer is the rank's own tensor."""
    padded: tuple[bool, bool]
    """Whether the buffer includes the padding in height and in width, so that the operation must not add it."""
    gathered: int | None = None
    """Dimension along which all ranks gather the whole input, each having an equal part; without sends and receives."""
    exchanged: bool = False
    """Whether any two ranks exchange pieces of this input."""
    receive_offsets: tuple[int, ...] = ()
    """For each of `receives`, the elements that its peer sends to ranks before this one."""
    send_offsets: tuple[int, ...] = ()
    """For each of `sends`, the elements that its peer receives from ranks before this one."""

    @property
    def is_full(self) -> bool:
        """Whether own and received elements fill the buffer."""
        return all(part.stop - part.start == size for part, size in zip(self.interior, self.shape, strict=True))


def pieces(
    source: Layer | None, source_config: Config, user: Layer, number: int, user_config: Config, gpus: int, rank: int
) -> EdgePieces:
    """Return the pieces of one edge; `source` is None for the batch, which every rank has."""
    devices = np.arange(gpus)
    out_low, out_high = boxes(user.output, user_config, devices)
    need_low, need_high = needed(user, number, out_low, out_high)
    padded = user_config.h > 1, user_config.w > 1
    pad_low, pad_high = _with_padding(
        user, number, padded, (out_low[rank], out_high[rank]), (need_low[rank], need_high[rank])
    )
    mine = _Box(need_low[rank], need_high[rank])
    shape = tuple(int(size) for size in np.maximum(pad_high - pad_low, 0))
    interior = mine.within(pad_low)
    assert len(shape) == 4
    if source is None or user.inputs[number].source == BATCH:
        return EdgePieces(shape, None, (), (), interior, mine.within(np.zeros(4, np.int64)), False, padded)
    own_low, own_high = boxes(source.output, source_config, devices)
    held = _Box(own_low[rank], own_high[rank])
    along = gathered_along(source, source_config, user, number, user_config, gpus)
    if along is not None:
        box = mine.within(np.zeros(4, np.int64))
        own = (held.within(held.low), held.within(mine.low)) if user_config.replicated else None
        return EdgePieces(source.output, own, (), (), box, box, False, padded, along)
    sends, receives = [], []
    if not source_config.replicated:
        for peer in range(gpus):
            if peer == rank:
                continue
            theirs = held.and_(_Box(need_low[peer], need_high[peer]))
            if theirs.size:
                sends.append((peer, theirs.within(held.low)))
            ours = mine.and_(_Box(own_low[peer], own_high[peer]))
            if ours.size:
                receives.append((peer, ours.within(pad_low)))
    kept = mine.and_(held)
    own = (kept.within(held.low), kept.within(pad_low)) if kept.size else None
    whole = 0 < kept.size == held.size == int(np.prod(shape)) and not receives and not sends
    summed = source_config.replicated and not user_config.replicated  # the gradient comes from all ranks
    exchanges = bool(sends or receives or summed)
    is_own = whole and not summed
    if not exchanges and not is_own and _has_all(user, number, user_config, held, mine):  # it takes what it needs
        shape, interior, is_own = held.shape, mine.within(held.low), True
    moved = moved_between(source, source_config, user, number, user_config, gpus)
    return EdgePieces(
        shape,
        own,
        tuple(sends),
        tuple(receives),
        interior,
        interior,
        is_own,
        padded,
        exchanged=bool(moved.any()),
        receive_offsets=tuple(int(moved[peer, :rank].sum()) for peer, _ in receives),
        send_offsets=tuple(int(moved[:rank, peer].sum()) for peer, _ in sends),
    )


def moved_between(
    source: Layer, source_config: Config, user: Layer, number: int, user_config: Config, gpus: int
) -> Ints:
    """Return the elements that each rank (row) sends to each other one (column) for one input."""
    devices = np.arange(gpus)
    if source_config.replicated:
        return np.zeros((gpus, gpus), np.int64)
    own_low, own_high = boxes(source.output, source_config, devices)
    need_low, need_high = needed(user, number, *boxes(user.output, user_config, devices))
    low, high = np.maximum(own_low[:, None], need_low[None]), np.minimum(own_high[:, None], need_high[None])
    moved = volume(low, high)
    np.fill_diagonal(moved, 0)
    return moved


def _has_all(user: Layer, number: int, user_config: Config, held: _Box, mine: _Box) -> bool:
    """Whether a rank has the whole height and width of an input, for a layer that does not split them.

    A convolution of size 1 and stride 2, say, does not need the last row, and would be given a copy without it.
    """
    edge = user.inputs[number]
    first = np.array(edge.origin)
    last = first + np.array(edge.extents)
    same = (held.low[:2] == mine.low[:2]).all() and (held.high[:2] == mine.high[:2]).all()
    whole = (held.low[2:] == first[2:]).all() and (held.high[2:] == last[2:]).all()
    return bool(mine.size and user_config.h == user_config.w == 1 and same and whole)


@dataclass(frozen=True)
class _Box:
    low: Ints
    high: Ints

    def and_(self, other: _Box) -> _Box:
        return _Box(np.maximum(self.low, other.low), np.minimum(self.high, other.high))

    @property
    def shape(self) -> tuple[int, int, int, int]:
        n, c, h, w = (int(size) for size in self.high - self.low)
        return n, c, h, w

    @property
    def size(self) -> int:
        return int(np.maximum(self.high - self.low, 0).prod())

    def within(self, origin: Ints) -> Box:
        n, c, h, w = (slice(int(a), int(b)) for a, b in zip(self.low - origin, self.high - origin, strict=True))
        return n, c, h, w


def _with_padding(
    user: Layer, number: int, padded: tuple[bool, bool], output: tuple[Ints, Ints], need: tuple[Ints, Ints]
) -> tuple[Ints, Ints]:
    """Return the needed box extended by the padding that windows reach, in split dimensions."""
    (low, high), (need_low, need_high) = output, need
    first, last = need_low.copy(), need_high.copy()
    if (high <= low).any() or (need_high <= need_low).any():
        return first, first
    edge = user.inputs[number]
    for place, split in ((2, padded[0]), (3, padded[1])):
        rule = edge.needs[place]
        if split and rule.rule == "window":
            wanted = rule.padded(int(low[place]), int(high[place]), edge.extents[place], user.output[place])
            first[place], last[place] = (each + edge.origin[place] for each in wanted)
    return first, last
