"""Measurements of two or three concurrent kernels."""

from __future__ import annotations

from typing import Annotated

from msgspec import Meta

from gpusim.io.files import Document, Nanoseconds, PositiveNanoseconds


class PairCase(Document, frozen=True, kw_only=True):
    """Two or three single-kernel ops, measured concurrently between a fork and a join."""

    trace: str
    ops: tuple[str, ...]
    kernels: tuple[str, ...]
    alone_ns: Annotated[tuple[PositiveNanoseconds, ...], Meta(min_length=1)]
    """Time of each op alone between the same fork and join, launch costs included, in ns."""
    empty_ns: Nanoseconds = 0
    """Time between two adjacent timestamps, in ns; 0 if the file has none."""
    together_ns: PositiveNanoseconds
    predicted_ns: Nanoseconds
    fitted: bool = False
    cold: bool = False
    """True if the L2 cache held none of the ops' data; otherwise a run just before had left their inputs there."""

    @property
    def slowdown(self) -> float:
        """Time together over the longest time alone."""
        return self.together_ns / max(self.alone_ns)

    @property
    def error(self) -> float:
        """Prediction error of the time together, (predicted - measured) / measured."""
        return self.predicted_ns / self.together_ns - 1.0
