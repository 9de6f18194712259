"""Bring the measured gaps in research/2026-11-23-limits.md up to date and draw docs/images/limits.png.

    python scripts/make_limits_page.py [--no-picture]

Needs plotly, and for the picture kaleido with a Chrome or Chromium (`pip install ".[app]"`); `--no-picture` omits it.
To be run again whenever a rule of the engine, a hardware model's numbers, the example's trace or the newest results
of a search recipe change.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from gpusim.analysis.limits import limits
from gpusim.formats.hardware import load_hardware
from gpusim.io.files import write_bytes
from gpusim.plan.graph import OpGraph
from gpusim.trace.store import load_trace
from gpusim.validation.again import trace_files
from gpusim.validation.gaps import gaps_markdown, measured_gaps, newest_of_each_step, search_files
from gpusim.validation.replayed import SUFFIX, ReplayedSchedule

ROOT = Path(__file__).resolve().parent.parent
PAGE = ROOT / "research" / "2026-11-23-limits.md"
PICTURE = ROOT / "docs" / "images" / "limits.png"
EXAMPLE, HARDWARE = "googlenet-train-b8", "h200"
RESULTS = ROOT / "validate" / "results"


def with_part(page: str, name: str, lines: str) -> str:
    """Replace the lines between the marks of a part."""
    begin, end = f"<!-- {name}:begin -->\n", f"<!-- {name}:end -->"
    before, rest = page.split(begin)
    return f"{before}{begin}{lines}\n{end}{rest.split(end)[1]}"


def gaps(results: dict[Path, list[ReplayedSchedule]]) -> str:
    """Return the tables of measured gaps. A file's traces, with the variants measured for it, are in its folder."""
    measured = []
    for path, schedules in results.items():
        traces = trace_files(path.with_name(path.name.removesuffix(SUFFIX) + ".json"))
        measured += measured_gaps(schedules, traces)
    return "\n".join(gaps_markdown(measured))


def main() -> None:
    """Write the page and the picture."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--no-picture", action="store_true", help="only the numbers")
    options = parser.parse_args()
    page = PAGE.read_text("utf-8")
    results = newest_of_each_step(search_files(RESULTS))
    names = " and ".join(f"`validate/results/{path.name}`" for path, of_file in results.items() if of_file)
    source = f"*Steps and times of {names} (each step's newest), in us; bounds of this version.*"
    write_bytes(PAGE, with_part(page, "measured", f"{gaps(results)}\n\n{source}").encode())
    print(PAGE)
    if not options.no_picture:
        from gpusim.report.figures.limits import limits_figure
        from gpusim.report.figures.output import write_png

        write_png(PICTURE, limits_figure(limits(OpGraph.build(load_trace(EXAMPLE), load_hardware(HARDWARE)))))
        print(PICTURE)


if __name__ == "__main__":
    main()
