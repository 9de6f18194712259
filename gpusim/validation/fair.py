"""A fair comparison: every policy and the search on the same kernels, each with the same number of trials on the GPU.

All are planned on the captured kernels, and once more on those that are fastest alone. Of each the schedules compared
best (`gpusim.search.events`) are tried, those on other numbers of streams first, since errors of predictions depend on
it, and the fastest is replayed. A row of the search is a searched one.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from pathlib import Path

from gpusim.defaults import SEARCH, SEARCHED
from gpusim.engine.evaluate import Evaluator
from gpusim.formats.recipe import Recipe
from gpusim.formats.results import Kernels
from gpusim.io.file_limits import MAX_STREAMS
from gpusim.plan.graph import OpGraph
from gpusim.plan.ranking import ranked_variants
from gpusim.plan.schedule import Schedule
from gpusim.plan.sync import StepSync
from gpusim.policies.registry import POLICIES, stream_counts
from gpusim.search.events import compared_ns, events_of
from gpusim.search.explore import explore
from gpusim.validation.recipe import FASTEST_KERNELS, MEASURED_IOS
from gpusim.validation.stage_times import measured_ios, read_stage_times, stage_times_path

#: The policy that takes measured stage latencies.
IOS = "ios"
#: Numbers of streams below the recipe's that limit a search of its own; all searches share the budget.
SEARCH_LIMITS = (4, 8)


def kernels_of(schedule: Schedule) -> Kernels:
    """Return which kernels a schedule runs."""
    return "chosen" if schedule.has_variants else "captured"


def fair_schedules(graph: OpGraph, recipe: Recipe, path: Path | None = None) -> Iterator[tuple[str, Schedule]]:
    """Yield the `recipe.trials` schedules compared best of each policy and of the search, on both choices of kernels.

    Where the captured kernels are those that are fastest alone, policies are planned on them once.
    `FASTEST_KERNELS` has one schedule: recorded order on one stream, on the kernels chosen for all. `MEASURED_IOS` has
    schedules on captured kernels, whose stages were measured, and those with merged convolutions in place of chosen
    kernels. `path` is the file of the trace: next to it are the latencies of these stages.
    """
    choices: list[tuple[int, ...]] = [()]
    if graph.variants:
        choices.append(ranked_variants(graph, 0.0))
    evaluator, step = Evaluator(graph), StepSync.of(graph.trace, graph.preds, {})
    for variants in choices:
        planned_on = dataclasses.replace(graph.choosing(variants), variants=())
        for policy in recipe.policies:
            if policy == MEASURED_IOS:
                made = _by_stage_times(graph, recipe, path, merging=bool(variants))
            elif any(variants) or not (variants or policy == FASTEST_KERNELS):
                made = [dataclasses.replace(each, variants=variants) for each in _planned(planned_on, policy, recipe)]
            else:
                continue
            for each in best_of(evaluator, step, made, recipe.trials):
                yield policy, each


def best_of(evaluator: Evaluator, step: StepSync, made: Sequence[Schedule], trials: int) -> list[Schedule]:
    """Return the schedules compared best, of each predicted time one: the best of each number of streams first."""
    times_ns = [evaluator.makespan_ns(each) for each in made]
    events = [events_of(evaluator.graph, each, step) for each in made]
    ranked = sorted(range(len(made)), key=lambda number: compared_ns(times_ns[number], events[number]))
    of_time: dict[int, Schedule] = {}
    for number in ranked:
        of_time.setdefault(times_ns[number], made[number])
    of_streams: dict[int, Schedule] = {}
    for each in of_time.values():
        of_streams.setdefault(each.stream_count, each)
    first = list(of_streams.values())
    return [*first, *(each for each in of_time.values() if each not in first)][:trials]


def counts_of(name: str, streams: int) -> tuple[int, ...]:
    """Return the numbers of streams on which a policy is planned: up to `streams`, and as many as it takes itself."""
    return POLICIES[name].stream_counts((*stream_counts(streams), MAX_STREAMS))


def _planned(graph: OpGraph, name: str, recipe: Recipe) -> list[Schedule]:
    """Return a contender's schedules: a policy's on each number of streams, and on as many as it takes itself."""
    if name == FASTEST_KERNELS:
        return [Schedule.in_recorded_order(len(graph))]
    if name == SEARCH:
        return _searched(graph, recipe)
    return [POLICIES[name](graph, count) for count in counts_of(name, recipe.streams)]


def _by_stage_times(graph: OpGraph, recipe: Recipe, path: Path | None, *, merging: bool) -> list[Schedule]:
    """Return the schedules of IOS by measured stage latencies, with merged convolutions or without."""
    if path is None:
        return []
    times, file = read_stage_times(path, recipe), str(stage_times_path(path, recipe))
    made = [measured_ios(graph, count, times, file, merging=merging) for count in counts_of(IOS, recipe.streams)]
    return [each for each in made if each.has_variants == merging]


def _searched(graph: OpGraph, recipe: Recipe) -> list[Schedule]:
    """Return what searches on few and many streams found, without the policies' own schedules that they start from."""
    limits = [*(limit for limit in SEARCH_LIMITS if limit < recipe.streams), recipe.streams]
    searched: dict[Schedule, None] = {}
    for limit in limits:
        explored = explore(graph, streams=limit, budget_s=recipe.budget_s / len(limits), seed=recipe.seed)
        planned = {row.schedule for row in explored.rows if row.policy not in SEARCHED}
        found = (row.schedule for row in explored.rows if row.policy == SEARCH)
        searched.update(dict.fromkeys(each for each in found if each not in planned))
    return list(searched)


def contenders_of(schedules: Sequence[Schedule]) -> list[tuple[int, ...]]:
    """Return the numbers of the schedules of each policy and choice of kernels."""
    tried: dict[tuple[str, Kernels], list[int]] = {}
    for number, schedule in enumerate(schedules):
        tried.setdefault((schedule.policy, kernels_of(schedule)), []).append(number)
    return [tuple(numbers) for numbers in tried.values()]


def fastest_of_each(schedules: Sequence[Schedule], times_ns: Sequence[int]) -> dict[int, tuple[int, ...]]:
    """Return the number of the fastest schedule per policy and choice of kernels, with the times of its trials."""
    return {
        min(numbers, key=times_ns.__getitem__): tuple(times_ns[number] for number in numbers)
        for numbers in contenders_of(schedules)
    }
