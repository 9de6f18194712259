"""What goes with the error of a prediction, over the schedules tried in the fair comparison (no arguments).

For each step and choice of kernels of the newest results: the correlation, over all schedules on several streams, of
the error (measured less predicted, over measured) with the number of events and of streams, the predicted saving over
one stream, and the share of the predicted time with one, two, and more than three kernels at once.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from gpusim.engine.fast import FastEngine
from gpusim.formats.results import ResultCase, newest_results, read_results
from gpusim.plan.graph import OpGraph
from gpusim.plan.lower import lower
from gpusim.plan.schedule import Schedule
from gpusim.plan.sync import StepSync
from gpusim.search.events import events_of
from gpusim.trace.store import read_trace
from gpusim.validation.chosen import hardware_of
from gpusim.validation.fair import contenders_of, kernels_of
from gpusim.validation.predictions import read_predictions
from gpusim.validation.recipe import read_recipe
from gpusim.validation.stages import predicted_path, trace_path

FEATURES = ("events", "streams", "predicted saving", "one at once", "two at once", "more than three at once")


def shares_at_once(graph: OpGraph, schedule: Schedule) -> list[float]:
    """Return the shares of the predicted time with one, two, and more than three kernels."""
    timeline = FastEngine().run(lower(graph, schedule), graph.hardware)
    changes = sorted([(at, 1) for at in timeline.start_ns] + [(at, -1) for at in timeline.end_ns])
    time_ns: Counter[int] = Counter()
    running = last_ns = 0
    for at, change in changes:
        time_ns[min(running, 4)] += at - last_ns
        running, last_ns = running + change, at
    return [time_ns[count] / timeline.makespan_ns for count in (1, 2, 4)]


def tried_steps() -> Iterator[tuple[OpGraph, list[tuple[Schedule, int, int, ResultCase]]]]:
    """Yield each measured step with its tried schedules: each with its time, in ns, its events, and its contender's
    row.
    """
    recipe = read_recipe(Path("validate/fair.toml"))
    results = read_results(newest_results(Path("validate/results"), "fair"))
    rows = {(case.trace, case.policy, case.kernels): case for case in results.cases}
    for case in recipe.case:
        path = trace_path(case, recipe)
        trace = read_trace(path)
        if not any(step == trace.name for step, _, _ in rows):
            continue
        graph = OpGraph.build(trace, hardware_of(trace))
        step = StepSync.of(trace, graph.preds, {})
        chosen = read_predictions(predicted_path(case, recipe), path).chosen(graph, trace.name)
        tried = []
        for numbers in contenders_of(chosen.schedules):
            first = chosen.schedules[numbers[0]]
            row = rows[trace.name, first.policy, kernels_of(first)]
            for number, time_ns in zip(numbers, row.tried_ns, strict=True):
                schedule = chosen.schedules[number]
                tried.append((schedule, time_ns, events_of(graph, schedule, step), row))
        yield graph, tried


def main() -> None:
    positive: Counter[str] = Counter()
    groups = 0
    for graph, tried in tried_steps():
        found: dict[str, list[list[float]]] = {"captured": [], "chosen": []}
        for schedule, time_ns, events, row in tried:
            if schedule.stream_count > 1:
                saving = 1 - schedule.predicted_ns / row.predicted_sequential_ns
                features = [events, schedule.stream_count, saving, *shares_at_once(graph, schedule)]
                found[kernels_of(schedule)].append([1 - schedule.predicted_ns / time_ns, *features])
        for kernels, values in found.items():
            if not values:  # a trace without other kernels
                continue
            error, *features = np.array(values).T
            line = {}
            for name, feature in zip(FEATURES, features, strict=True):
                line[name] = np.corrcoef(error, feature)[0, 1] if feature.std() > 0 else 0.0
                positive[name] += line[name] > 0
            groups += 1
            shown = {name: round(float(value), 2) for name, value in line.items()}
            print(graph.trace.name, kernels, len(values), shown)
    print({name: f"{positive[name]} of {groups}" for name in FEATURES})


if __name__ == "__main__":
    main()
