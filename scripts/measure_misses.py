"""Measure misses in the L2 cache, and small products next to each other: python scripts/measure_misses.py OUT.json.

Misses: an elementwise kernel reads tensors of one size in turn, a few that stay in the cache or many that do not; the
difference a kernel, over the size, has the delay of a first miss as its intercept. Products: the time that each kernel
of a chain loses beside 1, 3 or 7 other chains, which tells five causes apart. Chains of spin kernels only start beside
it; equal kernels also compute; with the same operands they share what they read; shifted, they start at other times;
and with operands of its own, each kernel reads from DRAM. Embedding bags launch 1,024 blocks whatever their number, so
that most blocks of a few bags only begin and end. Everything runs in one CUDA graph at a time, with nothing else on the
GPU.
"""

from __future__ import annotations

import json
import statistics
import sys
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
import torch
from torch.nn import functional
from torch.profiler import record_function

from gpusim.gpu.device import provenance, require_gpu
from gpusim.gpu.profiling import ITERATIONS, RANGE, attribute, exported_events, profiled
from gpusim.units import KIB, MIB

SIZES = (32 * KIB, 64 * KIB, 128 * KIB, 256 * KIB, 512 * KIB, MIB)
#: Memory that does not stay in the cache, and tensors that do.
COLD_BYTES, WARM_TENSORS = 256 * MIB, 4
NEIGHBORS = (1, 3, 7)
CHAIN = 32
#: Highest SM clock of an H200, for spin kernels where the clock cannot be read.
BOOST_MHZ = 1980
ROUNDS, REPLAYS = 11, 5
HEAD_START_CYCLES = 4_000_000
#: Length of a spin kernel over that of the kernel beside it: the chain of spins must end first, with all gaps.
SPIN_SHARE = 1 / 3
#: Products of experts, of an encoder, and of attention: m, n, k.
PRODUCTS = ((192, 1024, 384), (192, 384, 1024), (768, 768, 768), (1280, 384, 384))
#: Convolutions of as few blocks: channels, pixels a side.
CONVOLUTIONS = ((64, 28), (128, 14))
#: Numbers of embedding bags, of 6 rows of 48 floats: 8, 128 and 1,024 of the 1,024 blocks have work.
BAGS = (32, 512, 4096)
BAG_ROWS, BAG_WIDTH, TABLE_ROWS = 6, 48, 30_000

Calls = Sequence[Callable[[], object]]


def graph_ns(lanes: Sequence[Calls]) -> float:
    """Return the median time of a replay of one graph that runs each lane on a stream of its own.

    The graph is recorded from the first lane's stream: torch's own stream for recordings comes from the same pool of 32
    as the lanes', and a lane that got it would make all later lanes wait for its end.
    """
    for lane in lanes:
        for call in lane[:2]:
            call()
    torch.cuda.synchronize()
    graph, streams = torch.cuda.CUDAGraph(), [torch.cuda.Stream() for _ in lanes]
    with torch.cuda.graph(graph, stream=streams[0], capture_error_mode="thread_local"):
        for stream in streams[1:]:
            stream.wait_stream(streams[0])
        for stream, lane in zip(streams, lanes, strict=True):
            with torch.cuda.stream(stream):
                for call in lane:
                    call()
        for stream in streams[1:]:
            streams[0].wait_stream(stream)
    times = []
    for _ in range(ROUNDS + 2):
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        torch.cuda._sleep(HEAD_START_CYCLES)  # the GPU waits until the host has queued all replays
        begin.record()
        for _ in range(REPLAYS):
            graph.replay()
        end.record()
        end.synchronize()
        times.append(begin.elapsed_time(end) * 1e6 / REPLAYS)
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


