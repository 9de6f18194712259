"""Running a recipe: capture, explore, replay, compare; each on the GPU in a process of its own.

A capture holds the profiler, and torch allows one session a process; and a case that fails must not take the others
along. Exploring needs no GPU and goes on beside the captures.
"""

from __future__ import annotations

import datetime
import multiprocessing
import tempfile
from collections.abc import Callable
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from gpusim.errors import GpuError, GpusimError, OutputError
from gpusim.hardware.model import HardwareModel, hardware_for_gpu, load_hardware
from gpusim.plan.measurement import Measurement
from gpusim.plan.schedule import Schedule, make_schedule
from gpusim.recipes.recipe import Case, Recipe
from gpusim.report.results import SCHEMA, ResultCase, Results, write_results
from gpusim.runtime.isolate import alone
from gpusim.search.explore import SEARCH, explore
from gpusim.trace.schema import Trace
from gpusim.trace.store import read_trace, write_trace

Result = TypeVar("Result")

EXPLORE_WORKERS = 4
DEFAULT_HARDWARE = "h200"


@dataclass(frozen=True)
class _Explored:
    """What is needed of an exploration to replay it."""

    schedules: tuple[Schedule, ...]
    peaks: tuple[int, ...]
    worth_it: bool
    bounds_ns: dict[str, int]
    hardware: str


def run_recipe(recipe: Recipe, folder: Path, command: str, say: Callable[[str], None]) -> Results:
    """Run all cases; results are written after each, so that an interrupt loses only the case at hand.

    A case that fails is reported and left out; where all fail, the first error is raised.
    """
    if not folder.is_dir():
        raise OutputError(str(folder), "there is no such folder for the results")
    with tempfile.TemporaryDirectory() as scratch:
        place = Path(scratch if recipe.traces is None else recipe.traces)
        try:
            place.mkdir(parents=True, exist_ok=True)
        except OSError as cause:
            raise OutputError(str(place), f"no folder for the traces: {cause.strerror or cause}") from cause
        return _Run(recipe, folder, command, say, place).all()


class _Run:
    """State of one run: what has been measured so far."""

    def __init__(self, recipe: Recipe, folder: Path, command: str, say: Callable[[str], None], traces: Path) -> None:
        self.recipe, self.folder, self.command, self.say, self.traces = recipe, folder, command, say, traces
        self.rows: list[ResultCase] = []
        self.errors: list[GpusimError] = []
        self.results: Results | None = None

    def all(self) -> Results:
        spawn = multiprocessing.get_context("spawn")
        with ProcessPoolExecutor(EXPLORE_WORKERS, mp_context=spawn) as explorers:
            waiting: list[tuple[Case, Path, Future[_Explored]]] = []
            for case in self.recipe.case:
                path = self._step(alone, _capture, case, self.traces, self.recipe.seed, self.command)
                if path is not None:
                    self.say(f"captured {path.name}")
                    waiting.append((case, path, explorers.submit(_explore, path, self.recipe)))
            for case, path, exploring in waiting:
                found = self._step(exploring.result)
                if found is None:
                    continue
                measured = self._step(alone, _replay, path, found.schedules, self.recipe.seed, self.command)
                if measured is not None:
                    self._add(case, read_trace(path), found, measured)
        if self.results is None:
            raise self.errors[0]
        return self.results

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

    def _add(self, case: Case, trace: Trace, found: _Explored, measured: list[Measurement]) -> None:
        for measurement, peak in zip(measured, found.peaks, strict=True):
            row = _row(case, trace, found, measurement, peak)
            self.rows.append(row)
            self.say(f"{row.trace} {row.policy}: {row.speedup:.2f}x, prediction error {row.error:+.1%}")
        gpu = measured[0].gpu
        versions = {"driver": gpu.driver, "cuda": gpu.cuda, "torch": gpu.torch, "cudnn": gpu.cudnn}
        self.results = Results(
            schema=SCHEMA,
            recipe=self.recipe.name,
            gpu=gpu.name,
            date=datetime.date.today().isoformat(),
            command=self.command,
            hardware=found.hardware,
            versions=versions,
            cases=tuple(self.rows),
        )
        write_results(self.results, self.folder)


