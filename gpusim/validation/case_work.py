"""Steps of a recipe for one case; those on the GPU are module-level functions, to run in their own process."""

from __future__ import annotations

import gc
import statistics
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import msgspec

from gpusim.formats.measurement import Measurement
from gpusim.formats.pairs import PairCase
from gpusim.formats.recipe import Case, Recipe
from gpusim.formats.results import ProcessTimes, ResultCase
from gpusim.formats.trace import Trace
from gpusim.gpu.isolate import stopwatch
from gpusim.gpu.trial import fastest
from gpusim.plan.graph import OpGraph
from gpusim.trace.store import read_trace, write_trace
from gpusim.validation.chosen import Chosen, hardware_of


def capture_case(case: Case, folder: Path, seed: int, command: str) -> Path:
    """Capture a case of a recipe into `folder`, with progress on standard error.

    Raises `CaptureError` and the errors of `capture`.
    """
    from gpusim.gpu.capture.capture import capture
    from gpusim.gpu.capture.options import CaptureOptions

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
    trace = capture(options, stopwatch()).trace
    path = folder / f"{trace.name}.json.gz"
    write_trace(trace, path)
    return path


def add_variants(trace: Trace, folder: Path, seed: int) -> Path:
    """Measure the kernel variants of a trace, and write the trace with them into `folder`."""
    from gpusim.gpu.capture.variants import with_variants

    path = folder / f"{trace.name}.json.gz"
    write_trace(with_variants(trace, seed), path)
    return path


@contextmanager
def collected_before() -> Iterator[Callable[[], None]]:
    """Let the garbage collector pass over all older objects within this context; its value does so again.

    Each recording of a graph collects garbage two or three times, and those of a trace and of torch take longest.
    """

    def pass_over() -> None:
        gc.collect()
        gc.freeze()

    pass_over()
    try:
        yield pass_over
    finally:
        gc.unfreeze()


def replay_chosen(
    path: Path, chosen: Chosen, recipe: Recipe, command: str, trust_code: bool
) -> tuple[Chosen, list[Measurement]]:
    """Measure the chosen schedules; the contender that is fastest in a trial becomes the searched schedule."""
    from gpusim.gpu.replay.replay import replay
    from gpusim.gpu.replay.timing import ROUNDS

    trace = read_trace(path)
    graph = OpGraph.build(trace, hardware_of(trace))
    with collected_before():
        if chosen.contenders:
            times_ns, _ = fastest(graph, chosen.contenders, recipe.seed, trust_code=trust_code)
            chosen = chosen.with_searched(times_ns)
        measured = replay(
            graph,
            chosen.schedules,
            command=command,
            seed=recipe.seed,
            recordings=recipe.recordings,
            rounds=recipe.rounds or ROUNDS,
            trust_code=trust_code,
        )
    return chosen, measured


def measure_pairs_of(path: Path, recipe: Recipe) -> list[PairCase]:
    """Run pairs and triples of a trace's kernels concurrently, as many as the recipe asks for."""
    from gpusim.gpu.calibrate.pairs import measure_pairs

    trace = read_trace(path)
    return measure_pairs(trace, hardware_of(trace), recipe.pairs, recipe.seed)


def result_case(case: Case, trace: Trace, chosen: Chosen, measurement: Measurement, peak_bytes: int) -> ResultCase:
    """Return one row of a results file. `peak_bytes` is the predicted peak memory."""
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
        link=measurement.link,
        processes=(process_times(measurement),),
    )


def process_times(measurement: Measurement) -> ProcessTimes:
    """Return the times of the process that made a measurement."""
    return ProcessTimes(
        measured_ns=measurement.schedule.median_ns,
        sequential_ns=measurement.sequential.median_ns,
        date=measurement.date,
        gpu_id=measurement.gpu_id,
        gpusim=measurement.gpusim,
    )


def with_process(row: ResultCase, measurement: Measurement) -> ResultCase:
    """Add one more process to a row: times are the median of its processes, with their range as interval.

    Outputs are equal if they are in each process. Predictions stay.
    """
    outputs, schedule, sequential = measurement.outputs, measurement.schedule, measurement.sequential
    processes = (*row.processes, process_times(measurement))
    measured_ns = [each.measured_ns for each in processes]
    sequential_ns = [each.sequential_ns for each in processes]
    return msgspec.structs.replace(
        row,
        processes=processes,
        measured_ns=round(statistics.median(measured_ns)),
        interval_ns=(min(measured_ns), max(measured_ns)),
        fastest_ns=min(row.fastest_ns, schedule.fastest_ns),
        slowest_ns=max(row.slowest_ns, schedule.slowest_ns),
        sequential_ns=round(statistics.median(sequential_ns)),
        sequential_interval_ns=(min(sequential_ns), max(sequential_ns)),
        sequential_fastest_ns=min(row.sequential_fastest_ns, sequential.fastest_ns),
        sequential_slowest_ns=max(row.sequential_slowest_ns, sequential.slowest_ns),
        outputs_equal=row.outputs_equal and outputs.equal,
        bit_equal=row.bit_equal and outputs.bit_equal,
        outputs_sensitive=row.outputs_sensitive and outputs.sensitive,
        worst_error=max(row.worst_error, outputs.worst_error),
        sequential_error=max(row.sequential_error, outputs.sequential_error),
        measured_peak_bytes=max(row.measured_peak_bytes, measurement.peak_bytes),
        sequential_peak_bytes=max(row.sequential_peak_bytes, measurement.sequential_peak_bytes),
    )
