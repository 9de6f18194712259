"""Branch overhead of a CUDA graph: the same step with and without an idle branch."""

from __future__ import annotations

import gc
from dataclasses import dataclass
from functools import partial

import torch

from gpusim.defaults import DEFAULT_SEED
from gpusim.formats.hardware import HardwareModel
from gpusim.formats.trace import Trace
from gpusim.gpu.device import explain_out_of_memory, require_gpu, set_precision
from gpusim.gpu.replay.allowlist import check_operators
from gpusim.gpu.replay.execute import Runner, make_initial
from gpusim.gpu.replay.timing import time_typical
from gpusim.plan.graph import OpGraph
from gpusim.plan.sync import plan_sync

#: Recordings per graph: the addresses of tensors change its time by more than the overhead.
RECORDINGS = 5
LINE, BRANCH = "line", "branch"


@dataclass
class _Recorded:
    graph: torch.cuda.CUDAGraph
    peak_bytes: int

    def replay(self) -> None:
        self.graph.replay()


@explain_out_of_memory
def branch_cost_ns(trace: Trace, hardware: HardwareModel, seed: int = DEFAULT_SEED) -> float:
    """Return the extra time of each gap in the sequential graph once one tiny kernel has a branch of its own, in ns.

    The kernel starts with the step and ends long before it; only the end of the graph waits for it. Raises `GpuError`
    without a GPU or memory.
    """
    check_operators(trace, trace.name)
    device = require_gpu()
    set_precision(trace.model.dtype)
    runner = Runner(trace, device)
    runner.bind(make_initial(trace, device, seed).tensors)
    ops = range(len(trace.ops))
    releases = plan_sync(trace, OpGraph.build(trace, hardware).preds, ops, [0] * len(ops)).releases
    lanes = {name: torch.cuda.Stream() for name in (LINE, BRANCH)}
    tiny = torch.zeros(1, device=device)
    for lane in lanes.values():
        with torch.cuda.stream(lane):
            tiny.zero_()
    with torch.cuda.stream(lanes[LINE]):  # libraries initialize on first use of a stream
        runner.run_in_order(releases)
    torch.cuda.synchronize()

    def record(branch: bool) -> _Recorded:
        runner.drop_temporaries()
        gc.collect()
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=lanes[LINE], capture_error_mode="thread_local"):
            if branch:
                lanes[BRANCH].wait_stream(lanes[LINE])
                with torch.cuda.stream(lanes[BRANCH]):
                    tiny.zero_()
            runner.run_in_order(releases)
            if branch:
                lanes[LINE].wait_stream(lanes[BRANCH])
        return _Recorded(graph, torch.cuda.max_memory_allocated())

    times = time_typical({LINE: partial(record, False), BRANCH: partial(record, True)}, RECORDINGS)
    gaps = max(1, sum(len(op.kernels) for op in trace.ops) - 1)
    return (times[BRANCH].median_ns - times[LINE].median_ns) / gaps
