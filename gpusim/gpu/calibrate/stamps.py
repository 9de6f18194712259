"""Times of pieces of work in one CUDA graph: a kernel before and one after each piece record the GPU's clock."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from gpusim.gpu.launch_state import make_launches_slow
from gpusim.gpu.replay.execute import Runner

REPLAYS = 40
#: Pieces without work: their time is that between two stamps with nothing between them.
EMPTY_PIECES = 10

SOURCE = """
extern "C" __global__ void stamp(long long* out, int slot) {
    long long now;
    asm volatile("mov.u64 %0, %globaltimer;" : "=l"(now));
    out[slot] = now;
}
"""

Calls = Sequence[Callable[[], object]]
"""One piece of work: a call for each stream."""


class Stamps:
    """Kernels that record the time before and after each of `count` pieces of work."""

    def __init__(self, count: int, device: torch.device) -> None:
        self._times_ns = torch.zeros(2 * count, dtype=torch.int64, device=device)
        self._kernel = torch.cuda._compile_kernel(SOURCE, "stamp")
        self._record(0)  # a first launch loads the kernel, which a graph cannot record

    def begin(self, piece: int) -> None:
        self._record(2 * piece)

    def end(self, piece: int) -> None:
        self._record(2 * piece + 1)

    def _record(self, slot: int) -> None:
        self._kernel(grid=(1, 1, 1), block=(1, 1, 1), args=[self._times_ns, slot])

    def replayed_ns(self, graph: Any, replays: int, unused: int) -> torch.Tensor:
        """Return the times of the pieces in each of `replays` replays, after `unused` others: replays x pieces, ns.

        Launches are in their slow state.
        """
        make_launches_slow()
        samples = []
        for _ in range(unused + replays):
            graph.replay()
            torch.cuda.synchronize()
            begins_ends = self._times_ns.cpu().view(-1, 2)
            samples.append(begins_ends[:, 1] - begins_ends[:, 0])
        return torch.stack(samples[unused:])


def measured_ns(runner: Runner, pieces: Sequence[Calls], prepare: Callable[[int], object]) -> torch.Tensor:
    """Return the times of pieces of work on a runner's tensors in several replays: replays x pieces, in ns.

    The calls of a piece run on streams of their own, forked from the first stream and joined. `prepare` is called
    before each piece with its number; its work is not timed. Each piece starts from the tensors of now.
    """
    tensors = list(runner.tensors)
    lanes = [torch.cuda.Stream() for _ in range(max(1, *map(len, pieces)))]
    for lane in lanes:  # libraries initialize on first use of a stream
        with torch.cuda.stream(lane):
            for calls in pieces:
                for call in calls:
                    call()
    runner.tensors[:] = tensors
    stamps = Stamps(len(pieces), runner.device)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=lanes[0], capture_error_mode="thread_local"):
        for number, calls in enumerate(pieces):
            prepare(number)
            stamps.begin(number)
            fork_and_join(lanes, calls)
            stamps.end(number)
            runner.tensors[:] = tensors
    unused = REPLAYS // 8
    return stamps.replayed_ns(graph, REPLAYS - unused, unused)


def fork_and_join(lanes: Sequence[torch.cuda.Stream], calls: Calls) -> None:
    """Fork from the first stream, run one call in each, and join."""
    for lane in lanes[1 : len(calls)]:
        lane.wait_stream(lanes[0])
    for lane, call in zip(lanes, calls, strict=False):
        with torch.cuda.stream(lane):
            call()
    for lane in lanes[1 : len(calls)]:
        lanes[0].wait_stream(lane)


def run_each(runner: Runner, ops: Sequence[int]) -> None:
    for op in ops:
        runner.run(op)
