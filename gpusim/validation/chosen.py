"""Choice of the schedules that a recipe replays for a step, with their predictions. Needs no GPU."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import msgspec

from gpusim.bounds.bounds import bounds
from gpusim.defaults import PARTITIONS, RECOMMENDED, SEARCH, SEARCHED, VARIANTS
from gpusim.engine.evaluate import Evaluator
from gpusim.formats.hardware import HardwareModel, default_hardware
from gpusim.formats.measurement import Measurement
from gpusim.formats.recipe import Recipe
from gpusim.formats.trace import Trace
from gpusim.plan.graph import OpGraph
from gpusim.plan.ranking import ranked_variants
from gpusim.plan.schedule import Schedule
from gpusim.policies.random_schedules import RANDOM, random_schedule
from gpusim.policies.registry import POLICIES
from gpusim.search.explore import explore
from gpusim.search.explored import Explored
from gpusim.search.trial import contenders
from gpusim.search.variants import parse_splits
from gpusim.trace.store import read_trace
from gpusim.validation.fair import fair_schedules
from gpusim.validation.neighbours import neighbour_schedules
from gpusim.validation.recipe import FASTEST_KERNELS, ON_PARTITIONS, SEARCHES, WITHOUT_VARIANTS


@dataclass(frozen=True)
class Chosen:
    """Schedules of one step, in replay order."""

    schedules: tuple[Schedule, ...]
    peaks: tuple[int, ...]
    """Predicted peak memory of each schedule, in bytes."""
    contenders: tuple[Schedule, ...]
    """Candidates for the searched schedule, tried on the GPU where the recipe asks for it; best prediction first."""
    contender_peaks: tuple[int, ...]
    """Predicted peak memory of each contender, in bytes."""
    worth_it: bool
    """Whether any schedule is predicted to win beyond the model's uncertainty."""
    bounds_ns: dict[str, int]
    hardware: str
    sequential_ns: int
    """Predicted time of the sequential graph, in ns."""
    intervals_ns: tuple[tuple[int, int], ...]
    """Predicted interval of each schedule, in ns, for 90 % of measurements."""

    def only(self, numbers: Sequence[int]) -> Chosen:
        """Return a copy with only these schedules, by number."""
        return dataclasses.replace(
            self,
            schedules=tuple(self.schedules[number] for number in numbers),
            peaks=tuple(self.peaks[number] for number in numbers),
            intervals_ns=tuple(self.intervals_ns[number] for number in numbers),
        )

    def held_to(self, measured: Sequence[Measurement]) -> list[Measurement]:
        """Return the measurements of the schedules with these stored predictions."""
        return [
            msgspec.structs.replace(
                each,
                predicted_ns=schedule.predicted_ns,
                predicted_interval_ns=interval_ns,
                predicted_sequential_ns=self.sequential_ns,
            )
            for each, schedule, interval_ns in zip(measured, self.schedules, self.intervals_ns, strict=True)
        ]

    def with_searched(self, times_ns: Sequence[int]) -> Chosen:
        """Replace the searched schedule by the fastest contender; without variants, by the fastest contender without
        them.

        `times_ns` has each contender's time in the trial.
        """
        numbers = range(len(times_ns))
        captured = [number for number in numbers if not self.contenders[number].has_variants]
        numbers_of = dict(zip((SEARCH, WITHOUT_VARIANTS), (numbers, captured), strict=True))
        schedules, peaks = list(self.schedules), list(self.peaks)
        for place, schedule in enumerate(self.schedules):
            if numbers_of.get(schedule.policy):
                number = min(numbers_of[schedule.policy], key=lambda each: times_ns[each])
                schedules[place] = dataclasses.replace(self.contenders[number], policy=schedule.policy)
                peaks[place] = self.contender_peaks[number]
        return dataclasses.replace(self, schedules=tuple(schedules), peaks=tuple(peaks))


def hardware_of(trace: Trace) -> HardwareModel:
    """Return the model of the GPU that a trace was captured on, or the default one."""
    return default_hardware(trace.provenance.gpu.name)


