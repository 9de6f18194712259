"""Fill README.md's table of predicted against measured from validate/results: python scripts/make_readme_table.py.

With --check nothing is written, and the exit status is 1 where README.md is out of date.
"""

from __future__ import annotations

import argparse
import re
from collections.abc import Iterable, Sequence
from pathlib import Path

from gpusim.files import write_bytes
from gpusim.recipes.recipe import FASTEST_KERNELS
from gpusim.report.pages import with_section
from gpusim.report.results import ResultCase, Results, first_of_each_step, read_results
from gpusim.report.results_table import summary_lines
from gpusim.search.searches import SEARCH

ROOT = Path(__file__).resolve().parent.parent
GPU = "h200"
BEGIN, END = "<!-- results:begin -->", "<!-- results:end -->"
RESULTS_NAME = re.compile(r"^(?P<recipe>\w+)_(?P<gpu>[\w-]+)_(?P<date>\d{8})\.json$")


#: Recipes whose newest results the table shows; a step that is in two, as the first has it.
SHOWN = ("search_again", "search_inference", "search_training", "search_training_32", "search_training_large")


def newest(folder: Path, recipe: str) -> Path:
    """The newest results file of a recipe. Exits where there is none."""
    found = [(match["date"], path) for path in folder.glob("*.json") if (match := RESULTS_NAME.match(path.name))]
    mine = [(date, path) for date, path in found if path.name.startswith(f"{recipe}_{GPU}_")]
    if not mine:
        raise SystemExit(f"{folder}: no results of the recipe '{recipe}' ({recipe}_<gpu>_<yyyymmdd>.json)")
    return max(mine)[1]


def recommended(cases: Iterable[ResultCase]) -> list[ResultCase]:
    """For each step the schedule that `gpusim explore` recommends; its fastest policy where a recipe has no search."""
    by_trace: dict[str, list[ResultCase]] = {}
    for case in cases:
        by_trace.setdefault(case.trace, []).append(case)
    return [
        next((c for c in group if c.policy == SEARCH), None) or min(group, key=lambda c: c.predicted_ns)
        for group in by_trace.values()
    ]


def section(runs: Sequence[tuple[str, Results]]) -> str:
    """The text between the markers: the table, and how it was measured. `runs` are results with their files' names."""
    cases = [case for _, results in runs for case in results.cases]
    found = [
        (case, _fastest_kernels(results.cases, case)) for _, results in runs for case in recommended(results.cases)
    ]
    lines = [
        "The schedule that a trial on the GPU of the twelve (NASNet-A: eight) best predictions found, as "
        "`gpusim explore --measure 12` does; policies are among them. Times in us, all measured but for *predicted*. "
        "*Kernels*: sequential graph over the same order with the "
        "[fastest kernels](research/2026-11-23-variants.md) on one stream; *streams*: that over the schedule; "
        "*both*: sequential graph over the schedule. *Error* is that of the schedule's "
        "predicted time, by the hardware model of its day; *outputs* are compared with the sequential run's: bit for "
        "bit, or [within a tolerance](research/2026-11-23-capture-and-replay.md#comparing-results).",
        "",
        "| step | sequential graph | fastest kernels, one stream | schedule (streams) | kernels | streams | both "
        "| predicted | error | outputs |",
        "|---|--:|--:|--:|--:|--:|--:|--:|--:|---|",
        *(_row(case, kernels) for case, kernels in found if case.streams > 1),
        "",
        *(_one_stream(case) for case, _ in found if case.streams == 1),
        "",
        *(_provenance(results, source) for source, results in runs),
        "",
        "All schedules replayed by these commands, not only the best ones "
        "([one table of everything](validate/results/all.md)):",
        "",
        *summary_lines(cases),
    ]
    return "\n".join(lines)


def _fastest_kernels(cases: Iterable[ResultCase], found: ResultCase) -> ResultCase | None:
    """The schedule of a step that has the fastest kernels in recorded order on one stream, where it was replayed."""
    return next((case for case in cases if case.trace == found.trace and case.policy == FASTEST_KERNELS), None)


def _row(case: ResultCase, kernels: ResultCase | None) -> str:
    alone_ns = case.sequential_ns if kernels is None else kernels.measured_ns
    cells = (
        f"`{case.trace}`",
        f"{case.sequential_ns / 1e3:.0f}",
        "" if kernels is None else f"{kernels.measured_ns / 1e3:.0f}",
        f"{case.measured_ns / 1e3:.0f} ({case.streams})",
        "" if kernels is None else f"{case.sequential_ns / alone_ns:.2f}x",
        "" if kernels is None else f"**{alone_ns / case.measured_ns:.2f}x**",
        f"{case.speedup:.2f}x",
        f"{case.predicted_ns / 1e3:.0f}",
        f"{case.error:+.1%}",
        case.outputs,
    )
    return f"| {' | '.join(cells)} |"


def _one_stream(case: ResultCase) -> str:
    measured, sequential = f"{case.measured_ns / 1e3:.0f} us", f"{case.sequential_ns / 1e3:.0f} us"
    return (
        f"- `{case.trace}` gains nothing from streams: the fastest found has one, and takes {measured} with other "
        f"kernels, {case.speedup:.2f} times as fast as the {sequential} of the sequential graph."
    )


def _provenance(results: Results, source: str) -> str:
    clocks = sorted({case.sm_clock_mhz for case in results.cases if case.sm_clock_mhz})
    clock = "-".join(str(mhz) for mhz in dict.fromkeys((clocks[0], clocks[-1]))) if clocks else "unknown"
    versions = results.versions
    names = (("driver", "driver"), ("CUDA", "cuda"), ("torch", "torch"), ("cuDNN", "cudnn"))
    software = ", ".join(f"{name} {versions[key]}" for name, key in names if key in versions)
    return (
        f"- [`validate/results/{source}`](validate/results/{source}): one {results.gpu}, {results.date}, {software}, "
        f"SM clock {clock} MHz; `gpusim validate validate/{results.recipe}.toml -o validate/results` reproduces it."
    )


def main(arguments: Sequence[str] | None = None) -> int:
    """Write or check README.md."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="only say whether README.md is up to date")
    options = parser.parse_args(arguments)
    paths = [newest(ROOT / "validate" / "results", recipe) for recipe in SHOWN]
    readme = ROOT / "README.md"
    old = readme.read_text(encoding="utf-8")
    runs = first_of_each_step([read_results(path) for path in paths])
    shown = list(zip((path.name for path in paths), runs, strict=True))
    new = with_section(old, "README.md", BEGIN, END, section(shown))
    if options.check:
        if new != old:
            print("README.md does not show the newest results: run python scripts/make_readme_table.py")
        return int(new != old)
    write_bytes(readme, new.encode())
    print(f"README.md shows {', '.join(path.name for path in paths)}")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
