"""A recipe in stages, over several days: capture (GPU), predict (no GPU), measure (GPU).

Each stage skips work of earlier runs, so that an interrupted one is simply run again. Predictions are files that can be
committed between capture and measurement; measured cases are added to the newest results file of the recipe.
"""

from __future__ import annotations

import datetime
import statistics
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Literal

import msgspec

from gpusim.errors import GpusimError, RecipeError
from gpusim.formats.measurement import Measurement
from gpusim.formats.recipe import Case, Recipe
from gpusim.formats.results import SCHEMA, ResultCase, Results, read_all_results
from gpusim.formats.trace import Timing, Trace
from gpusim.gpu.isolate import alone
from gpusim.io.files import make_folder
from gpusim.io.packed import is_file
from gpusim.plan.graph import OpGraph
from gpusim.trace.store import bundled_traces, read_trace, structure_hash, write_trace
from gpusim.validation.case_work import capture_case, replay_chosen, result_case
from gpusim.validation.chosen import Chosen, choose_schedules, hardware_of
from gpusim.validation.fair import fastest_of_each, kernels_of, slow_counts
from gpusim.validation.memory_stages import MemoryResults, measured_or_said, predict_memory
from gpusim.validation.predictions import (
    Predictions,
    predictions_of,
    predictions_path,
    read_predictions,
    write_predictions,
)
from gpusim.validation.recipe import MEASURED_IOS
from gpusim.validation.replayed import SUFFIX as REPLAYED_SUFFIX
from gpusim.validation.replayed import ReplayedSchedule, read_replayed, write_replayed
from gpusim.validation.stage_times import (
    measure_stages_of,
    read_stage_times,
    stage_times_path,
    with_merged,
)
from gpusim.validation.tables import write_results
from gpusim.validation.trials import trials_path, try_schedules

Stage = Literal["capture", "predict", "measure"]
Say = Callable[[str], None]


def selected(recipe: Recipe, numbers: Sequence[int]) -> tuple[Case, ...]:
    """Return the cases with these numbers, counted from 1; all where none is given. Raises `RecipeError`."""
    for number in numbers:
        if not 1 <= number <= len(recipe.case):
            raise RecipeError(recipe.name, f"no case {number}: cases are numbered 1 to {len(recipe.case)}")
    return tuple(recipe.case[number - 1] for number in numbers) or recipe.case


def trace_path(case: Case, recipe: Recipe) -> Path:
    """Return the path of a case's trace, captured or not. Raises `RecipeError` for a recipe that keeps none.

    IOS by measured stages has a copy of a given trace, with merges.
    """
    if case.trace is not None:
        given = bundled_traces().get(case.trace, Path(case.trace))
        if MEASURED_IOS not in recipe.policies or recipe.traces is None:
            return given
        return Path(recipe.traces) / given.name
    if recipe.traces is None:
        raise RecipeError(recipe.name, "stages need a folder that keeps the traces", place="$.traces")
    return Path(recipe.traces) / f"{case.trace_name}.json.gz"


def predicted_path(case: Case, recipe: Recipe) -> Path:
    """Return the path of a case's predictions: in the folder of the recipe's traces, else next to the trace."""
    path = trace_path(case, recipe)
    return predictions_path(path if recipe.traces is None else Path(recipe.traces) / path.name)


def capture_stage(recipe: Recipe, cases: Sequence[Case], command: str, say: Say) -> list[Path]:
    """Capture each case without a trace, and measure IOS's stages where the recipe asks for them.

    A failed capture does not stop the others; if all fail, the first error is raised.
    """
    paths: list[Path] = []
    errors: list[GpusimError] = []
    for case in cases:
        path = trace_path(case, recipe)
        if not is_file(path):
            make_folder(path.parent, "traces")
            try:
                if case.trace is not None:
                    given = read_trace(bundled_traces().get(case.trace, Path(case.trace)))
                    write_trace(with_merged(given, recipe.seed), path)
                else:
                    path = alone(capture_case, case, path.parent, recipe.seed, command)
            except GpusimError as cause:
                errors.append(cause)
                say(f"failed: {case.spec or case.trace}: {cause}")
                continue
            say(f"captured {path.name}")
        if MEASURED_IOS in recipe.policies and not is_file(stage_times_path(path, recipe)):
            trace = read_trace(path)
            graph = OpGraph.build(trace, hardware_of(trace))
            measure_stages_of(path, graph, recipe, slow_counts(recipe.streams), command)
            stages = read_stage_times(path, recipe).stages
            merged = sum(each.merged_ns is not None for each in stages)
            faster = sum(each.is_faster_merged for each in stages)
            say(f"measured {len(stages)} stages of {path.name}; {faster} of {merged} are faster merged")
        paths.append(path)
    if errors and not paths:
        raise errors[0]
    return paths


