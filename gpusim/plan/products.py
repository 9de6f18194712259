"""Share of a step's time in small matrix products, which lose more next to each other than predicted."""

from __future__ import annotations

from collections.abc import Sequence

from gpusim.formats.trace import Trace
from gpusim.plan.tasks import Task


def small_products_share(trace: Trace, tasks: Sequence[Sequence[Task]], sms: int) -> float:
    """Return the share of kernel time in matrix products, convolutions apart, of fewer blocks than the GPU has SMs."""
    all_ns = small_ns = 0.0
    for op, of_op in zip(trace.ops, tasks, strict=True):
        for task in of_op:
            all_ns += task.dur_ns
            if task.matrix and task.blocks < sms and "convolution" not in op.target:
                small_ns += task.dur_ns
    return small_ns / all_ns if all_ns else 0.0
