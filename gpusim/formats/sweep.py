"""Sweep file (TOML): lists of traces, hardware models, policies and stream counts to simulate."""

from __future__ import annotations

from typing import Annotated

from msgspec import Meta

from gpusim.defaults import DEFAULT_ENGINE, DEFAULT_SEED, DEFAULT_SWEEP_STREAMS
from gpusim.formats.schedule import StreamCount
from gpusim.io.files import Count, Document

#: Name for all bundled traces, all hardware models, or all policies that are not slow.
ALL = "all"


class Sweep(Document, frozen=True, kw_only=True):
    """The lists of a sweep, whose product gives its points. Names may be globs over bundled names, or `all`."""

    traces: Annotated[tuple[str, ...], Meta(min_length=1)]
    """Bundled names, or trace files from the working directory; the trace determines model and batch."""
    hardware: tuple[str, ...] = ()
    """Bundled names or `.json` files; if empty, the model of the GPU of each trace."""
    policies: Annotated[tuple[str, ...], Meta(min_length=1)] = (ALL,)
    """Policy names; `all` leaves out slow policies (seconds per call), which must be named."""
    streams: Annotated[tuple[StreamCount, ...], Meta(min_length=1)] = DEFAULT_SWEEP_STREAMS
    """Stream counts for every policy; counts above the maximum of a policy are replaced by it, once."""
    engine: str = DEFAULT_ENGINE
    seed: Count = DEFAULT_SEED
    """Seed, part of every point's identity; no registered policy draws random numbers today."""
