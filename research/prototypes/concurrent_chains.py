"""What a kernel of a chain loses beside other chains, by kind of kernel and of chain.

    python research/prototypes/concurrent_chains.py OUT.json.gz SECONDS

A chain of one kind of kernel, on operands that stay in the L2 cache, runs beside 0, 1, 3 and 7 chains of the same kind,
and beside 7 chains of some other kinds. Two stamps take its time in one CUDA graph; the chains beside it go on for
longer. Then graphs of equal chains are profiled, which tells kernels from gaps. `kernels` has the launches of each
kind, which a prediction needs.
"""

from __future__ import annotations

import gzip
import json
import statistics
import sys
from collections.abc import Callable, Sequence
from functools import partial
from itertools import pairwise
from pathlib import Path
from time import monotonic
from typing import Any

import msgspec
import torch
from torch.nn import functional
from torch.profiler import record_function

from gpusim.gpu.calibrate.stamps import Stamps
from gpusim.gpu.device import provenance, require_gpu
from gpusim.gpu.profiling import ITERATIONS, RANGE, attribute, exported_events, profiled

CHAIN, LONGER = 24, 1.7
NEIGHBORS = (1, 3, 7)
REPLAYS, UNUSED, PROFILED_REPLAYS = 24, 4, 6
SPIN_CYCLES = 6000
#: m, n, k of products; rows and columns of row-wise kernels; elements of elementwise ones; channels and pixels.
PRODUCTS = (
    (64, 256, 256),
    (64, 1024, 256),
    (192, 1024, 384),
    (192, 384, 1024),
    (384, 512, 512),
    (512, 768, 512),
    (1024, 1024, 256),
)
ROWS = ((192, 384), (1024, 512))
ELEMENTS = (74_000, 300_000)
CONVOLUTIONS = ((64, 28), (128, 14), (256, 14))
#: Kinds beside which every kind runs, seven chains of each.
BESIDE = ("spin", "product 192 x 384 x 1024", "product 512 x 768 x 512", "norm 192 x 384", "add 74000", "add 300000")

Call = Callable[[], object]


def kinds() -> dict[str, Callable[[], Call]]:
    """Return a function for each kind of kernel that makes a call of it with operands of its own."""

    def product(m: int, n: int, k: int) -> Call:
        a, weight, bias = (torch.randn(*shape, device="cuda") for shape in ((m, k), (n, k), (n,)))
        return partial(torch.addmm, bias, a, weight.t(), out=torch.empty(m, n, device="cuda"))

    def batched(batch: int, m: int, k: int) -> Call:
        a, b = torch.randn(batch, m, k, device="cuda"), torch.randn(batch, k, m, device="cuda")
        return partial(torch.bmm, a, b, out=torch.empty(batch, m, m, device="cuda"))

    def norm(rows: int, columns: int) -> Call:
        x, weight, bias = (torch.randn(*shape, device="cuda") for shape in ((rows, columns), (columns,), (columns,)))
        return partial(torch.native_layer_norm, x, [columns], weight, bias, 1e-5)

    def softmax(rows: int, columns: int) -> Call:
        return partial(torch.softmax, torch.randn(rows, columns, device="cuda"), -1)

    def add(count: int) -> Call:
        x, y = torch.randn(count, device="cuda"), torch.randn(count, device="cuda")
        return partial(torch.add, x, y, out=torch.empty_like(x))

    def gelu(count: int) -> Call:
        return partial(functional.gelu, torch.randn(count, device="cuda"))

    def total(rows: int, columns: int) -> Call:
        return partial(torch.sum, torch.randn(rows, columns, device="cuda"), 0)

    def convolution(channels: int, side: int) -> Call:
        x = torch.randn(2, channels, side, side, device="cuda")
        return partial(functional.conv2d, x, torch.randn(channels, channels, 3, 3, device="cuda"), padding=1)

    def batch_norm(channels: int, side: int) -> Call:
        x = torch.randn(2, channels, side, side, device="cuda")
        weight, bias, mean, var = (torch.rand(channels, device="cuda") for _ in range(4))
        return partial(functional.batch_norm, x, mean, var, weight, bias)

    made: dict[str, Callable[[], Call]] = {}
    for m, n, k in PRODUCTS:
        made[f"product {m} x {n} x {k}"] = partial(product, m, n, k)
    made["batched product 32 x 96 x 64"] = partial(batched, 32, 96, 64)
    for rows, columns in ROWS:
        made[f"norm {rows} x {columns}"] = partial(norm, rows, columns)
        made[f"softmax {rows} x {columns}"] = partial(softmax, rows, columns)
        made[f"sum {rows} x {columns}"] = partial(total, rows, columns)
    for count in ELEMENTS:
        made[f"add {count}"] = partial(add, count)
        made[f"gelu {count}"] = partial(gelu, count)
    for channels, side in CONVOLUTIONS:
        made[f"convolution {channels} x {side}"] = partial(convolution, channels, side)
    made["batch norm 128 x 28"] = partial(batch_norm, 128, 28)
    return made


