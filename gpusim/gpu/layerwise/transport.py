"""Exchanges of tensors between the ranks of a plan: over torch.distributed, or none for one rank alone.

Ranks post the same exchanges in the same order (`gpusim.gpu.layerwise.rank`), so neither backend needs tags.
"""

from __future__ import annotations

import datetime
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Final, Protocol

import torch
import torch.distributed as dist

#: Timeout of a collective: longer means that a rank was lost. By NCCL, torch's watchdog then ends the process; it does
#: not watch the collectives of a CUDA graph.
TIMEOUT: Final = datetime.timedelta(seconds=120)
Tensors = Sequence[tuple[int, torch.Tensor]]
"""Ranks, each with a tensor for it or from it, which may be a view."""
Finish = Callable[[], None]
"""Waits for what was begun."""


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

    def begin_exchange(self, sends: Tensors, receives: Tensors, offsets: Sequence[int]) -> Finish:
        """Begin to send tensors and to receive into others; all ranks call it.

        `offsets` has, for each tensor received, the elements that its sender sends to others before.
        """
        ...

    def gather(self, whole: torch.Tensor, part: torch.Tensor, place: int) -> None:
        """Put equal parts of all ranks next to each other along a dimension of `whole`, which is contiguous."""
        ...

    def begin_scatter(self, part: torch.Tensor, whole: torch.Tensor, place: int) -> Finish:
        """Begin to sum all ranks' tensors, of which each rank keeps a part: the opposite of `gather`."""
        ...

    def all_reduce(self, tensor: torch.Tensor, ranks: tuple[int, ...]) -> None:
        """Sum a tensor over some ranks, in place."""
        ...

    def sum_by_reading(self, tensors: Sequence[torch.Tensor]) -> torch.Tensor | None:
        """Return the sums of tensors over all ranks, flat, one behind the other; None if it has no such way."""
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

    def begin_exchange(self, sends: Tensors, receives: Tensors, offsets: Sequence[int]) -> Finish:
        """See `Transport`. A view that is not in one piece of memory is copied."""
        incoming = [(peer, into if into.is_contiguous() else into.new_empty(into.shape)) for peer, into in receives]
        operations = [dist.P2POp(dist.isend, tensor.contiguous(), peer) for peer, tensor in sends]
        operations += [dist.P2POp(dist.irecv, tensor, peer) for peer, tensor in incoming]
        works = dist.batch_isend_irecv(operations) if operations else []

        def finish() -> None:
            for work in works:
                work.wait()
            operations.clear()  # until now it has held what is sent
            for (_, into), (_, tensor) in zip(receives, incoming, strict=True):
                if tensor is not into:
                    into.copy_(tensor)

        return finish

    def gather(self, whole: torch.Tensor, part: torch.Tensor, place: int) -> None:
        """See `Transport`. Parts that are not in one piece of `whole` are received elsewhere and copied."""
        views = by_rank(whole, part, place)
        parts = views if views.is_contiguous() else views.new_empty(views.shape)
        dist.all_gather_into_tensor(parts.view(-1), part.contiguous().view(-1))
        if parts is not views:
            views.copy_(parts)

    def begin_scatter(self, part: torch.Tensor, whole: torch.Tensor, place: int) -> Finish:
        """See `Transport`."""
        parts = by_rank(whole, part, place).contiguous()
        work = dist.reduce_scatter_tensor(part.view(-1), parts.view(-1), async_op=True)
        return _finish([work])

    def all_reduce(self, tensor: torch.Tensor, ranks: tuple[int, ...]) -> None:
        """See `Transport`."""
        if len(ranks) > 1:
            dist.all_reduce(tensor, group=self._groups[ranks])

    def sum_by_reading(self, tensors: Sequence[torch.Tensor]) -> torch.Tensor | None:
        """See `Transport`."""
        return None

    def begin_sum(self, tensor: torch.Tensor, ranks: tuple[int, ...]) -> None:
        """See `Transport`."""
        if len(ranks) > 1:
            self._begun.append(dist.all_reduce(tensor, group=self._sums[ranks], async_op=True))

    def finish(self) -> None:
        """See `Transport`."""
        for work in self._begun:
            work.wait()
        self._begun.clear()


def by_rank(whole: torch.Tensor, part: torch.Tensor, place: int) -> torch.Tensor:
    """Return a view of a tensor with the number of equal parts along a dimension before the shape of each."""
    return whole.unflatten(place, (-1, part.shape[place])).movedim(place, 0)


def _finish(works: Sequence[Any]) -> Finish:
    def finish() -> None:
        for work in works:
            work.wait()

    return finish


def _made(groups: Iterable[tuple[int, ...]]) -> dict[tuple[int, ...], Any]:
    # Torch gives a group its own default, 10 to 30 minutes, not the timeout of the group of all ranks.
    return {ranks: dist.new_group(list(ranks), timeout=TIMEOUT) for ranks in sorted(groups)}


class Alone:
    """One rank by itself: nothing is received and buffers keep their content. Only for timing computation."""

    def __init__(self, rank: int) -> None:
        self.rank = rank

    def begin_exchange(self, sends: Tensors, receives: Tensors, offsets: Sequence[int]) -> Finish:
        """See `Transport`."""
        return _finish([])

    def gather(self, whole: torch.Tensor, part: torch.Tensor, place: int) -> None:
        """See `Transport`."""

    def begin_scatter(self, part: torch.Tensor, whole: torch.Tensor, place: int) -> Finish:
        """See `Transport`."""
        return _finish([])

    def all_reduce(self, tensor: torch.Tensor, ranks: tuple[int, ...]) -> None:
        """See `Transport`."""

    def sum_by_reading(self, tensors: Sequence[torch.Tensor]) -> torch.Tensor | None:
        """See `Transport`."""
        return None

    def begin_sum(self, tensor: torch.Tensor, ranks: tuple[int, ...]) -> None:
        """See `Transport`."""

    def finish(self) -> None:
        """See `Transport`."""
