"""Kind of a step: mostly convolutional, as those whose predictions are known best, or another.

The calibration network, GoogLeNet and DenseNet-121, on which constants are fitted, spend their time in convolutions,
batch norms and pooling. Steps with less of these are predicted less well (research/2026-11-24-intervals.md).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from gpusim.formats.trace import Trace
from gpusim.plan.tasks import Task

#: Parts of the names of these operators, in any direction and of any library.
KNOWN_BEST: Final = ("convolution", "batch_norm", "pool")
#: Least share of kernel time in them of a mostly convolutional step. From 0.7 to 0.8 the intervals hold at least 80 %
#: of the measured schedules of each kind; below, 66 % of those of U-Nets (research/2026-11-30-block-turnover.md).
LEAST_SHARE: Final = 0.7


def mostly_convolutional(trace: Trace, tasks: Sequence[Sequence[Task]]) -> bool:
    """Return True if convolutions, batch norms and pooling take most of the kernel time; also without kernels."""
    all_ns = known_ns = 0.0
    for op, of_op in zip(trace.ops, tasks, strict=True):
        op_ns = sum(task.dur_ns for task in of_op)
        all_ns += op_ns
        if any(name in op.target for name in KNOWN_BEST):
            known_ns += op_ns
    return known_ns >= LEAST_SHARE * all_ns
