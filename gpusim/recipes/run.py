"""Running a recipe: capture, explore, replay, compare; each on the GPU in a process of its own.

A capture holds the profiler, and torch allows one session a process; and a case that fails must not take the others
along. Exploring needs no GPU: the next steps are explored while one is replayed.
"""

from __future__ import annotations

import datetime
import multiprocessing
import tempfile
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from pathlib import Path
from typing import TypeVar

import msgspec

from gpusim.errors import GpuError, GpusimError, OutputError, TraceError
from gpusim.plan.measurement import Measurement
from gpusim.plan.pairs import PairCase
from gpusim.plan.schedule import Schedule, check_schedule, chosen_variants
from gpusim.recipes.chosen import Chosen, choose_schedules, hardware_of
from gpusim.recipes.recipe import Case, Recipe
from gpusim.recipes.trial import fastest
from gpusim.report.pairs import write_pairs
from gpusim.report.replayed import ReplayedSchedule, write_replayed
from gpusim.report.results import SCHEMA, ResultCase, Results
from gpusim.report.results_table import write_results
from gpusim.runtime.isolate import alone
from gpusim.trace.dependencies import dependencies
from gpusim.trace.schema import Trace
from gpusim.trace.store import bundled_traces, read_trace, structure_hash, write_trace
from gpusim.units import counted
from gpusim.version import code_version

Result = TypeVar("Result")

EXPLORE_WORKERS = 2


def run_recipe(recipe: Recipe, folder: Path, command: str, say: Callable[[str], None]) -> Results:
    """Run all cases; results are written after each, so that an interrupt loses only the case at hand.

    A case that fails is reported and left out; where all fail, the first error is raised.
    """
    _make_folder(folder, "results")
    with tempfile.TemporaryDirectory() as scratch:
        place = Path(scratch if recipe.traces is None else recipe.traces)
        _make_folder(place, "traces")
        return _Run(recipe, folder, command, say, place).all()


def _make_folder(folder: Path, what: str) -> None:
    """Raises `OutputError` where there is none and none can be made."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as cause:
        raise OutputError(str(folder), f"no folder for the {what}: {cause.strerror or cause}") from cause


class _Run:
    """State of one run: what has been measured so far."""

    def __init__(self, recipe: Recipe, folder: Path, command: str, say: Callable[[str], None], traces: Path) -> None:
        self.recipe, self.folder, self.command, self.say, self.traces = recipe, folder, command, say, traces
        self.rows: list[ResultCase] = []
        self.replayed: list[ReplayedSchedule] = []
        self.pairs: list[PairCase] = []
        self.errors: list[GpusimError] = []
        self.results: Results | None = None

    def all(self) -> Results:
        captured = [(case, self._step(self._trace_of, case)) for case in self.recipe.case]
        spawn = multiprocessing.get_context("spawn")
        # Not beside the captures: those measure the host's pace.
        with ProcessPoolExecutor(EXPLORE_WORKERS, mp_context=spawn) as explorers:
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
                replayed = self._step(alone, _replay, path, chosen, self.recipe, self.command)
                measured = None
                if replayed is not None:
                    chosen, measured = replayed
                if measured is not None:
                    self._add(case, read_trace(path), chosen, measured)
                if measured is not None and self.recipe.pairs:
                    found = self._step(alone, _pairs, path, self.recipe)
                    self._add_pairs(found or [], case)
        if self.results is None:
            raise self.errors[0]
        return self.results

    def _trace_of(self, case: Case) -> Path:
        """The case's trace file, captured or given variants now where the recipe says so."""
        path: Path
        if case.trace is not None:
            given = bundled_traces().get(case.trace, Path(case.trace))
            trace = read_trace(given)
            if trace.ground_truth is None:
                raise TraceError(str(given), "has no measured times", place="$.ground_truth")
            if not case.variants:
                return given
            path = _vary(trace, self.traces, self.recipe.seed)
            self.say(f"measured the variants of {path.name}")
            return path
        path = alone(_capture, case, self.traces, self.recipe.seed, self.command)
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
            row = _row(case, trace, chosen, measurement, peak)
            self.rows.append(row)
            self.replayed.append(_replayed(trace, schedule, measurement))
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

    def _add_pairs(self, found: list[PairCase], case: Case) -> None:
        assert self.results is not None
        self.pairs += [msgspec.structs.replace(pair, fitted=case.fitted) for pair in found]
        if found:
            write_pairs(self.results, self.pairs, self.folder)
            self.say(f"{found[0].trace}: {len(found)} pairs and triples of kernels")


