"""Chains of equal calls on 1, 2, 4 and 8 streams, and chains of different calls side by side: small matrix products,
channels-last convolutions, gathers and additions of rows by index, and kernels of many small blocks.

Each chain has operands of its own, which stay in the L2 cache from replay to replay, but for the largest rows by index.
Every run is a CUDA graph of its own, between two kernels that record the time. No rule of the engines was made from
these (research/2026-11-24-small-products.md); `gpusim.analysis.concurrent_chains` says how far predictions are.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Final, Protocol

import torch
from torch.nn import functional
from torch.profiler import record_function

from gpusim.formats.concurrent_chains import ChainedCall, ChainsBeside, ConcurrentChains
from gpusim.formats.rules import CHANNELS_LAST, ROWS_BY_INDEX, SMALL_BLOCKS, SMALL_PRODUCTS
from gpusim.formats.trace import Dtype, Kernel
from gpusim.gpu.calibrate.stamps import Stamps, fork_and_join
from gpusim.gpu.device import precision, require_gpu
from gpusim.gpu.profiling import ITERATIONS, RANGE, attribute, exported_events, profiled

#: Numbers of streams with equal chains, and calls of each chain.
STREAMS, CALLS = (2, 4, 8), 24
#: Graphs of each run, since a graph has two states, and replays of each.
RECORDINGS, REPLAYS, UNUSED = 3, 20, 4
#: m, n and k: fewer blocks than an H200 has SMs (16, 24, 48, 48 and 128).
PRODUCTS: Final = ((64, 1024, 256), (192, 384, 1024), (192, 1024, 384), (384, 512, 512), (512, 768, 512))
#: Input and output channels, side of the filter and of the image; of GoogLeNet, batch 1.
CONVOLUTIONS: Final = ((64, 192, 3, 56), (96, 128, 3, 28), (192, 64, 1, 28), (160, 320, 3, 14), (512, 128, 1, 14))
#: Indices, rows they point at, and width: of graph networks. A call has 2.1, 4.5 and 7.2 MB of its own: eight chains of
#: the last have 57 MB, which an H200's L2 cache does not keep, all other runs of equal chains at most 36 MB.
ROWS: Final = ((3200, 800, 128), (4800, 960, 192), (6000, 1000, 256))
#: Elements of kernels of many small blocks: 3,200, 4,800 and 6,000 blocks if each has 256.
ELEMENTS: Final = (819_200, 1_228_800, 1_536_000)
#: Width of their rows.
ROW_WIDTH: Final = 256

Call = Callable[[], object]
"""A call on operands of its own."""


class Bench(Protocol):
    """Interface of `ChainBench`."""

    def kernels(self, calls: Sequence[Call]) -> list[tuple[Kernel, ...]]:
        """Return the kernels of each call, profiled one call at a time."""

    def time_ns(self, chains: Sequence[tuple[Call, int]]) -> float:
        """Return the time of chains (call, number of calls) on a stream each, between two stamps."""


@dataclass(frozen=True)
class Experiment:
    """Calls to make chains of; `make` is called once for each chain, within `dtype`'s precision."""

    name: str
    dtype: Dtype
    make: Callable[[], Mapping[str, Callable[[], Call]]]


def products() -> dict[str, Callable[[], Call]]:
    """Return a function for each product that makes a call of it, in FP32 memory."""

    def product(m: int, n: int, k: int) -> Call:
        a, weight, bias = (torch.randn(*shape, device="cuda") for shape in ((m, k), (n, k), (n,)))
        return partial(torch.addmm, bias, a, weight.t(), out=torch.empty(m, n, device="cuda"))

    return {f"{m} x {n} x {k}": partial(product, m, n, k) for m, n, k in PRODUCTS}


