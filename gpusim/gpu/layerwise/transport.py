"""Exchanges of tensors between the ranks of a plan: over torch.distributed, or none for one rank alone.

Ranks post the same exchanges in the same order (`gpusim.gpu.layerwise.rank`), so neither backend needs tags.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, Protocol

import torch
import torch.distributed as dist


class Transport(Protocol):
    """Communication of a rank with the others."""

    rank: int

    def exchange(self, sends: Sequence[tuple[int, torch.Tensor]], receives: Sequence[tuple[int, torch.Tensor]]) -> None:
        """Send tensors and receive into others; all are contiguous."""
        ...

    def all_reduce(self, tensor: torch.Tensor, ranks: tuple[int, ...], *, wait: bool = True) -> None:
        """Sum a tensor over some ranks, in place; without `wait` it is complete after `finish`."""
        ...

    def finish(self) -> None:
        """Wait for all operations begun so far."""
        ...


class Distributed:
    """Communication by torch.distributed. Groups are made once, on all ranks in the same order."""

    def __init__(self, groups: Iterable[tuple[int, ...]]) -> None:
        self.rank = dist.get_rank()
        everyone = tuple(range(dist.get_world_size()))
        self._groups: dict[tuple[int, ...], Any] = {everyone: dist.group.WORLD}
        for ranks in sorted(set(groups) - {everyone}):
            if len(ranks) > 1:
                self._groups[ranks] = dist.new_group(list(ranks))
        self._begun: list[Any] = []

    def exchange(self, sends: Sequence[tuple[int, torch.Tensor]], receives: Sequence[tuple[int, torch.Tensor]]) -> None:
        """See `Transport`."""
        operations = [dist.P2POp(dist.isend, tensor, peer) for peer, tensor in sends]
        operations += [dist.P2POp(dist.irecv, tensor, peer) for peer, tensor in receives]
        if operations:
            for work in dist.batch_isend_irecv(operations):
                work.wait()

    def all_reduce(self, tensor: torch.Tensor, ranks: tuple[int, ...], *, wait: bool = True) -> None:
        """See `Transport`."""
        if len(ranks) < 2:
            return
        work = dist.all_reduce(tensor, group=self._groups[ranks], async_op=True)
        if wait:
            work.wait()
        else:
            self._begun.append(work)

    def finish(self) -> None:
        """See `Transport`."""
        for work in self._begun:
            work.wait()
        self._begun.clear()


class Alone:
    """One rank by itself: nothing is received and buffers keep their content. Only for timing computation."""

    def __init__(self, rank: int) -> None:
        self.rank = rank

    def exchange(self, sends: Sequence[tuple[int, torch.Tensor]], receives: Sequence[tuple[int, torch.Tensor]]) -> None:
        """See `Transport`."""

    def all_reduce(self, tensor: torch.Tensor, ranks: tuple[int, ...], *, wait: bool = True) -> None:
        """See `Transport`."""

    def finish(self) -> None:
        """See `Transport`."""
