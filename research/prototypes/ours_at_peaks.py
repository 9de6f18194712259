"""Print measured plans of `least_time` beside each policy's, at that policy's peak: RESULTS.json ...

For each step: time of `least_time` over the policy's, and its peak over the policy's, of the fastest measured plan of
ours with at most 1.1 % more memory; then errors and the order of pairs over all rows.
"""

from __future__ import annotations

import statistics
import sys
from pathlib import Path

from gpusim.formats.results import ResultCase, read_results
from gpusim.memplan.compare import LEAST_TIME
from gpusim.validation.memory_tables import memory_cases, order_right, peak_error

#: Most that our plan's peak may exceed the other's, as a factor.
MARGIN = 1.011


def main(paths: list[str]) -> None:
    """Print the tables for these results files together."""
    cases = [case for path in paths for case in memory_cases(read_results(Path(path)).cases)]
    for step in dict.fromkeys(case.trace for case in cases):
        rows = [case for case in cases if case.trace == step]
        mine = [case for case in rows if case.policy == LEAST_TIME]
        print(step, f"keeps all: {rows[0].sequential_ns / 1e3:.0f} us, {rows[0].sequential_peak_bytes / 2**20:.0f} MiB")
        for case in rows:
            if case.policy != LEAST_TIME:
                print(line(case, mine))
        if best := half(mine):
            share, slower = best.measured_peak_bytes / best.sequential_peak_bytes, best.measured_ns / best.sequential_ns
            print(f"  nearest to half the peak: {share:.1%} of it, {slower - 1:+.1%} time")
    moved = [case for case in cases if case.predicted_ns != case.predicted_sequential_ns]
    errors = sorted(abs(case.error) for case in moved)
    peaks = sorted(abs(peak_error(case)) for case in cases)
    right, pairs = order_right(cases)
    print(f"{len(cases)} plans, peaks within {peaks[-1]:.2%}; {right} of {pairs} pairs in order")
    print(f"{len(moved)} differ from keeping all: median {statistics.median(errors):.2%}, largest {errors[-2:]}")


def line(case: ResultCase, mine: list[ResultCase]) -> str:
    """Describe a policy's plan and the fastest of ours with as much memory."""
    text = (
        f"  {case.policy:13} {case.measured_peak_bytes / 2**20:6.0f} MiB {case.measured_ns / 1e3:8.0f} us"
        f" {case.error:+6.1%}, peak {peak_error(case):+.2%}"
    )
    fit = [one for one in mine if one.measured_peak_bytes <= MARGIN * case.measured_peak_bytes]
    if not fit:
        return text + "; none of ours"
    best = min(fit, key=lambda one: one.measured_ns)
    time, peak = best.measured_ns / case.measured_ns, best.measured_peak_bytes / case.measured_peak_bytes
    return text + f"; ours: time {time:.3f}, peak {peak:.4f}, predicted {best.predicted_ns / case.predicted_ns:.3f}"


def half(mine: list[ResultCase]) -> ResultCase | None:
    """Return the fastest of our plans that keeps half the peak, or nearly."""
    fit = [one for one in mine if one.measured_peak_bytes <= 0.53 * one.sequential_peak_bytes]
    return min(fit, key=lambda one: one.measured_ns, default=None)


if __name__ == "__main__":
    main(sys.argv[1:])
