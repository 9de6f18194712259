"""Output of `gpusim limits`: tables, a document for `--json`, rows for `--csv`."""

from __future__ import annotations

import csv
import io
from typing import Any

from gpusim.analysis.gap import PARTS, Gap
from gpusim.analysis.limits import Limits, Scope
from gpusim.report.fit import print_table
from gpusim.report.terminal import Table, console, styled
from gpusim.text import csv_cell, visible
from gpusim.units import format_times_ns

CSV_FIELDS = (
    "trace",
    "hardware",
    "scope",
    "ops",
    "kernels",
    "work_ns",
    "span_ns",
    "parallelism_mean",
    "parallelism_max",
    "width",
    "width_exact",
    "sequential_ns",
    "unlimited_ns",
    "best_ns",
    "best_streams",
    "limit",
    "makespan_ns",
    "loss_ns",
    "share_of_potential",
)


def limits_document(limits: Limits) -> dict[str, Any]:
    """Return the document of `limits --json`: times in ns, shares of the potential as fractions."""
    return {
        "trace": limits.trace,
        "hardware": limits.hardware,
        "calibrated": limits.calibrated,
        "streams": limits.streams,
        "scopes": [_scope_document(scope) for scope in limits.scopes],
    }


def _scope_document(scope: Scope) -> dict[str, Any]:
    parallelism = scope.parallelism
    return {
        "scope": scope.name,
        "ops": scope.ops,
        "kernels": scope.kernels,
        "work_ns": parallelism.work_ns,
        "span_ns": parallelism.span_ns,
        "parallelism": {
            "mean": parallelism.mean,
            "max": parallelism.maximum,
            "width": parallelism.width,
            "width_exact": parallelism.width_exact,
            "running": parallelism.running,
            "by_phase": dict(parallelism.by_phase),
        },
        "sequential_ns": scope.sequential_ns,
        "unlimited_ns": scope.unlimited_ns,
        "best": {"makespan_ns": scope.best_ns, "streams": scope.streams, "speedup": scope.speedup},
        "potential_ns": scope.potential_ns,
        "won_ns": scope.won_ns,
        "losses": [
            {
                "limit": loss.limit,
                "makespan_ns": loss.makespan_ns,
                "loss_ns": loss.loss_ns,
                "share": scope.share(loss.loss_ns),
            }
            for loss in scope.losses
        ],
        "gap": gap_document(scope.gap),
    }


def gap_document(gap: Gap) -> dict[str, Any]:
    """Return a gap for `--json`; the parts add up to time minus bound."""
    return {
        "bound": gap.bound,
        "bound_ns": gap.bound_ns,
        "time_ns": gap.time_ns,
        "ratio": gap.ratio,
        "largest": gap.largest,
        "parts": [{"part": name, "time_ns": time_ns} for name, time_ns in gap.parts],
    }


def limits_csv(limits: Limits) -> str:
    """Return one row per scope and limit, with a header; values of the scope are repeated on its rows."""
    out = io.StringIO()
    writer = csv.writer(out, lineterminator="\n")
    writer.writerow(CSV_FIELDS)
    for scope in limits.scopes:
        parallelism = scope.parallelism
        head = [
            limits.trace,
            limits.hardware,
            scope.name,
            scope.ops,
            scope.kernels,
            parallelism.work_ns,
            parallelism.span_ns,
        ]
        head += [
            parallelism.mean,
            parallelism.maximum,
            parallelism.width,
            str(parallelism.width_exact).lower(),
            scope.sequential_ns,
        ]
        head += [scope.unlimited_ns, scope.best_ns, scope.streams]
        for loss in scope.losses:
            row = [*head, loss.limit, loss.makespan_ns, loss.loss_ns, scope.share(loss.loss_ns)]
            writer.writerow(map(csv_cell, row))
    return out.getvalue()


def print_limits(limits: Limits) -> None:
    """Print the parallelism of each scope, and where its potential goes."""
    out = console()
    out.print(
        styled(
            (visible(limits.trace), "bold"),
            " on ",
            (visible(limits.hardware), "bold"),
            f": inter-op parallelism, and what is lost of it on up to {limits.streams} streams\n",
        )
    )
    print_table(out, _parallelism_table(limits))
    out.print(
        styled(
            ("\nWhere the potential goes", "bold"),
            ": limits switched on one after the other, share of the potential",
        )
    )
    print_table(out, _losses_table(limits))
    out.print(
        styled(("\nFrom the largest lower bound to the best list schedule", "bold"), ": limits of that one schedule")
    )
    print_table(out, _gap_table(limits))
    out.print(
        "T1: all kernels one after the other, without gaps; T-inf: the longest chain of dependent ones. "
        "A negative loss is a scheduling anomaly. docs/commands/limits.md explains each number.",
        style="dim",
    )
    if not all(scope.parallelism.width_exact for scope in limits.scopes):
        out.print(">= width: too many ops for the exact one; at least as many as run at once", style="dim")


