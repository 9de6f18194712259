"""Results of a validation recipe: the document, the table generated from it, and what it says in one line."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Final

from rich.table import Table

from gpusim.errors import MeasurementError
from gpusim.files import Count, Document, Nanoseconds, Positive, read_document, write_bytes, write_document
from gpusim.report.tables import console
from gpusim.trace.schema import Dtype, Frontend, MemoryFormat, Mode
from gpusim.units import format_ns

SCHEMA: Final = "gpusim-results/1"


class ResultCase(Document, frozen=True, kw_only=True, omit_defaults=False):
    """One replayed schedule: predicted, measured, and what it is compared with."""

    trace: str
    network: str
    mode: Mode
    batch: Positive
    dtype: Dtype
    memory_format: MemoryFormat
    frontend: Frontend
    policy: str
    streams: Positive
    predicted_ns: Nanoseconds
    measured_ns: Nanoseconds
    interval_ns: tuple[Nanoseconds, Nanoseconds]
    sequential_ns: Nanoseconds
    sequential_interval_ns: tuple[Nanoseconds, Nanoseconds]
    predicted_sequential_ns: Nanoseconds
    slowest_ns: Nanoseconds = 0
    sequential_slowest_ns: Nanoseconds = 0
    """Slowest recordings of the two, beside the fastest that were timed; 0 in results from before they were kept."""
    eager_ns: Nanoseconds
    outputs_equal: bool
    bit_equal: bool
    worst_error: float
    sequential_error: float
    """Difference between two sequential runs."""
    fitted: bool
    worth_it: bool
    """The verdict of `explore`."""
    bounds_ns: dict[str, Nanoseconds]
    predicted_peak_bytes: Count
    measured_peak_bytes: Count
    sequential_peak_bytes: Count
    events: Count
    sm_clock_mhz: Count
    baselines: dict[str, Nanoseconds] = {}

    @property
    def speedup(self) -> float:
        """Sequential graph over schedule, measured."""
        return self.sequential_ns / self.measured_ns

    @property
    def predicted_speedup(self) -> float:
        """The same, predicted."""
        return self.predicted_sequential_ns / self.predicted_ns

    @property
    def error(self) -> float:
        """(predicted - measured) / measured."""
        return self.predicted_ns / self.measured_ns - 1.0

    @property
    def sequential_prediction_error(self) -> float:
        """The same for the sequential graph."""
        return self.predicted_sequential_ns / self.sequential_ns - 1.0


class Results(Document, frozen=True, kw_only=True, omit_defaults=False):
    """Everything one run of a recipe measured."""

    schema: str
    recipe: str
    gpu: str
    date: str
    command: str
    hardware: str
    versions: dict[str, str]
    cases: tuple[ResultCase, ...]


def read_results(path: Path) -> Results:
    """Read a results file. Raises `MeasurementError`."""
    return read_document(path, Results, SCHEMA, MeasurementError)


def results_name(results: Results) -> str:
    """`<recipe>_<gpu>_<yyyymmdd>`, the GPU as one short word."""
    gpu = results.gpu.replace("NVIDIA", "").strip().replace(" ", "-").lower()
    return f"{results.recipe}_{gpu}_{results.date.replace('-', '')}"


def write_results(results: Results, folder: Path) -> Path:
    """Write the JSON document and its Markdown table. Raises `OutputError`."""
    path = folder / f"{results_name(results)}.json"
    write_document(path, results, indent=1)
    write_bytes(path.with_suffix(".md"), results_markdown(results, path.name).encode())
    return path


def results_markdown(results: Results, source: str) -> str:
    """The table of a results file with its provenance and summary."""
    versions = ", ".join(f"{name} {version}" for name, version in results.versions.items())
    clocks = sorted({case.sm_clock_mhz for case in results.cases})
    clock_text = "-".join(str(c) for c in dict.fromkeys((clocks[0], clocks[-1]))) if clocks else "?"
    lines = [
        f"# {results.recipe} on {results.gpu}",
        "",
        f"Generated from `{source}`. {results.date}, {versions}, SM clock {clock_text} MHz, hardware model "
        f"{results.hardware}. Command: `{results.command}`",
        "",
        *summary_lines(results.cases),
        "",
        *case_table(results.cases),
    ]
    return "\n".join(lines) + "\n"


def case_table(cases: Iterable[ResultCase]) -> list[str]:
    """Markdown rows: one for each replayed schedule, times in us."""
    rows = [
        "| step | policy | streams | eager | sequential graph | schedule | 95 % interval | speed-up | predicted "
        "| error | sequential error | outputs |",
        "|---|---|--:|--:|--:|--:|--:|--:|--:|--:|--:|---|",
    ]
    for case in cases:
        outputs = "bit-equal" if case.bit_equal else ("equal" if case.outputs_equal else "DIFFERENT")
        interval = f"{case.interval_ns[0] / 1e3:.0f}-{case.interval_ns[1] / 1e3:.0f}"
        rows.append(
            f"| {case.trace} | {case.policy} | {case.streams} | {case.eager_ns / 1e3:.0f} | "
            f"{case.sequential_ns / 1e3:.0f} | {case.measured_ns / 1e3:.0f} | {interval} | **{case.speedup:.2f}x** | "
            f"{case.predicted_ns / 1e3:.0f} | {case.error:+.1%} | {case.sequential_prediction_error:+.1%} | {outputs} |"
        )
    return rows


def summary_lines(cases: Sequence[ResultCase]) -> list[str]:
    """Prediction errors in words: median, 90th percentile and largest, of schedules and of sequential graphs."""
    concurrent = [abs(case.error) for case in cases if case.streams > 1]
    sequential = [abs(error) for error in {c.trace: c.sequential_prediction_error for c in cases}.values()]
    lines = []
    for what, errors in (("multi-stream schedules", concurrent), ("sequential graphs", sequential)):
        if errors:
            ordered = sorted(errors)
            p90 = ordered[min(len(ordered) - 1, round(0.9 * (len(ordered) - 1)))]
            lines.append(
                f"- {len(errors)} {what}: prediction error median {statistics.median(errors):.1%}, "
                f"90 % of cases within {p90:.1%}, largest {ordered[-1]:.1%}"
            )
    return lines


def print_results(results: Results) -> None:
    """The results as a table for people."""
    table = Table(show_edge=False, header_style="bold")
    for column in ("step", "policy", "streams", "sequential", "schedule", "speed-up", "predicted", "error", "outputs"):
        table.add_column(column, justify="left" if column in ("step", "policy", "outputs") else "right")
    for case in results.cases:
        table.add_row(
            case.trace,
            case.policy,
            str(case.streams),
            format_ns(case.sequential_ns),
            format_ns(case.measured_ns),
            f"{case.speedup:.2f}x",
            format_ns(case.predicted_ns),
            f"{case.error:+.1%}",
            "equal" if case.outputs_equal else "DIFFERENT",
        )
    out = console()
    out.print(table)
    for line in summary_lines(results.cases):
        out.print(line)
