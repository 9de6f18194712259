"""Tables of what was replayed: python scripts/make_results_table.py.

Writes the Markdown table of every results file beside it, which git ignores, and the searched schedules against the
policies between the markers in research/2026-11-23-fidelity.md. With --check nothing is written, and the exit status is
1 where that page is out of date.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from gpusim.bounds.bounds import bounds
from gpusim.defaults import SEARCH
from gpusim.errors import MeasurementError
from gpusim.formats.results import SCHEMA, ResultCase, Results, read_results
from gpusim.io.files import document_schema, write_bytes
from gpusim.plan.graph import OpGraph
from gpusim.report.pages import with_section
from gpusim.trace.store import read_trace
from gpusim.validation.again import trace_files
from gpusim.validation.chosen import hardware_of
from gpusim.validation.pair_results import SUFFIX as PAIRS_SUFFIX
from gpusim.validation.pair_results import pairs_markdown, read_pairs
from gpusim.validation.recipe import FASTEST_KERNELS, SEARCHES, WITHOUT_VARIANTS
from gpusim.validation.replayed import SUFFIX, ReplayedSchedule, read_replayed
from gpusim.validation.tables import results_markdown

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "validate" / "results"
PAGE = ROOT / "research" / "2026-11-23-fidelity.md"
#: Recipe that repeats steps of another one; the rows are that recipe's.
AGAIN = "search_again"
BEGIN, END = "<!-- searched:begin -->", "<!-- searched:end -->"
#: Published systems to beat (`docs/policies.md`).
PUBLISHED = ("nimble", "opara", "torchsched", "ios")


@dataclass(frozen=True)
class Run:
    """A results file with its stored schedules, one per case; None where not stored."""

    path: Path
    results: Results
    schedules: tuple[ReplayedSchedule | None, ...]

    def other_kernels(self, number: int) -> int | None:
        """Return the number of ops with another kernel than the captured one in a case's schedule; None where
        unknown.
        """
        schedule = self.schedules[number]
        return None if schedule is None else sum(bool(variant) for variant in schedule.variants)


def read_runs(folder: Path) -> list[Run]:
    """Read all results files of replayed schedules in a folder, by name."""
    runs = []
    for path in sorted(folder.glob("*_*.json")):
        if path.name.endswith(PAIRS_SUFFIX) or document_schema(path, MeasurementError) != SCHEMA:
            continue
        results = read_results(path)
        beside = path.with_name(path.stem + SUFFIX)
        kept = read_replayed(beside) if beside.is_file() else [None] * len(results.cases)
        runs.append(Run(path, results, tuple(kept)))
    return runs


def searched(runs: Sequence[Run]) -> str:
    """Compare the newest searched schedule of each step with the policies replayed in the same run."""
    lines = [
        "| step | sequential graph | fastest kernels, one stream | searched, captured kernels | searched | speed-up "
        "| its prediction | best of all policies | best of Nimble, Opara, torchsched, IOS | over eager "
        "| over the bound |",
        "|---|--:|--:|--:|--:|--:|--:|--:|--:|--:|--:|",
    ]
    searches = [run for run in runs if run.results.recipe.startswith("search_")]
    rows: dict[str, str] = {}
    for run in sorted(searches, key=lambda run: (run.results.recipe != AGAIN, len(run.results.recipe))):
        steps: dict[str, dict[str, int]] = {}
        for number, case in enumerate(run.results.cases):
            steps.setdefault(case.trace, {})[case.policy] = number
        rows = {trace: _searched_row(run, trace, numbers) for trace, numbers in steps.items()} | rows
    lines += [rows[trace] for trace in sorted(rows)]
    return "\n".join(lines)


def _searched_row(run: Run, trace: str, numbers: dict[str, int]) -> str:
    cases = {policy: run.results.cases[number] for policy, number in numbers.items()}
    searched_case = cases[SEARCH]
    others = run.other_kernels(numbers[SEARCH]) or 0
    kernels = f" ({others} others)" if others else ""
    policies = [case for policy, case in cases.items() if policy not in SEARCHES]
    return (
        f"| `{trace}` | {searched_case.sequential_ns / 1e3:,.0f} | {_time(cases.get(FASTEST_KERNELS))} "
        f"| {_time(cases.get(WITHOUT_VARIANTS))} | {searched_case.measured_ns / 1e3:,.0f}{kernels} "
        f"| {searched_case.speedup:.2f}x | {searched_case.error:+.1%} | {_over(searched_case, policies)} "
        f"| {_over(searched_case, [case for case in policies if case.policy in PUBLISHED])} "
        f"| {searched_case.eager_ns / searched_case.measured_ns:.1f}x "
        f"| {searched_case.measured_ns / _bound_ns(run, numbers[SEARCH]):.2f} |"
    )


def _time(case: ResultCase | None) -> str:
    return "" if case is None else f"{case.measured_ns / 1e3:,.0f}"


def _over(searched_case: ResultCase, policies: Sequence[ResultCase]) -> str:
    best = min(policies, key=lambda case: case.measured_ns)
    return f"{best.measured_ns / searched_case.measured_ns:.3f} ({best.policy})"


def _bound_ns(run: Run, number: int) -> float:
    """Return the largest lower bound for the kernels of a schedule, in ns."""
    schedule = run.schedules[number]
    assert schedule is not None, f"{run.path}: its schedules were not kept"
    trace = read_trace(trace_files(run.path)[schedule.trace])
    graph = OpGraph.build(trace, hardware_of(trace))
    return bounds(graph.choosing(schedule.variants)).largest[0]


def main(arguments: Sequence[str] | None = None) -> int:
    """Write or check both."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="only say whether the page is up to date")
    options = parser.parse_args(arguments)
    runs = read_runs(RESULTS)
    old = PAGE.read_text(encoding="utf-8")
    new = with_section(old, PAGE.name, BEGIN, END, searched(runs))
    if options.check:
        if new != old:
            print(f"{PAGE.relative_to(ROOT)} is out of date: run python scripts/make_results_table.py")
        return int(new != old)
    tables = {run.path: results_markdown(run.results, run.path.name) for run in runs}
    tables |= {path: pairs_markdown(read_pairs(path), path.name) for path in sorted(RESULTS.glob(f"*{PAIRS_SUFFIX}"))}
    for path, text in tables.items():
        write_bytes(path.with_suffix(".md"), text.encode())
    write_bytes(PAGE, new.encode())
    print(f"wrote {PAGE.relative_to(ROOT)} and {len(tables)} tables in {RESULTS.relative_to(ROOT)}")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
