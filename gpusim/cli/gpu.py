"""`gpusim capture`, `replay`, `calibrate` and `validate`: everything that runs on a GPU."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import click

from gpusim.cli.common import (
    check_output,
    choose_hardware,
    command_line,
    hardware_option,
    json_option,
    naming,
    needs_torch,
    one_of,
    print_json,
    say,
    seed_option,
)
from gpusim.errors import OptionError

if TYPE_CHECKING:
    from gpusim.hardware.model import HardwareModel
    from gpusim.plan.graph import OpGraph
    from gpusim.plan.schedule import Schedule

MODES = ("train", "infer")
DTYPES = ("fp32", "tf32", "bf16")
FORMATS = ("contiguous", "channels_last")
FRONTENDS = ("aten", "inductor")
DEFAULT_STREAMS = 4


@click.command()
@click.argument("spec")
@click.option("--mode", required=True, metavar="train|infer", callback=one_of("mode", MODES))
@click.option("--batch", type=click.IntRange(min=1), required=True)
@click.option("--dtype", default="tf32", show_default=True, metavar="|".join(DTYPES), callback=one_of("dtype", DTYPES))
@click.option(
    "--memory-format",
    default="contiguous",
    show_default=True,
    metavar="|".join(FORMATS),
    callback=one_of("memory format", FORMATS),
)
@click.option(
    "--frontend",
    default="aten",
    show_default=True,
    metavar="|".join(FRONTENDS),
    callback=one_of("front end", FRONTENDS),
)
@seed_option
@click.option("-o", "output", required=True, metavar="TRACE", help="The trace file to write (.json or .json.gz).")
@json_option
def capture(
    spec: str,
    mode: str,
    batch: int,
    dtype: str,
    memory_format: str,
    frontend: str,
    seed: int,
    output: str,
    as_json: bool,
) -> None:
    """Capture one step of SPEC on this GPU: torchvision:NAME, timm:NAME or path/to/file.py:function."""
    target = check_output(output)
    assert target is not None
    with needs_torch():
        from gpusim.runtime.capture import CaptureOptions
        from gpusim.runtime.capture import capture as run
    from gpusim.report.tables import captured_document, print_captured
    from gpusim.trace.store import write_trace

    options = CaptureOptions(
        spec=spec,
        mode=mode,  # type: ignore[arg-type]
        batch=batch,
        dtype=dtype,  # type: ignore[arg-type]
        memory_format=memory_format,  # type: ignore[arg-type]
        frontend=frontend,  # type: ignore[arg-type]
        seed=seed,
        command=command_line(),
    )
    captured = run(options, say)
    write_trace(captured.trace, target)
    document = captured_document(captured.trace, captured.loss_error, captured.gradient_error, str(target))
    if as_json:
        print_json(document)
    else:
        print_captured(document)


@click.command()
@click.option("--trace", required=True, metavar="TRACE", help="Trace file or bundled name.")
@click.option("--schedule", "schedule_file", metavar="FILE", help="Schedule to replay.")
@click.option("--policy", default=None, metavar="P", help="Replay this policy's schedule instead.")
@click.option("--streams", type=int, default=None, help=f"Streams for the policy [default: {DEFAULT_STREAMS}].")
@hardware_option
@seed_option
@click.option("--perfetto", "perfetto_file", metavar="OUT", help="Write simulated and measured timeline side by side.")
@click.option("-o", "output", metavar="MEASUREMENT", help="Write the measurement here (.json).")
@json_option
def replay(
    trace: str,
    schedule_file: str | None,
    policy: str | None,
    streams: int | None,
    hardware: str | None,
    seed: int,
    perfetto_file: str | None,
    output: str | None,
    as_json: bool,
) -> None:
    """Run a schedule on this GPU from its trace alone, check its outputs, and time it against the sequential graph."""
    from gpusim.plan.graph import OpGraph
    from gpusim.plan.measurement import write_measurement
    from gpusim.plan.schedule import check_schedule, check_streams, make_schedule, read_schedule
    from gpusim.policies.registry import policy_by_name
    from gpusim.report.tables import print_measurement
    from gpusim.runtime.allowlist import check_operators
    from gpusim.trace.store import load_trace

    if (schedule_file is None) == (policy is None):
        raise OptionError("give either --schedule FILE or --policy P")
    target, timeline_target = check_output(output), check_output(perfetto_file)
    check_streams(DEFAULT_STREAMS if streams is None else streams)
    make = policy_by_name(policy) if policy else None
    step = load_trace(trace)
    check_operators(step, trace)
    model = choose_hardware(hardware, step)
    with naming(trace):
        graph = OpGraph.build(step, model)
    if make is not None and policy is not None:
        assignment = make(graph, streams or DEFAULT_STREAMS)
        schedule = make_schedule(step, assignment.order, assignment.streams, policy=policy, made_by=command_line())
    else:
        assert schedule_file is not None
        schedule = read_schedule(Path(schedule_file))
        check_schedule(schedule, step, graph.preds, schedule_file)
    with needs_torch():
        from gpusim.runtime.replay import replay as run
        from gpusim.runtime.replay import require_equal

    (measurement,) = run(step, [schedule], model, command=command_line(), seed=seed, say=say)
    if target is not None:
        write_measurement(measurement, target)
    if timeline_target is not None:
        _write_side_by_side(graph, schedule, model, timeline_target, seed)
    if as_json:
        print_json(measurement)
    else:
        print_measurement(measurement, step)
    require_equal(measurement)


def _write_side_by_side(graph: OpGraph, schedule: Schedule, model: HardwareModel, target: Path, seed: int) -> None:
    """Simulated and measured timeline of one schedule in one Perfetto file."""
    from gpusim.engine.reference import ReferenceEngine
    from gpusim.plan.lower import lower
    from gpusim.plan.schedule import check_schedule
    from gpusim.report.perfetto import run_from_kineto, run_from_timeline, write_perfetto
    from gpusim.runtime.timeline import measured_events

    order, streams = check_schedule(schedule, graph.trace, graph.preds)
    simulated = ReferenceEngine().run(lower(graph, order, streams), graph.hardware)
    events = measured_events(graph.trace, order, streams, seed)
    title = f"{schedule.policy}, {schedule.streams} streams"
    runs = [
        run_from_timeline(simulated, graph.trace, f"simulated: {title}", model),
        run_from_kineto(events, f"measured (profiled replay): {title}"),
    ]
    write_perfetto(target, runs)


@click.command()
@click.option("-o", "output", required=True, metavar="FILE", help="The hardware model to write (.json).")
@click.option("--base", default="h200", show_default=True, metavar="NAME", help="Model to take data-sheet limits from.")
@json_option
def calibrate(output: str, base: str, as_json: bool) -> None:
    """Measure this GPU's launch, gap, queue, event, bandwidth and copy constants."""
    target = check_output(output)
    assert target is not None
    from gpusim.hardware.model import load_hardware

    model = load_hardware(base)
    with needs_torch():
        from gpusim.runtime.calibrate import calibrate as run
    from gpusim.files import write_document
    from gpusim.report.tables import print_hardware

    measured = run(model, command_line(), say)
    write_document(target, measured, indent=1)
    if as_json:
        print_json(measured)
    else:
        print_hardware([measured])


@click.command()
@click.argument("recipe")
@click.option(
    "-o", "output", default="validate/results", show_default=True, metavar="DIR", help="Folder for the results."
)
@json_option
def validate(recipe: str, output: str, as_json: bool) -> None:
    """Capture, explore, replay and compare the cases of RECIPE (a .toml file) on this GPU."""
    from gpusim.recipes.recipe import read_recipe

    plan = read_recipe(Path(recipe))
    with needs_torch():
        from gpusim.recipes.run import run_recipe
        from gpusim.runtime.device import require_gpu
    from gpusim.report.results_table import print_results
    from gpusim.runtime.isolate import alone

    alone(require_gpu)  # in a process of its own, like all that touches the GPU here
    results = run_recipe(plan, Path(output), command_line(), say)
    if as_json:
        print_json(results)
    else:
        print_results(results)
