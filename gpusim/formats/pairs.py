"""Measurement of a few kernels run together."""

from __future__ import annotations

from typing import Annotated

from msgspec import Meta

from gpusim.io.files import Document, Nanoseconds, PositiveNanoseconds


class PairCase(Document, frozen=True, kw_only=True):
    """Two or three ops of one kernel each, forked, run side by side and joined."""

    trace: str
    ops: tuple[str, ...]
    kernels: tuple[str, ...]
    alone_ns: Annotated[tuple[PositiveNanoseconds, ...], Meta(min_length=1)]
    """Each by itself in the same place; launch costs included."""
    empty_ns: Nanoseconds = 0
    """Between two stamps with nothing between them; 0 in files that do not say."""
    together_ns: PositiveNanoseconds
    predicted_ns: Nanoseconds
    fitted: bool = False
    cold: bool = False
    """Whether nothing of theirs was in the L2 cache. Where it was, what they read was there from a run just before."""

    @property
    def slowdown(self) -> float:
        """Together, over the longest alone."""
        return self.together_ns / max(self.alone_ns)

    @property
    def error(self) -> float:
        """(predicted - measured) / measured slow-down."""
        return self.predicted_ns / self.together_ns - 1.0
