"""Memory plans of a results file as a table: peaks and times, predicted and measured."""

from __future__ import annotations

import statistics
from collections.abc import Sequence

from gpusim.formats.results import ResultCase
from gpusim.memplan.policies.registry import MEMORY_POLICIES
from gpusim.quantiles import quantile
from gpusim.units import MIB, counted


def memory_cases(cases: Sequence[ResultCase]) -> list[ResultCase]:
    """Return the cases of memory policies."""
    return [case for case in cases if case.policy in MEMORY_POLICIES]


def peak_error(case: ResultCase) -> float:
    """(predicted - measured) / measured peak."""
    return case.predicted_peak_bytes / case.measured_peak_bytes - 1.0 if case.measured_peak_bytes else 0.0


def memory_lines(cases: Sequence[ResultCase]) -> list[str]:
    """Summarize the predictions of memory plans, with a row for each; empty where there are none."""
    planned = memory_cases(cases)
    return [*memory_summary(planned), "", *memory_table(planned)] if planned else []


def memory_summary(planned: Sequence[ResultCase]) -> list[str]:
    """Summarize the predictions of memory plans, in lines.

    Errors are of networks that no constant was fitted on. The baseline that keeps all tensors is anchored to its own
    time, and so are plans without copies or recomputation: only the other plans are evidence for predicted times.
    """
    apart = [case for case in planned if not case.fitted]
    lines: list[str] = []
    peaks = sorted(abs(peak_error(case)) for case in apart)
    times = sorted(abs(case.error) for case in apart if case.predicted_ns != case.predicted_sequential_ns)
    for quantity, errors in (("peaks", peaks), ("step times that differ from the step that keeps all", times)):
        if errors:
            lines.append(
                f"- {counted(len(errors), 'memory plan')}, {quantity}: error median {statistics.median(errors):.2%}, "
                f"90 % within {quantile(errors, 0.9):.2%}, largest {errors[-1]:.2%}"
            )
    right, pairs = order_right(apart)
    if pairs:
        lines.append(f"- {right} of {pairs} pairs of plans of one step that differ by more than 2 % in the right order")
    return lines


def order_right(cases: Sequence[ResultCase], margin: float = 0.02) -> tuple[int, int]:
    """Return the pairs of plans in the predicted order, and all pairs, of those that differ by more than `margin`."""
    right = pairs = 0
    for number, one in enumerate(cases):
        for other in cases[number + 1 :]:
            if one.trace != other.trace:
                continue
            slower, faster = max(one.measured_ns, other.measured_ns), min(one.measured_ns, other.measured_ns)
            if slower > (1 + margin) * faster:
                pairs += 1
                right += (one.measured_ns < other.measured_ns) == (one.predicted_ns < other.predicted_ns)
    return right, pairs


def memory_table(cases: Sequence[ResultCase]) -> list[str]:
    """Return Markdown rows, one per plan, with times in us and sizes in MiB."""
    rows = [
        "| step | policy | budget | keeps all, us | measured, us | slower | predicted, us | error | keeps all, MiB "
        "| measured, MiB | of it | predicted, MiB | error | results |",
        "|---|---|--:|--:|--:|--:|--:|--:|--:|--:|--:|--:|--:|---|",
    ]
    for case in cases:
        budget = f"{case.memory_budget_bytes / MIB:.0f}" if case.memory_budget_bytes else ""
        share = case.measured_peak_bytes / case.sequential_peak_bytes if case.sequential_peak_bytes else 0.0
        rows.append(
            f"| {case.trace} | {case.policy} | {budget} "
            f"| {case.sequential_ns / 1e3:.0f} | {case.measured_ns / 1e3:.0f} "
            f"| {case.measured_ns / case.sequential_ns - 1:+.1%} | {case.predicted_ns / 1e3:.0f} | {case.error:+.1%} "
            f"| {case.sequential_peak_bytes / MIB:.1f} | {case.measured_peak_bytes / MIB:.1f} | {share:.0%} "
            f"| {case.predicted_peak_bytes / MIB:.1f} | {peak_error(case):+.2%} | {case.outputs} |"
        )
    return rows
