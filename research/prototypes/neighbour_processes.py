"""The neighbourhoods in two processes, from their results: python research/prototypes/neighbour_processes.py."""

from __future__ import annotations

import statistics
from pathlib import Path

import msgspec

from gpusim.formats.results import ResultCase, newest_results, read_results
from gpusim.search.near_best import NEAR_FRAC
from gpusim.validation.statistics import by_step, kendall_tau, regret

RESULTS = Path(__file__).parents[2] / "validate" / "results"


def choice(cases: list[ResultCase], process: int | None) -> str:
    """Return tau of the schedules near the fastest, and the regret of all, by one process or by the results' times."""
    rows = [
        case if process is None else msgspec.structs.replace(case, measured_ns=case.processes[process].measured_ns)
        for case in cases
    ]
    least_ns = min(case.measured_ns for case in rows)
    near = [case for case in rows if case.measured_ns <= (1 + NEAR_FRAC) * least_ns]
    return f"{len(near)}, {kendall_tau(near):.2f}, {regret(rows):.1%}"


def main() -> None:
    """Print a row for each step with two processes, and how far these are apart."""
    apart: list[float] = []
    head = ("step", "second over first: median (range)", "sequential over capture", "near, tau, regret: first")
    print(f"| {' | '.join(head)} | second | both |")
    print("|---|--:|--:|--:|--:|--:|")
    for name, of_step in by_step(read_results(newest_results(RESULTS, "neighbours")).cases).items():
        cases = [case for case in of_step if case.streams > 1]
        if min(len(case.processes) for case in cases) < 2:
            continue
        over = [case.processes[1].measured_ns / case.processes[0].measured_ns - 1 for case in cases]
        apart += map(abs, over)
        captured_ns = cases[0].predicted_sequential_ns
        states = [f"{process.sequential_ns / captured_ns - 1:+.1%}" for process in cases[0].processes[:2]]
        chosen = [choice(cases, process) for process in (0, 1, None)]
        times = f"{statistics.median(over):+.1%} ({min(over):+.1%} to {max(over):+.1%})"
        print(f"| {name} | {times} | {', '.join(states)} | {' | '.join(chosen)} |")
    print(f"{len(apart)} schedules: {statistics.median(apart):.1%} apart in the median, {max(apart):.1%} at most")


if __name__ == "__main__":
    main()
