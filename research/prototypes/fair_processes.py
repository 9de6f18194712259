"""The fair comparison in two processes, from its results: python research/prototypes/fair_processes.py."""

from __future__ import annotations

import statistics
from pathlib import Path

from gpusim.formats.results import ResultCase, newest_results, read_results
from gpusim.search.budget import SEARCH
from gpusim.validation.recipe import FASTEST_KERNELS
from gpusim.validation.statistics import by_step

RESULTS = Path(__file__).parents[2] / "validate" / "results"


def gain(cases: list[ResultCase], process: int) -> float:
    """Return the best policy's time over the search's in one process."""
    times = {case.policy: case.processes[process].measured_ns for case in cases}
    search_ns = times.pop(SEARCH)
    times.pop(FASTEST_KERNELS, None)
    return min(times.values()) / search_ns


def main() -> None:
    """Print a row for each step with two processes, and the means."""
    gains: dict[tuple[str, int], list[float]] = {}
    apart: list[float] = []
    print("| step | second over first: median (range) | sequential | captured: search over best policy | chosen |")
    print("|---|--:|--:|--:|--:|")
    for name, cases in by_step(read_results(newest_results(RESULTS, "fair")).cases).items():
        if min(len(case.processes) for case in cases) < 2:
            continue
        first, second = cases[0].processes[:2]
        over = [100 * (case.processes[1].measured_ns / case.processes[0].measured_ns - 1) for case in cases]
        apart += map(abs, over)
        cells = []
        for kernels in ("captured", "chosen"):
            of_kernels = [case for case in cases if case.kernels == kernels]
            if not any(case.policy == SEARCH for case in of_kernels):
                cells.append("")
                continue
            both = [gain(of_kernels, process) for process in (0, 1)]
            for process, each in enumerate(both):
                gains.setdefault((kernels, process), []).append(each)
            cells.append(", ".join(f"{each:.3f}" for each in both))
        shown = f"{statistics.median(over):+.1f} ({min(over):+.1f} to {max(over):+.1f}) %"
        sequential = f"{100 * (second.sequential_ns / first.sequential_ns - 1):+.1f} %"
        print(f"| {name} | {shown} | {sequential} | {' | '.join(cells)} |")
    for (kernels, process), each in gains.items():
        print(f"{kernels}, process {process + 1}: {statistics.geometric_mean(each):.3f} of {len(each)}")
    print(f"{len(apart)} schedules: {statistics.median(apart):.1f} % apart in the median, {max(apart):.1f} % at most")


if __name__ == "__main__":
    main()
