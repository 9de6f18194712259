"""Table of optimized steps beside torch.compile: python scripts/make_optimize_table.py.

Writes it between the markers of docs/use-the-faster-step.md, from the newest validate/results/compile_*.json. With
--check nothing is written, and the exit status is 1 where the page is out of date.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Sequence
from pathlib import Path

from gpusim.formats.results import ResultCase, read_results
from gpusim.io.files import write_bytes
from gpusim.report.pages import with_section

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "validate" / "results"
PAGE = ROOT / "docs" / "use-the-faster-step.md"
BEGIN, END = "<!-- optimized:begin -->", "<!-- optimized:end -->"
KERNELS = {"aten": "ATen", "inductor": "Inductor"}


def row(case: ResultCase) -> str:
    """One step: times of a call in us, and the speed-up over the fastest measured mode of torch.compile."""
    fastest = case.fastest_compiled
    compiled = case.alongside_ns(fastest)
    cells = [f"`{case.trace}`", *(f"{time_ns / 1e3:,.0f}" for time_ns in (case.eager_ns, compiled, case.measured_ns))]
    kernels = "mixed" if case.kernels == "chosen" else KERNELS[case.frontend]
    return f"|{'|'.join([*cells, f'{case.over(fastest):.2f}x', kernels])}|"


def table() -> str:
    """The whole section."""
    file = max(RESULTS.glob("compile_*.json"))
    results = read_results(file)
    cases = sorted(results.cases, key=lambda case: case.trace)
    lines = ["|step|eager|compiled|optimize|speed-up|kernels|", "|---|--:|--:|--:|--:|---|", *map(row, cases)]
    head = f"us of a call, {results.gpu} ([results](../{file.relative_to(ROOT).as_posix()})):"
    errors = [abs(case.predicted_ns / case.measured_ns - 1.0) for case in cases]
    tail = f"Prediction error of a call: median {statistics.median(errors):.1%}, largest {max(errors):.1%}."
    return "\n".join([head, "", *lines, "", tail])


def main(arguments: Sequence[str] | None = None) -> int:
    """Write or check the page."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="write nothing")
    options = parser.parse_args(arguments)
    page = PAGE.read_text(encoding="utf-8")
    new = with_section(page, PAGE.name, BEGIN, END, f"\n{table()}\n")
    if options.check:
        if new != page:
            print(f"{PAGE.name} is out of date: run python scripts/make_optimize_table.py")
        return int(new != page)
    write_bytes(PAGE, new.encode())
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
