"""Output of `gpusim transfer`: a table, and a document for `--json`."""

from __future__ import annotations

from typing import Any

from gpusim.analysis.transfer import Transfer
from gpusim.report.fit import print_table
from gpusim.report.terminal import Table, console
from gpusim.text import visible
from gpusim.units import format_times_ns


def transfer_document(transfer: Transfer) -> dict[str, Any]:
    """Return settings and rows; times in ns."""
    return {
        "settings": [
            {
                "name": setting.name,
                "trace": setting.trace,
                "batch": setting.batch,
                "hardware": setting.hardware,
                "calibrated": setting.calibrated,
                "policy": setting.policy,
                "streams": setting.streams,
                "tuned_ns": setting.tuned_ns,
                "sequential_ns": setting.sequential_ns,
            }
            for setting in transfer.settings
        ],
        "rows": [
            {
                "tuned_for": row.tuned_for,
                "used_on": row.used_on,
                "time_ns": row.time_ns,
                "best_ns": row.best_ns,
                "lost_frac": row.lost_frac,
            }
            for row in transfer.rows
        ],
        "text": transfer.sentence,
    }


def print_transfer(transfer: Transfer) -> None:
    """Print one line per schedule and setting, then the summary."""
    out = console()
    table = Table(show_edge=False, header_style="bold")
    for column in ("tuned for", "used on", "time", "best", "lost"):
        table.add_column(column, justify="left" if column in ("tuned for", "used on") else "right")
    times = format_times_ns(time for row in transfer.rows for time in (row.time_ns, row.best_ns))
    names = [setting.name for setting in transfer.settings]
    for number, row in enumerate(transfer.rows):
        table.add_row(
            row.tuned_for,
            row.used_on,
            times[2 * number],
            times[2 * number + 1],
            f"{row.lost_frac:+.1%}",
            style="bold" if row.tuned_for == row.used_on else None,
            end_section=(number + 1) % len(names) == 0,
        )
    print_table(out, table, fold=("used on",))
    out.print(f"\n{visible(transfer.sentence)}")
    guessed = sorted({setting.hardware for setting in transfer.settings if not setting.calibrated})
    if guessed:
        out.print(f"Uncalibrated: {', '.join(map(visible, guessed))}. Treat those rows as a trend.", style="yellow")
