"""Times of one rank's computation on one GPU: each share by itself, and all shares of a rank in order.

As in a step, a share runs after the L2 cache was overwritten and its input written: the previous layer's output is in
the cache, weights and older tensors are not. Each time is the difference of two CUDA graphs, with the share and without
it, timed alternately. Without a GPU, the host's clock times the same calls.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from math import prod
from typing import Final

import torch

from gpusim.defaults import DEFAULT_BATCH_NORM, BatchNorm
from gpusim.formats.hardware import HardwareModel
from gpusim.gpu.layerwise.batch import Data
from gpusim.gpu.layerwise.rank import Rank
from gpusim.gpu.layerwise.recorded import new_graph
from gpusim.gpu.layerwise.transport import Alone
from gpusim.gpu.replay.timing import time_interleaved
from gpusim.layerwise.compute import PassTimes, share_key
from gpusim.layerwise.fixed_plans import Choice
from gpusim.layerwise.layers import LayerGraph
from gpusim.layerwise.made_up import sum_kernel
from gpusim.layerwise.shares import Share

#: Runs before timing: libraries choose algorithms and allocate workspaces.
WARM_UP: Final = 3
#: Rounds, and their length in ms, for a share and for a rank.
SHARE_ROUNDS, SHARE_MS = 7, 3.0
RANK_ROUNDS, RANK_MS = 15, 20.0
#: Bytes written to evict the L2 cache: twice its size on an H200.
FLUSH_BYTES: Final = 128 << 20


def rank_alone(
    graph: LayerGraph,
    choice: Choice,
    gpus: int,
    number: int,
    *,
    device: torch.device,
    batch_norm: BatchNorm = DEFAULT_BATCH_NORM,
) -> Rank:
    """Return one rank of a plan by itself, in single precision; `graph` is that of the whole batch."""
    transport = Alone(number)
    return Rank(graph, choice, gpus, transport, device=device, batch_norm=batch_norm, keep_buffers=True)


def time_rank(rank: Rank, data: Data) -> int:
    """Time of a rank's forward and backward pass in ns: one CUDA graph, median over rounds."""

    def step() -> None:
        rank.clear()
        for index in range(len(rank.states)):
            rank.forward_layer(index, data)
        if rank.graph.training:
            for index in reversed(range(len(rank.states))):
                rank.backward_layer(index)

    return _times({"rank": step}, rank, RANK_ROUNDS, RANK_MS)["rank"]


def time_shares(
    rank: Rank, data: Data, known: dict[str, PassTimes], report: Callable[[str], None] = lambda text: None
) -> dict[str, PassTimes]:
    """Return the times of a rank's shares by `share_key`, except those in `known`, each share by itself."""
    times_of: dict[str, PassTimes] = {}
    flush = torch.empty(FLUSH_BYTES if rank.device.type == "cuda" else 1024, dtype=torch.int8, device=rank.device)
    for index, state in enumerate(rank.states):
        if not state.active:
            continue
        key = share_key(state.layer, share_of_state(rank, index))
        if key in known or key in times_of:
            continue
        report(state.layer.name)
        times_of[key] = _time_share(rank, index, data, flush)
    return times_of


def share_of_state(rank: Rank, index: int) -> Share:
    """Return the share of a layer on a rank as its buffers hold it: without the padding that the operation adds."""
    state = rank.states[index]
    n, c, h, w = (int(high - low) for low, high in zip(state.low, state.high, strict=True))
    elements = 0
    for edge in state.edges:
        size = 1
        for part in edge.interior:
            size *= part.stop - part.start
        elements += size
    return Share((n, c, h, w), elements)


def predicted_ns(rank: Rank, times: dict[str, PassTimes], hardware: HardwareModel) -> float:
    """Time of a rank's shares in ns, and of the sums of gradients of outputs that several layers use."""
    total_ns = 0.0
    for index, state in enumerate(rank.states):
        if not state.active:
            continue
        share = share_of_state(rank, index)
        total_ns += times[share_key(state.layer, share)].total_ns
        if rank.graph.training and len(rank.users[index]) > 1:
            output_bytes = prod(share.output) * state.layer.element_bytes
            total_ns += sum_kernel(len(rank.users[index]), output_bytes, hardware).dur_ns
    return total_ns


