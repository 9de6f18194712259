"""The gap between kernels of a CUDA graph by the memory that a replay touches.

    python research/prototypes/launch_misses.py OUT.json

A graph has a chain of small kernels between two stamps, and after it a kernel that touches some memory. The chain
touches none itself: what its time grows by with that memory are launches whose data the L2 cache has lost since the
replay before. `spin` kernels count cycles, `add` kernels add a few numbers, `mixed` takes turns of eight kernels.

`idle` has turns of a kernel that touches some memory and a spin kernel that waits for it, on the same stream or on one
of 1 or 7 others, which is idle meanwhile. What a turn takes longer than on one stream are two changes of stream.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch

from gpusim.gpu.calibrate.stamps import Stamps
from gpusim.gpu.device import provenance, require_gpu
from gpusim.units import MIB

SIZES_MIB = (0, 8, 16, 24, 28, 30, 32, 34, 36, 38, 40, 42, 44, 48, 52, 56, 60, 64, 80, 128)
CHAIN, REPLAYS, UNUSED = 120, 40, 8
SPIN_CYCLES = 1500
STREAMS = (1, 2, 4, 8)
TURNS, OTHERS = 28, (0, 1, 7)

Call = Callable[[], object]


def chains() -> dict[str, list[Call]]:
    """Return the kinds of chains."""
    x = torch.randn(64, 256, device="cuda")
    out = torch.empty_like(x)
    mixed: list[Call] = [
        partial(torch.add, x, 1.0, out=out),
        partial(torch.mul, x, 2.0, out=out),
        partial(torch.sigmoid, x, out=out),
        partial(torch.tanh, x, out=out),
        partial(torch.exp, x, out=out),
        partial(torch.relu, x),
        partial(torch.softmax, x, -1),
        partial(torch.sum, x, -1),
    ]
    return {
        "spin": [partial(torch.cuda._sleep, SPIN_CYCLES)] * CHAIN,
        "add": mixed[:1] * CHAIN,
        "mixed": mixed * (CHAIN // len(mixed)),
    }


def chain_ns(stamps: Stamps, calls: Sequence[Call], sweep: Sequence[Call], lanes: Sequence[torch.cuda.Stream]) -> float:
    """Return the median time of the chain in ns; its kernels take turns on the streams."""
    for call in (*calls[:8], *sweep):
        call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=lanes[0], capture_error_mode="thread_local"):
        stamps.begin(0)
        before = lanes[0]
        for number, call in enumerate(calls):
            lane = lanes[number % len(lanes)]
            if lane is not before:
                lane.wait_stream(before)
            with torch.cuda.stream(lane):
                call()
            before = lane
        if before is not lanes[0]:
            lanes[0].wait_stream(before)
        stamps.end(0)
        for call in sweep:
            call()
    return float(stamps.replayed_ns(graph, REPLAYS, UNUSED).double().median())


def main() -> None:
    """Write the time of a kernel of each chain by memory."""
    require_gpu()
    command = "python research/prototypes/launch_misses.py OUT.json"
    result: dict[str, Any] = provenance(command, partial(torch.cuda._sleep, 2_000_000))
    result |= {"chain": CHAIN, "ns": {}}
    memory = torch.zeros(max(SIZES_MIB) * MIB // 4, device="cuda")
    stamps = Stamps(1, torch.device("cuda"))
    lanes = [torch.cuda.Stream() for _ in range(max(STREAMS))]
    with torch.no_grad():
        for name, calls in chains().items():
            for kind in ("written", "read"):
                for streams in STREAMS if kind == "written" else (1,):
                    times = {}
                    for size in SIZES_MIB:
                        part = memory[: size * MIB // 4]
                        touch = partial(part.add_, 1.0) if kind == "written" else partial(torch.sum, part)
                        ns = chain_ns(stamps, calls, [touch] if size else [], lanes[:streams])
                        times[str(size)] = ns / CHAIN
                    key = f"{name}, {kind}, {streams} streams"
                    result["ns"][key] = times
                    print(key, {size: round(ns) for size, ns in times.items()}, flush=True)
        for others in OTHERS:
            turns = [lane for other in lanes[1 : 1 + others] for lane in (lanes[0], other)] or lanes[:1]
            times = {}
            for size in SIZES_MIB[1:]:
                calls = [partial(memory[: size * MIB // 4].add_, 1.0), partial(torch.cuda._sleep, SPIN_CYCLES)] * TURNS
                times[str(size)] = chain_ns(stamps, calls, [], turns) / TURNS
            result["ns"][f"idle, {others} others"] = times
            print(f"idle, {others} others", {size: round(ns) for size, ns in times.items()}, flush=True)
    Path(sys.argv[1]).write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
