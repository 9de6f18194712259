"""Delays of narrower kinds of waits for another stream, as a rule of the model.

    python research/prototypes/narrow_waits.py OUT.json validate/results/*_h200_*.json

Predicts the stored schedules of captured kernels as they are, sorts the kernels that wait for another stream by what
that timeline says, and predicts the schedules again with a delay of one kind. `bound` waits decide: the awaited kernel
ended last. `gone` waits do not: the kernel before on the same stream ended later. `fork` and `hand` are bound waits
with and without another successor of the awaited kernel; `join` are those of a stream whose kernel before ended at most
`NEAR_NS` earlier, `idle` those of a stream without a kernel for longer. `gone near` and `gone long` waits were over at
most and more than `NEAR_NS` before the kernel before ended; `gone needed` ones have an event in the replay, `gone
spare` ones follow from others. Writes all times to OUT.json and prints the errors of four groups, with regret and tau
of all steps. Where OUT.json exists, only prints.
"""

from __future__ import annotations

import json
import statistics
import sys
from collections import Counter
from collections.abc import Container, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
from held_events import OTHERS

from gpusim.engine.base import Timeline
from gpusim.engine.fast import FastEngine
from gpusim.errors import GpusimError
from gpusim.formats.results import ResultCase
from gpusim.plan.lower import lower
from gpusim.plan.sync import plan_sync
from gpusim.plan.tasks import Plan
from gpusim.validation.again import replayed_schedules
from gpusim.validation.statistics import MIN_SCHEDULES, kendall_tau, regret

KINDS = ("all", "bound", "gone", "fork", "hand", "join", "idle", "gone near", "gone long", "gone needed", "gone spare")
DELAYS_NS, NEAR_NS = (100, 200, 400, 800), 5_000


def kinds_of(timeline: Timeline, needed: Container[int]) -> Iterator[tuple[int, set[str]]]:
    """Yield each kernel that waits for another stream, with the kinds of its wait; `needed` has ops with an event."""
    tasks, end_ns = timeline.plan.tasks, timeline.end_ns
    previous: dict[int, int] = {}
    before: list[int | None] = []
    for number, task in enumerate(tasks):
        before.append(previous.get(task.queue))
        previous[task.queue] = number
    followers = Counter(dep for task in tasks for dep in task.deps)
    followers.update(each for each in before if each is not None)
    for number, (task, own) in enumerate(zip(tasks, before, strict=True)):
        others = [dep for dep in task.deps if tasks[dep].queue != task.queue]
        if task.kind != "kernel" or not others:
            continue
        last = max(others, key=end_ns.__getitem__)
        kinds = {"all"}
        own_ns = -1 if own is None else end_ns[own]
        if own_ns > end_ns[last]:
            kinds |= {"gone", "gone near" if own_ns - end_ns[last] <= NEAR_NS else "gone long"}
            kinds.add("gone needed" if task.op in needed else "gone spare")
        else:
            kinds |= {"bound", "fork" if followers[last] > 1 else "hand"}
            kinds.add("join" if own is not None and end_ns[last] - own_ns <= NEAR_NS else "idle")
        yield number, kinds


def delayed(plan: Plan, numbers: set[int], delay_ns: int) -> Plan:
    """Return the plan with a delay of some kernels."""
    tasks = tuple(
        msgspec.structs.replace(task, extra_ns=task.extra_ns + delay_ns) if number in numbers else task
        for number, task in enumerate(plan.tasks)
    )
    return replace(plan, tasks=tasks)


def predicted(files: list[Path]) -> list[dict[str, Any]]:
    """Return the times of each schedule on several streams: as predicted, and by kind and delay."""
    engine, rows = FastEngine(), []
    for file in files:
        if file.stem.startswith(OTHERS):
            continue
        try:
            found = list(replayed_schedules(file))
        except GpusimError:  # without schedules
            continue
        for case, graph, schedule in found:
            if case.streams < 2 or schedule.has_variants or schedule.partitions:
                continue
            plan = lower(graph, schedule, memory=False)
            base = engine.run(plan, graph.hardware)
            sync = plan_sync(graph.trace, graph.preds, schedule.order, schedule.streams)
            needed = {op for op, before in zip(schedule.order, sync.waits, strict=True) if before}
            waits = list(kinds_of(base, needed))
            chosen = {kind: {number for number, kinds in waits if kind in kinds} for kind in KINDS}
            rows.append(
                {
                    "file": file.stem,
                    "case": msgspec.to_builtins(case),
                    "family": case.network.partition("_")[0],
                    "less_known": graph.less_known,
                    "predicted_ns": base.makespan_ns,
                    "waits": {kind: len(numbers) for kind, numbers in chosen.items()},
                    "delayed_ns": {
                        kind: [
                            engine.run(delayed(plan, numbers, delay_ns), graph.hardware).makespan_ns
                            for delay_ns in DELAYS_NS
                        ]
                        for kind, numbers in chosen.items()
                    },
                }
            )
    return rows


def line(rows: list[dict[str, Any]], kind: str, delay: int) -> str:
    """Return the errors of the four groups (median, 95 %, bias), and regret and tau of all steps."""
    families = sorted({row["family"] for row in rows if row["many"]})
    of_first = set(families[::2])
    time_ns = [row["delayed_ns"][kind][delay] if kind else row["predicted_ns"] for row in rows]
    cells = []
    for less_known in (False, True):
        for first in (True, False):
            errors = [
                ns / row["case"]["measured_ns"] - 1
                for ns, row in zip(time_ns, rows, strict=True)
                if row["less_known"] == less_known
                and (row["family"] in of_first) == first
                and not row["case"]["fitted"]
                and "neighbours" not in row["file"]
                and row["many"]
            ]
            sizes = sorted(map(abs, errors))
            most = sizes[min(len(sizes) - 1, int(0.95 * len(sizes)))]
            cells.append(f"{statistics.median(sizes):.2%}, {most:.1%}, {statistics.fmean(errors):+.2%}")
    steps: dict[tuple[str, str], list[ResultCase]] = {}
    for ns, row in zip(time_ns, rows, strict=True):
        if row["many"]:
            case = msgspec.convert({**row["case"], "predicted_ns": ns}, ResultCase)
            steps.setdefault((row["file"], row["case"]["trace"]), []).append(case)
    lost = [regret(step) for step in steps.values()]
    taus = [tau for tau in map(kendall_tau, steps.values()) if tau is not None]
    return " | ".join([*cells, f"{statistics.fmean(lost):.2%}, {statistics.fmean(taus):.3f}"])


def main() -> None:
    """Predict all schedules, or read the times, and print the table."""
    out, *files = map(Path, sys.argv[1:])
    if not out.exists():
        out.write_text(json.dumps(predicted(files)) + "\n")
    rows = json.loads(out.read_text())
    steps = Counter((row["file"], row["case"]["trace"]) for row in rows)
    for row in rows:
        row["many"] = steps[row["file"], row["case"]["trace"]] >= MIN_SCHEDULES
    waits = Counter()
    for row in rows:
        waits.update(row["waits"])
    print(f"{len(rows)} schedules; waits: {dict(waits)}")
    print(f"| today | {line(rows, '', 0)} |")
    for kind in KINDS:
        for delay, delay_ns in enumerate(DELAYS_NS):
            print(f"| {kind}, {delay_ns} ns | {line(rows, kind, delay)} |", flush=True)


if __name__ == "__main__":
    main()
