"""Statistics of predictions: errors, bias, order, regret, and coverage of the intervals."""

from __future__ import annotations

import itertools
import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from gpusim.formats.results import ResultCase
from gpusim.quantiles import quantile

#: Relative difference of measured times below which two schedules count as equal.
NOISE_FRAC = 0.01
#: Fewest schedules of a step for a statistic on their order.
MIN_SCHEDULES = 8


@dataclass(frozen=True, slots=True)
class Fidelity:
    """Predicted against measured times of schedules on several streams; errors are fractions of the measured time."""

    schedules: int
    median: float
    p90: float
    p95: float
    largest: float
    bias: float
    covered: float | None
    """Share of measured times within their predicted interval; None without intervals."""
    tau: tuple[float, ...]
    """Kendall's tau per step: predicted against measured order of schedules that differ beyond the noise."""
    regret: tuple[float, ...]
    """Regret per step: measured time of the schedule predicted best over the best measured one, less 1."""


def counted_replays(cases: Iterable[ResultCase]) -> list[ResultCase]:
    """Return the cases whose errors count: on several streams, with outputs within the tolerance, so a valid time."""
    return [case for case in cases if case.streams > 1 and case.outputs_equal]


def fidelity(cases: Iterable[ResultCase]) -> Fidelity | None:
    """Return the statistics of the cases that count; None where there are none."""
    used = counted_replays(cases)
    if not used:
        return None
    errors = sorted(abs(case.error) for case in used)
    steps = [step for step in by_step(used).values() if len(step) >= MIN_SCHEDULES]
    return Fidelity(
        schedules=len(used),
        median=statistics.median(errors),
        p90=quantile(errors, 0.90),
        p95=quantile(errors, 0.95),
        largest=errors[-1],
        bias=statistics.fmean(case.error for case in used),
        covered=_covered(used),
        tau=tuple(tau for tau in map(kendall_tau, steps) if tau is not None),
        regret=tuple(map(regret, steps)),
    )


def by_step(cases: Iterable[ResultCase]) -> dict[str, list[ResultCase]]:
    """Return the cases of each trace, in order."""
    cases_of: dict[str, list[ResultCase]] = {}
    for case in cases:
        cases_of.setdefault(case.trace, []).append(case)
    return cases_of


def kendall_tau(cases: Sequence[ResultCase]) -> float | None:
    """Return pairs of schedules in the right order less those in the wrong one, over both; None where no two differ.

    Schedules differ where measured times do by more than the noise. A pair with equal predictions counts as wrong.
    """
    right = wrong = 0
    for one, other in itertools.combinations(cases, 2):
        slow, fast = (one, other) if one.measured_ns > other.measured_ns else (other, one)
        if slow.measured_ns < fast.measured_ns * (1 + NOISE_FRAC):
            continue
        if slow.predicted_ns > fast.predicted_ns:
            right += 1
        else:
            wrong += 1
    return (right - wrong) / (right + wrong) if right + wrong else None


def regret(cases: Sequence[ResultCase]) -> float:
    """Return the measured time of the schedule predicted best over the best measured time, less 1."""
    chosen = min(cases, key=lambda case: case.predicted_ns)
    return chosen.measured_ns / min(case.measured_ns for case in cases) - 1


def _covered(cases: Iterable[ResultCase]) -> float | None:
    """Return the share of times within their interval, without results from before intervals, which have (0, 0)."""
    held = [low <= case.measured_ns <= high for case in cases for low, high in (case.predicted_interval_ns,) if high]
    return sum(held) / len(held) if held else None


def fidelity_table(cases: Sequence[ResultCase]) -> list[str]:
    """Return Markdown: fitted and other networks separately, then each step. Empty where no step has enough
    schedules.
    """
    steps = by_step(case for case in cases if case.streams > 1)
    if not any(len(step) >= MIN_SCHEDULES for step in steps.values()):
        return []
    groups = {
        "networks that constants were fitted on": [case for case in cases if case.fitted],
        "all other networks": [case for case in cases if not case.fitted],
    }
    lines = [
        "| schedules on several streams | number | median error | 90 % within | 95 % within | largest | bias "
        "| within the 90 % interval | Kendall tau, mean (least) | regret, mean (largest) |",
        "|---|--:|--:|--:|--:|--:|--:|--:|--:|--:|",
    ]
    for name, group in {**groups, **steps}.items():
        accuracy = fidelity(group)
        if accuracy is None:
            continue
        tau = f"{statistics.fmean(accuracy.tau):.2f} ({min(accuracy.tau):.2f})" if accuracy.tau else ""
        loss = f"{statistics.fmean(accuracy.regret):.1%} ({max(accuracy.regret):.1%})" if accuracy.regret else ""
        covered = "" if accuracy.covered is None else f"{accuracy.covered:.0%}"
        lines.append(
            f"| {name} | {accuracy.schedules} | {accuracy.median:.1%} | {accuracy.p90:.1%} | {accuracy.p95:.1%} | "
            f"{accuracy.largest:.1%} | {accuracy.bias:+.1%} | {covered} | {tau} | {loss} |"
        )
    return lines