def convolutions() -> dict[str, Callable[[], Call]]:
    """Return a function for each convolution that makes a call of it, in BF16 and channels last."""

    def convolution(inputs: int, outputs: int, filter_side: int, side: int) -> Call:
        x = torch.randn(1, inputs, side, side, device="cuda", dtype=torch.bfloat16)
        weight = torch.randn(outputs, inputs, filter_side, filter_side, device="cuda", dtype=torch.bfloat16)
        x, weight = (each.contiguous(memory_format=torch.channels_last) for each in (x, weight))
        return partial(functional.conv2d, x, weight, padding=filter_side // 2)

    return {
        f"{inputs} to {outputs}, {filter_side} x {filter_side}, image {side} x {side}": partial(
            convolution, inputs, outputs, filter_side, side
        )
        for inputs, outputs, filter_side, side in CONVOLUTIONS
    }


def rows_by_index() -> dict[str, Callable[[], Call]]:
    """Return a function for each gather, and each addition to rows, that makes a call of it, in FP32."""

    def gather(indices: int, rows: int, width: int) -> Call:
        x, index = torch.randn(rows, width, device="cuda"), torch.randint(rows, (indices,), device="cuda")
        return partial(torch.index_select, x, 0, index, out=torch.empty(indices, width, device="cuda"))

    def addition(indices: int, rows: int, width: int) -> Call:
        total, index = torch.zeros(rows, width, device="cuda"), torch.randint(rows, (indices,), device="cuda")
        return partial(total.index_add_, 0, index, torch.randn(indices, width, device="cuda"))

    kinds = {"index_select": gather, "index_add": addition}
    return {
        f"{kind}, {indices} of {rows} x {width}": partial(make, indices, rows, width)
        for kind, make in kinds.items()
        for indices, rows, width in ROWS
    }


def small_blocks() -> dict[str, Callable[[], Call]]:
    """Return a function for each kernel of many small blocks that makes a call of it, in FP32.

    Additions of one row to all, fills, and concatenations of two tensors; ReLU has larger ones.
    """

    def addition(elements: int) -> Call:
        x = torch.zeros(elements // ROW_WIDTH, ROW_WIDTH, device="cuda")
        return partial(x.add_, torch.randn(ROW_WIDTH, device="cuda"))

    def fill(elements: int) -> Call:
        return partial(torch.empty(elements, device="cuda").fill_, 1.0)

    def concatenation(elements: int) -> Call:
        halves = [torch.randn(elements // 2, device="cuda") for _ in range(2)]
        return partial(torch.cat, halves, out=torch.empty(elements, device="cuda"))

    def relu(elements: int) -> Call:
        return partial(torch.relu_, torch.randn(elements, device="cuda"))

    cases = [("row added", addition, elements) for elements in ELEMENTS]
    cases += [("fill", fill, 2 * elements) for elements in ELEMENTS[:2]]
    cases += [("concatenation", concatenation, ELEMENTS[0]), ("ReLU", relu, 2 * ELEMENTS[0])]
    return {f"{name}, {elements} elements": partial(make, elements) for name, make, elements in cases}


EXPERIMENTS: Final = (
    Experiment(SMALL_PRODUCTS, "tf32", products),
    Experiment(CHANNELS_LAST, "bf16", convolutions),
    Experiment(ROWS_BY_INDEX, "tf32", rows_by_index),
    Experiment(SMALL_BLOCKS, "tf32", small_blocks),
)


def run(experiment: Experiment, bench: Bench | None = None) -> ConcurrentChains:
    """Measure an experiment on the current GPU."""
    with torch.no_grad(), precision(experiment.dtype):
        return measure(experiment.name, experiment.make(), bench or ChainBench())


def measure(name: str, make: Mapping[str, Callable[[], Call]], bench: Bench) -> ConcurrentChains:
    """Measure chains of each call alone, of equal calls side by side, and of all kinds of calls side by side.

    Chains of different calls have numbers of calls by which they take about as long as each other.
    """
    calls = {kind: [make_call() for _ in range(max(STREAMS))] for kind, make_call in make.items()}
    kernels = bench.kernels([each[0] for each in calls.values()])
    empty_ns = bench.time_ns([])
    alone_ns = {kind: (bench.time_ns([(each[0], CALLS)]) - empty_ns) / CALLS for kind, each in calls.items()}
    longest_ns = max(alone_ns.values())
    runs = [[(kind, CALLS)] * streams for kind in calls for streams in STREAMS]
    runs.append([(kind, round(CALLS * longest_ns / alone_ns[kind])) for kind in calls])
    return ConcurrentChains(
        name=name,
        empty_ns=empty_ns,
        calls=tuple(
            ChainedCall(name=kind, kernels=of_call, call_ns=alone_ns[kind])
            for kind, of_call in zip(calls, kernels, strict=True)
        ),
        runs=tuple(
            ChainsBeside(
                chains=tuple(kind for kind, _ in chains),
                calls=tuple(number for _, number in chains),
                together_ns=bench.time_ns([(calls[kind][lane], number) for lane, (kind, number) in enumerate(chains)]),
            )
            for chains in runs
        ),
    )


class ChainBench:
    """Streams and stamps for chains on the current GPU."""

    def __init__(self, device: torch.device | None = None) -> None:
        self.lanes = [torch.cuda.Stream() for _ in range(max(*STREAMS, len(PRODUCTS), len(CONVOLUTIONS)))]
        self.stamps = Stamps(1, device or require_gpu())

    def kernels(self, calls: Sequence[Call]) -> list[tuple[Kernel, ...]]:
        """Return the kernels of each call, profiled one call at a time. Raises `CaptureError`."""
        with profiled() as session:
            for iteration in range(ITERATIONS + 1):
                for number, call in enumerate(calls):
                    with record_function(f"{RANGE}{iteration}:{number}"):
                        call()
                    torch.cuda.synchronize()
        return attribute(exported_events(session), len(calls)).kernels

    def time_ns(self, chains: Sequence[tuple[Call, int]]) -> float:
        """Return the median time of chains (call, number of calls) on a stream each, between two stamps."""
        for lane, (call, _) in zip(self.lanes, chains, strict=False):
            with torch.cuda.stream(lane):  # libraries initialize on first use of a stream
                call()
        work = [partial(_repeat, call, number) for call, number in chains]
        return statistics.median(self._recorded_ns(work) for _ in range(RECORDINGS))

    def _recorded_ns(self, work: Sequence[Call]) -> float:
        torch.cuda.synchronize()
        graph: Any = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=self.lanes[0], capture_error_mode="thread_local"):
            self.stamps.begin(0)
            fork_and_join(self.lanes, work)
            self.stamps.end(0)
        return float(self.stamps.replayed_ns(graph, REPLAYS, UNUSED).double().median())


def _repeat(call: Call, number: int) -> None:
    for _ in range(number):
        call()
