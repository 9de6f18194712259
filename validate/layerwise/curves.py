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
    """Return a topology with curves for this number of ranks; all ranks call it. Gathers are those of a transport."""
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
    """Return a call of a transport's own gather or of its opposite; None for other collectives."""
    gpus = dist.get_world_size()
    whole, part = torch.ones(size // 4, device=device), torch.ones(size // 4 // gpus, device=device)
    if name == "all_gather":
        return lambda: transport.gather(whole, part)
    if name == "reduce_scatter":
        return lambda: transport.begin_scatter(part, whole)()
    return None
