"""Measured timeline of a replayed schedule next to the simulated one, for Perfetto.

The profiler slows a replay (by 30 % for GoogLeNet training 8 on an H200) and shows the executor's streams, not those of
the capture: use it to inspect, not to time.
"""

from __future__ import annotations

from typing import Any

import torch

from gpusim.gpu.calibrate.microbench import GPU_CATEGORIES
from gpusim.gpu.device import explain_out_of_memory, require_gpu, set_precision
from gpusim.gpu.profiling import exported_events, profiled
from gpusim.gpu.replay.cudagraph import GraphRecorder
from gpusim.gpu.replay.execute import Runner, make_initial
from gpusim.plan.graph import OpGraph
from gpusim.plan.schedule import Schedule


@explain_out_of_memory
def measured_events(graph: OpGraph, schedule: Schedule, seed: int, trust_code: bool) -> list[dict[str, Any]]:
    """Return the GPU events of one profiled replay of a legal schedule. Raises `GpuError` without a GPU."""
    device = require_gpu()
    trace = graph.trace
    set_precision(trace.model.dtype)
    runner = Runner(trace, device, trust_code=trust_code)
    runner.bind(make_initial(trace, device, seed).tensors)
    recorded = GraphRecorder(runner, graph.preds).record(schedule, warm=True)
    for _ in range(3):
        recorded.replay()
    torch.cuda.synchronize()
    with profiled() as session:
        recorded.replay()
        torch.cuda.synchronize()
    return [event for event in exported_events(session) if event.get("cat") in GPU_CATEGORIES]
