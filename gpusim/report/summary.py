"""Summary of an exploration as plain numbers for an overview, independent of the engine."""

from __future__ import annotations

from typing import TYPE_CHECKING

from gpusim.io.files import Document

if TYPE_CHECKING:
    from gpusim.search.explored import Explored, Row
    from gpusim.search.verdict import Verdict


class SummaryRow(Document, frozen=True, kw_only=True):
    """Numbers of one schedule; see `gpusim.search.explored.Row`."""

    policy: str
    streams: int
    makespan_ns: int
    speedup: float
    peak_bytes: int
    compared_ns: int
    """What rows are compared by."""


class SummaryWay(Document, frozen=True, kw_only=True):
    """One way to run the step; see `gpusim.search.verdict.VerdictRow`."""

    what: str
    label: str
    time_ns: int
    measured: bool
    speedup_over_eager: float | None
    advice: str
    best: bool
    """True for the recommended way."""


class SummaryVerdict(Document, frozen=True, kw_only=True):
    """Verdict of an exploration; see `gpusim.search.verdict.Verdict`."""

    worth_it: bool
    speedup: float
    low: float
    high: float
    text: str
    """Text of the verdict, without names of commands."""
    other_kernels: bool = False
    searched: bool = False
    less_known: bool = False
    unknown: bool = False
    rows: tuple[SummaryWay, ...] = ()


class Summary(Document, frozen=True, kw_only=True):
    """Numbers of an exploration; times in ns."""

    step: str
    """Name of the trace."""
    hardware: str
    """Label of the hardware model."""
    rows: tuple[SummaryRow, ...]
    best_row: int
    """Index of the recommended row."""
    sequential_ns: int
    bounds: tuple[tuple[int, str], ...]
    """Lower bounds with their names."""
    largest_bound: tuple[int, str]
    eager_ns: int | None
    """Eager time measured at capture; None if not measured, or on another GPU."""
    concurrency_ns: int
    """Time saved by streams alone, with ops in recorded order."""
    verdict: SummaryVerdict
    kernels_ns: int = 0
    """Time saved by other kernels, with ops in recorded order."""
    passed_over: SummaryRow | None = None
    """Searched schedule predicted faster than the recommended one."""
    passed_over_reason: str = ""
    """Reason why it is not recommended, as a clause."""

    @property
    def best(self) -> SummaryRow:
        """Recommended row."""
        return self.rows[self.best_row]

    def best_of(self, policy: str) -> SummaryRow:
        """Return the best row of a policy, as rows are compared."""
        return min((row for row in self.rows if row.policy == policy), key=lambda row: row.compared_ns)


def summarize(explored: Explored) -> Summary:
    """Return the summary of an exploration."""
    passed = explored.passed_over
    return Summary(
        step=explored.trace.name,
        hardware=explored.hardware.label,
        rows=tuple(_row(row) for row in explored.rows),
        best_row=next(place for place, row in enumerate(explored.rows) if row is explored.best),
        sequential_ns=explored.sequential_ns,
        bounds=explored.bounds.named,
        largest_bound=explored.bounds.largest,
        eager_ns=explored.attribution.eager_ns,
        concurrency_ns=explored.attribution.concurrency_ns,
        verdict=summarize_verdict(explored.verdict),
        kernels_ns=explored.attribution.kernels_ns,
        passed_over=None if passed is None else _row(passed),
        passed_over_reason=explored.passed_over_reason,
    )


def summarize_verdict(verdict: Verdict) -> SummaryVerdict:
    """Return the summary of a verdict."""
    from gpusim.search.verdict import best_way  # imported here because it imports the engine

    best = best_way(verdict.rows)
    return SummaryVerdict(
        worth_it=verdict.worth_it,
        speedup=verdict.speedup,
        low=verdict.low,
        high=verdict.high,
        text=verdict.sentence,
        other_kernels=verdict.other_kernels,
        searched=verdict.searched,
        less_known=verdict.less_known,
        unknown=verdict.unknown,
        rows=tuple(
            SummaryWay(
                what=row.what,
                label=row.label,
                time_ns=row.time_ns,
                measured=row.measured,
                speedup_over_eager=row.speedup_over_eager,
                advice=row.advice,
                best=row is best,
            )
            for row in verdict.rows
        ),
    )


def _row(row: Row) -> SummaryRow:
    return SummaryRow(
        policy=row.policy,
        streams=row.streams,
        makespan_ns=row.makespan_ns,
        speedup=row.speedup,
        peak_bytes=row.peak_bytes,
        compared_ns=row.compared_ns,
    )