def choose_schedules(path: Path, recipe: Recipe) -> Chosen:
    """Choose the schedules that `recipe` asks for, for the trace in `path`."""
    trace = read_trace(path)
    hardware = hardware_of(trace)
    graph = OpGraph.build(trace, hardware)
    other = recipe.trials or recipe.neighbours
    searches = not other and (not recipe.counts or any(policy in SEARCHES for policy in recipe.policies))
    explored = _explore(graph, recipe) if searches else None
    if recipe.neighbours:
        wanted = neighbour_schedules(graph, recipe)
    elif recipe.trials:
        wanted = fair_schedules(graph, recipe, path)
    else:
        wanted = _asked_for(graph, explored, recipe)
    asked_for = [*wanted, *_by_lot(graph, recipe)]
    evaluator = Evaluator(graph)
    sequential_ns = evaluator.makespan_ns(POLICIES["sequential"](graph, 1))
    evaluations = [evaluator.evaluate(schedule) for _, schedule in asked_for]
    made_by = f"gpusim validate, {hardware.label}, seed {recipe.seed}"
    schedules = tuple(
        schedule.made(policy, made_by, evaluation.makespan_ns)
        for (policy, schedule), evaluation in zip(asked_for, evaluations, strict=True)
    )
    tried = [] if explored is None else contenders(explored, recipe.measure)
    intervals_ns = tuple(each.interval_ns(graph, each.predicted_ns) for each in schedules)
    bound = bounds(graph)
    return Chosen(
        schedules,
        tuple(evaluation.peak_bytes for evaluation in evaluations),
        tuple(row.schedule.made(SEARCH, made_by, row.makespan_ns) for row in tried),
        tuple(row.peak_bytes for row in tried),
        any(latest_ns < sequential_ns for _, latest_ns in intervals_ns),
        {name.removesuffix("_ns"): time_ns for name, time_ns in bound.document().items()},
        hardware.label,
        sequential_ns,
        intervals_ns,
    )


def _explore(graph: OpGraph, recipe: Recipe) -> Explored:
    return explore(
        graph,
        streams=recipe.streams,
        budget_s=recipe.budget_s,
        seed=recipe.seed,
        also=recipe.policies,
        splits=parse_splits(recipe.partitions, recipe.streams, graph.hardware.limits.sms) if recipe.partitions else (),
    )


def _asked_for(graph: OpGraph, explored: Explored | None, recipe: Recipe) -> Iterator[tuple[str, Schedule]]:
    """Yield the recipe's policies, each at all of its stream counts, or at the one predicted best."""
    for policy in recipe.policies:
        if policy == FASTEST_KERNELS:
            if graph.variants:
                yield (
                    policy,
                    dataclasses.replace(POLICIES["sequential"](graph, 1), variants=ranked_variants(graph, 0.0)),
                )
        elif explored is not None and policy in SEARCHES:
            yield from _searched(explored, policy)
        elif explored is not None and not recipe.counts:
            yield policy, explored.best_of(policy).schedule
        else:
            for count in POLICIES[policy].stream_counts(recipe.counts):
                yield policy, POLICIES[policy](graph, count)


def _searched(explored: Explored, kind: str) -> Iterator[tuple[str, Schedule]]:
    """Yield one of `SEARCHES`: the recommendation, or the best schedule of one kind; for partitions, the best per
    split.
    """
    if kind == RECOMMENDED:
        yield RECOMMENDED, explored.best.schedule
    elif kind == SEARCH:
        searched = (row for row in explored.rows if row.policy in SEARCHED)
        yield SEARCH, min(searched, key=lambda row: row.compared_ns, default=explored.best).schedule
    elif kind == WITHOUT_VARIANTS:
        yield WITHOUT_VARIANTS, explored.best_of(SEARCH).schedule
    elif kind == VARIANTS and explored.variants is not None:
        yield VARIANTS, explored.best_of(VARIANTS).schedule
    elif kind == PARTITIONS:
        for tried in explored.partitions:
            on_split = [row for row in explored.rows if row.schedule.partitions == tried.partitions]
            sms = "+".join(str(partition.sms) for partition in tried.partitions)
            yield f"{ON_PARTITIONS}{sms}", min(on_split, key=lambda row: row.compared_ns).schedule


def _by_lot(graph: OpGraph, recipe: Recipe) -> Iterator[tuple[str, Schedule]]:
    for number in range(recipe.random):
        yield RANDOM, random_schedule(graph, number, recipe.seed)
