"""Results of concurrent kernels: slow-down of pairs and triples over the longest kernel alone."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Annotated, Final

from msgspec import Meta

from gpusim.errors import MeasurementError
from gpusim.formats.pairs import PairCase
from gpusim.formats.results import Results, results_name
from gpusim.io.files import Document, read_document, write_bytes, write_document
from gpusim.quantiles import quantile

SCHEMA: Final = "gpusim-pairs/1"
SUFFIX: Final = ".pairs.json"


class PairResults(Document, frozen=True, kw_only=True):
    """All pairs and triples of one run of a recipe."""

    schema: str
    recipe: str
    gpu: str
    date: str
    command: str
    hardware: str
    versions: dict[str, str]
    gpusim: str = ""
    """Version of gpusim, as in a measurement."""
    cases: Annotated[tuple[PairCase, ...], Meta(min_length=1)]


def write_pairs(results: Results, cases: Sequence[PairCase], folder: Path) -> Path:
    """Write JSON and Markdown next to the results of the same run. Raises `OutputError`."""
    document = PairResults(
        schema=SCHEMA,
        recipe=results.recipe,
        gpu=results.gpu,
        date=results.date,
        command=results.command,
        hardware=results.hardware,
        versions=results.versions,
        gpusim=results.gpusim,
        cases=tuple(cases),
    )
    path = folder / f"{results_name(results)}{SUFFIX}"
    write_document(path, document)
    write_bytes(path.with_suffix(".md"), pairs_markdown(document, path.name).encode())
    return path


def read_pairs(path: Path) -> PairResults:
    """Read a file of pairs. Raises `MeasurementError`."""
    return read_document(path, PairResults, SCHEMA, MeasurementError)


def pairs_markdown(results: PairResults, source: str) -> str:
    """Return the errors of the predicted slow-downs by trace, with their provenance."""
    versions = ", ".join(f"{name} {version}" for name, version in results.versions.items())
    lines = [
        f"# {results.recipe}: kernels run together on {results.gpu}",
        "",
        f"Generated from `{source}`. {results.date}, {versions}, hardware model {results.hardware}. "
        f"Command: `{results.command}`",
        "",
        "Slow-down: two or three kernels side by side, over the longest of them alone. Error: predicted over measured. "
        "The L2 cache before: *warm* with what they read, *cold* without.",
        "",
        "| trace | L2 cache | pairs and triples | measured slow-down, median | error, median | 95 % within | bias |",
        "|---|---|--:|--:|--:|--:|--:|",
    ]
    traces = dict.fromkeys(case.trace for case in results.cases)
    groups = {trace: [case for case in results.cases if case.trace == trace] for trace in traces}
    for name, cases in ({**groups, "all": list(results.cases)}).items():
        slowdown = statistics.median(case.slowdown for case in cases)
        median, p95, bias = pair_errors(cases)
        cache = " and ".join(sorted({"cold" if case.cold else "warm" for case in cases}))
        lines.append(f"| {name} | {cache} | {len(cases)} | {slowdown:.2f} | {median:.1%} | {p95:.1%} | {bias:+.1%} |")
    return "\n".join(lines) + "\n"


def pair_errors(cases: Iterable[PairCase]) -> tuple[float, float, float]:
    """Return median and 95th percentile of the absolute error, and the mean error."""
    errors = [case.error for case in cases]
    ordered = sorted(abs(error) for error in errors)
    return statistics.median(ordered), quantile(ordered, 0.95), statistics.fmean(errors)
