"""New predictions, by the current model, of schedules that a recipe replayed. Needs no GPU."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Iterator, Mapping
from pathlib import Path

import msgspec

from gpusim.defaults import RECOMMENDED
from gpusim.engine.fast import FastEngine
from gpusim.errors import MeasurementError, RecipeError
from gpusim.formats.recipe import Recipe
from gpusim.formats.results import ResultCase, Results, read_results
from gpusim.io.files import read_toml
from gpusim.io.packed import files_in, is_file, is_folder
from gpusim.plan.anchor import anchored_to
from gpusim.plan.graph import OpGraph
from gpusim.plan.lower import lower
from gpusim.plan.schedule import Schedule
from gpusim.rules.anchor import is_as_captured
from gpusim.trace.store import bundled_traces, read_trace, structure_hash
from gpusim.validation.chosen import hardware_of
from gpusim.validation.memory_again import memory_again, plans_path
from gpusim.validation.recipe import is_search
from gpusim.validation.replayed import SUFFIX, read_replayed, wrong_trace
from gpusim.validation.stages import trace_path


def trace_files(results: Path) -> dict[str, Path]:
    """Return the trace files that a results file's cases may refer to, by name.

    Traces named in its recipe, in the folder above, take precedence; then those next to the results, then the bundled
    ones. Next to `results/` is `traces/`; its subfolder with the recipe's name has the traces of this recipe alone.
    Raises `MeasurementError` or `RecipeError`.
    """
    place = results.absolute().parent.parent  # `results` may be a bare file name
    name = read_results(results).recipe
    folders = (place / "traces", place / "traces" / name)
    stored = {file.name.removesuffix(".json.gz"): file for folder in folders for file in files_in(folder, ".json.gz")}
    # Not `read_recipe`, which resolves traces: paths in a recipe are relative to where it was run.
    recipe = place / f"{name}.toml"
    files = []
    if os.path.isfile(recipe):
        read = read_toml(recipe, Recipe, RecipeError)
        named = [case for case in read.case if case.trace is not None and case.trace.endswith(".json.gz")]
        files = [place.parent / trace_path(case, read) for case in named]
    given = {file.name.removesuffix(".json.gz"): file for file in files if is_file(file)}
    return {**bundled_traces(), **stored, **given}


def traces_in(folder: Path) -> dict[str, Path]:
    """Return the traces `NAME.json.gz` of a folder, by name. Raises `MeasurementError` where there is no such
    folder.
    """
    if not is_folder(folder):
        raise MeasurementError(str(folder), "there is no such folder of traces")
    return {file.name.removesuffix(".json.gz"): file for file in files_in(folder, ".json.gz")}


def replayed_schedules(
    results: Path, traces: Mapping[str, Path] | None = None
) -> Iterator[tuple[ResultCase, OpGraph, Schedule]]:
    """Yield each case of a results file with the op graph of its step and its schedule.

    `traces` take precedence over those of `trace_files`. The schedules are in the file next to it
    (`gpusim.validation.replayed`), one per case. Raises `MeasurementError` where they belong to other cases, or a trace
    is missing or has changed, and `ScheduleError` where one is illegal for its trace.
    """
    files = {**trace_files(results), **(traces or {})}
    cases = read_results(results).cases
    schedules_file = results.with_name(results.stem + SUFFIX)
    if not is_file(schedules_file):
        problem = f"there is no {schedules_file.name} next to it, so no schedules to predict again"
        raise MeasurementError(str(results), f"{problem} (steps of gpusim.optimize have none)")
    schedules = read_replayed(schedules_file)
    if len(schedules) != len(cases):
        raise MeasurementError(str(results), f"has {len(cases)} cases, and {len(schedules)} schedules next to it")
    searched = {(each.trace, each.schedule) for each in schedules if is_search(each.policy)}
    graphs: dict[str, OpGraph] = {}
    hashes: dict[str, str] = {}
    for number, (case, schedule) in enumerate(zip(cases, schedules, strict=True)):
        if (schedule.trace, schedule.policy, schedule.measured_ns) != (case.trace, case.policy, case.measured_ns):
            raise MeasurementError(str(results), f"{case.trace} {case.policy} does not match its schedule")
        if case.trace not in graphs:
            if case.trace not in files:
                raise MeasurementError(str(results), f"there is no trace '{case.trace}' next to it or bundled")
            trace = read_trace(files[case.trace])
            graphs[case.trace] = OpGraph.build(trace, hardware_of(trace))
            hashes[case.trace] = structure_hash(trace)
        graph = graphs[case.trace]
        if schedule.trace_hash != hashes[case.trace]:
            raise wrong_trace(results, case.trace, files[case.trace])
        chosen = zip(schedule.variants, graph.trace.ops, strict=True) if len(schedule.variants) == len(graph) else ()
        if files[case.trace] == bundled_traces().get(case.trace) and any(v > len(op.variants) for v, op in chosen):
            raise wrong_trace(results, case.trace, files[case.trace], "without the kernels that its schedules choose")
        checked = schedule.schedule.check(graph, f"{schedules_file}: $.schedules[{number}]")
        found = is_search(case.policy) or (case.policy == RECOMMENDED and (case.trace, checked) in searched)
        yield case, graph, dataclasses.replace(checked, searched=found)


def predict_again(results: Path, traces: Mapping[str, Path] | None = None) -> tuple[Results, Results]:
    """Return a results file as stored, and with new predictions of its schedules or memory plans.

    `traces` and what is raised are as for `replayed_schedules`.
    """
    then = read_results(results)
    if is_file(plans_path(results)):
        return then, memory_again(results, then, {**trace_files(results), **(traces or {})})
    engine = FastEngine()
    now = [_predicted(*each, engine) for each in replayed_schedules(results, traces)]
    return then, msgspec.structs.replace(then, cases=tuple(now))


def anchored_again(results: Path, traces: Mapping[str, Path] | None = None) -> dict[int, ResultCase]:
    """Return new predictions of schedules beside a sequential graph that is not as captured, by number of case.

    They are anchored to the sequential graph of the same run. `traces` and what is raised are as for
    `replayed_schedules`; there are none for memory plans, and for traces without a capture's times.
    """
    if is_file(plans_path(results)):
        return {}
    engine = FastEngine()
    graphs: dict[tuple[str, int], OpGraph] = {}
    found: dict[int, ResultCase] = {}
    for number, (case, graph, schedule) in enumerate(replayed_schedules(results, traces)):
        times_ns = case.sequential_times_ns
        as_captured = all(is_as_captured(case.predicted_sequential_ns, time_ns) for time_ns in times_ns)
        if graph.trace.ground_truth is None or as_captured:
            continue
        key = case.trace, case.sequential_ns
        if key not in graphs:
            trace = anchored_to(graph.trace, case.sequential_ns)
            graphs[key] = OpGraph.build(trace, hardware_of(trace))
        found[number] = _predicted(case, graphs[key], schedule, engine)
    return found


def _predicted(case: ResultCase, graph: OpGraph, schedule: Schedule, engine: FastEngine) -> ResultCase:
    """Return a case with the prediction and the interval of today."""
    predicted_ns = engine.run(lower(graph, schedule, memory=False), graph.hardware).makespan_ns
    interval_ns = schedule.interval_ns(graph, predicted_ns)
    return msgspec.structs.replace(case, predicted_ns=predicted_ns, predicted_interval_ns=interval_ns)
