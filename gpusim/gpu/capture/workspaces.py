"""How much GPU memory each op takes for itself while it runs: cuDNN's workspaces, temporaries of torch."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch

from gpusim.gpu.replay.execute import InitialState, Runner

_PEAK, _NOW = "requested_bytes.all.peak", "requested_bytes.all.current"


def op_workspaces(runner: Runner, state: InitialState, releases: Sequence[Iterable[int]]) -> list[int]:
    """For each op the bytes asked for at most while it ran, less what it left; `state` is as before in the end.

    The allocator keeps these counts on the host, so nothing is waited for. What a library keeps from its first call on,
    such as cuBLAS's workspace of a stream, is not an op's: the step runs once before.
    """
    workspace_bytes = [0] * len(runner.trace.ops)
    for counted in (False, True):
        for op in range(len(runner.trace.ops)):
            runner.release(releases[op])
            torch.cuda.reset_peak_memory_stats()
            runner.run(op)
            if counted:
                stats = torch.cuda.memory_stats()
                workspace_bytes[op] = max(0, stats[_PEAK] - stats[_NOW])
        torch.cuda.synchronize()
        runner.drop_temporaries()
        state.restore()
    return workspace_bytes
