"""Measure misses in the L2 cache, and small products next to each other: python scripts/measure_misses.py OUT.json.

Misses: an elementwise kernel reads tensors of one size in turn, a few that stay in the cache or many that do not; the
difference a kernel, over the size, has the delay of a first miss as its intercept. Products: chains of equal kernels on
1 to 8 streams, over one chain. Everything runs in one CUDA graph at a time, with nothing else on the GPU.
"""

from __future__ import annotations

import datetime
import json
import statistics
import sys
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

import torch
from torch.nn import functional

from gpusim.gpu.device import gpu_facts, require_gpu
from gpusim.units import KIB, MIB
from gpusim.version import code_version

SIZES = (32 * KIB, 64 * KIB, 128 * KIB, 256 * KIB, 512 * KIB, MIB)
#: Memory that does not stay in the cache, and tensors that do.
COLD_BYTES, WARM_TENSORS = 256 * MIB, 4
LANES = (1, 2, 4, 8)
CHAIN = 16
ROUNDS = 15
#: Products of experts, of an encoder, and of attention: m, n, k.
PRODUCTS = ((192, 1024, 384), (192, 384, 1024), (768, 768, 768), (1280, 384, 384))
#: Convolutions of as few blocks: channels, pixels a side.
CONVOLUTIONS = ((64, 28), (128, 14))

Calls = Sequence[Callable[[], object]]


def graph_ns(lanes: Sequence[Calls]) -> float:
    """Return the median time of one graph that runs each lane on a stream of its own."""
    for lane in lanes:
        for call in lane[:2]:
            call()
    torch.cuda.synchronize()
    graph, streams = torch.cuda.CUDAGraph(), [torch.cuda.Stream() for _ in lanes]
    with torch.cuda.graph(graph):
        current = torch.cuda.current_stream()
        for stream, lane in zip(streams, lanes, strict=True):
            stream.wait_stream(current)
            with torch.cuda.stream(stream):
                for call in lane:
                    call()
        for stream in streams:
            current.wait_stream(stream)
    times = []
    for _ in range(ROUNDS + 2):
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begin.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(begin.elapsed_time(end) * 1e6)
    return float(statistics.median(times[2:]))


def misses() -> dict[str, dict[str, float]]:
    """Return the time of a kernel with its input in the cache and not, by size of the input in bytes."""
    found = {}
    for size in SIZES:
        count = COLD_BYTES // size
        inputs = list(torch.ones(count, size // 4, device="cuda").unbind())
        out = torch.empty(size // 4, device="cuda")
        cold = graph_ns([[partial(torch.neg, each, out=out) for each in inputs]]) / count
        few = inputs[:WARM_TENSORS]
        warm = graph_ns([[partial(torch.neg, few[i % len(few)], out=out) for i in range(count)]]) / count
        found[str(size)] = {"warm_ns": warm, "cold_ns": cold}
    return found


def side_by_side() -> dict[str, dict[str, float]]:
    """Return the time of several chains of equal kernels over that of one, by kind and number of chains."""
    calls: dict[str, Callable[[], Callable[[], object]]] = {}
    for m, n, k in PRODUCTS:

        def product(m: int = m, n: int = n, k: int = k) -> Callable[[], object]:
            a, b = torch.randn(m, k, device="cuda"), torch.randn(k, n, device="cuda")
            return partial(torch.mm, a, b, out=torch.empty(m, n, device="cuda"))

        calls[f"product {m} x {n} x {k}"] = product
    for channels, side in CONVOLUTIONS:

        def convolution(channels: int = channels, side: int = side) -> Callable[[], object]:
            x = torch.randn(2, channels, side, side, device="cuda")
            return partial(functional.conv2d, x, torch.randn(channels, channels, 3, 3, device="cuda"), padding=1)

        calls[f"convolution {channels} channels, {side} x {side}"] = convolution
    found = {}
    for name, make in calls.items():
        lanes = [[make()] * CHAIN for _ in range(max(LANES))]
        times = {count: graph_ns(lanes[:count]) for count in LANES}
        found[name] = {"one_ns": times[1], **{f"over_one_{count}": times[count] / times[1] for count in LANES[1:]}}
    return found


def main() -> None:
    """Write what was found, with the GPU's name."""
    require_gpu()
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = True
    facts = gpu_facts(lambda: torch.cuda._sleep(2_000_000))
    with torch.no_grad():
        result = {
            "gpu": facts.name,
            "date": datetime.date.today().isoformat(),
            "command": "python scripts/measure_misses.py",
            "versions": {"driver": facts.driver, "cuda": facts.cuda, "torch": facts.torch, "cudnn": facts.cudnn},
            "sm_clock_mhz": facts.sm_clock_mhz,
            "gpusim": code_version(),
            "misses": misses(),
            "side_by_side": side_by_side(),
        }
    Path(sys.argv[1]).write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