def _time_share(rank: Rank, index: int, data: Data, flush: torch.Tensor) -> PassTimes:
    state = rank.states[index]
    # In a step, a rank's own layers produce its inputs; here they are random.
    sources = [torch.randn(edge.shape, device=rank.device, dtype=rank.dtype) for edge in state.edges]
    inputs = [torch.empty_like(source) for source in sources]
    wants = [state.layer.inputs[number].source >= 0 for number in range(len(inputs))]
    gradient: list[torch.Tensor] = []

    def touch() -> None:
        flush.zero_()
        for tensor, source in zip(inputs, sources, strict=True):
            tensor.copy_(source)

    def forward(products: list[torch.Tensor] | None = None) -> tuple[torch.Tensor, list[torch.Tensor]]:
        leaves = [x.detach().requires_grad_(want) for x, want in zip(inputs, wants, strict=True)]
        return rank.run_share(index, leaves, data.targets, products), leaves

    touch()
    gradient.append(torch.randn_like(forward()[0].detach()))
    written = torch.empty_like(gradient[0])

    def before_backward(products: list[torch.Tensor] | None = None) -> tuple[torch.Tensor, list[torch.Tensor]]:
        touch()
        output, leaves = forward(products)
        flush.zero_()
        written.copy_(gradient[0])
        return output, leaves

    def nothing_more() -> None:
        before_backward()

    def both() -> None:
        rank.clear()
        output, leaves = before_backward()
        rank.differentiate(index, output, written, leaves)

    def without_weights() -> None:
        rank.clear()
        products: list[torch.Tensor] = []
        output, leaves = before_backward(products)
        rank.differentiate_inputs(index, output, written, leaves, products[0])

    def only_forward() -> None:
        touch()
        forward()

    contenders: dict[str, Callable[[], None]] = {"touch": touch, "forward": only_forward}
    if rank.graph.training:
        contenders |= {"before": nothing_more, "both": both}
        if state.layer.product is not None:
            contenders["without_weights"] = without_weights
    times = _times(contenders, rank, SHARE_ROUNDS, SHARE_MS)
    backward = times["both"] - times["before"] if rank.graph.training else 0
    product_ns = max(0.0, float(times["both"] - times["without_weights"])) if "without_weights" in times else None
    forward_ns = max(0.0, float(times["forward"] - times["touch"]))
    return PassTimes(forward_ns, max(0.0, float(backward)), product_ns=product_ns)


def _times(contenders: dict[str, Callable[[], None]], rank: Rank, rounds: int, round_ms: float) -> dict[str, int]:
    """Median time of each in ns, as a CUDA graph; on the CPU by the host's clock."""
    if rank.device.type != "cuda":
        return {name: _host_time(run) for name, run in contenders.items()}
    replays: dict[str, Callable[[], object]] = {}
    for name, run in contenders.items():
        replays[name] = record(run, rank.generator).replay
    return {name: timing.median_ns for name, timing in time_interleaved(replays, rounds, round_ms).items()}


def record(run: Callable[[], None], generator: torch.Generator | None) -> torch.cuda.CUDAGraph:
    """Return a CUDA graph of what a rank runs by itself; `generator` is that of the rank."""
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(WARM_UP):
            run()
    torch.cuda.current_stream().wait_stream(side)
    recorded = new_graph(generator)
    with torch.cuda.graph(recorded):
        run()
    return recorded


def _host_time(run: Callable[[], None], repeats: int = 3) -> int:
    run()
    samples = []
    for _ in range(repeats):
        begin = time.perf_counter_ns()
        run()
        samples.append(time.perf_counter_ns() - begin)
    return sorted(samples)[repeats // 2]
