"""Run of a recipe: capture, explore, replay, compare; GPU work in processes of its own.

A capture holds the profiler, which torch allows once per process, and a failed case must not stop the others. Exploring
needs no GPU: the next steps are explored during a replay.
"""

from __future__ import annotations

import datetime
import multiprocessing
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from pathlib import Path
from typing import TypeVar

import msgspec

from gpusim.errors import GpuError, GpusimError, RecipeError, TraceError
from gpusim.formats.measurement import Measurement
from gpusim.formats.pairs import PairCase
from gpusim.formats.recipe import Case, Recipe
from gpusim.formats.results import SCHEMA, ResultCase, Results
from gpusim.formats.trace import Trace
from gpusim.gpu.isolate import alone
from gpusim.io.files import make_folder
from gpusim.io.processes import end_with_parent
from gpusim.io.scratch import scratch_folder
from gpusim.trace.store import bundled_traces, read_trace
from gpusim.trace.trust import check_trace_code
from gpusim.units import counted
from gpusim.validation.case_work import (
    add_variants,
    capture_case,
    measure_pairs_of,
    replay_chosen,
    result_case,
)
from gpusim.validation.chosen import Chosen, choose_schedules
from gpusim.validation.pair_results import write_pairs
from gpusim.validation.recipe import check_recipe_code
from gpusim.validation.replayed import ReplayedSchedule, write_replayed
from gpusim.validation.tables import write_results
from gpusim.version import code_version

Result = TypeVar("Result")

EXPLORE_WORKERS = 2


def run_recipe(
    recipe: Recipe, folder: Path, command: str, say: Callable[[str], None], *, trust_code: bool = False
) -> Results:
    """Run all cases; results are written after each, so that an interrupt loses only the current case.

    A case that fails is reported and left out; where all fail, the first error is raised. Raises `TrustError` for a
    recipe that names a Python file, unless `trust_code`; a trace with code fails its own case.
    """
    check_recipe_code(recipe, recipe.name, trust_code)
    for name in ("trials", "neighbours"):
        if getattr(recipe, name):
            problem = f"{name} need stages: `gpusim validate` with --stage or --case"
            raise RecipeError(recipe.name, problem, place=f"$.{name}")
    make_folder(folder, "results")
    with scratch_folder() as scratch:
        place = scratch if recipe.traces is None else Path(recipe.traces)
        make_folder(place, "traces")
        return _Run(recipe, folder, command, say, place, trust_code).all()


class _Run:
    """State of one run: the measurements so far."""

    def __init__(
        self,
        recipe: Recipe,
        folder: Path,
        command: str,
        say: Callable[[str], None],
        traces: Path,
        trust_code: bool,
    ) -> None:
        self.recipe, self.folder, self.command, self.say, self.traces = recipe, folder, command, say, traces
        self.trust_code = trust_code
        self.rows: list[ResultCase] = []
        self.replayed: list[ReplayedSchedule] = []
        self.pairs: list[PairCase] = []
        self.errors: list[GpusimError] = []
        self.results: Results | None = None

    def all(self) -> Results:
        captured = [(case, self._step(self._trace_of, case)) for case in self.recipe.case]
        spawn = multiprocessing.get_context("spawn")
        # Not during captures, which measure the host's pace.
        with ProcessPoolExecutor(EXPLORE_WORKERS, mp_context=spawn, initializer=end_with_parent) as explorers:
            waiting = [
                (case, path, explorers.submit(choose_schedules, path, self.recipe))
                for case, path in captured
                if path is not None
            ]
            for case, path, choosing in waiting:
                if not choosing.done():
                    self.say(f"choosing schedules of {path.name}")
                chosen = self._step(choosing.result)
                if chosen is None:
                    continue
                tried = f" after a trial of {len(chosen.contenders)}" if chosen.contenders else ""
                self.say(f"replaying {counted(len(chosen.schedules), 'schedule')} of {path.name}{tried}")
                replayed = self._step(alone, replay_chosen, path, chosen, self.recipe, self.command, self.trust_code)
                measured = None
                if replayed is not None:
                    chosen, measured = replayed
                if measured is not None:
                    self._add(case, read_trace(path), chosen, measured)
                if measured is not None and self.recipe.pairs:
                    pairs = self._step(alone, measure_pairs_of, path, self.recipe)
                    self._add_pairs(pairs or [], case)
        if self.results is None:
            raise self.errors[0]
        return self.results

    def _trace_of(self, case: Case) -> Path:
        """Return the case's trace file, captured or extended by variants now where the recipe says so."""
        path: Path
        if case.trace is not None:
            given = bundled_traces().get(case.trace, Path(case.trace))
            trace = read_trace(given)
            check_trace_code(trace, str(given), self.trust_code)
            if trace.ground_truth is None:
                raise TraceError(str(given), "has no measured times", place="$.ground_truth")
            if not case.variants:
                return given
            path = add_variants(trace, self.traces, self.recipe.seed)
            self.say(f"measured the variants of {path.name}")
            return path
        self.say(f"capturing {case.trace_name}")
        path = alone(capture_case, case, self.traces, self.recipe.seed, self.command)
        self.say(f"captured {path.name}")
        return path

    def _step(self, work: Callable[..., Result], *args: object) -> Result | None:
        try:
            return work(*args)
        except BrokenProcessPool as cause:
            error: GpusimError = GpuError(f"a process that explored died: {cause}")
        except GpusimError as cause:
            error = cause
        self.errors.append(error)
        self.say(f"failed: {error}")
        return None

    def _add(self, case: Case, trace: Trace, chosen: Chosen, measured: list[Measurement]) -> None:
        for measurement, schedule, peak in zip(measured, chosen.schedules, chosen.peaks, strict=True):
            row = result_case(case, trace, chosen, measurement, peak)
            self.rows.append(row)
            self.replayed.append(ReplayedSchedule.of(trace, schedule, measurement))
            self.say(f"{row.trace} {row.policy} {row.streams}: {row.speedup:.2f}x, prediction error {row.error:+.1%}")
        gpu = measured[0].gpu
        self.results = Results(
            schema=SCHEMA,
            recipe=self.recipe.name,
            gpu=gpu.name,
            date=datetime.date.today().isoformat(),
            command=self.command,
            hardware=chosen.hardware,
            gpusim=code_version(),
            versions={"driver": gpu.driver, "cuda": gpu.cuda, "torch": gpu.torch, "cudnn": gpu.cudnn},
            cases=tuple(self.rows),
        )
        path = write_results(self.results, self.folder)
        write_replayed(self.replayed, path)

    def _add_pairs(self, pairs: list[PairCase], case: Case) -> None:
        assert self.results is not None
        self.pairs += [msgspec.structs.replace(pair, fitted=case.fitted) for pair in pairs]
        if pairs:
            write_pairs(self.results, self.pairs, self.folder)
            self.say(f"{pairs[0].trace}: {len(pairs)} pairs and triples of kernels")