def predict_stage(recipe: Recipe, cases: Sequence[Case], say: Say) -> list[Path]:
    """Choose and predict the schedules of each captured case without predictions for its trace.

    Existing predictions are never replaced: that would invalidate a blind test. Raises `RecipeError` where no case is
    captured.
    """
    if recipe.measure:
        raise RecipeError(recipe.name, "trials choose schedules on the GPU, after predictions", place="$.measure")
    paths: list[Path] = []
    for case in cases:
        path = trace_path(case, recipe)
        if not is_file(path):
            say(f"not captured yet: {path.name}")
            continue
        if recipe.memory_policies:
            paths.append(predict_memory(path, recipe))
            say(f"planned {path.name}")
            continue
        trace = read_trace(path)
        target = predicted_path(case, recipe)
        if is_file(target):
            read_predictions(target, path)
        else:
            make_folder(target.parent, "predictions")  # the trace may be in a set
            write_predictions(predictions_of(path, trace, choose_schedules(path, recipe), recipe.name), target)
            say(f"predicted {path.name}")
        paths.append(target)
    if not paths:
        raise RecipeError(recipe.name, "no case is captured yet: run the stage 'capture' first")
    return paths


def measure_stage(
    recipe: Recipe, cases: Sequence[Case], folder: Path, command: str, say: Say, *, trust_code: bool = False
) -> Results:
    """Replay the predicted schedules of each case that the recipe's results lack; results are written after each case,
    and trials after each contender.

    Each schedule is timed in `recipe.processes` processes; `interval_ns` is the range of their medians.
    """
    if recipe.memory_policies:
        return _measure_memory(recipe, cases, folder, command, say, trust_code)
    make_folder(folder, "results")
    joined = _Joined.of(recipe, folder)
    errors: list[GpusimError] = []
    for case in cases:
        path = trace_path(case, recipe)
        try:
            if not is_file(path):
                raise RecipeError(str(path), "not captured yet: run the stage 'capture' first")
            trace = read_trace(path)
            if joined.has(trace):
                continue
            predicted, trials = predicted_path(case, recipe), trials_path(folder, recipe, trace.name)
            predictions = read_predictions(predicted, path)
            chosen = predictions.chosen(OpGraph.build(trace, hardware_of(trace)), str(predicted))
            tried: list[tuple[int, ...]] = [()] * len(chosen.schedules)
            if recipe.trials:
                times_ns = alone(try_schedules, path, predicted, chosen, recipe, trials, trust_code)
                of_each = fastest_of_each(chosen.schedules, times_ns)
                chosen, tried = chosen.only(list(of_each)), list(of_each.values())
            runs: list[Sequence[Measurement]] = []
            for _ in range(recipe.processes):
                runs.append(alone(replay_chosen, path, chosen, recipe, command, trust_code)[1])
                joined.check_gpu(runs[-1][0].gpu.name)
        except GpusimError as cause:
            errors.append(cause)
            say(f"failed: {cause}")
            continue
        measured = chosen.held_to([between_processes(each) for each in zip(*runs, strict=True)])
        joined.add(case, trace, predictions, chosen, measured, command, tried)
        trials.unlink(missing_ok=True)
        say(f"measured {len(measured)} schedules of {trace.name}")
    if errors and len(errors) == len(cases):
        raise errors[0]
    if joined.results is None:
        raise RecipeError(recipe.name, "has no case to measure")
    return joined.results


def _measure_memory(
    recipe: Recipe, cases: Sequence[Case], folder: Path, command: str, say: Say, trust_code: bool
) -> Results:
    """Run `measure_stage` for memory plans."""
    paths = [(case, trace_path(case, recipe)) for case in cases]
    for line in measured_or_said(recipe, folder, paths, command, trust_code):
        say(line)
    results = MemoryResults(recipe, folder).results
    if results is None:
        raise RecipeError(recipe.name, "no case could be measured")
    return results