def _parallelism_table(limits: Limits) -> Table:
    table = _table_of_scopes(limits)
    scopes = limits.scopes
    parallelisms = [scope.parallelism for scope in scopes]
    work, span, alone, best = _in_one_unit(
        [parallelism.work_ns for parallelism in parallelisms],
        [parallelism.span_ns for parallelism in parallelisms],
        [scope.sequential_ns for scope in scopes],
        [scope.best_ns for scope in scopes],
    )
    table.add_row("ops", *(str(scope.ops) for scope in scopes))
    table.add_row("T1", *work)
    table.add_row("T-inf", *span)
    table.add_row("mean", *(f"{parallelism.mean:.2f}" for parallelism in parallelisms))
    table.add_row("max", *(str(parallelism.maximum) for parallelism in parallelisms))
    table.add_row(
        "width", *(f"{'' if parallelism.width_exact else '>= '}{parallelism.width}" for parallelism in parallelisms)
    )
    table.add_row("sequential", *alone)
    table.add_row("best", *best)
    table.add_row("streams", *(str(scope.streams) for scope in scopes))
    table.add_row("speed-up", *(f"{scope.speedup:.2f}x" for scope in scopes), style="bold")
    return table


def _losses_table(limits: Limits) -> Table:
    table = _table_of_scopes(limits)
    scopes = limits.scopes
    names = [f"+ {loss.limit}" for loss in scopes[0].losses] if scopes else []
    unlimited, best, won, alone, *losses = _in_one_unit(
        [scope.unlimited_ns for scope in scopes],
        [scope.best_ns for scope in scopes],
        [scope.won_ns for scope in scopes],
        [scope.sequential_ns for scope in scopes],
        *([scope.losses[place].loss_ns for scope in scopes] for place in range(len(names))),
    )
    table.add_row("longest op: no limit", *unlimited)
    for place, (name, times) in enumerate(zip(names, losses, strict=True)):
        shares = [scope.share(scope.losses[place].loss_ns) for scope in scopes]
        table.add_row(name, *map(_change, times, shares))
    table.add_row("= best list schedule", *best, style="bold", end_section=True)
    table.add_row("+ won by concurrency", *map(_change, won, (s.share(s.won_ns) for s in scopes)), style="green")
    table.add_row("= sequential graph", *alone, style="bold")
    return table


def _gap_table(limits: Limits) -> Table:
    table = _table_of_scopes(limits)
    gaps = [scope.gap for scope in limits.scopes]
    names = [name for name in PARTS if any(name in dict(gap.parts) for gap in gaps)]
    bound, best, *parts = _in_one_unit(
        [gap.bound_ns for gap in gaps],
        [gap.time_ns for gap in gaps],
        *([gap.part_ns(name) for gap in gaps] for name in names),
    )
    table.add_row("bound", *(gap.bound for gap in gaps))
    table.add_row("", *bound)
    for name, times in zip(names, parts, strict=True):
        table.add_row(f"+ {name}", *map(_change, times, (gap.part_ns(name) / max(1, gap.bound_ns) for gap in gaps)))
    table.add_row("= best list schedule", *best, style="bold")
    table.add_row("over the bound", *(f"{gap.ratio:.2f}x" for gap in gaps))
    return table


def _table_of_scopes(limits: Limits) -> Table:
    """Return a table with a column per scope."""
    table = Table(show_edge=False, header_style="bold")
    table.add_column("")
    for scope in limits.scopes:
        table.add_column(scope.name, justify="right")
    return table


def _in_one_unit(*rows: list[int]) -> list[list[str]]:
    """Format the times of the rows with one unit."""
    texts = iter(format_times_ns(time_ns for row in rows for time_ns in row))
    return [[next(texts) for _ in row] for row in rows]


def _change(time: str, share: float) -> str:
    """Format a change of a time with its share."""
    if not share:
        return "-"
    return f"{'' if time.startswith('-') else '+'}{time} {share:>6.1%}"