class Chains:
    """Chains of calls in one CUDA graph, on streams that are always the same."""

    def __init__(self) -> None:
        self.lanes = [torch.cuda.Stream() for _ in range(1 + max(NEIGHBORS))]
        self.stamps = Stamps(2, torch.device("cuda"))
        self.calls: dict[str, list[list[Call]]] = {
            name: [[make()] * CHAIN for _ in self.lanes] for name, make in kinds().items()
        }
        self.calls["spin"] = [[partial(torch.cuda._sleep, SPIN_CYCLES)] * CHAIN for _ in self.lanes]

    def graph(self, subject: Sequence[Call], beside: Sequence[Sequence[Call]]) -> torch.cuda.CUDAGraph:
        """Record a chain between two stamps, and others beside it."""
        for lane, calls in zip(self.lanes, [subject, *beside], strict=False):
            with torch.cuda.stream(lane):  # libraries initialize on first use of a stream
                for call in calls[:2]:
                    call()
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        used = self.lanes[: 1 + len(beside)]
        with torch.cuda.graph(graph, stream=used[0], capture_error_mode="thread_local"):
            for lane in used[1:]:
                lane.wait_stream(used[0])
            longest = max(map(len, [subject, *beside]))
            for place in range(longest):  # in turns, so that all streams begin alike
                for number, (lane, calls) in enumerate(zip(used, [subject, *beside], strict=True)):
                    with torch.cuda.stream(lane):
                        if place == 0 and number < 2:
                            self.stamps.begin(number)
                        if place < len(calls):
                            calls[place]()
                        if place == len(calls) - 1 and number < 2:
                            self.stamps.end(number)
            for lane in used[1:]:
                used[0].wait_stream(lane)
        return graph

    def ns(self, graph: torch.cuda.CUDAGraph) -> list[float]:
        """Return the median times of the first two chains of a graph, in ns."""
        return [float(each) for each in self.stamps.replayed_ns(graph, REPLAYS, UNUSED).double().median(0).values]


def repeated(calls: Sequence[Call], count: int) -> list[Call]:
    """Return a chain of `count` calls."""
    return [calls[place % len(calls)] for place in range(count)]


def launched(calls: dict[str, list[list[Call]]]) -> dict[str, Any]:
    """Return the kernels of a call of each kind."""
    names = [name for name in calls if name != "spin"]
    with profiled() as session:
        for iteration in range(ITERATIONS + 1):
            for number, name in enumerate(names):
                with record_function(f"{RANGE}{iteration}:{number}"):
                    calls[name][0][0]()
                torch.cuda.synchronize()
    return {
        name: msgspec.to_builtins(each)
        for name, each in zip(names, attribute(exported_events(session), len(names)).kernels, strict=True)
    }


def durations(graph: torch.cuda.CUDAGraph) -> dict[str, Any]:
    """Return durations and gaps of the kernels of each of the executor's streams, medians in ns."""
    with profiled() as session:
        for _ in range(PROFILED_REPLAYS):
            graph.replay()
            torch.cuda.synchronize()
    by_stream: dict[Any, list[dict[str, Any]]] = {}
    for event in exported_events(session):
        if event.get("cat") in ("kernel", "gpu_memset") and event["name"] != "stamp":
            by_stream.setdefault(event["args"].get("stream"), []).append(event)
    found = {}
    for stream, events in by_stream.items():
        events.sort(key=lambda e: e["ts"])
        gaps = [after["ts"] - e["ts"] - e["dur"] for e, after in pairwise(events)]
        found[str(stream)] = {
            "kernels": len(events),
            "dur_ns": statistics.median(e["dur"] for e in events) * 1e3,
            "gap_ns": statistics.median(gaps) * 1e3 if gaps else 0.0,
        }
    return found


def main() -> None:
    """Write what was found, with the GPU's name."""
    out, seconds = sys.argv[1:]
    end = monotonic() + float(seconds)
    require_gpu()
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = True
    command = "python research/prototypes/concurrent_chains.py OUT.json.gz SECONDS"
    result = provenance(command, partial(torch.cuda._sleep, 2_000_000))
    result |= {"chain": CHAIN, "spin_cycles": SPIN_CYCLES, "losses": {}, "profiles": {}}

    def write() -> None:
        Path(out).write_bytes(gzip.compress(json.dumps(result).encode(), 5))

    with torch.no_grad():
        chains = Chains()
        alone = {name: chains.ns(chains.graph(calls[0], []))[0] for name, calls in chains.calls.items()}
        result["alone_ns"] = alone
        equal = {name: chains.graph(calls[0], []) for name, calls in chains.calls.items()}
        for name, calls in chains.calls.items():
            if monotonic() > end - float(seconds) / 2:
                break
            cases = [(name, count) for count in NEIGHBORS] + [(other, NEIGHBORS[-1]) for other in BESIDE]
            for other, count in dict.fromkeys(cases):
                # Neighbors that slow down go on for longer anyway; those that do not must outlast the chain.
                length = min(400, max(2, round(LONGER * CHAIN * alone[name] / alone[other])))
                lanes = [repeated(each, length) for each in chains.calls[other][1 : 1 + count]]
                graph = chains.graph(calls[0], lanes)
                mine_ns, theirs_ns = chains.ns(graph)
                key = f"{name} | {count} | {other}"
                result["losses"][key] = {"ns": mine_ns, "beside_ns": theirs_ns, "length": length}
                if other == name and count == NEIGHBORS[-1]:
                    equal[key] = graph
        print(f"{len(result['losses'])} graphs, {end - monotonic():.0f} s left", flush=True)
        write()
        result["kernels"] = launched(chains.calls)
        for key, graph in equal.items():
            if monotonic() > end:
                break
            result["profiles"][key] = durations(graph)
    write()
    print(f"{len(result['profiles'])} profiles, {end - monotonic():.0f} s left", flush=True)


if __name__ == "__main__":
    main()
