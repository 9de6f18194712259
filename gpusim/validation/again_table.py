"""Current predictions next to those in a results file, as a table and for `--json`."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from typing import Any

from rich.table import Table

from gpusim.formats.results import ResultCase, Results
from gpusim.report.tables import console
from gpusim.rules.anchor import SAME_FRAC
from gpusim.units import counted
from gpusim.validation.memory_tables import memory_cases, memory_summary
from gpusim.validation.statistics import by_step, counted_replays, fidelity


def again_document(then: Results, now: Results, anew: Mapping[int, ResultCase]) -> dict[str, Any]:
    """Return the document of `gpusim validate RESULTS.json --again --json`; times in integer ns.

    `anew` is as in `print_again`.
    """
    return {
        "recipe": then.recipe,
        "gpu": then.gpu,
        "hardware": then.hardware,
        "cases": [
            {
                "trace": case.trace,
                "network": case.network,
                "mode": case.mode,
                "batch": case.batch,
                "policy": case.policy,
                "streams": case.streams,
                "measured_ns": case.measured_ns,
                "predicted_ns": again.predicted_ns,
                "then_ns": case.predicted_ns,
                "fitted": case.fitted,
                **({"anchored_ns": anew[number].predicted_ns} if number in anew else {}),
                **_peaks(case, again),
            }
            for number, (case, again) in enumerate(zip(then.cases, now.cases, strict=True))
        ],
    }


def _peaks(case: ResultCase, again: ResultCase) -> dict[str, int]:
    """Return the peaks of a memory plan's case, in bytes; empty for a schedule's."""
    if not memory_cases([case]):
        return {}
    return {
        "measured_peak_bytes": case.measured_peak_bytes,
        "predicted_peak_bytes": again.predicted_peak_bytes,
        "then_peak_bytes": case.predicted_peak_bytes,
    }


def print_again(then: Results, now: Results, anew: Mapping[int, ResultCase]) -> None:
    """Print the errors of schedules on several streams, stored and new: left-out and fitted networks, and each step.

    `anew` has the predictions anchored to the run's own sequential graph, by number of case, where that graph is not as
    captured (`gpusim.rules.anchor.is_as_captured`). They stand in for the others, and these are left out, in rows of
    their own. For memory plans, also the lines of `memory_summary` on the new predictions.
    """
    table = Table(title=f"{then.recipe} on {then.gpu}, {len(then.cases)} schedules")
    table.add_column("networks", no_wrap=True)
    table.add_column("predicted")
    for name in ("n", "median", "95 % within", "largest", "bias", "in interval", "tau", "regret"):
        table.add_column(name, justify="right")
    anchored = [anew.get(number, case) for number, case in enumerate(now.cases)]
    as_captured = [case for number, case in enumerate(now.cases) if number not in anew]
    ways = {"then": then.cases, "now": now.cases}
    if anew:
        ways |= {"anew": tuple(anchored), "as captured": tuple(as_captured)}
    for networks, fitted in (("left out", False), ("fitted on", True)):
        for when, cases in ways.items():
            _add_row(table, networks, when, [case for case in cases if case.fitted == fitted])
    table.add_section()
    anew_of = by_step(anew.values())
    for step, of_step in by_step(now.cases).items():
        _add_row(table, step, "now", of_step)
        _add_row(table, step, "anew", anew_of.get(step, []))
    console().print(table)
    if anew:
        schedules = counted(len(counted_replays(anew.values())), "schedule")
        console().print(
            f"anew: {schedules} beside a sequential graph that is more than {SAME_FRAC:.0%} from its capture, "
            "predicted from that graph; as captured: without these."
        )
    for line in memory_summary(memory_cases(now.cases)):
        console().print(line)


def _add_row(table: Table, name: str, when: str, cases: Sequence[ResultCase]) -> None:
    errors = fidelity(cases)
    if errors is None:
        return
    shares = (f"{errors.median:.1%}", f"{errors.p95:.1%}", f"{errors.largest:.1%}", f"{errors.bias:+.1%}")
    tau = f"{statistics.mean(errors.tau):.2f}" if errors.tau else "-"
    regret = f"{statistics.mean(errors.regret):.1%}" if errors.regret else "-"
    covered = "-" if errors.covered is None else f"{errors.covered:.0%}"
    table.add_row(name, when, str(errors.schedules), *shares, covered, tau, regret)