def kernels() -> dict[str, Callable[[], Callable[[], object]]]:
    """Return a function for each kind of kernel that makes a call of it with operands of its own."""

    def product(m: int, n: int, k: int) -> Callable[[], object]:
        a, weight, bias = (torch.randn(*shape, device="cuda") for shape in ((m, k), (n, k), (n,)))
        return partial(torch.addmm, bias, a, weight.t(), out=torch.empty(m, n, device="cuda"))

    def convolution(channels: int, side: int) -> Callable[[], object]:
        x = torch.randn(2, channels, side, side, device="cuda")
        return partial(functional.conv2d, x, torch.randn(channels, channels, 3, 3, device="cuda"), padding=1)

    def elementwise(size: int) -> Callable[[], object]:
        x = torch.randn(size // 4, device="cuda")
        return partial(torch.neg, x, out=torch.empty_like(x))

    def bags(count: int) -> Callable[[], object]:
        table = torch.randn(TABLE_ROWS, BAG_WIDTH, device="cuda")
        rows = torch.randint(0, TABLE_ROWS, (count * BAG_ROWS,), device="cuda")
        offsets = torch.arange(0, count * BAG_ROWS, BAG_ROWS, device="cuda")
        return partial(functional.embedding_bag, rows, table, offsets, mode="sum")

    made: dict[str, Callable[[], Callable[[], object]]] = {}
    for m, n, k in PRODUCTS:
        made[f"product {m} x {n} x {k}"] = partial(product, m, n, k)
    for channels, side in CONVOLUTIONS:
        made[f"convolution {channels} channels, {side} x {side}"] = partial(convolution, channels, side)
    made["elementwise"] = partial(elementwise, SIZES[-1])
    for count in BAGS:
        made[f"embedding bags, {count}"] = partial(bags, count)
    return made


def launched() -> dict[str, list[Any]]:
    """Return the kernels of a call of each kind: name, grid, block and resources, which the model needs."""
    calls = [make() for make in kernels().values()]
    with profiled() as session:
        for iteration in range(ITERATIONS + 1):
            for number, call in enumerate(calls):
                with record_function(f"{RANGE}{iteration}:{number}"):
                    call()
                torch.cuda.synchronize()
    of_calls = attribute(exported_events(session), len(calls)).kernels
    return {name: msgspec.to_builtins(each) for name, each in zip(kernels(), of_calls, strict=True)}


def side_by_side(cycles_per_ns: float) -> dict[str, dict[str, float]]:
    """Return the time that a kernel of a chain loses to other chains, in ns, by kind of kernel and of chains."""
    found = {}
    for name, make in kernels().items():
        warm = [[make()] * CHAIN for _ in range(1 + max(NEIGHBORS))]
        one_ns = graph_ns(warm[:1])
        kernel_ns = one_ns / CHAIN
        spin = [partial(torch.cuda._sleep, int(SPIN_SHARE * kernel_ns * cycles_per_ns))] * CHAIN
        cold = [[make() for _ in range(CHAIN)] for _ in range(1 + max(NEIGHBORS))]
        cold_ns = graph_ns(cold[:1])
        found[name] = {"kernel_ns": kernel_ns, "cold_kernel_ns": cold_ns / CHAIN}
        for count in NEIGHBORS:
            step_ns = kernel_ns / (count + 1)
            shifted: list[Calls] = [
                [partial(torch.cuda._sleep, int(number * step_ns * cycles_per_ns)), *lane] if number else lane
                for number, lane in enumerate(warm[: count + 1])
            ]
            times = {
                "spin": graph_ns([warm[0], *[spin] * count]) - one_ns,
                "equal": graph_ns(warm[: count + 1]) - one_ns,
                "same operands": graph_ns([warm[0]] * (count + 1)) - one_ns,
                "shifted": graph_ns(shifted) - count * step_ns - one_ns,
                "cold": graph_ns(cold[: count + 1]) - cold_ns,
            }
            found[name].update({f"{kind}, {count}": lost_ns / CHAIN for kind, lost_ns in times.items()})
    return found


def main() -> None:
    """Write what was found, with the GPU's name."""
    require_gpu()
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = True
    result = provenance("python scripts/measure_misses.py", lambda: torch.cuda._sleep(2_000_000))
    cycles_per_ns = (result["sm_clock_mhz"] or BOOST_MHZ) / 1000
    with torch.no_grad():
        result |= {"misses": misses(), "kernels": launched(), "side_by_side": side_by_side(cycles_per_ns)}
    Path(sys.argv[1]).write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
