"""How fast the best of a few trials is, by the schedules that may be tried (no arguments).

The schedules tried in the fair comparison stand for what `explore` finds; `contenders` chooses those to try. Before:
policies and the search on captured kernels, and the search on chosen ones. Now: policies on chosen kernels, too. Alone:
the search or the policies, on chosen kernels. Regret: the time of the fastest tried over that of the fastest of all.
"""

from __future__ import annotations

import statistics
from pathlib import Path
from types import SimpleNamespace

from gpusim.formats.results import newest_results, read_results
from gpusim.plan.graph import OpGraph
from gpusim.plan.schedule import Schedule
from gpusim.plan.sync import StepSync
from gpusim.search.budget import POLICIES_WITH_VARIANTS, SEARCH, VARIANTS
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


def _group(schedule: Schedule) -> str:
    """Return the name that `explore` would give to the schedule's row."""
    if not schedule.has_variants:
        return schedule.policy
    return VARIANTS if schedule.policy == SEARCH else POLICIES_WITH_VARIANTS


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
                rows.append(Row(_group(schedule), streams, schedule.predicted_ns, 1.0, 0, schedule, events=events))
                times_ns[id(rows[-1])] = time_ns
        fastest_ns = min(times_ns.values())
        before = [row for row in rows if row.policy != POLICIES_WITH_VARIANTS]
        search = [row for row in rows if row.policy == VARIANTS]
        policies = [row for row in rows if row.policy == POLICIES_WITH_VARIANTS]
        sources = {"before": before, "now": rows, "search alone": search, "policies alone": policies}
        for name, of_source in sources.items():
            for count in COUNTS:
                tried = contenders(SimpleNamespace(allowed=of_source), count)
                loss = min(times_ns[id(row)] for row in tried) / fastest_ns - 1
                losses.setdefault((name, count), []).append(loss)
        captured_ns = min(row.compared_ns for row in before if row.policy != VARIANTS and row.policy != SEARCH)
        best_ns = min(row.compared_ns for row in rows)
        fastest = min(rows, key=lambda row: times_ns[id(row)])
        print(f"policies on captured kernels {captured_ns / best_ns - 1:.1%}", end=", ")
        print(f"the fastest {fastest.compared_ns / best_ns - 1:.1%} slower than the best by prediction")
        print(trace.name, {name: f"{losses[name, 8][-1]:.2%}" for name in sources})
    for (name, count), each in losses.items():
        print(f"{name}, {count} trials: mean {statistics.mean(each):.2%}, largest {max(each):.2%}, {len(each)} steps")


if __name__ == "__main__":
    main()
