"""Exchanges of tensors between the ranks of a plan: over torch.distributed, or none for one rank alone.

Ranks post the same exchanges in the same order (`gpusim.gpu.layerwise.rank`), so neither backend needs tags.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
import torch.distributed as dist


@dataclass(frozen=True, slots=True)
class Groups:
    """Groups of ranks that a plan needs, each of at least two."""

    together: frozenset[tuple[int, ...]]
    """Ranks that share statistics, and all ranks."""
    weights: frozenset[tuple[int, ...]]
    """Ranks that hold the same weights."""


class Transport(Protocol):
    """Communication of a rank with the others."""

    rank: int

    def exchange(self, sends: Sequence[tuple[int, torch.Tensor]], receives: Sequence[tuple[int, torch.Tensor]]) -> None:
        """Send tensors and receive into others; all are contiguous."""
        ...

    def all_reduce(self, tensor: torch.Tensor, ranks: tuple[int, ...]) -> None:
        """Sum a tensor over some ranks, in place."""
        ...

    def begin_sum(self, tensor: torch.Tensor, ranks: tuple[int, ...]) -> None:
        """Begin to sum a tensor over ranks that hold the same weights, in place; it is complete after `finish`."""
        ...

    def finish(self) -> None:
        """Wait for all sums begun so far."""
        ...


class Distributed:
    """Communication by torch.distributed. Groups are made once, on all ranks in the same order.

    Sums of gradients have groups of their own: a group has one stream on a GPU, where a sum would delay exchanges.
    """

    def __init__(self, groups: Groups) -> None:
        self.rank = dist.get_rank()
        everyone = tuple(range(dist.get_world_size()))
        self._groups: dict[tuple[int, ...], Any] = {everyone: dist.group.WORLD}
        self._groups |= _made(groups.together - {everyone})
        self._sums = _made(groups.weights)
        self._begun: list[Any] = []

    def exchange(self, sends: Sequence[tuple[int, torch.Tensor]], receives: Sequence[tuple[int, torch.Tensor]]) -> None:
        """See `Transport`."""
        operations = [dist.P2POp(dist.isend, tensor, peer) for peer, tensor in sends]
        operations += [dist.P2POp(dist.irecv, tensor, peer) for peer, tensor in receives]
        if operations:
            for work in dist.batch_isend_irecv(operations):
                work.wait()

    def all_reduce(self, tensor: torch.Tensor, ranks: tuple[int, ...]) -> None:
        """See `Transport`."""
        if len(ranks) > 1:
            dist.all_reduce(tensor, group=self._groups[ranks])

    def begin_sum(self, tensor: torch.Tensor, ranks: tuple[int, ...]) -> None:
        """See `Transport`."""
        if len(ranks) > 1:
            self._begun.append(dist.all_reduce(tensor, group=self._sums[ranks], async_op=True))

    def finish(self) -> None:
        """See `Transport`."""
        for work in self._begun:
            work.wait()
        self._begun.clear()


def _made(groups: Iterable[tuple[int, ...]]) -> dict[tuple[int, ...], Any]:
    return {ranks: dist.new_group(list(ranks)) for ranks in sorted(groups)}


class Alone:
    """One rank by itself: nothing is received and buffers keep their content. Only for timing computation."""

    def __init__(self, rank: int) -> None:
        self.rank = rank

    def exchange(self, sends: Sequence[tuple[int, torch.Tensor]], receives: Sequence[tuple[int, torch.Tensor]]) -> None:
        """See `Transport`."""

    def all_reduce(self, tensor: torch.Tensor, ranks: tuple[int, ...]) -> None:
        """See `Transport`."""

    def begin_sum(self, tensor: torch.Tensor, ranks: tuple[int, ...]) -> None:
        """See `Transport`."""

    def finish(self) -> None:
        """See `Transport`."""
