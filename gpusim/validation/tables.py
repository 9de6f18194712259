"""Results of a validation recipe as tables: Markdown next to the document, and on the terminal."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Sequence
from pathlib import Path

from gpusim.formats.results import ResultCase, Results, results_name
from gpusim.io.files import write_bytes, write_document
from gpusim.quantiles import quantile
from gpusim.report.fit import print_table
from gpusim.report.terminal import Table, console
from gpusim.rules.anchor import SAME_FRAC, is_as_captured
from gpusim.units import counted, format_ns
from gpusim.validation.memory_tables import memory_lines
from gpusim.validation.statistics import counted_replays, fidelity_table


def write_results(results: Results, folder: Path) -> Path:
    """Write the JSON document and its Markdown table. Raises `OutputError`."""
    path = folder / f"{results_name(results)}.json"
    write_document(path, results, indent=1)
    write_bytes(path.with_suffix(".md"), results_markdown(results, path.name).encode())
    return path


def results_markdown(results: Results, source: str) -> str:
    """Return the table of a results file with its provenance and summary."""
    versions = ", ".join(f"{name} {version}" for name, version in results.versions.items())
    clocks = sorted({case.sm_clock_mhz for case in results.cases})
    clock_text = "-".join(str(c) for c in dict.fromkeys((clocks[0], clocks[-1]))) if clocks else "?"
    code = f"gpusim {results.gpusim}, " if results.gpusim else ""
    lines = [
        f"# {results.recipe} on {results.gpu}",
        "",
        f"Generated from `{source}`. {results.date}, {code}{versions}, SM clock {clock_text} MHz, hardware model "
        f"{results.hardware}. Command: `{results.command}`",
        "",
        *(memory_lines(results.cases) or _schedule_lines(results.cases)),
    ]
    return "\n".join(lines) + "\n"


def _schedule_lines(cases: Sequence[ResultCase]) -> list[str]:
    return [
        *summary_lines(cases),
        "",
        *(line for table in (fidelity_table(cases),) if table for line in (*table, "")),
        *case_table(cases),
    ]


def case_table(cases: Iterable[ResultCase]) -> list[str]:
    """Return Markdown rows, one per replayed schedule, with times in us."""
    rows = [
        "| step | policy | streams | eager | sequential graph | schedule | 95 % interval | speed-up | predicted "
        "| error | sequential at capture | outputs |",
        "|---|---|--:|--:|--:|--:|--:|--:|--:|--:|--:|---|",
    ]
    for case in cases:
        interval = f"{case.interval_ns[0] / 1e3:.0f}-{case.interval_ns[1] / 1e3:.0f}"
        rows.append(
            f"| {case.trace} | {case.way} | {case.streams} | {case.eager_ns / 1e3:.0f} | "
            f"{case.sequential_ns / 1e3:.0f} | {case.measured_ns / 1e3:.0f} | {interval} | **{case.speedup:.2f}x** | "
            f"{case.predicted_ns / 1e3:.0f} | {case.error:+.1%} | {case.sequential_prediction_error:+.1%} "
            f"| {case.outputs} |"
        )
    return rows


def summary_lines(cases: Sequence[ResultCase]) -> list[str]:
    """Summarize prediction errors (median, 90th percentile, largest), with fitted networks separately.

    Schedules whose outputs differ have no valid time and do not count. Sequential graphs are anchored to the capture's
    measurement: their deviation in replay shows how well a measurement repeats, and nothing about the model.
    """
    lines = []
    several = counted_replays(cases)
    for fitted, whose in ((False, "on networks that no constant was fitted on"), (True, "on fitted networks")):
        errors = sorted(abs(case.error) for case in several if case.fitted == fitted)
        if errors:
            lines.append(
                f"- {counted(len(errors), 'multi-stream schedule')} {whose}: prediction error median "
                f"{statistics.median(errors):.1%}, 90 % of cases within {quantile(errors, 0.9):.1%}, "
                f"largest {errors[-1]:.1%}"
            )
    apart = sorted(abs(error) for error in {c.trace: c.sequential_prediction_error for c in cases}.values())
    if apart:
        lines.append(
            f"- {counted(len(apart), 'sequential graph')}, anchored and so no evidence: measured again within "
            f"{statistics.median(apart):.1%} in the median of what capture measured, {apart[-1]:.1%} at most"
        )
    same = [case for case in several if is_as_captured(case.predicted_sequential_ns, case.sequential_ns)]
    if len(same) < len(several):
        others = counted(len(several) - len(same), "schedule")
        text = f"- {others} beside a sequential graph that is more than {SAME_FRAC:.0%} from its capture"
        errors = sorted(abs(case.error) for case in same)
        rest = f"median {statistics.median(errors):.1%}, largest {errors[-1]:.1%}" if errors else "no schedule"
        lines.append(f"{text}; without: {rest}")
    return lines


def print_results(results: Results) -> None:
    """Print the results as a table."""
    table = Table(show_edge=False, header_style="bold")
    for column in ("step", "policy", "streams", "sequential", "schedule", "speed-up", "predicted", "error", "outputs"):
        table.add_column(column, justify="left" if column in ("step", "policy", "outputs") else "right")
    for case in results.cases:
        table.add_row(
            case.trace,
            case.way,
            str(case.streams),
            format_ns(case.sequential_ns),
            format_ns(case.measured_ns),
            f"{case.speedup:.2f}x",
            format_ns(case.predicted_ns),
            f"{case.error:+.1%}",
            case.outputs.removeprefix("bit-"),
        )
    out = console()
    print_table(out, table)
    for line in summary_lines(results.cases):
        out.print(line)
