"""Latencies of the stages that IOS chooses from, measured on the GPU as IOS does.

One CUDA graph holds all stages, each between two kernels that record the time. Before each, its ops run once, so that
weights and inputs are where repeated runs of the stage would leave them. The groups of a stage run on streams of their
own, forked from the first and joined, so that a latency has the stage's barriers.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from pathlib import Path

import torch

from gpusim.defaults import DEFAULT_SEED
from gpusim.gpu.calibrate.pairs import EMPTY_STAGES, REPLAYS, STAMP_SOURCE, run_each, side_by_side
from gpusim.gpu.device import explain_out_of_memory, require_gpu, set_precision
from gpusim.gpu.replay.allowlist import check_operators
from gpusim.gpu.replay.execute import Runner, make_initial
from gpusim.trace.store import read_trace

Stage = tuple[tuple[int, ...], ...]
"""Groups of a stage, each with its ops in order."""


@explain_out_of_memory
def measure_stage_times(path: Path, stages: Sequence[Stage], trust_code: bool = False) -> tuple[str, list[int]]:
    """Return the GPU's name and the latency of each stage of a trace's step, in ns. Raises `GpuError` without a GPU."""
    trace = read_trace(path)
    check_operators(trace, trace.name)
    device = require_gpu()
    set_precision(trace.model.dtype)
    runner = Runner(trace, device, trust_code=trust_code)
    runner.bind(make_initial(trace, device, DEFAULT_SEED).tensors)
    runner.run_in_order()
    tensors = list(runner.tensors)
    measured: list[Stage] = [*stages, *[()] * EMPTY_STAGES]
    lanes = [torch.cuda.Stream() for _ in range(max(1, *map(len, measured)))]
    for lane in lanes:  # libraries initialize on first use of a stream
        with torch.cuda.stream(lane):
            run_each(runner, sorted({op for groups in stages for ops in groups for op in ops}))
    stamps = torch.zeros(2 * len(measured), dtype=torch.int64, device=device)
    kernel = torch.cuda._compile_kernel(STAMP_SOURCE, "stamp")

    def stamp(slot: int) -> None:
        kernel(grid=(1, 1, 1), block=(1, 1, 1), args=[stamps, slot])

    stamp(0)
    torch.cuda.synchronize()
    runner.tensors[:] = tensors
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=lanes[0], capture_error_mode="thread_local"):
        for number, groups in enumerate(measured):
            run_each(runner, [op for ops in groups for op in ops])
            stamp(2 * number)
            side_by_side(lanes, [partial(run_each, runner, ops) for ops in groups])
            stamp(2 * number + 1)
            runner.tensors[:] = tensors
    samples = []
    for _ in range(REPLAYS):
        graph.replay()
        torch.cuda.synchronize()
        noted = stamps.cpu().view(-1, 2)
        samples.append(noted[:, 1] - noted[:, 0])
    means_ns = torch.stack(samples[REPLAYS // 8 :]).double().mean(0)
    empty_ns = float(means_ns[len(stages) :].mean())
    times_ns = [max(0, round(time_ns - empty_ns)) for time_ns in means_ns[: len(stages)].tolist()]
    return torch.cuda.get_device_name(), times_ns