def _capture(case: Case, folder: Path, seed: int, command: str) -> Path:
    from gpusim.runtime.capture import CaptureOptions, capture

    options = CaptureOptions(
        spec=case.spec,
        mode=case.mode,
        batch=case.batch,
        dtype=case.dtype,
        memory_format=case.memory_format,
        frontend=case.frontend,
        seed=seed,
        command=command,
    )
    trace = capture(options).trace
    path = folder / f"{trace.name}.json.gz"
    write_trace(trace, path)
    return path


def _hardware(trace: Trace) -> HardwareModel:
    return hardware_for_gpu(trace.provenance.gpu.name) or load_hardware(DEFAULT_HARDWARE)


def _explore(path: Path, recipe: Recipe) -> _Explored:
    trace = read_trace(path)
    hardware = _hardware(trace)
    explored = explore(trace, hardware, streams=recipe.streams, budget_s=recipe.budget_s, seed=recipe.seed)
    chosen = [explored.best if policy == SEARCH else explored.best_of(policy) for policy in recipe.policies]
    schedules = tuple(
        make_schedule(
            trace,
            row.assignment.order,
            row.assignment.streams,
            policy=policy,
            made_by=explored.schedule.made_by,
            predicted_ns=row.makespan_ns,
        )
        for policy, row in zip(recipe.policies, chosen, strict=True)
    )
    bound = explored.bounds
    return _Explored(
        schedules,
        tuple(row.peak_bytes for row in chosen),
        explored.verdict.worth_it,
        {
            "critical_path": bound.critical_path_ns,
            "area": bound.area_ns,
            "bandwidth": bound.bandwidth_ns,
            "front_end": bound.front_end_ns,
        },
        hardware.label,
    )


def _replay(path: Path, schedules: tuple[Schedule, ...], seed: int, command: str) -> list[Measurement]:
    from gpusim.runtime.replay import replay

    trace = read_trace(path)
    return replay(trace, schedules, _hardware(trace), command=command, seed=seed)


def _row(case: Case, trace: Trace, found: _Explored, measurement: Measurement, peak_bytes: int) -> ResultCase:
    assert trace.ground_truth is not None
    schedule, sequential, outputs = measurement.schedule, measurement.sequential, measurement.outputs
    model = trace.model
    return ResultCase(
        trace=trace.name,
        network=model.network,
        mode=model.mode,
        batch=model.batch,
        dtype=model.dtype,
        memory_format=model.memory_format,
        frontend=model.frontend,
        policy=measurement.policy,
        streams=measurement.streams,
        predicted_ns=measurement.predicted_ns,
        measured_ns=schedule.median_ns,
        interval_ns=(schedule.lo_ns, schedule.hi_ns),
        sequential_ns=sequential.median_ns,
        sequential_interval_ns=(sequential.lo_ns, sequential.hi_ns),
        predicted_sequential_ns=measurement.predicted_sequential_ns,
        slowest_ns=schedule.slowest_ns,
        sequential_slowest_ns=sequential.slowest_ns,
        eager_ns=trace.ground_truth.eager.median_ns,
        outputs_equal=outputs.equal,
        bit_equal=outputs.bit_equal,
        worst_error=outputs.worst_error,
        sequential_error=outputs.sequential_error,
        fitted=case.fitted,
        worth_it=found.worth_it,
        bounds_ns=found.bounds_ns,
        predicted_peak_bytes=peak_bytes,
        measured_peak_bytes=measurement.peak_bytes,
        sequential_peak_bytes=measurement.sequential_peak_bytes,
        events=measurement.events,
        sm_clock_mhz=measurement.gpu.sm_clock_mhz,
    )
