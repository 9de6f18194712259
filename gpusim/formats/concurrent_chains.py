"""Measured chains of calls side by side, in the report of `gpusim calibrate --rules`."""

from __future__ import annotations

from typing import Annotated

from msgspec import Meta

from gpusim.formats.trace import Kernel
from gpusim.io.file_limits import MAX_COST_NS
from gpusim.io.files import Document, Positive
from gpusim.text import short_value

Nanoseconds = Annotated[float, Meta(ge=0, le=MAX_COST_NS)]


class ChainedCall(Document, frozen=True, kw_only=True):
    """A call that chains are made of."""

    name: str
    kernels: Annotated[tuple[Kernel, ...], Meta(min_length=1)]
    """Kernels of a call, as profiled one call at a time."""
    call_ns: Annotated[float, Meta(gt=0, le=MAX_COST_NS)]
    """Time of a call in a chain alone, with its gaps, in ns."""


class ChainsBeside(Document, frozen=True, kw_only=True):
    """Chains that ran side by side, one on each stream."""

    chains: Annotated[tuple[str, ...], Meta(min_length=2)]
    """Names of their calls."""
    calls: tuple[Positive, ...]
    """Number of calls of each chain."""
    together_ns: Nanoseconds
    """Time from their start to the end of the last, in ns."""


class ConcurrentChains(Document, frozen=True, kw_only=True):
    """One experiment: chains of several kinds of calls alone, and side by side. Times are medians of graphs."""

    name: str
    """Name of its rule in the report."""
    empty_ns: Nanoseconds
    """Part of each time in `runs` that is not theirs: that between two kernels that record the time, in ns."""
    calls: tuple[ChainedCall, ...]
    runs: Annotated[tuple[ChainsBeside, ...], Meta(min_length=1)]

    def problem(self) -> tuple[int, str] | None:
        """Return the first run that does not fit the calls, and how; None if all do."""
        known = {call.name for call in self.calls}
        for number, run in enumerate(self.runs):
            unknown = [name for name in run.chains if name not in known]
            if unknown:
                return number, f"has a chain of '{short_value(unknown[0])}', which is not among the calls"
            if len(run.calls) != len(run.chains):
                return number, f"has {len(run.chains)} chains, and {len(run.calls)} numbers of calls"
            if run.together_ns <= self.empty_ns:
                return number, f"takes {run.together_ns} ns, no more than what is not its own"
        return None
