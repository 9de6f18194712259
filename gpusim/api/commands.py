"""Functions of commands beyond the public API: bundled files, benchmarks, comparisons, checks of the rules."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from gpusim.api.gpu import MISSING_TORCH, MISSING_TORCH_TO_ESTIMATE, needs_torch
from gpusim.api.predict import simulate
from gpusim.api.resolve import Say
from gpusim.errors import HardwareError, MeasurementError, PlanError
from gpusim.formats.hardware import HardwareModel, bundled_hardware, load_hardware, read_hardware
from gpusim.formats.trace import Dtype, Frontend, MemoryFormat, Mode
from gpusim.step import Step, load
from gpusim.trace.store import bundled_traces, load_trace, read_manifest
from gpusim.units import counted

if TYPE_CHECKING:
    from gpusim.analysis.engine_benchmark import Bench
    from gpusim.analysis.hardware_comparison import Difference
    from gpusim.formats.measurement import Measurement
    from gpusim.formats.results import Results
    from gpusim.formats.rules import Rules
    from gpusim.memplan.measured import MemorySnapshot
    from gpusim.plan.schedule import Schedule
    from gpusim.policies.registry import RegisteredPolicy
    from gpusim.search.explored import Explored
    from gpusim.search.trial import Trial


def trace_entries() -> list[dict[str, object]]:
    """Return the manifest entry of each bundled trace, or at least its name."""
    entries = {entry["name"]: entry for entry in read_manifest()}
    return [entries.get(name, {"name": name}) for name in bundled_traces()]


def hardware_models() -> list[HardwareModel]:
    """Return the bundled hardware models."""
    return [read_hardware(path) for path in bundled_hardware().values()]


def registered_policies() -> list[RegisteredPolicy]:
    """Return the registered policies."""
    from gpusim.policies.registry import POLICIES

    return list(POLICIES.values())


def hardware_model(name: str) -> HardwareModel:
    """Load a hardware model by bundled name or file. Raises `HardwareError`, `UnknownNameError`."""
    return load_hardware(name)


def compare_hardware(first: str, second: str, judged_by: tuple[str, ...]) -> list[Difference]:
    """Compare every measured number of two models of one GPU, with the effect on predictions of bundled steps."""
    from gpusim.analysis.hardware_comparison import compare

    models = load_hardware(first), load_hardware(second)
    try:
        return list(compare(*models, [load_trace(name) for name in judged_by]))
    except (PlanError, HardwareError) as cause:
        raise HardwareError(f"{first} and {second}", f"cannot be compared: {cause}") from cause


def read_memory_snapshot(path: Path) -> MemorySnapshot:
    """Read a memory snapshot of a measured run. Raises `MeasurementError`."""
    from gpusim.memplan.measured import read_snapshot

    return read_snapshot(path)


def bench(step: Step, round_s: float, say: Say) -> Bench:
    """Measure the schedules that each engine simulates per second on this machine."""
    from gpusim.analysis.engine_benchmark import bench as run

    with step.naming():
        return run(step.trace, step.hardware, round_s=round_s, report=say)


def predicted_eager_ns(step: Step, engine: str) -> int | None:
    """Return the predicted time of the eager step in ns; None for a trace without host times."""
    from gpusim.engine.base import engine_by_name
    from gpusim.search.eager import predict_eager

    return predict_eager(step.graph, engine_by_name(engine))


@dataclass(frozen=True)
class CapturedSpec:
    """A captured step, with the errors of the rebuilt step against the model."""

    step: Step
    loss_error: float
    gradient_error: float


def capture_spec(
    spec: str,
    *,
    mode: Mode,
    batch: int,
    dtype: Dtype,
    memory_format: MemoryFormat,
    frontend: Frontend,
    style: str,
    variants: bool,
    counters: bool,
    estimate_for: str | None,
    seed: int,
    command: str,
    say: Say,
) -> CapturedSpec:
    """Capture one step of a named network or of a file's function.

    With `estimate_for`, a hardware model, nothing runs and kernels are estimated for its GPU. Raises `CaptureError`,
    and `GpuError` without torch, or without a GPU unless kernels are estimated.
    """
    with needs_torch(MISSING_TORCH if estimate_for is None else MISSING_TORCH_TO_ESTIMATE):
        from gpusim.gpu.capture.capture import capture
        from gpusim.gpu.capture.counters import find_ncu, with_counters
        from gpusim.gpu.capture.options import CaptureOptions
    options = CaptureOptions(
        spec=spec,
        mode=mode,
        batch=batch,
        dtype=dtype,
        memory_format=memory_format,
        frontend=frontend,
        style=style,
        seed=seed,
        variants=variants,
        command=command,
    )
    if estimate_for is not None:
        from gpusim.gpu.capture.estimate import capture_estimated

        hardware = load_hardware(estimate_for)
        return CapturedSpec(load(capture_estimated(options, hardware, say), hardware), 0.0, 0.0)
    if counters:
        find_ncu()  # before the long work
    captured = capture(options, say)
    trace = with_counters(captured.trace, seed, say) if counters else captured.trace
    return CapturedSpec(load(trace), captured.loss_error, captured.gradient_error)


def rule_experiments() -> tuple[str, ...]:
    """Return the names of the experiments of `check_rules`."""
    from gpusim.formats.rules import EXPERIMENTS

    return EXPERIMENTS


def check_rules(model: HardwareModel, command: str, say: Say, only: Sequence[str] = ()) -> Rules:
    """Check the rules of the engines on this machine's GPU and return the report; `only` names some experiments.

    Raises `GpuError`.
    """
    with needs_torch():
        from gpusim.gpu.calibrate.rules import check_rules as run
    return run(model, command, say, only)


def require_equal(measurement: Measurement) -> None:
    """Raise `ReplayError` if the outputs of a replay differ from those of the sequential run."""
    with needs_torch():
        from gpusim.gpu.replay.replay import require_equal as check
    check(measurement)


def require_gpu_alone() -> None:
    """Raise `GpuError` without a GPU; the check runs in a separate process, so this one never uses the GPU."""
    from gpusim.gpu.isolate import alone

    with needs_torch():
        from gpusim.gpu.device import require_gpu
    alone(require_gpu)


def validation_results(source: str | None) -> list[Results]:
    """Read the results of a file or folder, or the bundled ones. Raises `MeasurementError`."""
    from gpusim.formats.results import read_all_results, read_results
    from gpusim.io.resources import resource_dir

    path = resource_dir("validate/results") if source is None else Path(source)
    if not os.path.isdir(path):  # `Path.is_dir` raises for a name that is too long
        return [read_results(path)]
    results = list(read_all_results(path).values())
    if not results:
        raise MeasurementError(str(path), "has no file of results (gpusim validate -o)")
    return results


def try_best(
    explored: Explored, count: int, *, command: str, say: Say, trust_code: bool = False
) -> tuple[Explored, Trial]:
    """Try the `count` schedules predicted best on the GPU; the fastest becomes the exploration's best.

    Raises as `gpusim.gpu.trial.try_best` does.
    """
    from gpusim.gpu.trial import try_best as run

    return run(explored, count, command=command, say=say, trust_code=trust_code)


def write_measurement(measurement: Measurement, path: Path) -> None:
    """Write a measurement as JSON, atomically. Raises `OutputError`."""
    from gpusim.formats.measurement import write_measurement as write

    write(measurement, path)


def write_side_by_side(
    step: Step, schedule: Schedule, path: Path, seed: int, measurement: Measurement, trust_code: bool
) -> None:
    """Write simulated and measured timelines of a schedule to one Perfetto file, with its measurement. Needs a GPU."""
    from gpusim.report.perfetto import run_from_kineto, run_from_timeline, write_perfetto

    with needs_torch():
        from gpusim.gpu.measured_timeline import measured_events
    simulated = simulate(step, schedule)
    events = measured_events(step.graph, schedule, seed, trust_code)
    title = f"{schedule.policy}, {counted(schedule.stream_count, 'stream')}"
    runs = [
        run_from_timeline(simulated.recorded, simulated.ran.trace, f"simulated: {title}", step.hardware),
        run_from_kineto(events, f"measured (profiled replay): {title}"),
    ]
    write_perfetto(path, runs, measurement)
