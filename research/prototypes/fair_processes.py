"""The fair comparison, process by process, from its results: python research/prototypes/fair_processes.py."""

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
    """Print a row for each step and each process after the first, next to the one before, and means over steps."""
    by_name = by_step(read_results(newest_results(RESULTS, "fair")).cases)
    gains: dict[tuple[str, int], list[float]] = {}
    apart: dict[int, list[float]] = {}
    print("| step | process | over the one before: median (range) | sequential | GPUs |")
    print("|---|--:|--:|--:|---|")
    for name, cases in by_name.items():
        for later in range(1, min(len(case.processes) for case in cases)):
            before, after = cases[0].processes[later - 1 : later + 1]
            over = [
                100 * (case.processes[later].measured_ns / case.processes[later - 1].measured_ns - 1) for case in cases
            ]
            apart.setdefault(later, []).extend(map(abs, over))
            shown = f"{statistics.median(over):+.1f} ({min(over):+.1f} to {max(over):+.1f}) %"
            sequential = f"{100 * (after.sequential_ns / before.sequential_ns - 1):+.1f} %"
            gpus = " and ".join(each.gpu_id[4:12] or "not known" for each in (before, after))
            print(f"| {name} | {later + 1} | {shown} | {sequential} | {gpus} |")
    for later, each in apart.items():
        print(
            f"process {later + 1} over {later}, {len(each)} schedules: {statistics.median(each):.1f} % apart in the "
            f"median, {max(each):.1f} % at most"
        )
    print("| step | captured: search over best policy, by process | chosen |")
    print("|---|--:|--:|")
    for name, cases in by_name.items():
        cells = []
        for kernels in ("captured", "chosen"):
            of_kernels = [case for case in cases if case.kernels == kernels]
            if not any(case.policy == SEARCH for case in of_kernels):
                cells.append("")
                continue
            each = [gain(of_kernels, process) for process in range(min(len(case.processes) for case in cases))]
            for process, value in enumerate(each):
                gains.setdefault((kernels, process), []).append(value)
            cells.append(", ".join(f"{value:.3f}" for value in each))
        print(f"| {name} | {' | '.join(cells)} |")
    for (kernels, process), each in gains.items():
        print(f"{kernels}, process {process + 1}: {statistics.geometric_mean(each):.3f} of {len(each)}")
    fair = [case for cases in by_name.values() for case in cases if not case.fitted]
    most = max(len(case.processes) for case in fair)
    for number in range(most):
        print(f"process {number + 1}, networks without a fitted constant: {errors(fair, number)}")
    print(f"median of processes: {errors(fair, None)}")
    several = [case for case in fair if len(case.processes) > 1 and case.streams > 1 and case.outputs_equal]
    inside = [[_within(case, each.measured_ns) for each in case.processes] for case in several]
    print(
        f"{len(several)} with several processes: {sum(_within(case, case.measured_ns) for case in several)} within by "
        f"the median, {sum(map(all, inside))} in all processes"
    )


if __name__ == "__main__":
    main()
