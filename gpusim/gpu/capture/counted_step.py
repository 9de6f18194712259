"""Program run under ncu: a trace's step, once for warm-up and once within the profiler's range."""

from __future__ import annotations

import sys
from pathlib import Path

import torch

from gpusim.gpu.device import require_gpu, set_precision
from gpusim.gpu.replay.allowlist import check_operators
from gpusim.gpu.replay.execute import Runner, make_initial
from gpusim.plan.sync import program_order_releases
from gpusim.trace.store import read_trace


def main(file: str, seed: int) -> None:
    """Run the step of a trace in recorded order on one stream."""
    trace = read_trace(Path(file))
    check_operators(trace, file)
    device = require_gpu()
    set_precision(trace.model.dtype)
    runner = Runner(trace, device, trust_code=True)  # the capture has just run this code
    state = make_initial(trace, device, seed)
    runner.bind(state.tensors)
    releases = program_order_releases(trace)
    runner.run_in_order(releases)
    runner.drop_temporaries()
    state.restore()
    torch.cuda.synchronize()
    torch.cuda.profiler.start()
    runner.run_in_order(releases)
    torch.cuda.synchronize()
    torch.cuda.profiler.stop()


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))
