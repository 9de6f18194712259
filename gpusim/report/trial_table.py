"""Output of `gpusim explore --measure` on the schedules tried on the GPU."""

from __future__ import annotations

from typing import Any

from gpusim.formats.trace import Trace
from gpusim.report.as_captured import not_as_captured
from gpusim.report.fit import print_table
from gpusim.report.terminal import Table, console, styled
from gpusim.search.trial import Trial
from gpusim.text import visible
from gpusim.units import counted, format_ns


def trial_document(trial: Trial) -> dict[str, Any]:
    """Return the part `measured` of `explore --measure --json`."""
    return {
        "tried": [
            {
                "policy": row.schedule.policy,
                "streams": row.streams,
                "predicted_ns": row.makespan_ns,
                "measured_ns": time_ns,
            }
            for row, time_ns in zip(trial.rows, trial.times_ns, strict=True)
        ],
        "best": {"policy": trial.best.policy, "streams": trial.best.streams},
        "measurement": trial.measurement,
    }


def print_trial(trial: Trial, trace: Trace) -> None:
    """Print the schedules tried, and the replay of the fastest."""
    out = console()
    table = Table(show_edge=False, header_style="bold")
    for column in ("tried on the GPU", "streams", "predicted", "measured"):
        table.add_column(column, justify="left" if column == "tried on the GPU" else "right")
    for row, time_ns in zip(trial.rows, trial.times_ns, strict=True):
        style = "bold green" if row is trial.fastest else None
        table.add_row(
            row.schedule.policy, str(row.streams), format_ns(row.makespan_ns), format_ns(time_ns), style=style
        )
    out.print()
    print_table(out, table)
    measurement = trial.measurement
    if measurement is None:
        out.print(styled(("\nMeasured.", "bold"), " Nothing tried was faster than the sequential graph."))
        return
    speedup = measurement.sequential.median_ns / measurement.schedule.median_ns
    text = f"{speedup:.2f}x over the sequential graph ({format_ns(measurement.sequential.median_ns)})"
    kept = "" if trial.best is trial.fastest else "; the sequential graph stays"
    out.print(
        styled(
            ("\nMeasured.", "bold"),
            f" {visible(measurement.policy)}, {counted(measurement.streams, 'stream')}: "
            f"{format_ns(measurement.schedule.median_ns)}, {text}, outputs equal{kept}",
        )
    )
    note = not_as_captured(measurement, trace)
    if note:
        out.print(f"Note: {note}.")
