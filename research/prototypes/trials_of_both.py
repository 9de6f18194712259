"""How fast the best of a few trials is where policies, the search, or both are tried (no arguments).

The schedules tried in the fair comparison stand for what `explore` finds; those to try are chosen by `contenders`, of
the policies' schedules, the search's, and all. Regret: the time of the fastest tried over that of the fastest of all.
"""

from __future__ import annotations

import statistics
from pathlib import Path
from types import SimpleNamespace

from gpusim.formats.results import newest_results, read_results
from gpusim.plan.graph import OpGraph
from gpusim.plan.sync import StepSync
from gpusim.search.budget import SEARCH
from gpusim.search.events import events_of
from gpusim.search.explored import Row
from gpusim.search.trial import contenders
from gpusim.trace.store import read_trace
from gpusim.validation.chosen import hardware_of
from gpusim.validation.fair import contenders_of, kernels_of
from gpusim.validation.predictions import read_predictions
from gpusim.validation.recipe import read_recipe
from gpusim.validation.stages import predicted_path, trace_path

COUNTS = (2, 4, 6, 8, 12)


def main() -> None:
    recipe = read_recipe(Path("validate/fair.toml"))
    results = read_results(newest_results(Path("validate/results"), "fair"))
    of_case = {(case.trace, case.policy, case.kernels): case for case in results.cases}
    losses: dict[tuple[str, int], list[float]] = {}
    for case in recipe.case:
        path = trace_path(case, recipe)
        trace = read_trace(path)
        if not any(step == trace.name for step, _, _ in of_case):
            continue
        graph = OpGraph.build(trace, hardware_of(trace))
        step = StepSync.of(trace, graph.preds, {})
        chosen = read_predictions(predicted_path(case, recipe), path).chosen(graph, trace.name)
        rows, times_ns = [], {}
        for numbers in contenders_of(chosen.schedules):
            first = chosen.schedules[numbers[0]]
            tried_ns = of_case[trace.name, first.policy, kernels_of(first)].tried_ns
            for number, time_ns in zip(numbers, tried_ns, strict=True):
                schedule = chosen.schedules[number]
                streams, events = schedule.stream_count, events_of(graph, schedule, step)
                rows.append(Row(schedule.policy, streams, schedule.predicted_ns, 1.0, 0, schedule, events=events))
                times_ns[id(rows[-1])] = time_ns
        fastest_ns = min(times_ns.values())
        sources = {"search": [row for row in rows if row.policy == SEARCH], "both": rows}
        sources["policies"] = [row for row in rows if row.policy != SEARCH]
        for name, of_source in sources.items():
            for count in COUNTS:
                tried = contenders(SimpleNamespace(allowed=of_source), count)
                loss = min(times_ns[id(row)] for row in tried) / fastest_ns - 1
                losses.setdefault((name, count), []).append(loss)
        print(trace.name, {name: f"{losses[name, 8][-1]:.2%}" for name in sources})
    for (name, count), each in losses.items():
        print(f"{name}, {count} trials: mean {statistics.mean(each):.2%}, largest {max(each):.2%}, {len(each)} steps")


if __name__ == "__main__":
    main()
