"""IOS and out-of-order backprop on 2 to 16 streams: python research/prototypes/ios_counts.py OUT.json [NAME...].

For each step of the fair comparison (or those named), on captured and on chosen kernels: the CPU time to plan `ios` on
each number of streams, which numbers give the same schedule but for the names of its streams, and their predicted
times; the same for `ooo_backprop`. Then how much faster than the replayed one of
`validate/results/fair_h200_20261128.json` schedules beside those of 4 and 8 streams are predicted. OUT.json is written
after each step, and steps that it has are kept; the table is printed from it. Run it in the repository's root.
"""

from __future__ import annotations

import dataclasses
import json
import sys
import time
from pathlib import Path
from typing import Any

from gpusim.engine.evaluate import Evaluator
from gpusim.formats.results import read_results
from gpusim.plan.graph import OpGraph
from gpusim.plan.ranking import ranked_variants
from gpusim.plan.schedule import Schedule
from gpusim.plan.sync import StepSync
from gpusim.policies.registry import POLICIES, stream_counts
from gpusim.search.events import compared_ns, events_of
from gpusim.trace.store import read_trace
from gpusim.validation.again import replayed_schedules
from gpusim.validation.chosen import hardware_of
from gpusim.validation.fair import best_of, kernels_of
from gpusim.validation.predictions import read_predictions
from gpusim.validation.recipe import read_recipe
from gpusim.validation.stages import predicted_path, trace_path

RECIPE, RESULTS = Path("validate/fair.toml"), Path("validate/results/fair_h200_20261128.json")
#: Numbers of streams: `ios` has at most 8 groups in a stage, so on more it repeats what it plans on 8.
COUNTS = {"ios": (*range(2, 9), 16), "ooo_backprop": tuple(range(2, 17))}
#: Numbers of streams on which `ios` was planned before its schedules were measured.
THEN = (4, 8)
#: A predicted gain that counts, as a share of the time.
GAIN_FRAC = 0.005


def renamed(schedule: Schedule) -> Schedule:
    """Return the schedule with streams numbered as they first occur."""
    numbers: dict[int, int] = {}
    for op in schedule.order:
        numbers.setdefault(schedule.streams[op], len(numbers))
    return dataclasses.replace(schedule, streams=tuple(numbers[stream] for stream in schedule.streams))


def of_step(graph: OpGraph, variants: tuple[int, ...], known: set[Schedule]) -> dict[str, Any]:
    """Return, for each policy, a row for each number of streams; `known` are the schedules predicted before."""
    planned_on = dataclasses.replace(graph.choosing(variants), variants=())
    evaluator, step = Evaluator(graph), StepSync.of(graph.trace, graph.preds, {})
    found: dict[str, Any] = {}
    for name, counts in COUNTS.items():
        made: dict[int, Schedule] = {}
        rows = []
        distinct: dict[Schedule, int] = {}
        for count in counts:
            begin_s = time.process_time()
            schedule = dataclasses.replace(POLICIES[name](planned_on, count), variants=variants)
            cpu_s = time.process_time() - begin_s
            made[count] = schedule
            number = distinct.setdefault(renamed(schedule), len(distinct))
            predicted_ns, events = evaluator.makespan_ns(schedule), events_of(graph, schedule, step)
            rows.append(
                {
                    "streams": count,
                    "cpu_s": round(cpu_s, 3),
                    "schedule": number,
                    "streams_used": schedule.stream_count,
                    "predicted_ns": predicted_ns,
                    "compared_ns": int(compared_ns(predicted_ns, events)),
                    "was_predicted": renamed(schedule) in known,
                }
            )
        ruled = POLICIES[name].stream_counts(stream_counts(16))
        tried = best_of(evaluator, step, [made[count] for count in ruled], 4)
        tried_numbers = [distinct[renamed(each)] for each in tried]
        found[name] = {"rows": rows, "planned_by_rule": ruled, "tried": tried_numbers}
    return found


def measured(graph_of: dict[str, OpGraph]) -> dict[tuple[str, str, str], int]:
    """Return today's predictions of the replayed schedules, by step, kernels and policy."""
    times_ns = {}
    for case, graph, schedule in replayed_schedules(RESULTS):
        if case.trace in graph_of and case.policy in COUNTS:
            times_ns[case.trace, kernels_of(schedule), case.policy] = Evaluator(graph).makespan_ns(schedule)
    return times_ns


