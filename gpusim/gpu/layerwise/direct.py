"""Exchanges by kernels that read the other GPUs' memory, in place of NCCL's: for the GPUs of one host.

A rank copies what others need to memory that all can read (torch's symmetric memory), waits until all have, and reads
theirs. Two such spaces are used in turns, so one barrier is enough: who passes that of the next exchange knows that all
have read what it wrote for the last but one.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import prod

import torch
import torch.distributed as dist

from gpusim.gpu.layerwise.transport import Finish, Tensors, Transport, by_rank
from gpusim.layerwise.buckets import SHARED_SUM_BYTES
from gpusim.layerwise.fixed_plans import Choice
from gpusim.layerwise.gathers import gathered_along
from gpusim.layerwise.layers import BATCH, LayerGraph
from gpusim.layerwise.pieces import moved_between


@dataclass(frozen=True)
class Space:
    """Memory of each rank that all ranks can read, in the order of ranks, and a barrier of all ranks."""

    memory: Sequence[torch.Tensor]
    barrier: Callable[[], None]


class Direct:
    """A transport with exchanges and small sums of its own; other sums are those of another one."""

    def __init__(self, other: Transport, spaces: tuple[Space, Space]) -> None:
        self.rank, self._other, self._spaces, self._used = other.rank, other, spaces, 0
        on_gpu = spaces[0].memory[0].device.type == "cuda"
        # The kernels of a sum are short, and the product beside them fills the GPU.
        self._side = torch.cuda.Stream(priority=-1) if on_gpu else None

    def _next(self) -> Space:
        self._used += 1
        return self._spaces[self._used % 2]

    def gather(self, whole: torch.Tensor, part: torch.Tensor, place: int) -> None:
        """See `Transport`."""
        space, elements = self._next(), part.numel()
        space.memory[self.rank][:elements].view(part.shape).copy_(part)
        space.barrier()
        torch.cat([each[:elements].view(part.shape) for each in space.memory], dim=place, out=whole)

    def begin_scatter(self, part: torch.Tensor, whole: torch.Tensor, place: int) -> Finish:
        """See `Transport`."""
        space, elements = self._next(), part.numel()

        def run() -> None:
            parts = by_rank(whole, part, place)
            space.memory[self.rank][: whole.numel()].view(parts.shape).copy_(parts)
            space.barrier()
            first, second, *others = (each[self.rank * elements :][:elements] for each in space.memory)
            total = torch.add(first, second, out=part.view(-1))
            for other in others:
                total.add_(other)

        return self._beside(run, part, whole)

    def begin_exchange(self, sends: Tensors, receives: Tensors, offsets: Sequence[int]) -> Finish:
        """See `Transport`."""
        space = self._next()

        def run() -> None:
            place = 0
            for _, tensor in sends:
                space.memory[self.rank][place:][: tensor.numel()].view(tensor.shape).copy_(tensor)
                place += tensor.numel()
            space.barrier()
            for (peer, into), offset in zip(receives, offsets, strict=True):
                sent = space.memory[peer][offset:][: into.numel()].view(into.shape)
                torch.mul(sent, 1, out=into)  # a copy between GPUs would be made by a slower engine

        return self._beside(run, sends, receives)

    def _beside(self, run: Callable[[], None], *tensors: object) -> Finish:
        """Run kernels beside those of the current stream, with tensors of which its allocator knows nothing."""
        if self._side is None:
            run()
            return lambda: None
        side, held = self._side, list(tensors)
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            run()

        def finish() -> None:
            torch.cuda.current_stream().wait_stream(side)
            held.clear()

        return finish

    def all_reduce(self, tensor: torch.Tensor, ranks: tuple[int, ...]) -> None:
        """See `Transport`."""
        self._other.all_reduce(tensor, ranks)

    def sum_by_reading(self, tensors: Sequence[torch.Tensor]) -> torch.Tensor:
        """See `Transport`. No exchange may be on its way: they use the same spaces."""
        space, elements = self._next(), sum(tensor.numel() for tensor in tensors)
        torch.cat([tensor.flatten() for tensor in tensors], out=space.memory[self.rank][:elements])
        space.barrier()
        return torch.stack([each[:elements] for each in space.memory]).sum(dim=0)

    def begin_sum(self, tensor: torch.Tensor, ranks: tuple[int, ...]) -> None:
        """See `Transport`."""
        self._other.begin_sum(tensor, ranks)

    def finish(self) -> None:
        """See `Transport`. The end of a step: a recorded one begins again with the same space."""
        self._other.finish()
        if self._used % 2:
            self._next().barrier()


def direct(
    other: Transport, graph: LayerGraph, choice: Choice, gpus: int, device: torch.device, dtype: torch.dtype
) -> Transport:
    """Return `other` with the exchanges of a plan by memory that all GPUs of this host can read; all ranks call it."""
    elements = shared_elements(graph, choice, gpus)
    return Direct(other, spaces(elements, device, dtype)) if elements else other


def shared_elements(graph: LayerGraph, choice: Choice, gpus: int) -> int:
    """Return the most elements that a rank gives to others in one exchange or sum of a plan; 0 without exchanges."""
    elements, sums = 0, SHARED_SUM_BYTES // min(layer.element_bytes for layer in graph.layers)
    for user, config in zip(graph.layers, choice, strict=True):
        for number, edge in enumerate(user.inputs):
            if edge.source == BATCH:
                continue
            source, source_config = graph.layers[edge.source], choice[edge.source]
            if gathered_along(source, source_config, user, number, config, gpus) is not None:
                elements = max(elements, sums, prod(source.output))
            else:
                moved = moved_between(source, source_config, user, number, config, gpus)
                most = max(int(moved.sum(axis=0).max()), int(moved.sum(axis=1).max()))
                elements = max(elements, most, sums) if most else elements
    return elements


def spaces(elements: int, device: torch.device, dtype: torch.dtype) -> tuple[Space, Space]:
    """Make two spaces on all ranks."""
    return _space(elements, device, dtype), _space(elements, device, dtype)


def _space(elements: int, device: torch.device, dtype: torch.dtype) -> Space:
    """Make a space on all ranks."""
    # Where it was not set up, multicast can hang; no gather needs it. Read when memory is first shared.
    os.environ.setdefault("TORCH_SYMM_MEM_DISABLE_MULTICAST", "1")
    from torch.distributed import _symmetric_memory as symmetric  # not in every build of torch

    mine = symmetric.empty(elements, dtype=dtype, device=device)
    shared = symmetric.rendezvous(mine, dist.group.WORLD)
    memory = [shared.get_buffer(rank, (elements,), dtype) for rank in range(dist.get_world_size())]
    return Space(memory, lambda: shared.barrier(channel=0))
