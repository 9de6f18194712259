"""GPU memory that each op allocates for itself while it runs: cuDNN's workspaces, temporaries of torch."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import partial

import torch

from gpusim.gpu.replay.execute import InitialState, Runner

_PEAK, _NOW = "requested_bytes.all.peak", "requested_bytes.all.current"


def op_workspaces(runner: Runner, state: InitialState, releases: Sequence[Iterable[int]]) -> list[int]:
    """Return each op's peak allocation while it runs, less the bytes it leaves, in bytes; `state` is restored at the
    end.

    The allocator keeps these counts on the host, so no synchronization is needed. Memory that a library keeps from its
    first call on, such as cuBLAS's workspace of a stream, does not count: the step runs once before.
    """
    workspace_bytes = [0] * len(runner.trace.ops)
    for counted in (False, True):
        for op in range(len(runner.trace.ops)):
            runner.release(releases[op])
            taken_bytes = workspace_of(partial(runner.run, op))
            if counted:
                workspace_bytes[op] = taken_bytes
        torch.cuda.synchronize()
        runner.drop_temporaries()
        state.restore()
    return workspace_bytes


def workspace_of(call: Callable[[], object]) -> int:
    """Return the most that a call allocates while it runs, less the bytes that it leaves and returns."""
    torch.cuda.reset_peak_memory_stats()
    result = call()
    stats = torch.cuda.memory_stats()
    del result  # until here it counts as left
    return int(max(0, stats[_PEAK] - stats[_NOW]))
