"""Times of collectives among the GPUs of one machine, as curves of a topology: `gpusim calibrate --gpus N`.

Each rank is a process (`python -m gpusim.gpu.calibrate.collectives`), started and monitored by
`gpusim.gpu.layerwise.launch`. A time is the slowest rank's median over rounds of several calls in a row. On a GPU they
are in one CUDA graph: launched one by one, a short collective takes as long as its host (40 us on two H100s).
"""

from __future__ import annotations

import json
import statistics
import sys
import time
from collections.abc import Callable
from typing import Final

import msgspec
import torch
import torch.distributed as dist

from gpusim.errors import GpuError
from gpusim.formats.topology import Collective, Curve, Topology
from gpusim.gpu.layerwise.__main__ import join, leave
from gpusim.gpu.layerwise.launch import launch

COLLECTIVES: Final[tuple[Collective, ...]] = ("all_reduce", "all_gather", "reduce_scatter", "all_to_all")
#: Buffer sizes per GPU, in bytes; on CPUs (tests) the first few.
SIZES: Final = tuple(4**power * 256 for power in range(12))
_CPU_SIZES: Final = SIZES[:2]
#: Rounds, and calls in a row per round.
_ROUNDS, _CALLS = 7, 20
#: Most bytes that all calls of a round move; it limits the number of calls with large sizes.
_ROUND_BYTES: Final = 4 << 30
TIMEOUT_S: Final = 600.0
MODULE: Final = "gpusim.gpu.calibrate.collectives"


def measure_collectives(gpus: int, base: Topology, source: str) -> Topology:
    """Return `base` with curves measured among 2, 4, ... and `gpus` GPUs of this machine.

    Raises `GpuError` if there are fewer GPUs (without any, CPUs are measured with gloo), and where a rank fails.
    """
    there = torch.cuda.device_count()
    if 0 < there < gpus:
        raise GpuError(f"this machine has {there} GPUs, fewer than the {gpus} to measure")
    if gpus > base.gpus_per_node:
        raise GpuError(f"{base.name} has {base.gpus_per_node} GPUs per node, fewer than the {gpus} to measure")
    curves = []
    for count in sorted({*(2**power for power in range(1, 11) if 2**power < gpus), gpus}):
        points_of = json.loads(launch(count, MODULE, [], timeout_s=TIMEOUT_S))
        curves += [
            Curve(collective=name, gpus=count, points=tuple(map(tuple, points)), source=source)
            for name, points in points_of.items()
        ]
    return msgspec.structs.replace(base, curves=tuple(curves))


def time_collective(name: Collective, size_bytes: int, device: torch.device) -> int:
    """Return the slowest rank's median time of one collective with buffers of `size_bytes`, in ns."""
    return time_calls(_prepared(name, size_bytes, device), size_bytes, device)


def time_calls(run: Callable[[], object], size_bytes: int, device: torch.device) -> int:
    """Return the slowest rank's median time of a call that all ranks make, with buffers of `size_bytes`, in ns."""
    calls = max(1, min(_CALLS, _ROUND_BYTES // size_bytes))
    for _ in range(3):
        run()
    run_all = _in_a_row(run, calls, device)
    samples = []
    for _ in range(_ROUNDS):
        dist.barrier()
        _wait(device)
        begin = time.perf_counter_ns()
        run_all()
        _wait(device)
        samples.append((time.perf_counter_ns() - begin) / calls)
    slowest = torch.tensor([statistics.median(samples)], dtype=torch.float64, device=device)
    dist.all_reduce(slowest, op=dist.ReduceOp.MAX)
    return max(1, round(float(slowest)))


def _in_a_row(run: Callable[[], object], calls: int, device: torch.device) -> Callable[[], object]:
    """Return a function that makes this many calls, recorded in a CUDA graph on a GPU."""

    def repeat() -> None:
        for _ in range(calls):
            run()

    if device.type != "cuda":
        return repeat
    _wait(device)
    graph = torch.cuda.CUDAGraph()
    # NCCL's monitoring thread queries events during the recording, which other modes refuse.
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):
        repeat()
    graph.replay()
    return graph.replay


def _prepared(name: Collective, size_bytes: int, device: torch.device) -> Callable[[], object]:
    """Return a function that makes one call; the size is defined in `gpusim.formats.topology.Curve.points`."""
    gpus = dist.get_world_size()
    elements = max(gpus, size_bytes // 4 // gpus * gpus)
    whole = torch.ones(elements, device=device)
    part = torch.ones(elements // gpus, device=device)
    if name == "all_reduce":
        return lambda: dist.all_reduce(whole)
    if name == "all_gather":
        return lambda: dist.all_gather_into_tensor(whole, part)
    if name == "reduce_scatter":
        return lambda: dist.reduce_scatter_tensor(part, whole)
    received = torch.empty_like(whole)
    return lambda: dist.all_to_all_single(received, whole)


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def main() -> int:
    """Run one rank; rank 0 writes the curves to standard output."""
    device = join()
    sizes = SIZES if device.type == "cuda" else _CPU_SIZES
    points_of = {name: [[size, time_collective(name, size, device)] for size in sizes] for name in COLLECTIVES}
    if dist.get_rank() == 0:
        sys.stdout.write(json.dumps(points_of))
    return 0


if __name__ == "__main__":
    leave(main())
