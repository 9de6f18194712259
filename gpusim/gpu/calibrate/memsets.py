"""How much longer small memsets take beside copies between host and device, in a CUDA graph. Needs a GPU."""

from __future__ import annotations

import ctypes
import math
import statistics
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import torch

from gpusim.errors import GpuError
from gpusim.gpu.calibrate.copies import DIRECTIONS, CopyBench, Direction, Lanes
from gpusim.gpu.calibrate.microbench import spin_cycles
from gpusim.units import MIB, NS_PER_US

#: Size of a small memset, their number in a graph, and the kernels between them.
MEMSET_BYTES, MEMSETS, SPIN_US = 96, 150, 5.0
#: Copies beside them, and their size: 2.4 ms at 55 GB/s, in which most memsets and kernels run. Most of that time at
#: least `gpusim.rules.copies.MANY_PENDING` have yet to start, as in a memory plan.
COPIES, COPY_BYTES = 16, 8 * MIB


def memset_waits_ns(bench: CopyBench) -> dict[Direction, float]:
    """Return how much longer a small memset takes beside copies in each direction, with the gaps around it, in ns."""
    cycles = spin_cycles(SPIN_US)
    small = torch.empty(MEMSET_BYTES, dtype=torch.uint8, device="cuda")
    ops = [partial(_memset, small), partial(torch.cuda._sleep, cycles)] * MEMSETS
    alone_ns = memset_ns(bench.profiled_events(ops, {}))
    waits_ns: dict[Direction, float] = {}
    for direction in DIRECTIONS:
        lanes: Lanes = {direction: bench.copies(COPY_BYTES, COPIES, direction)}
        beside_ns = memset_ns(bench.profiled_events(ops, lanes))
        waits_ns[direction] = 0.0 if alone_ns is None or beside_ns is None else max(0.0, beside_ns - alone_ns)
    bench.forget()
    return waits_ns


def _memset(tensor: torch.Tensor) -> None:
    """Set a tensor's bytes to 0 on the current stream; torch's own ops launch a kernel for that."""
    stream, place = torch.cuda.current_stream().cuda_stream, ctypes.c_uint64(tensor.data_ptr())
    size = ctypes.c_size_t(tensor.nbytes)
    code = ctypes.CDLL("libcuda.so.1").cuMemsetD8Async(place, ctypes.c_ubyte(0), size, ctypes.c_void_p(stream))
    if code:
        raise GpuError(f"error {code} of cuMemsetD8Async")


def memset_ns(events: Sequence[Mapping[str, Any]]) -> float | None:
    """Return the median time from the end of the kernel before a memset to the start of the next one, in ns.

    `events` are the profiler's, by start. Where there are copies, only memsets between the first start and the last end
    of a copy count. None without memsets, as where a small one is a kernel.
    """
    copies = [event for event in events if event["cat"] == "gpu_memcpy"]
    first = min((event["ts"] for event in copies), default=-math.inf)
    last = max((event["ts"] + event["dur"] for event in copies), default=math.inf)
    others = [event for event in events if event["cat"] != "gpu_memcpy"]
    times_us = [
        after["ts"] - before["ts"] - before["dur"]
        for before, memset, after in zip(others, others[1:], others[2:], strict=False)
        if memset["cat"] == "gpu_memset" and first <= before["ts"] and after["ts"] <= last
    ]
    return statistics.median(times_us) * NS_PER_US if times_us else None
