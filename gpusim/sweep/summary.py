"""Summary of a sweep: the fastest schedule of each trace on each GPU, and failures."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from gpusim.report.fit import print_table
from gpusim.report.terminal import Table, console
from gpusim.sweep.store import PointRow
from gpusim.text import message
from gpusim.units import format_times_ns

#: Maximum number of distinct failures printed; the store has all.
SHOWN_FAILURES = 5
#: Least width of a trace's name while other columns are left out: with it, streams stay in a terminal of 80 columns.
FOLDED_TRACE = 12


@dataclass(frozen=True)
class Best:
    """The fastest point of a trace on a GPU."""

    row: PointRow
    points: int
    """Number of candidate points."""

    @property
    def limit(self) -> float:
        """Upper limit on the speed-up of any schedule, from the largest lower bound."""
        row = self.row
        bounds = (row.critical_path_ns, row.area_ns, row.bandwidth_ns, row.front_end_ns, row.contention_ns)
        return (row.sequential_ns or 0) / max(1, *(bound or 0 for bound in bounds))


@dataclass(frozen=True)
class Failure:
    """An error, with the number of points of a trace on a GPU that have it."""

    trace: str
    hardware: str
    error: str
    points: int


def hardware_label(row: PointRow) -> str:
    """Return the hardware model's name, marked `(uncalibrated)` if it is."""
    return row.hardware if row.calibrated else f"{row.hardware} (uncalibrated)"


def best_points(rows: Sequence[PointRow]) -> list[Best]:
    """Return the fastest point of each trace, hardware model, engine and version; of equal ones, the fewest streams."""
    groups: dict[tuple[str, ...], list[PointRow]] = {}
    for row in rows:
        if row.makespan_ns is not None:
            key = (row.trace_hash, row.hardware_hash, row.engine, row.version)
            groups.setdefault(key, []).append(row)
    return [
        Best(min(group, key=lambda row: (row.makespan_ns, row.streams, row.policy)), len(group))
        for group in groups.values()
    ]


def failures(rows: Sequence[PointRow]) -> list[Failure]:
    """Return the errors of failed points, most frequent first."""
    counts = Counter((row.trace, hardware_label(row), row.error) for row in rows if row.error is not None)
    return [Failure(trace, hardware, error, count) for (trace, hardware, error), count in counts.most_common()]


def summary_document(rows: Sequence[PointRow]) -> dict[str, Any]:
    """Return the results for `sweep --json`."""
    return {
        "best": [
            {
                "trace": best.row.trace,
                "hardware": hardware_label(best.row),
                "calibrated": best.row.calibrated,
                "policy": best.row.policy,
                "streams": best.row.streams,
                "makespan_ns": best.row.makespan_ns,
                "sequential_ns": best.row.sequential_ns,
                "speedup": best.row.speedup,
                "speedup_limit": best.limit,
                "peak_bytes": best.row.peak_bytes,
                "points": best.points,
            }
            for best in best_points(rows)
        ],
        "failures": [asdict(failure) for failure in failures(rows)],
    }


def print_summary(rows: Sequence[PointRow]) -> None:
    """Print the best policy of each trace and hardware model, and failures."""
    out = console()
    table = Table(show_edge=False, header_style="bold")
    left = ("trace", "hardware", "best policy")
    for column in ("trace", "hardware", "best policy", "streams", "predicted", "speed-up", "at most", "points"):
        table.add_column(column, justify="left" if column in left else "right")
    best_rows = best_points(rows)
    times = format_times_ns(best.row.makespan_ns or 0 for best in best_rows)
    for best, time in zip(best_rows, times, strict=True):
        row = best.row
        table.add_row(
            row.trace,
            hardware_label(best.row),
            row.policy,
            str(row.streams),
            time,
            f"{row.speedup:.2f}x",
            f"{best.limit:.2f}x",
            str(best.points),
        )
    print_table(out, table, drop=("points", "at most", "streams"), fold=("trace",), readable=FOLDED_TRACE)
    failed = failures(rows)
    for failure in failed[:SHOWN_FAILURES]:
        text = f"{failure.points} points of {failure.trace} on {failure.hardware} failed: {failure.error}"
        out.print(message(text), style="yellow")
    if len(failed) > SHOWN_FAILURES:
        out.print(f"... and {sum(failure.points for failure in failed[SHOWN_FAILURES:])} more; the store has them all")
