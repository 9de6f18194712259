"""Doubts about the kernels of an imported trace: times longer than alone, and launches of unknown size."""

from __future__ import annotations

from typing import Final

from gpusim.formats.trace import Kernel, Trace

#: Share of the busy time with concurrent kernels above which their times are in doubt: less is within the interval.
MAX_CONCURRENT_FRAC: Final = 0.05
#: Share of the kernel time without launch sizes above which concurrency is in doubt: most of it is a guess then.
MAX_UNSIZED_FRAC: Final = 0.5


def slowed_frac(trace: Trace) -> float:
    """Return the largest share of the kernels' summed time that they would not take alone; 0 without doubt.

    Concurrent kernels take longer than alone. One after the other they take at least the profile's busy time, since
    sharing the GPU makes no work disappear. Copies beside kernels slow none: they count as busy time alone.
    """
    source = trace.provenance.imported_from
    if source is None:
        return 0.0
    if source.times_alone or source.concurrent_ns <= MAX_CONCURRENT_FRAC * source.busy_ns:
        return source.slowed_frac
    summed_ns = sum(kernel.dur_ns for op in trace.ops for kernel in op.kernels if kernel.kind == "kernel")
    return max(source.slowed_frac, 1 - source.busy_ns / summed_ns) if summed_ns else 0.0


def unsized_frac(trace: Trace) -> float:
    """Return the share of the kernel time without launch sizes in an imported trace; 0 up to `MAX_UNSIZED_FRAC`."""
    if trace.provenance.imported_from is None:
        return 0.0
    kernels = [kernel for op in trace.ops for kernel in op.kernels if kernel.kind == "kernel"]
    total_ns = sum(kernel.dur_ns for kernel in kernels)
    share = sum(kernel.dur_ns for kernel in kernels if _is_unsized(kernel)) / total_ns if total_ns else 0.0
    return share if share > MAX_UNSIZED_FRAC else 0.0


def _is_unsized(kernel: Kernel) -> bool:
    """Return True for one thread without a register, which no launch has: the import knew no size."""
    return kernel.grid == kernel.block == (1, 1, 1) and not kernel.regs_per_thread
