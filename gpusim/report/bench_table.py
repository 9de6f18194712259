"""Output of `gpusim bench`: a table, and a document for `--json`."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from gpusim.analysis.engine_benchmark import Bench
from gpusim.report.fit import print_table
from gpusim.report.terminal import Table, console
from gpusim.text import visible

ROWS = (
    ("reference", "reference engine"),
    ("fast", "fast engine"),
    ("fast_run", "fast engine, from a plan's Python objects"),
    ("fast_with_lowering", "fast engine, from launch orders and streams"),
    ("fast_all_cores", "the same on all cores, wall time"),
    ("list_fast", "list scheduler"),
)


def bench_document(bench: Bench) -> dict[str, Any]:
    """Return the document of `bench --json`."""
    return asdict(bench) | {"ratio": bench.ratio}


def print_bench(bench: Bench) -> None:
    """Print the rates and their ratios to the reference engine."""
    out = console()
    out.print(
        f"{visible(bench.trace)}: {bench.kernels} kernels a schedule. "
        f"Seconds of CPU time on one of {bench.cores} cores.\n"
    )
    table = Table("", "schedules/s", "kernels/s", "against the reference", box=None)
    for column in table.columns[1:]:
        column.justify = "right"
    for name, title in ROWS:
        rate = getattr(bench, name)
        table.add_row(
            title,
            f"{rate.schedules_per_s:,.0f}",
            f"{rate.kernels_per_s:,.0f}",
            f"{rate.schedules_per_s / bench.reference.schedules_per_s:,.0f}x",
        )
    print_table(out, table)
    agree = "agree" if bench.makespans_equal else "DISAGREE"
    out.print(f"\nThe engines {agree} on every makespan. Compiled functions were ready after {bench.ready_s:.1f} s.")
