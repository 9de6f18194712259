"""Moves of `gpusim.search.neighbourhood`: changes of a schedule, joined changes, and detection of repeated ones.

A third to two thirds of random changes leave the waits of every op unchanged: a chain moves to a free stream, or an op
past one that depends on it. `Fingerprints` distinguishes these from changes worth an evaluation.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from gpusim.plan.graph import OpGraph
from gpusim.plan.partitions import Layout
from gpusim.policies.shared.base import work_order
from gpusim.search.events import compared_ns
from gpusim.trace.merging import plain_variants

#: Kinds of moves, and their probabilities.
RESTREAM, RESTREAM_STRETCH, REORDER, EXCHANGE, VARY = range(5)
MOVE_SHARES = (0.3, 0.2, 0.4, 0.1, 0.0)
MOVE_SHARES_WITH_VARIANTS = (0.2, 0.15, 0.25, 0.05, 0.35)
#: Numbers of ops that get another variant in one move.
VARIED = (1, 1, 2, 6)
#: Numbers of ops of its stream that an op moves past, and of ops of a stream that move to another together.
HOPS = (1, 2, 3, 8)
STRETCHES = (2, 3, 5, 9)
#: Maximum number of ops with known ancestors: a bit per pair, 50 MB. In larger steps, fewer schedules are recognised as
#: equal.
MOST_RELATED = 20_000
#: Uniform random numbers per move, except for moves of variants.
_DRAWS = 4


@dataclass
class Current:
    """A schedule from which the search continues."""

    keys: npt.NDArray[np.float64]
    streams: npt.NDArray[np.int32]
    variants: npt.NDArray[np.int32]
    makespan_ns: int
    """Makespan as judged by the search, the mean over perturbed steps (`gpusim.search.robust`)."""
    events: int = 0
    """Number of its events; 0 where they are not compared."""
    stale: int = 0
    """Number of batches of neighbours without a better one."""
    tried: dict[int, int] = field(default_factory=dict, repr=False)
    """Fingerprints of evaluated neighbours, and the fewest events with which each was evaluated."""

    @property
    def compared_ns(self) -> int:
        """What the search minimises (`gpusim.search.events`)."""
        return compared_ns(self.makespan_ns, self.events)


@dataclass
class Candidates:
    """Schedules to evaluate, one per row."""

    keys: npt.NDArray[np.float64]
    streams: npt.NDArray[np.int32]
    variants: npt.NDArray[np.int32]

    @classmethod
    def copies(cls, current: Current, count: int) -> Candidates:
        """Return `count` copies of a schedule."""
        return cls(
            np.repeat(current.keys[None, :], count, axis=0),
            np.repeat(current.streams[None, :], count, axis=0),
            np.repeat(current.variants[None, :], count, axis=0),
        )

    @property
    def chosen(self) -> npt.NDArray[np.int32] | None:
        """The variants, or None if all kernels are the captured ones."""
        return self.variants if self.variants.any() else None

    def row(self, number: int, makespan_ns: int, events: int = 0, stale: int = 0) -> Current:
        """Return a copy of one schedule."""
        keys, streams, variants = self.keys[number].copy(), self.streams[number].copy(), self.variants[number].copy()
        return Current(keys, streams, variants, makespan_ns, events, stale)

    def rows(self, numbers: Iterable[int]) -> Candidates:
        """Return some of the schedules."""
        chosen = list(numbers)
        return Candidates(self.keys[chosen], self.streams[chosen], self.variants[chosen])

    def with_more(self, more: Candidates) -> Candidates:
        """Return these schedules followed by others."""
        return Candidates(
            np.concatenate([self.keys, more.keys]),
            np.concatenate([self.streams, more.streams]),
            np.concatenate([self.variants, more.variants]),
        )


class Moves:
    """Generator of neighbours; uses only uniform random numbers, which are the same in all versions of numpy."""

    def __init__(self, graph: OpGraph, max_streams: int, random: np.random.Generator, variants: bool) -> None:
        self.graph = graph
        self.max_streams = max_streams
        self.random = random
        self.work = np.array(work_order(graph), np.int64)
        self.variants = list(map(plain_variants, graph.trace.ops)) if variants and graph.variants else []
        """Number of variants of each op that the search may choose."""
        self.variable = [op for op, count in enumerate(self.variants) if count]
        self.shares: tuple[float, ...] = MOVE_SHARES_WITH_VARIANTS if self.variable else MOVE_SHARES

    def draw(self, current: Current, count: int) -> Candidates:
        """Return `count` changed copies of a schedule."""
        candidates = Candidates.copies(current, count)
        by_key = self.work[np.argsort(current.keys[self.work], kind="stable")]
        limit = self.max_streams
        kinds = np.searchsorted(np.cumsum(self.shares[:-1]), self.random.random(count), side="right").tolist()
        for row, (kind, draws) in enumerate(zip(kinds, self.random.random((count, _DRAWS)).tolist(), strict=True)):
            place = int(draws[0] * len(by_key))
            op, own = by_key[place], current.streams[by_key[place]]
            other = (own + 1 + int(draws[1] * (limit - 1))) % limit
            if kind == RESTREAM:
                candidates.streams[row, op] = other
            elif kind == RESTREAM_STRETCH:
                ahead = by_key[place:]
                stretch = ahead[current.streams[ahead] == own]
                candidates.streams[row, stretch[: STRETCHES[int(draws[2] * len(STRETCHES))]]] = other
            elif kind == REORDER:
                later = draws[1] < 0.5
                ahead = by_key[place:] if later else by_key[place::-1]
                passed = ahead[current.streams[ahead] == own][: 1 + HOPS[int(draws[2] * len(HOPS))]]
                candidates.keys[row, op] = current.keys[passed[-1]] + (draws[3] if later else -draws[3])
            elif kind == EXCHANGE:
                ahead = by_key[place:]
                candidates.streams[row, ahead[current.streams[ahead] == own]] = other
                candidates.streams[row, ahead[current.streams[ahead] == other]] = own
            else:
                self._vary(candidates, row, VARIED[int(draws[2] * len(VARIED))])
        return candidates

    def _vary(self, candidates: Candidates, row: int, count: int) -> None:
        """Change the variants of some ops in one row."""
        for draws in self.random.random((count, 4)).tolist():
            op = self.variable[int(draws[0] * len(self.variable))]
            candidates.variants[row, op] = int(draws[1] * (1 + self.variants[op]))
            if draws[2] < 0.5:  # a smaller kernel pays off only next to another
                candidates.streams[row, op] = int(draws[3] * self.max_streams)


def joined(current: Current, near: Candidates, better: Iterable[int], most: int) -> Candidates:
    """Return copies with the joined changes of several neighbours: the first two, the first three and so on.

    `better` has their numbers, best first; neighbours that change an op already changed are left out. There are at most
    `most` copies.
    """
    changed = (near.keys != current.keys) | (near.streams != current.streams) | (near.variants != current.variants)
    candidates = Candidates.copies(current, most + 1)
    so_far = np.zeros(len(current.keys), bool)
    count = 0
    for number in better:
        change = changed[number]
        if count <= most and not (so_far & change).any():
            so_far |= change
            candidates.keys[count:, change] = near.keys[number, change]
            candidates.streams[count:, change] = near.streams[number, change]
            candidates.variants[count:, change] = near.variants[number, change]
            count += 1
    return candidates.rows(range(1, count))


class Fingerprints:
    """Fingerprints that distinguish schedules by the waits, kernels and SMs of their ops.

    An op waits for its predecessor on its stream, unless it depends on that one anyway. Schedules that differ only in
    the order of a fork's successors count as equal: successors of a fork start in turn, but the difference is a
    fraction of a microsecond.
    """

    def __init__(self, graph: OpGraph, random: np.random.Generator, layout: Layout | None) -> None:
        self.work = len(work_order(graph))
        self.of_stream = None if layout is None else np.array(layout.of_stream, np.uint64)
        self.ancestors = _ancestors(graph) if len(graph) <= MOST_RELATED else None
        # Sums of products of large random numbers, modulo 2^64.
        weights = (random.random((4, len(graph))) * 2.0**53).astype(np.uint64)
        self.before, self.behind, self.kernels, self.places = weights

    def of(self, orders: npt.NDArray[np.int32], candidates: Candidates) -> list[int]:
        """Return a fingerprint per schedule; `orders` are their launch orders, with views last."""
        orders = orders[:, : self.work]
        rows = np.arange(len(orders))[:, None]
        streams = candidates.streams[rows, orders]
        by_stream = np.argsort(streams, axis=1, kind="stable")
        ops, streams = orders[rows, by_stream], streams[rows, by_stream]
        before, behind = ops[:, :-1], ops[:, 1:]
        waits = streams[:, 1:] == streams[:, :-1]
        if self.ancestors is not None:
            waits &= self.ancestors[behind, before >> 3] & (1 << (before & 7)) == 0
        hashes = (self.before[before] * self.behind[behind] * waits).sum(axis=1, dtype=np.uint64)
        if candidates.variants.any():
            hashes += (candidates.variants.astype(np.uint64) * self.kernels).sum(axis=1, dtype=np.uint64)
        if self.of_stream is not None:
            hashes += (self.of_stream[streams] * self.places[ops]).sum(axis=1, dtype=np.uint64)
        return [int(fingerprint) for fingerprint in hashes]


def _ancestors(graph: OpGraph) -> npt.NDArray[np.uint8]:
    """Return the ancestors with kernels of each op, as packed bits."""
    ancestors = np.zeros((len(graph), (len(graph) + 7) // 8), np.uint8)
    for op, preds in graph.work_preds.items():
        for before in preds:
            ancestors[op] |= ancestors[before]
            ancestors[op, before >> 3] |= 1 << (before & 7)
    return ancestors