def between_processes(runs: Sequence[Measurement]) -> Measurement:
    """Merge measurements of one schedule in several processes: median of medians, with their range as interval."""
    if len(runs) == 1:
        return runs[0]
    outputs = max((each.outputs for each in runs), key=lambda check: (not check.equal, check.worst_error))
    return msgspec.structs.replace(
        runs[0],
        schedule=_across([each.schedule for each in runs]),
        sequential=_across([each.sequential for each in runs]),
        outputs=outputs,
        peak_bytes=max(each.peak_bytes for each in runs),
        sequential_peak_bytes=max(each.sequential_peak_bytes for each in runs),
    )


def _across(times: Sequence[Timing]) -> Timing:
    medians_ns = [each.median_ns for each in times]
    return Timing(
        median_ns=round(statistics.median(medians_ns)),
        lo_ns=min(medians_ns),
        hi_ns=max(medians_ns),
        rounds=sum(each.rounds for each in times),
        fastest_ns=min(each.fastest_ns for each in times),
        slowest_ns=max(each.slowest_ns for each in times),
    )


class _Joined:
    """Newest results file of a recipe in a folder, extended by new cases."""

    def __init__(self, recipe: Recipe, folder: Path) -> None:
        self.recipe, self.folder = recipe, folder
        self.results: Results | None = None
        self.replayed: list[ReplayedSchedule] = []

    @classmethod
    def of(cls, recipe: Recipe, folder: Path) -> _Joined:
        joined = cls(recipe, folder)
        earlier = {name: each for name, each in read_all_results(folder).items() if each.recipe == recipe.name}
        if earlier:
            name, joined.results = max(earlier.items(), key=lambda item: item[1].date)
            joined.replayed = list(read_replayed(folder / f"{name}{REPLAYED_SUFFIX}"))
        return joined

    def has(self, trace: Trace) -> bool:
        """Whether this exact step was measured: a new capture under the same name may have other ops."""
        if self.results is None or all(case.trace != trace.name for case in self.results.cases):
            return False
        hashes = {each.trace_hash for each in self.replayed if each.trace == trace.name}
        return structure_hash(trace) in hashes

    def check_gpu(self, name: str) -> None:
        """Raise `RecipeError` where the results so far are of another GPU than `name`."""
        if self.results is not None and self.results.gpu != name:
            problem = f"results in '{self.folder}' are of {self.results.gpu}, this is {name}; give another folder"
            raise RecipeError(self.recipe.name, problem)

    def add(
        self,
        case: Case,
        trace: Trace,
        predictions: Predictions,
        chosen: Chosen,
        measured: Sequence[Measurement],
        command: str,
        tried: Sequence[tuple[int, ...]],
    ) -> None:
        gpu = measured[0].gpu
        today = datetime.date.today().isoformat()
        versions = {"driver": gpu.driver, "cuda": gpu.cuda, "torch": gpu.torch, "cudnn": gpu.cudnn}
        rows: list[ResultCase] = []
        self.replayed = [each for each in self.replayed if each.trace != trace.name]
        for each, schedule, peak, of_trial in zip(measured, chosen.schedules, chosen.peaks, tried, strict=True):
            row = result_case(case, trace, chosen, each, peak)
            run = {"commit": predictions.code, "date": today, "versions": versions}
            rows.append(msgspec.structs.replace(row, **run, kernels=kernels_of(schedule), tried_ns=of_trial))
            self.replayed.append(ReplayedSchedule.of(trace, schedule, each))
        if self.results is None:
            self.results = Results(
                schema=SCHEMA,
                recipe=self.recipe.name,
                gpu=gpu.name,
                date=today,
                command=command,
                hardware=predictions.hardware,
                versions=versions,
                cases=tuple(rows),
            )
        else:
            earlier = tuple(row for row in self.results.cases if row.trace != trace.name)
            self.results = msgspec.structs.replace(self.results, cases=(*earlier, *rows))
        write_replayed(self.replayed, write_results(self.results, self.folder))
