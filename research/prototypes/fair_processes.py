"""The fair comparison in two processes, from its results: python research/prototypes/fair_processes.py."""

from __future__ import annotations

import statistics
from pathlib import Path

import msgspec

from gpusim.defaults import SEARCH
from gpusim.formats.results import ResultCase, newest_results, read_results
from gpusim.validation.recipe import FASTEST_KERNELS
from gpusim.validation.statistics import by_step, fidelity

RESULTS = Path(__file__).parents[2] / "validate" / "results"


def gain(cases: list[ResultCase], process: int) -> float:
    """Return the best policy's time over the search's in one process."""
    times = {case.policy: case.processes[process].measured_ns for case in cases}
    search_ns = times.pop(SEARCH)
    times.pop(FASTEST_KERNELS, None)
    return min(times.values()) / search_ns


def errors(cases: list[ResultCase], process: int | None) -> str:
    """Return errors and coverage by the times of one process, or by the results' own."""
    rows = [
        case
        if process is None
        else msgspec.structs.replace(
            case,
            measured_ns=case.processes[process].measured_ns,
            sequential_ns=case.processes[process].sequential_ns,
        )
        for case in cases
    ]
    found = fidelity(rows)
    assert found is not None
    assert found.covered is not None
    return (
        f"median {found.median:.1%}, 95 % within {found.p95:.1%}, largest {found.largest:.1%}, "
        f"{found.covered:.0%} of {found.schedules} within the interval"
    )


def _within(case: ResultCase, measured_ns: int) -> bool:
    low_ns, high_ns = case.predicted_interval_ns
    return low_ns <= measured_ns <= high_ns


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
    fair = [case for case in read_results(newest_results(RESULTS, "fair")).cases if not case.fitted]
    for name, place in (("first process", 0), ("last process", -1), ("median of processes", None)):
        print(f"{name}, networks without a fitted constant: {errors(fair, place)}")
    several = [case for case in fair if len(case.processes) > 1 and case.streams > 1 and case.outputs_equal]
    inside = [[_within(case, each.measured_ns) for each in case.processes] for case in several]
    print(
        f"{len(several)} with two processes: {sum(_within(case, case.measured_ns) for case in several)} within by the "
        f"median, {sum(map(all, inside))} in both processes"
    )
    for (kernels, process), each in gains.items():
        print(f"{kernels}, process {process + 1}: {statistics.geometric_mean(each):.3f} of {len(each)}")
    print(f"{len(apart)} schedules: {statistics.median(apart):.1f} % apart in the median, {max(apart):.1f} % at most")


if __name__ == "__main__":
    main()
