"""The gap between the kernels of a trace, from its own sequential CUDA graph.

The profiled end of a kernel and the launch of the next one overlap by an amount that depends on the step: the bundled
steps take 0.16 to 0.37 us per kernel more than their kernels, and one gap for all misses two of ten by 5 %.

    gap = (sequential graph - sum of durations - extra of memory nodes) / (kernels - 1)

A gap is limited to a range, and the rest becomes a factor on all durations. Source: sequential graphs of bundled steps
timed without a profiler (research/2026-11-23-engine-rules.md, "The gap between kernels"). The result replaces
`GraphCosts.chain_ns` on the GPU of the trace.
"""

from __future__ import annotations

from typing import Final

#: Plausible range of gaps; the rest of the time scales the durations. Spin kernels on an H200 follow each other within
#: 0.5 us (validate/results, calibration).
MIN_GAP_NS: Final = 100.0
MAX_GAP_NS: Final = 600.0
#: Range of the factor; a sequential run that needs more does not belong to these kernels.
MIN_SCALE: Final = 0.2
MAX_SCALE: Final = 5.0
#: Share by which a sequential graph may differ from its capture. Launches have two states, in which the gap between
#: kernels differs by 0.18 us, or by 0.34 us beyond the L2 cache: 6 to 10 % of steps with short kernels
#: (research/2026-11-29-launch-states.md). Replays of other steps differ by at most 2.8 %, of two by 3.1 and 3.9 %.
SAME_FRAC: Final = 0.03


def gap_ns(sequential_ns: float, total_ns: float, extra_ns: float, kernels: int) -> float:
    """Return the gap between kernels whose durations add up to `total_ns`; `extra_ns` is that of all memory nodes."""
    gaps = max(1, kernels - 1)
    return min(MAX_GAP_NS, max(MIN_GAP_NS, (sequential_ns - extra_ns - total_ns) / gaps))


def scale(sequential_ns: float, total_ns: float, extra_ns: float, kernels: int, gap_ns: float) -> float:
    """Return the factor on all durations with which the sequential graph takes its measured time at this gap."""
    busy_ns = sequential_ns - extra_ns - gap_ns * (kernels - 1)
    return min(MAX_SCALE, max(MIN_SCALE, busy_ns / total_ns))


def is_as_captured(captured_ns: float, measured_ns: float) -> bool:
    """Return True if a sequential graph takes the time of its capture, so that predictions anchored to that hold.

    Also without a time at capture (0): then nothing is known against it.
    """
    return captured_ns <= 0 or abs(measured_ns / captured_ns - 1.0) <= SAME_FRAC
