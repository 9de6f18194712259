"""A recipe in stages, over several days: capture (GPU), predict (no GPU), measure (GPU).

Each stage skips work of earlier runs, so that an interrupted one is simply run again. Predictions are files that can be
committed between capture and measurement; measured cases are added to the newest results file of the recipe.
"""

from __future__ import annotations

import dataclasses
import datetime
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Literal

import msgspec

from gpusim.errors import GpusimError, RecipeError
from gpusim.formats.measurement import Measurement
from gpusim.formats.recipe import Case, Recipe
from gpusim.formats.results import SCHEMA, ResultCase, Results, read_all_results
from gpusim.formats.trace import Trace
from gpusim.gpu.isolate import alone
from gpusim.io.files import make_folder
from gpusim.io.packed import is_file
from gpusim.plan.graph import OpGraph
from gpusim.trace.store import bundled_traces, read_trace, structure_hash, write_trace
from gpusim.validation.case_work import capture_case, replay_chosen, result_case, with_process
from gpusim.validation.chosen import Chosen, choose_schedules, hardware_of
from gpusim.validation.fair import IOS, counts_of, fastest_of_each, kernels_of
from gpusim.validation.memory_stages import MemoryResults, measured_or_said, predict_memory
from gpusim.validation.predictions import (
    Predictions,
    predictions_of,
    predictions_path,
    read_predictions,
    write_predictions,
)
from gpusim.validation.recipe import MEASURED_IOS, check_numbers
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
    check_numbers(recipe, numbers, recipe.name)
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
                    say(f"capturing {case.trace_name}")
                    path = alone(capture_case, case, path.parent, recipe.seed, command)
            except GpusimError as cause:
                errors.append(cause)
                say(f"failed: {case.spec or case.trace}: {cause}")
                continue
            say(f"captured {path.name}")
        if MEASURED_IOS in recipe.policies and not is_file(stage_times_path(path, recipe)):
            trace = read_trace(path)
            graph = OpGraph.build(trace, hardware_of(trace))
            measure_stages_of(path, graph, recipe, counts_of(IOS, recipe.streams), command)
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
            say(f"not captured yet: {path}")
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
        raise RecipeError(
            recipe.name,
            f"no case is captured yet in {os.path.abspath(recipe.traces or '.')}: run the stage 'capture' first",
        )
    return paths


def measure_stage(
    recipe: Recipe, cases: Sequence[Case], folder: Path, command: str, say: Say, *, trust_code: bool = False
) -> Results:
    """Replay the predicted schedules of each case in as many processes as the recipe asks for and its results lack.

    Results are written after each process, and trials after each contender; a later process, on another day or another
    GPU of the kind, replays the schedules that the first one did.
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
            if joined.has(trace) and joined.lacks(trace) == 0:
                continue
            predicted, trials = predicted_path(case, recipe), trials_path(folder, recipe, trace.name)
            predictions = read_predictions(predicted, path)
            chosen = predictions.chosen(OpGraph.build(trace, hardware_of(trace)), str(predicted))
            if joined.has(trace):
                chosen = joined.chosen(trace, chosen)
            else:
                tried: list[tuple[int, ...]] = [()] * len(chosen.schedules)
                if recipe.trials:
                    times_ns = alone(try_schedules, path, predicted, chosen, recipe, trials, trust_code)
                    of_each = fastest_of_each(chosen.schedules, times_ns)
                    chosen, tried = chosen.only(list(of_each)), list(of_each.values())
                measured = _measured(path, chosen, recipe, command, trust_code, joined)
                joined.add(case, trace, predictions, chosen, chosen.held_to(measured), command, tried)
                trials.unlink(missing_ok=True)
            for _ in range(joined.lacks(trace)):
                joined.add_process(trace, _measured(path, chosen, recipe, command, trust_code, joined))
        except GpusimError as cause:
            errors.append(cause)
            say(f"failed: {cause}")
            continue
        say(f"measured {len(chosen.schedules)} schedules of {trace.name}")
    if errors and len(errors) == len(cases):
        raise errors[0]
    if joined.results is None:
        raise RecipeError(recipe.name, "has no case to measure")
    return joined.results


def _measured(
    path: Path, chosen: Chosen, recipe: Recipe, command: str, trust_code: bool, joined: _Joined
) -> list[Measurement]:
    """Measure the schedules in a process of its own. Raises `RecipeError` for another GPU than that of the results."""
    measured: list[Measurement] = alone(replay_chosen, path, chosen, recipe, command, trust_code)[1]
    joined.check_gpu(measured[0].gpu.name)
    return measured


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

    def lacks(self, trace: Trace) -> int:
        """Return the number of processes that a measured step lacks; rows that do not say their number are complete."""
        rows = () if self.results is None else self.results.cases
        counts = [len(row.processes) for row in rows if row.trace == trace.name and row.processes]
        return max(0, self.recipe.processes - min(counts, default=self.recipe.processes))

    def chosen(self, trace: Trace, chosen: Chosen) -> Chosen:
        """Return `chosen` with the schedules that a measured step's first process replayed."""
        assert self.results is not None
        rows = [row for row in self.results.cases if row.trace == trace.name]
        replayed = [each for each in self.replayed if each.trace == trace.name]
        schedules = tuple(
            dataclasses.replace(each.schedule, predicted_ns=row.predicted_ns)
            for each, row in zip(replayed, rows, strict=True)
        )
        return dataclasses.replace(chosen, schedules=schedules, contenders=())

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
        versions = _versions(measured[0])
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
        self._write()

    def add_process(self, trace: Trace, measured: Sequence[Measurement]) -> None:
        """Add one more process to the rows of a measured step. Raises `RecipeError` for another software version."""
        assert self.results is not None
        left = iter(measured)
        rows: list[ResultCase] = []
        for row in self.results.cases:
            if row.trace == trace.name:
                each = next(left)
                if (row.versions["torch"], row.versions["driver"]) != (each.gpu.torch, each.gpu.driver):
                    problem = (
                        f"{row.trace} was measured with {_software(row.versions)}, this is {_software(_versions(each))}"
                    )
                    raise RecipeError(self.recipe.name, f"{problem}; give another folder")
                row = with_process(row, each)
            rows.append(row)
        self.results = msgspec.structs.replace(self.results, cases=tuple(rows))
        times = iter([row for row in rows if row.trace == trace.name])
        self.replayed = [each.at(next(times)) if each.trace == trace.name else each for each in self.replayed]
        self._write()

    def _write(self) -> None:
        assert self.results is not None
        write_replayed(self.replayed, write_results(self.results, self.folder))


def _versions(measurement: Measurement) -> dict[str, str]:
    gpu = measurement.gpu
    return {"driver": gpu.driver, "cuda": gpu.cuda, "torch": gpu.torch, "cudnn": gpu.cudnn}


def _software(versions: dict[str, str]) -> str:
    return f"torch {versions['torch']}, driver {versions['driver']}"
