"""What commands need beyond the public API: parts of a replay's file, benchmarks, comparisons, checks of the rules."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from gpusim.api import Say, simulate
from gpusim.errors import HardwareError, PlanError
from gpusim.hardware.model import HardwareModel, bundled_hardware, load_hardware, read_hardware
from gpusim.on_gpu import needs_torch
from gpusim.step import Step, load
from gpusim.trace.schema import Dtype, MemoryFormat, Mode
from gpusim.trace.store import bundled_traces, load_trace, read_manifest

if TYPE_CHECKING:
    from gpusim.plan.measurement import Measurement
    from gpusim.plan.rules import Rules
    from gpusim.plan.schedule import Schedule
    from gpusim.policies.registry import RegisteredPolicy
    from gpusim.search.bench import Bench
    from gpusim.search.calibrations import Difference


def trace_entries() -> list[dict[str, object]]:
    """What the manifest says of each bundled trace; its name at least."""
    entries = {entry["name"]: entry for entry in read_manifest()}
    return [entries.get(name, {"name": name}) for name in bundled_traces()]


def hardware_models() -> list[HardwareModel]:
    """The bundled hardware models."""
    return [read_hardware(path) for path in bundled_hardware().values()]


def registered_policies() -> list[RegisteredPolicy]:
    """The policies, with what is known of each."""
    from gpusim.policies.registry import POLICIES

    return list(POLICIES.values())


def hardware_model(name: str) -> HardwareModel:
    """A hardware model by bundled name or file. Raises `HardwareError`, `UnknownNameError`."""
    return load_hardware(name)


def compare_hardware(first: str, second: str, judged_by: tuple[str, ...]) -> list[Difference]:
    """Every measured number of two models of one GPU, and what predictions of these steps make of the difference."""
    from gpusim.search.calibrations import compare

    models = load_hardware(first), load_hardware(second)
    try:
        return list(compare(*models, [load_trace(name) for name in judged_by]))
    except (PlanError, HardwareError) as cause:
        raise HardwareError(f"{first} and {second}", f"cannot be compared: {cause}") from cause


def bench(step: Step, round_s: float, say: Say) -> Bench:
    """How many schedules a second each engine simulates here."""
    from gpusim.search.bench import bench as run

    with step.naming():
        return run(step.trace, step.hardware, round_s=round_s, report=say)


def predicted_eager_ns(step: Step, engine: str) -> int | None:
    """The predicted eager step; None for a trace without host times."""
    from gpusim.engine.base import engine_by_name
    from gpusim.search.eager import predict_eager

    return predict_eager(step.graph, engine_by_name(engine))


@dataclass(frozen=True)
class CapturedSpec:
    """A captured step, and how far the rebuilt step was from the model's own."""

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
    variants: bool,
    counters: bool,
    seed: int,
    command: str,
    say: Say,
) -> CapturedSpec:
    """Capture one step of a named network or of a file's function.

    Raises `CaptureError`, and `GpuError` without a GPU.
    """
    with needs_torch():
        from gpusim.runtime.capture import CaptureOptions, capture
        from gpusim.runtime.counters import find_ncu, with_counters
    options = CaptureOptions(
        spec=spec,
        mode=mode,
        batch=batch,
        dtype=dtype,
        memory_format=memory_format,
        seed=seed,
        variants=variants,
        command=command,
    )
    if counters:
        find_ncu()  # before the long work
    captured = capture(options, say)
    trace = with_counters(captured.trace, seed, say) if counters else captured.trace
    return CapturedSpec(load(trace), captured.loss_error, captured.gradient_error)


def check_rules(model: HardwareModel, command: str, say: Say) -> Rules:
    """Whether the rules that the engines follow hold on this machine's GPU. Raises `GpuError`."""
    with needs_torch():
        from gpusim.runtime.rules import check_rules as run
    return run(model, command, say)


def require_equal(measurement: Measurement) -> None:
    """Raise `ReplayError` where the outputs of a replay were not those of the sequential run."""
    with needs_torch():
        from gpusim.runtime.replay import require_equal as check
    check(measurement)


def require_gpu_alone() -> None:
    """Raise `GpuError` without a GPU; looked for in a process of its own, so that this one never touches the GPU."""
    from gpusim.runtime.isolate import alone

    with needs_torch():
        from gpusim.runtime.device import require_gpu
    alone(require_gpu)


def write_measurement(measurement: Measurement, path: Path) -> None:
    """Write a measurement as JSON; all or nothing. Raises `OutputError`."""
    from gpusim.plan.measurement import write_measurement as write

    write(measurement, path)


def write_side_by_side(step: Step, schedule: Schedule, path: Path, seed: int, measurement: Measurement) -> None:
    """Simulated and measured timeline of one schedule in one Perfetto file, with its measurement. Needs a GPU."""
    from gpusim.report.perfetto import run_from_kineto, run_from_timeline, write_perfetto

    with needs_torch():
        from gpusim.runtime.timeline import measured_events
    simulated = simulate(step, schedule)
    events = measured_events(step.graph, schedule, seed)
    title = f"{schedule.policy}, {schedule.stream_count} streams"
    runs = [
        run_from_timeline(simulated.recorded, simulated.ran.trace, f"simulated: {title}", step.hardware),
        run_from_kineto(events, f"measured (profiled replay): {title}"),
    ]
    write_perfetto(path, runs, measurement)
