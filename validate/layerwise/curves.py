"""Times of collectives on these ranks, in CUDA graphs as the steps of plans are, in place of a topology's curves."""

from __future__ import annotations

from collections.abc import Callable

import msgspec
import torch
import torch.distributed as dist

from gpusim.formats.topology import Collective, Curve, Topology
from gpusim.gpu.calibrate.collectives import COLLECTIVES, SIZES, time_calls, time_collective
from gpusim.gpu.layerwise.transport import Transport

#: Sizes of buffers: of a plan's transfers and sums, and few enough to be timed in seconds.
LEAST_BYTES, MOST_BYTES = 4 << 10, 256 << 20


def with_own_curves(topology: Topology, device: torch.device, transport: Transport | None) -> Topology:
    """Return a topology with curves for this number of ranks; all ranks call it. Exchanges are those of a transport."""
    gpus = dist.get_world_size()
    sizes = [size for size in SIZES if LEAST_BYTES <= size <= (MOST_BYTES if device.type == "cuda" else LEAST_BYTES)]
    curves = []
    for name in COLLECTIVES:
        points = []
        for size in sizes:
            run = None if transport is None else _gather(name, size, device, transport)
            points.append((size, time_calls(run, size, device) if run else time_collective(name, size, device)))
        curves.append(Curve(collective=name, gpus=gpus, points=tuple(points), source="this run, in CUDA graphs"))
    others = [each for each in topology.curves if each.gpus != gpus]
    return msgspec.structs.replace(topology, curves=(*others, *curves))


def _gather(name: Collective, size: int, device: torch.device, transport: Transport) -> Callable[[], None] | None:
    """Return a call of a transport's own gather, its opposite, or exchange; None for sums."""
    gpus, rank = dist.get_world_size(), dist.get_rank()
    whole, part = torch.ones(size // 4, device=device), torch.ones(size // 4 // gpus, device=device)
    if name == "all_gather":
        return lambda: transport.gather(whole, part, 0)
    if name == "reduce_scatter":
        return lambda: transport.begin_scatter(part, whole, 0)()
    if name == "all_to_all":
        received = torch.empty_like(whole)
        others = [peer for peer in range(gpus) if peer != rank]
        sends, receives = ([(peer, each.chunk(gpus)[peer]) for peer in others] for each in (whole, received))
        before = [(rank - (peer < rank)) * part.numel() for peer in others]
        return lambda: transport.begin_exchange(sends, receives, before)()
    return None
