"""Quick measurements of the schedules of a case, contender by contender; a file keeps those of an interrupted run.

It lies beside the recipe's results until the case is among them.
"""

from __future__ import annotations

import datetime
from pathlib import Path
from typing import Final, Literal

import msgspec

from gpusim.errors import RecipeError
from gpusim.formats.recipe import Recipe
from gpusim.io.files import Count, Document, PositiveNanoseconds, read_document, write_document
from gpusim.io.packed import is_file
from gpusim.plan.graph import OpGraph
from gpusim.trace.store import read_trace, trace_sha256
from gpusim.validation.case_work import collected_before
from gpusim.validation.chosen import Chosen, hardware_of
from gpusim.validation.fair import contenders_of
from gpusim.version import code_version

SCHEMA: Final = "gpusim-trials/1"
SUFFIX: Final = ".trials.json.gz"


class Tried(Document, frozen=True, kw_only=True):
    """Schedules of one contender, by their numbers in the predictions, and their times in turns."""

    schedules: tuple[Count, ...]
    times_ns: tuple[PositiveNanoseconds, ...]


class Trials(Document, frozen=True, kw_only=True):
    """Contenders tried so far."""

    schema: Literal["gpusim-trials/1"]
    recipe: str
    trace: str
    predictions_sha256: str
    """Hash of the file with all schedules that are to be tried."""
    gpu: str
    date: str
    gpusim: str
    tried: tuple[Tried, ...]


def trials_path(folder: Path, recipe: Recipe, trace: str) -> Path:
    """Return the path of a case's trials, in the folder of the recipe's results."""
    return folder / f"{recipe.name}_{trace}{SUFFIX}"


def try_schedules(
    path: Path, predicted: Path, chosen: Chosen, recipe: Recipe, file: Path, trust_code: bool
) -> list[int]:
    """Return the time of each chosen schedule in a quick measurement, in ns; `file` keeps it, contender by contender.

    Call it in a process of its own. Contenders in `file` are not tried again. Raises `RecipeError` for trials of other
    predictions or on another GPU, and the errors of `replay`.
    """
    from gpusim.gpu.device import gpu_facts, require_gpu
    from gpusim.gpu.replay.replay import try_groups

    trace = read_trace(path)
    graph = OpGraph.build(trace, hardware_of(trace))
    require_gpu()
    trials = Trials(
        schema=SCHEMA,
        recipe=recipe.name,
        trace=trace.name,
        predictions_sha256=trace_sha256(predicted),
        gpu=gpu_facts().name,
        date=datetime.date.today().isoformat(),
        gpusim=code_version(),
        tried=(),
    )
    if is_file(file):
        trials = read_trials(file, trials)
    known = {each.schedules for each in trials.tried}
    groups = [numbers for numbers in contenders_of(chosen.schedules) if numbers not in known]

    with collected_before() as pass_over:

        def keep(group: int, times_ns: list[int]) -> None:
            nonlocal trials
            tried = Tried(schedules=groups[group], times_ns=tuple(times_ns))
            trials = msgspec.structs.replace(trials, tried=(*trials.tried, tried))
            write_document(file, trials)
            pass_over()

        if groups:
            schedules = [[chosen.schedules[number] for number in numbers] for numbers in groups]
            try_groups(graph, schedules, seed=recipe.seed, trust_code=trust_code, done=keep)
    of_schedule = {
        number: ns for each in trials.tried for number, ns in zip(each.schedules, each.times_ns, strict=True)
    }
    return [of_schedule[number] for number in range(len(chosen.schedules))]


def read_trials(file: Path, new: Trials) -> Trials:
    """Return the trials in a file, which must be of the predictions and the GPU of `new`. Raises `RecipeError`."""
    kept = read_document(file, Trials, SCHEMA, RecipeError)
    if kept.predictions_sha256 != new.predictions_sha256:
        raise RecipeError(str(file), "trials of other predictions; remove the file", place="$.predictions_sha256")
    if kept.gpu != new.gpu:
        raise RecipeError(str(file), f"trials on {kept.gpu}, this is {new.gpu}; give another folder", place="$.gpu")
    if any(len(each.schedules) != len(each.times_ns) for each in kept.tried):
        raise RecipeError(str(file), "as many times as schedules are needed", place="$.tried")
    return kept
