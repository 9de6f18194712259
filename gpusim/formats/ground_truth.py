"""Measured times of a captured step, as a trace holds them (`gpusim.formats.trace`)."""

from __future__ import annotations

from typing import Annotated

from msgspec import Meta

from gpusim.io import file_limits
from gpusim.io.files import Count, Document, Nanoseconds

BytesPerNs = Annotated[float, Meta(ge=file_limits.MIN_RATE, le=file_limits.MAX_RATE)]


class Timing(Document, frozen=True, kw_only=True):
    """A wall time measured without a profiler, over several rounds."""

    median_ns: Nanoseconds
    """Median over rounds; for a CUDA graph, of the recording with median time."""
    lo_ns: Nanoseconds
    """Lower end of the 95 % confidence interval of the median."""
    hi_ns: Nanoseconds
    """Upper end of it."""
    rounds: Count
    """Number of rounds."""
    fastest_ns: Nanoseconds = 0
    """Time of the fastest of several CUDA graph recordings."""
    slowest_ns: Nanoseconds = 0
    """Time of the slowest recording."""


class HostLink(Document, frozen=True, kw_only=True):
    """Rates of copies to and from pinned memory, measured."""

    h2d_bytes_per_ns: BytesPerNs
    """Host to device."""
    d2h_bytes_per_ns: BytesPerNs
    """Device to host."""


class GroundTruth(Document, frozen=True, kw_only=True):
    """Measured times of the captured step, without a profiler."""

    eager: Timing
    """Time of the eager step (with torch.optim's SGD in training), host time included."""
    graph: Timing
    """Time of the sequential CUDA graph."""
    attributed_frac: Annotated[float, Meta(ge=0, le=1)]
    """Share of the profiled GPU time attributed to ops."""
    unattributed: tuple[str, ...] = ()
    """Kernels that were not attributed."""
    link: HostLink | None = None
    """Host link measured with a step in training; replaces the hardware model's."""
