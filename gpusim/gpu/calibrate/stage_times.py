"""Latencies of the stages that IOS chooses from, measured on the GPU as IOS does.

One CUDA graph holds all stages, each between two kernels that record the time. Before each, its ops run once, so that
weights and inputs are where repeated runs of the stage would leave them. The groups of a stage run on streams of their
own, forked from the first and joined, so that a latency has the stage's barriers. A merged stage runs on one stream.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path

import torch

from gpusim.defaults import DEFAULT_SEED
from gpusim.gpu.calibrate.stamps import EMPTY_PIECES, Calls, measured_ns, run_each
from gpusim.gpu.device import explain_out_of_memory, require_gpu, set_precision
from gpusim.gpu.replay.allowlist import check_operators
from gpusim.gpu.replay.execute import Runner, make_initial
from gpusim.trace.store import read_trace

Stage = tuple[tuple[int, ...], ...]
"""Groups of a stage, each with its ops in order."""


@explain_out_of_memory
def measure_stage_times(
    path: Path, stages: Sequence[Stage], merges: Mapping[int, tuple[int, int]], trust_code: bool = False
) -> tuple[str, list[int], dict[int, int]]:
    """Return the GPU's name, the latency of each stage of a trace's step, and those of merged stages, all in ns.

    `merges` has the number of each stage to measure merged, too, with the op and the number of its variant that merges
    the stage's convolutions. Raises `GpuError` without a GPU.
    """
    trace = read_trace(path)
    check_operators(trace, trace.name)
    device = require_gpu()
    set_precision(trace.model.dtype)
    runner = Runner(trace, device, trust_code=trust_code)
    runner.bind(make_initial(trace, device, DEFAULT_SEED).tensors)
    runner.run_in_order()
    work: list[Calls] = [[partial(run_each, runner, ops) for ops in groups] for groups in stages]
    work += [[partial(run_merged, runner, stages[number], *merge)] for number, merge in merges.items()]
    times_ns = [round(time_ns) for time_ns in _latencies_ns(runner, work)]
    merged_ns = dict(zip(merges, times_ns[len(stages) :], strict=True))
    return torch.cuda.get_device_name(), times_ns[: len(stages)], merged_ns


def run_merged(runner: Runner, stage: Stage, op: int, number: int) -> None:
    """Run a stage on the current stream with its convolutions merged into `op`, by that variant."""
    variant = runner.trace.ops[op].variants[number - 1]
    chain = (op, *variant.covers)
    runner.run_chain(chain, variant.settings)
    run_each(runner, [each for group in sorted(stage) for each in group if each not in chain])


def _latencies_ns(runner: Runner, work: Sequence[Calls]) -> list[float]:
    """Return the mean time of each piece of work in one graph, less that of none, in ns."""
    stages = [*work, *([] for _ in range(EMPTY_PIECES))]

    def prepare(number: int) -> None:
        for call in stages[number]:
            call()

    means_ns = measured_ns(runner, stages, prepare).double().mean(0)
    empty_ns = float(means_ns[len(work) :].mean())
    return [max(0.0, time_ns - empty_ns) for time_ns in means_ns[: len(work)].tolist()]
