"""Figures of the rule for L2 cache misses (`gpusim.rules.l2_cache`): rates of the cache and of DRAM, and the delay of a
launch that misses the cache.

Rates come from kernels that read for a set time. For the delay, a chain of kernels without data runs before one that
touches more memory than the cache holds: what the chain takes longer is what its launches miss in the next replay.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any, Final, NamedTuple, Protocol

import msgspec
import torch

from gpusim.formats.hardware import Memory
from gpusim.gpu.calibrate.block_kernels import WORK
from gpusim.gpu.calibrate.microbench import spin_cycles
from gpusim.gpu.calibrate.stamps import Stamps
from gpusim.gpu.device import require_gpu

#: Kinds of work that read: from device memory, and from the L2 cache.
READ_KINDS: Final = ("dram", "l2")
#: SMs in use, as shares, and warps on each. The least warps do not load an SM: they give the rate of a warp.
SM_SHARES, WARPS = (1 / 32, 1 / 8, 1 / 4, 1 / 2, 3 / 4, 1.0), (2, 8, 16, 32)
#: Kernels of the chain, and the time of each, in us.
CHAIN, KERNEL_US = 120, 0.8
#: Memory that the kernel after the chain touches, in sizes of the L2 cache; from 0.9 on an H200 loses all.
TOUCHED_CACHES = 2
#: Graphs for each time: in the rarer of a graph's two states no launch misses (research/2026-11-27-graph-states.md).
RECORDINGS, REPLAYS, UNUSED = 7, 20, 4


class Reads(NamedTuple):
    """What reads: kind of work, SMs with a block, warps of each block."""

    kind: str
    sms: int
    warps: int


class ReadBench(Protocol):
    """Part of `BlockBench`."""

    sms: int

    def rates(self, parts: Sequence[tuple[str, int, int]]) -> list[float]:
        """Return chunks of work per us of concurrent kernels (kind, blocks, warps per block)."""


def read_rates(bench: ReadBench) -> dict[Reads, float]:
    """Measure bytes per ns from DRAM and from the L2 cache, by SMs in use and warps on each."""
    rates = {}
    for kind in READ_KINDS:
        for share in SM_SHARES:
            for warps in WARPS:
                reads = Reads(kind, max(1, round(share * bench.sms)), warps)
                (chunks,) = bench.rates([reads])
                rates[reads] = chunks * WORK[kind].chunk_bytes / 1000
    return rates


def cache_figures(memory: Memory, rates: Mapping[Reads, float], missed_ns: float) -> tuple[Memory, dict[str, str]]:
    """Return the memory with the measured figures, and a note on each; `missed_ns` is the delay of a launch.

    With them, predictions include losses to misses. `miss_ns` is kept: it is chosen, not measured.
    """
    best = max((reads for reads in rates if reads.kind == "l2"), key=lambda reads: rates[reads])
    figures = {"l2_bytes_per_ns": rates[best]}
    notes = {"l2_bytes_per_ns": f"reads of {best.sms} SMs with {best.warps} warps each"}
    for kind, field in (("l2", "warp_l2_bytes_per_ns"), ("dram", "warp_dram_bytes_per_ns")):
        of_warp = {
            reads.sms: rate / (reads.sms * reads.warps)
            for reads, rate in rates.items()
            if reads.kind == kind and reads.warps == min(WARPS)
        }
        figures[field] = statistics.median(of_warp.values())
        shown = ", ".join(f"{rate:.2f} on {sms}" for sms, rate in of_warp.items())
        notes[field] = f"the same, {min(WARPS)} warps an SM: {shown} SMs"
    figures["launch_miss_ns"] = missed_ns
    notes["launch_miss_ns"] = (
        f"kernels of a chain before one that writes {TOUCHED_CACHES} times the L2 cache, less the same without it, "
        f"median of {RECORDINGS} graphs"
    )
    return msgspec.structs.replace(memory, **figures), notes


def launch_miss_ns(cache_bytes: int, device: torch.device | None = None) -> float:
    """Measure the delay of a launch whose data the L2 cache has lost since the replay before, in ns."""
    device = device or require_gpu()
    memory = torch.zeros(TOUCHED_CACHES * cache_bytes // 4, device=device)
    spin = partial(torch.cuda._sleep, spin_cycles(KERNEL_US))
    stamps, lane = Stamps(1, device), torch.cuda.Stream()
    memory.add_(1.0)
    lost = []
    for _ in range(RECORDINGS):
        kept_ns, missed_ns = (_chain_ns(stamps, lane, spin, touched) for touched in (memory[:1], memory))
        lost.append((missed_ns - kept_ns) / CHAIN)
    return max(0.0, statistics.median(lost))


def _chain_ns(stamps: Stamps, lane: Any, call: Any, touched: torch.Tensor) -> float:
    """Return the median time of a chain in a graph that touches some memory after it, in ns."""
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=lane, capture_error_mode="thread_local"):
        stamps.begin(0)
        for _ in range(CHAIN):
            call()
        stamps.end(0)
        touched.add_(1.0)
    return float(stamps.replayed_ns(graph, REPLAYS, UNUSED).double().median())
