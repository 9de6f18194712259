"""Choice among schedules with a time held against each event.

    python research/prototypes/held_events.py validate/results/*_h200_*.json

Predicts the stored schedules again and compares each by its prediction and a time for each of its events. Prints the
regret (mean, largest, share of steps with at most 1 %) and the mean of Kendall's tau of all steps, of two halves of the
networks by the alphabet in turns, and of kinds; below, the regret of what `explore` would recommend of them, and of the
fastest of the `TRIED` compared best, as `--measure` finds it. Then the same with a delay of each kernel that waits for
another stream, and the errors that this has.
"""

from __future__ import annotations

import statistics
import sys
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import msgspec

from gpusim.defaults import SEARCH
from gpusim.engine.fast import FastEngine
from gpusim.errors import GpusimError
from gpusim.formats.results import ResultCase
from gpusim.plan.lower import lower
from gpusim.policies.registry import POLICIES
from gpusim.validation.again import replayed_schedules
from gpusim.validation.statistics import MIN_SCHEDULES, kendall_tau, regret

#: Lead that a searched schedule needed to be recommended then.
SEARCH_MARGIN = 0.06
HELD_NS, DELAYS_NS = (0, 50, 100, 150, 200, 300, 400), (0, 100, 200, 400)
TRIED = 4
#: Results whose kernels or schedules are of another kind.
OTHERS = ("loop", "partitions", "pairs")


@dataclass(frozen=True)
class Again:
    """A stored schedule, predicted again: without and with each delay of a wait."""

    family: str
    less_known: bool
    case: ResultCase
    predicted_ns: tuple[int, ...]


def predicted(
    files: Iterable[Path], delays_ns: Sequence[int] = DELAYS_NS, least: int = MIN_SCHEDULES
) -> dict[tuple[str, str], list[Again]]:
    """Return the schedules on several streams by results file and step, of steps with at least `least`."""
    engine, steps = FastEngine(), dict[tuple[str, str], list[Again]]()
    for file in files:
        if file.stem.startswith(OTHERS):
            continue
        try:
            rows = list(replayed_schedules(file))
        except GpusimError:  # without schedules
            continue
        for case, graph, schedule in rows:
            if case.streams < 2 or schedule.has_variants or schedule.partitions:
                continue
            plan = lower(graph, schedule, memory=False)
            queue = [task.queue for task in plan.tasks]
            times = []
            for delay_ns in delays_ns:
                tasks = tuple(
                    msgspec.structs.replace(task, extra_ns=task.extra_ns + delay_ns)
                    if task.kind == "kernel" and any(queue[dep] != task.queue for dep in task.deps)
                    else task
                    for task in plan.tasks
                )
                times.append(engine.run(replace(plan, tasks=tasks), graph.hardware).makespan_ns)
            again = Again(case.network.partition("_")[0], graph.less_known, case, tuple(times))
            steps.setdefault((file.stem, case.trace), []).append(again)
    return {key: rows for key, rows in steps.items() if len(rows) >= least}


def compared(rows: Sequence[Again], delay: int, held_ns: int) -> list[ResultCase]:
    """Return the cases with what they are compared by in place of their predictions."""
    return [
        msgspec.structs.replace(row.case, predicted_ns=row.predicted_ns[delay] + held_ns * row.case.events)
        for row in rows
    ]


def recommended_regret(cases: Sequence[ResultCase]) -> float | None:
    """Return the regret of the best policy, or of a searched schedule far ahead of it."""
    planned = [case for case in cases if case.policy in POLICIES]
    searched = [case for case in cases if case.policy == SEARCH]
    if not planned:
        return None
    best = min(planned, key=lambda case: case.predicted_ns)
    ahead = min(searched, key=lambda case: case.predicted_ns, default=best)
    chosen = ahead if ahead.predicted_ns < best.predicted_ns * (1 - SEARCH_MARGIN) else best
    return chosen.measured_ns / min(case.measured_ns for case in cases) - 1


def tried_regret(cases: Sequence[ResultCase]) -> float:
    """Return the regret of the fastest of the schedules compared best."""
    tried = sorted(cases, key=lambda case: case.predicted_ns)[:TRIED]
    return min(case.measured_ns for case in tried) / min(case.measured_ns for case in cases) - 1


def cell(steps: Iterable[Sequence[ResultCase]]) -> str:
    """Return regret and tau of some steps."""
    steps = list(steps)
    lost = [regret(step) for step in steps]
    taus = [tau for tau in map(kendall_tau, steps) if tau is not None]
    within = sum(each <= 0.01 for each in lost) / len(lost)
    return f"{statistics.fmean(lost):.2%}, {max(lost):.1%}, {within:.0%}, {statistics.fmean(taus):.3f}"


def main() -> None:
    """Print the tables."""
    steps = predicted(Path(each) for each in sys.argv[1:])
    families = sorted({row.family for rows in steps.values() for row in rows})
    of_first = set(families[::2])
    groups: dict[str, Callable[[Again], bool]] = {
        "all": lambda row: True,
        "first half": lambda row: row.family in of_first,
        "second half": lambda row: row.family not in of_first,
        "convolutional": lambda row: not row.less_known,
        "other kinds": lambda row: row.less_known,
    }
    print(f"{len(steps)} steps; mean regret, largest, share of steps within 1 %, tau\n| | {' | '.join(groups)} |")
    for delay, held_ns in [*((0, held) for held in HELD_NS), *((n, 0) for n in range(1, len(DELAYS_NS)))]:
        cells = [
            cell(compared(rows, delay, held_ns) for rows in steps.values() if of(rows[0])) for of in groups.values()
        ]
        name = f"{DELAYS_NS[delay]} ns a wait" if delay else f"{held_ns} ns held an event"
        lost = [
            each for rows in steps.values() if (each := recommended_regret(compared(rows, delay, held_ns))) is not None
        ]
        within = sum(each <= 0.01 for each in lost) / len(lost)
        recommended = f"{statistics.fmean(lost):.2%}, {max(lost):.1%}, {within:.0%}"
        trials = [tried_regret(compared(rows, delay, held_ns)) for rows in steps.values()]
        tried = f"fastest of {TRIED}: {statistics.fmean(trials):.2%}, {max(trials):.1%}"
        print(f"| {name} | {' | '.join(cells)} | recommended, {len(lost)} steps: {recommended} | {tried} |", flush=True)
    print("\nerrors of networks without fitted constants, without `neighbours`: median, 95 %, largest, bias")
    for delay, delay_ns in enumerate(DELAYS_NS):
        for kind in ("convolutional", "other kinds"):
            for half in ("first half", "second half"):
                errors = [
                    row.predicted_ns[delay] / row.case.measured_ns - 1
                    for (name, _), rows in steps.items()
                    for row in rows
                    if groups[kind](row) and groups[half](row) and not row.case.fitted and "neighbours" not in name
                ]
                sizes = sorted(map(abs, errors))
                most = sizes[min(len(sizes) - 1, int(0.95 * len(sizes)))]
                text = f"{statistics.median(sizes):.2%}, {most:.1%}, {sizes[-1]:.1%}, {statistics.fmean(errors):+.2%}"
                print(f"{delay_ns} ns a wait, {kind}, {half} ({len(sizes)}): {text}")


if __name__ == "__main__":
    main()
