"""What an exploration found, as numbers alone: all that an overview shows of it, and nothing that needs an engine."""

from __future__ import annotations

from typing import TYPE_CHECKING

from gpusim.files import Document

if TYPE_CHECKING:
    from gpusim.search.explore import Explored


class SummaryRow(Document, frozen=True, kw_only=True):
    """One schedule's numbers; see `gpusim.search.explore.Row`."""

    policy: str
    streams: int
    makespan_ns: int
    speedup: float
    peak_bytes: int


class SummaryVerdict(Document, frozen=True, kw_only=True):
    """See `gpusim.search.verdict.Verdict`."""

    worth_it: bool
    speedup: float
    low: float
    high: float
    text: str
    may_lose_cache: bool
    other_kernels: bool = False


class Summary(Document, frozen=True, kw_only=True):
    """The numbers of an exploration; times in ns."""

    step: str
    """Name of the trace."""
    hardware: str
    """Label of the hardware model."""
    rows: tuple[SummaryRow, ...]
    best_row: int
    """Which row is recommended."""
    sequential_ns: int
    bounds: tuple[tuple[int, str], ...]
    """Each lower bound and its name."""
    largest_bound: tuple[int, str]
    eager_ns: int | None
    """Measured with the trace; None where it was not, or on another GPU."""
    concurrency_ns: int
    """Saved by streams alone, ops in recorded order."""
    verdict: SummaryVerdict
    kernels_ns: int = 0
    """Saved by other kernels, likewise."""

    @property
    def best(self) -> SummaryRow:
        """The recommended row."""
        return self.rows[self.best_row]

    def best_of(self, policy: str) -> SummaryRow:
        """The fastest row of a policy."""
        return min((row for row in self.rows if row.policy == policy), key=lambda row: row.makespan_ns)


def summarize(explored: Explored) -> Summary:
    """The summary of an exploration."""
    rows = [
        SummaryRow(
            policy=row.policy,
            streams=row.streams,
            makespan_ns=row.makespan_ns,
            speedup=row.speedup,
            peak_bytes=row.peak_bytes,
        )
        for row in explored.rows
    ]
    found = explored.verdict
    return Summary(
        step=explored.trace.name,
        hardware=explored.hardware.label,
        rows=tuple(rows),
        best_row=next(place for place, row in enumerate(explored.rows) if row is explored.best),
        sequential_ns=explored.sequential_ns,
        bounds=explored.bounds.named,
        largest_bound=explored.bounds.largest,
        eager_ns=explored.attribution.eager_ns,
        concurrency_ns=explored.attribution.concurrency_ns,
        verdict=SummaryVerdict(
            worth_it=found.worth_it,
            speedup=found.speedup,
            low=found.low,
            high=found.high,
            text=found.text,
            may_lose_cache=found.may_lose_cache,
            other_kernels=found.other_kernels,
        ),
        kernels_ns=explored.attribution.kernels_ns,
    )