def _capture(case: Case, folder: Path, seed: int, command: str) -> Path:
    from gpusim.runtime.capture import CaptureOptions, capture

    assert case.spec is not None
    assert case.mode is not None
    assert case.batch is not None
    options = CaptureOptions(
        spec=case.spec,
        mode=case.mode,
        batch=case.batch,
        dtype=case.dtype,
        memory_format=case.memory_format,
        frontend=case.frontend,
        variants=case.variants,
        seed=seed,
        command=command,
    )
    trace = capture(options).trace
    path = folder / f"{trace.name}.json.gz"
    write_trace(trace, path)
    return path


def _vary(trace: Trace, folder: Path, seed: int) -> Path:
    from gpusim.runtime.variant_capture import with_variants

    path = folder / f"{trace.name}.json.gz"
    write_trace(with_variants(trace, seed), path)
    return path


def _replay(path: Path, chosen: Chosen, recipe: Recipe, command: str) -> tuple[Chosen, list[Measurement]]:
    """Measure the chosen schedules; what was searched becomes the contender that is fastest in a trial."""
    from gpusim.runtime.replay import replay

    trace = read_trace(path)
    hardware = hardware_of(trace)
    if chosen.contenders:
        times_ns, _ = fastest(trace, chosen.contenders, hardware, recipe.seed)
        chosen = chosen.with_searched(times_ns)
    measured = replay(
        trace, chosen.schedules, hardware, command=command, seed=recipe.seed, recordings=recipe.recordings
    )
    return chosen, measured


def _pairs(path: Path, recipe: Recipe) -> list[PairCase]:
    from gpusim.runtime.pairs import measure_pairs

    trace = read_trace(path)
    return measure_pairs(trace, hardware_of(trace), recipe.pairs, recipe.seed)


def _replayed(trace: Trace, schedule: Schedule, measurement: Measurement) -> ReplayedSchedule:
    order, stream_of = check_schedule(schedule, trace, dependencies(trace))
    return ReplayedSchedule(
        trace=trace.name,
        trace_hash=structure_hash(trace),
        policy=measurement.policy,
        order=tuple(order),
        stream_of=tuple(stream_of),
        variants=chosen_variants(schedule, trace),
        partitions=schedule.partitions,
        measured_ns=measurement.schedule.median_ns,
        sequential_ns=measurement.sequential.median_ns,
    )


def _row(case: Case, trace: Trace, chosen: Chosen, measurement: Measurement, peak_bytes: int) -> ResultCase:
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
        predicted_interval_ns=measurement.predicted_interval_ns,
        measured_ns=schedule.median_ns,
        interval_ns=(schedule.lo_ns, schedule.hi_ns),
        sequential_ns=sequential.median_ns,
        sequential_interval_ns=(sequential.lo_ns, sequential.hi_ns),
        predicted_sequential_ns=measurement.predicted_sequential_ns,
        fastest_ns=schedule.fastest_ns,
        slowest_ns=schedule.slowest_ns,
        sequential_fastest_ns=sequential.fastest_ns,
        sequential_slowest_ns=sequential.slowest_ns,
        eager_ns=trace.ground_truth.eager.median_ns,
        outputs_equal=outputs.equal,
        bit_equal=outputs.bit_equal,
        outputs_sensitive=outputs.sensitive,
        worst_error=outputs.worst_error,
        sequential_error=outputs.sequential_error,
        fitted=case.fitted,
        worth_it=chosen.worth_it,
        bounds_ns=chosen.bounds_ns,
        predicted_peak_bytes=peak_bytes,
        measured_peak_bytes=measurement.peak_bytes,
        sequential_peak_bytes=measurement.sequential_peak_bytes,
        events=measurement.events,
        sm_clock_mhz=measurement.gpu.sm_clock_mhz,
    )
