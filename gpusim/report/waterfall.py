"""Waterfalls of a gain or loss: totals, and the changes between them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final, Literal

from gpusim.report.summary import Summary

if TYPE_CHECKING:
    from gpusim.analysis.limits import Scope

Role = Literal["total", "loss", "gain"]
LONGEST, BEST, WON, SEQUENTIAL = "longest op", "best list schedule", "won by concurrency", "sequential graph"
EAGER: Final = "eager step (measured)"


@dataclass(frozen=True, slots=True)
class WaterfallRow:
    """One row: a total starts at 0, a change at `base_ns`; a negative change goes to the left."""

    name: str
    length_ns: int
    base_ns: int = 0
    role: Role = "total"
    share: float | None = None
    """Share of a change."""
    text: str = ""
    """Label of a bar; if empty, its length."""
    note: str = ""
    """Additional hover text."""


def longest_ns(rows: Sequence[WaterfallRow]) -> int:
    """Return the right end of the rows, in ns."""
    return max((max(row.base_ns, row.base_ns + row.length_ns) for row in rows), default=0)


def gain_rows(summary: Summary) -> list[WaterfallRow]:
    """Return the savings from the eager step, if measured, to the recommended schedule.

    Shares are relative to the time before each change.
    """
    rows: list[WaterfallRow] = []
    if summary.eager_ns is not None:
        rows.append(WaterfallRow(EAGER, summary.eager_ns))
        rows.append(_saved("launches from a CUDA graph", summary.eager_ns, summary.sequential_ns))
    rows.append(WaterfallRow(f"= {SEQUENTIAL}", summary.sequential_ns))
    program_ns = summary.sequential_ns - summary.concurrency_ns
    rows.append(_saved("streams, ops in recorded order", summary.sequential_ns, program_ns))
    if summary.kernels_ns:
        rows.append(_saved("other kernels", program_ns, program_ns - summary.kernels_ns))
    rows.append(_saved("better order and placement", program_ns - summary.kernels_ns, summary.best.makespan_ns))
    rows.append(WaterfallRow("= recommended schedule", summary.best.makespan_ns))
    return rows


def _saved(name: str, before_ns: int, after_ns: int) -> WaterfallRow:
    change_ns = after_ns - before_ns
    share = change_ns / before_ns if before_ns else 0.0
    return WaterfallRow(name, change_ns, before_ns, "gain" if change_ns <= 0 else "loss", share)


def limit_rows(scope: Scope) -> list[WaterfallRow]:
    """Return the loss to each limit from the longest op to the sequential graph, with shares of the possible gain."""

    def change(name: str, base_ns: int, length_ns: int, role: Role) -> WaterfallRow:
        return WaterfallRow(f"+ {name}", length_ns, base_ns, role, scope.share(length_ns))

    rows = [WaterfallRow(LONGEST, scope.unlimited_ns)]
    level_ns = scope.unlimited_ns
    for loss in scope.losses:
        rows.append(change(loss.limit, level_ns, loss.loss_ns, "loss" if loss.loss_ns >= 0 else "gain"))
        level_ns = loss.makespan_ns
    rows.append(WaterfallRow(f"= {BEST}", scope.best_ns))
    rows.append(change(WON, scope.best_ns, scope.won_ns, "gain"))
    rows.append(WaterfallRow(f"= {SEQUENTIAL}", scope.sequential_ns))
    return rows