def plan(out: Path, wanted: list[str]) -> None:
    """Plan the steps that the file lacks, and write each."""
    steps: dict[str, Any] = json.loads(out.read_text()) if out.exists() else {}
    recipe = read_recipe(RECIPE)
    POLICIES["ios"](OpGraph.build(*_of(trace_path(recipe.case[1], recipe))), 2)  # compiles
    for case in recipe.case:
        path = trace_path(case, recipe)
        trace, hardware = _of(path)
        if trace.name in steps or (wanted and trace.name not in wanted):
            continue
        graph = OpGraph.build(trace, hardware)
        stored = predicted_path(case, recipe)
        known = {renamed(each) for each in read_predictions(stored, path).chosen(graph, str(stored)).schedules}
        choices = {"captured": (), "chosen": ranked_variants(graph, 0.0)}
        replayed_ns = measured({trace.name: graph})
        step = {}
        for kernels, variants in choices.items():
            if kernels == "chosen" and not any(variants):
                continue
            step[kernels] = of_step(graph, variants, known)
            for name in COUNTS:
                step[kernels][name]["replayed_predicted_ns"] = replayed_ns[trace.name, kernels, name]
        steps[trace.name] = step
        out.write_text(json.dumps(steps, indent=1) + "\n", encoding="utf-8")
        print(trace.name, flush=True)


def _of(path: Path) -> Any:
    trace = read_trace(path)
    return trace, hardware_of(trace)


def show(steps: dict[str, Any]) -> None:
    """Print a row for each step and choice of kernels, and sums."""
    print(
        "| step, kernels | streams with equal schedules | s a call | s by the rule | tried then, now | new |",
        end="",
    )
    print(" replayed over best new | over best beside 4, 8 |\n|---|---|--:|--:|--:|--:|--:|--:|")
    new, better, kept, all_s = 0, [], 0, {}
    for trace, step in steps.items():
        for kernels, policies in step.items():
            found = policies["ios"]
            rows = {row["streams"]: row for row in found["rows"]}
            tried = [next(row for row in rows.values() if row["schedule"] == number) for number in found["tried"]]
            fresh = [row for row in tried if not row["was_predicted"]]
            then = {rows[count]["schedule"] for count in THEN}
            kept += sum(not rows[count]["was_predicted"] for count in THEN)
            replayed_ns = found["replayed_predicted_ns"]
            gain = gain_over(replayed_ns, fresh)
            of_any = gain_over(replayed_ns, [row for row in rows.values() if row["schedule"] not in then])
            calls_s = [row["cpu_s"] for count, row in rows.items() if count <= max(THEN)]
            planned_s = sum(rows[count]["cpu_s"] for count in found["planned_by_rule"])
            all_s[trace] = all_s.get(trace, 0.0) + planned_s
            new += len(fresh)
            if gain is not None and gain > GAIN_FRAC:
                better.append(f"{trace} {kernels}")
            row = f"| {trace}, {kernels} | {groups(found['rows'])} | {min(calls_s):.1f} to {max(calls_s):.1f} |"
            row += f" {planned_s:.1f} | {len(then)}, {len(tried)} | {len(fresh)} |"
            row += f" {shown(gain)} | {shown(of_any)} |"
            print(row)
    print(f"a step, both choices of kernels: {min(all_s.values()):.1f} to {max(all_s.values()):.1f} s of CPU time")
    print(f"{kept} schedules on {THEN} streams are not among the stored predictions; {new} tried by the rule are not")
    print(f"a new one is predicted faster than the replayed one by over {GAIN_FRAC:.1%}: {', '.join(better) or 'none'}")
    several = [
        f"{trace} {kernels}"
        for trace, step in steps.items()
        for kernels, policies in step.items()
        if len({row["schedule"] for row in policies["ooo_backprop"]["rows"]}) > 1
    ]
    print(f"ooo_backprop has more than one schedule: {', '.join(several) or 'nowhere'}")


def gain_over(replayed_ns: int, rows: list[dict[str, Any]]) -> float | None:
    """Return how much longer the replayed schedule is predicted than the best of the rows, or None without rows."""
    return replayed_ns / min(row["predicted_ns"] for row in rows) - 1 if rows else None


def shown(share: float | None) -> str:
    """Return a share in percent."""
    return "" if share is None else f"{share:+.2%}"


def groups(rows: list[dict[str, Any]]) -> str:
    """Return which numbers of streams give which schedule: `2: 0, 3: 1, 4 to 16: 2`."""
    runs: list[tuple[int, int, int]] = []
    for row in rows:
        if runs and runs[-1][2] == row["schedule"]:
            runs[-1] = runs[-1][0], row["streams"], row["schedule"]
        else:
            runs.append((row["streams"], row["streams"], row["schedule"]))
    return ", ".join(f"{first}" if first == last else f"{first} to {last}" for first, last, _ in runs)


def main(out: Path, wanted: list[str]) -> None:
    """Plan what is missing and print the tables."""
    plan(out, wanted)
    show(json.loads(out.read_text()))


if __name__ == "__main__":
    read_results(RESULTS)
    main(Path(sys.argv[1]), sys.argv[2:])
