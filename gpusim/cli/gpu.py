"""`gpusim capture`, `replay`, `calibrate` and `validate`: the commands that run on a GPU."""

from __future__ import annotations

from pathlib import Path

import click

from gpusim.cli.common import (
    check_output,
    check_output_folder,
    chosen_schedule,
    command_line,
    hardware_option,
    json_option,
    load_step,
    one_of,
    one_trace,
    policy_option,
    print_json,
    say,
    seed_option,
    streams_option,
    tell,
    trace_either_way,
    trust_option,
)
from gpusim.defaults import DEFAULT_HARDWARE
from gpusim.errors import OptionError, UnknownNameError

MODES = ("train", "infer")
DTYPES = ("fp32", "tf32", "bf16")
FORMATS = ("contiguous", "channels_last")
FRONTENDS = ("aten", "inductor")
STAGES = ("capture", "predict", "measure")


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
@click.option(
    "--style",
    default="default",
    show_default=True,
    metavar="NAME",
    help="Compilation style of front end inductor: default, apart, combo, gemv, given_layout, channels_last, or two "
    "joined: apart_given_layout.",
)
@click.option(
    "--variants", is_flag=True, help="Also measure other kernels of convolutions, products, batch norm and pooling."
)
@click.option(
    "--counters", is_flag=True, help="Count traffic and instructions of each kernel with ncu (Nsight Compute)."
)
@click.option(
    "--estimate", is_flag=True, help="Use no GPU: record only shapes, and estimate kernel times for the GPU of --hw."
)
@hardware_option
@seed_option
@click.option("-o", "output", required=True, metavar="TRACE", help="Trace file to write (.json or .json.gz).")
@json_option
def capture(
    spec: str,
    mode: str,
    batch: int,
    dtype: str,
    memory_format: str,
    frontend: str,
    style: str,
    variants: bool,
    counters: bool,
    estimate: bool,
    hardware: str | None,
    seed: int,
    output: str,
    as_json: bool,
) -> None:
    """Capture one step of SPEC on this GPU: torchvision:NAME, timm:NAME or path/to/file.py:function."""
    from gpusim.api.resolve import check_json_name

    target = check_output(output)
    assert target is not None
    check_json_name(target, "trace")
    if hardware is not None and not estimate:
        problem = "a step is captured on this machine's GPU; only an estimated one is for another"
        raise OptionError(problem, argument="hw", value=hardware)
    if counters and estimate:
        raise OptionError("--counters: nothing runs with --estimate, so there is nothing to count")
    from gpusim.api import commands
    from gpusim.report.tables import captured_document, print_captured

    captured = commands.capture_spec(
        spec,
        mode=mode,  # type: ignore[arg-type]
        batch=batch,
        dtype=dtype,  # type: ignore[arg-type]
        memory_format=memory_format,  # type: ignore[arg-type]
        frontend=frontend,  # type: ignore[arg-type]
        style=style,
        variants=variants,
        counters=counters,
        estimate_for=(hardware or DEFAULT_HARDWARE) if estimate else None,
        seed=seed,
        command=command_line(),
        say=say,
    )
    captured.step.save(target)
    document = captured_document(captured.step.trace, captured.loss_error, captured.gradient_error, str(target))
    if as_json:
        print_json(document)
    else:
        print_captured(document)


@click.command()
@trace_either_way
@click.option("--schedule", "schedule_file", metavar="FILE", help="Schedule to replay.")
@policy_option("Replay")
@click.option("--memory-plan", "plan_file", metavar="FILE", help="Replay this memory plan (gpusim memory -o FILE).")
@streams_option
@hardware_option
@trust_option
@seed_option
@click.option(
    "--perfetto", "perfetto_file", metavar="OUT", help="Write the simulated and measured timelines side by side."
)
@click.option("-o", "output", metavar="MEASUREMENT", help="Write the measurement here (.json).")
@json_option
def replay(
    trace_argument: str | None,
    trace: str | None,
    schedule_file: str | None,
    policy: str | None,
    plan_file: str | None,
    streams: int | None,
    hardware: str | None,
    trust_code: bool,
    seed: int,
    perfetto_file: str | None,
    output: str | None,
    as_json: bool,
) -> None:
    """Run a schedule on this GPU from its trace alone, check its outputs, and compare it with the sequential graph."""
    import gpusim
    from gpusim.api import commands, gpu, predict, resolve
    from gpusim.report.tables import print_measurement

    trace = one_trace(trace_argument, trace)
    if sum(given is not None for given in (schedule_file, policy, plan_file)) != 1:
        raise OptionError("give one of --schedule FILE, --policy P and --memory-plan FILE")
    if plan_file is not None and (streams is not None or perfetto_file is not None):
        raise OptionError("--memory-plan goes without --streams and --perfetto")
    target, timeline_target = check_output(output), check_output(perfetto_file)
    schedule: gpusim.Schedule | gpusim.MemoryPlan
    if plan_file is not None:
        step = load_step(trace, hardware)
        gpu.check_replay(step, trust_code)
        schedule = predict.load_memory_plan(step, plan_file)
    else:
        named, most_streams = chosen_schedule(policy, streams, schedule_file)
        resolve.check_schedule_arguments(named, most_streams)
        step = load_step(trace, hardware)
        gpu.check_replay(step, trust_code)
        schedule = resolve.resolve_plan(step, named) or resolve.resolve_schedule(step, named, most_streams)
    measurement = gpusim.replay(
        step, schedule, seed=seed, trust_code=trust_code, check_outputs=False, command=command_line(), say=say
    )
    if target is not None:
        commands.write_measurement(measurement, target)
    if timeline_target is not None and isinstance(schedule, gpusim.Schedule):
        commands.write_side_by_side(step, schedule, timeline_target, seed, measurement, trust_code)
    if as_json:
        print_json(measurement)
    else:
        print_measurement(measurement, step.trace)
    commands.require_equal(measurement)


def _experiments(_context: click.Context, _parameter: click.Parameter, values: tuple[str, ...]) -> tuple[str, ...]:
    """Return the names of experiments, which the command line gives with hyphens."""
    if not values:
        return ()
    from gpusim.api import commands

    known = {name.replace(" ", "-"): name for name in commands.rule_experiments()}
    for value in values:
        if value not in known:
            raise UnknownNameError("experiment", value, known)
    return tuple(known[value] for value in values)


@click.command()
@click.option("-o", "output", default=None, metavar="FILE", help="Hardware model to write (.json).")
@click.option(
    "--base", default=DEFAULT_HARDWARE, show_default=True, metavar="NAME", help="Model with the data-sheet limits."
)
@click.option(
    "--rules",
    "rules_file",
    default=None,
    metavar="FILE",
    help="Also check the engines' rules, and write the report here (.json, with .md next to it).",
)
@click.option(
    "--only", multiple=True, metavar="NAME", callback=_experiments, help="Only this experiment of --rules; repeatable."
)
@click.option("--gpus", type=int, metavar="N", help="Measure collectives of N GPUs instead; -o then writes a topology.")
@json_option
def calibrate(
    output: str | None, base: str, rules_file: str | None, only: tuple[str, ...], gpus: int | None, as_json: bool
) -> None:
    """Measure this GPU's launch, gap, queue, event, bandwidth and copy constants; check the engines' rules."""
    if only and rules_file is None:
        raise OptionError("--only goes with --rules FILE")
    target, rules_target = check_output(output), check_output(rules_file)
    if gpus is not None:
        _calibrate_links(gpus, base, target, rules_target is not None, as_json)
        return
    if target is None and rules_target is None:
        raise OptionError("give -o FILE for a hardware model, --rules FILE for a check of the rules, or both")
    import gpusim
    from gpusim.api import commands
    from gpusim.io.files import write_bytes, write_document
    from gpusim.report.tables import print_hardware
    from gpusim.validation.rules import print_rules, rules_markdown

    model = commands.hardware_model(base)
    measured = report = None
    if target is not None:
        measured = gpusim.calibrate(model, command=command_line(), say=say)
        write_document(target, measured, indent=1)
    if rules_target is not None:
        report = commands.check_rules(measured or model, command_line(), say, only)
        write_document(rules_target, report, indent=1)
        text = rules_markdown(report, measured or model, rules_target.name)
        write_bytes(rules_target.with_suffix(".md"), text.encode())
    if as_json:
        both = {"hardware": measured, "rules": report}
        print_json(measured if report is None else report if measured is None else both)
        return
    if measured is not None:
        print_hardware([measured])
    if report is not None:
        print_rules(report, measured or model)


def _calibrate_links(gpus: int, base: str, target: Path | None, rules: bool, as_json: bool) -> None:
    """Run `calibrate --gpus N`: measure collectives and write a topology."""
    if target is None or rules:
        raise OptionError("--gpus goes with -o FILE for a topology, and without --rules")
    import gpusim
    from gpusim.io.files import write_document

    topology = gpusim.calibrate_links(gpus, base, command=command_line())
    write_document(target, topology, indent=1)
    if as_json:
        print_json(topology)
        return
    for curve in topology.curves:
        tell(f"{curve.collective} of {curve.gpus} GPUs: {len(curve.points)} sizes")
    tell(f"topology written to {target}")


@click.command()
@click.argument("recipe")
@click.option(
    "-o",
    "output",
    default="validate/results",
    show_default=True,
    metavar="DIR",
    help="Folder for the results; created if missing.",
)
@click.option(
    "--stage",
    default=None,
    metavar="|".join(STAGES),
    callback=one_of("stage", STAGES),
    help="Run only one stage, for a run over several days; each stage resumes. 'predict' needs no GPU.",
)
@click.option(
    "--case", "cases", type=int, multiple=True, metavar="N", help="Only this case, counted from 1; repeatable."
)
@click.option(
    "--seconds",
    type=click.IntRange(min=1, max=86_400),
    default=None,
    metavar="S",
    help="Recipes with 'against' or 'ablations': stop after S seconds.",
)
@click.option("--again", is_flag=True, help="RECIPE is a results file: predict its schedules again, without a GPU.")
@click.option("--models", is_flag=True, help="With --again: compare the choices of simpler models.")
@click.option(
    "--traces", "traces_folder", default=None, metavar="DIR", help="With --again: search NAME.json.gz here first."
)
@trust_option
@json_option
def validate(
    recipe: str,
    output: str,
    stage: str | None,
    cases: tuple[int, ...],
    seconds: int | None,
    again: bool,
    models: bool,
    traces_folder: str | None,
    trust_code: bool,
    as_json: bool,
) -> None:
    """Capture, explore, replay and compare the cases of RECIPE (a .toml file) on this GPU."""
    if again:
        _predict_again(Path(recipe), None if traces_folder is None else Path(traces_folder), models, as_json)
        return
    if traces_folder is not None or models:
        raise OptionError(f"{'--models' if models else '--traces'} goes with --again")
    from gpusim.api.commands import require_gpu_alone
    from gpusim.validation.recipe import check_recipe, read_recipe
    from gpusim.validation.tables import print_results

    plan = read_recipe(Path(recipe), cases)
    folder = check_output_folder(output)
    if stage in (None, "capture"):  # other stages run no code of the recipe's files
        check_recipe(plan, recipe, trust_code)
    if seconds is not None and not plan.optimizes:
        problem = "only a recipe with 'against' or 'ablations' takes a time limit"
        raise OptionError(problem, argument="seconds", value=seconds)
    if plan.optimizes:
        from gpusim.validation.optimized import optimize_cases
        from gpusim.validation.stages import selected

        if stage is not None:
            raise OptionError("a recipe that optimizes has no stages", argument="stage", value=stage)
        require_gpu_alone()
        chosen = selected(plan, cases)
        results = optimize_cases(plan, chosen, folder, command_line(), say, trust_code=trust_code, within_s=seconds)
    elif stage is not None or cases:
        from gpusim.validation.stages import capture_stage, measure_stage, predict_stage, selected

        chosen = selected(plan, cases)
        if stage != "predict":
            require_gpu_alone()
        paths: list[Path] = []
        if stage in (None, "capture"):
            paths = capture_stage(plan, chosen, command_line(), say)
        if stage in (None, "predict"):
            paths = predict_stage(plan, chosen, say)
        if stage in ("capture", "predict"):
            if as_json:
                print_json([str(path) for path in paths])
            return
        results = measure_stage(plan, chosen, folder, command_line(), say, trust_code=trust_code)
    else:
        require_gpu_alone()
        from gpusim.validation.run import run_recipe

        results = run_recipe(plan, folder, command_line(), say, trust_code=trust_code)
    if as_json:
        print_json(results)
    else:
        print_results(results)


def _predict_again(results: Path, traces_folder: Path | None, models: bool, as_json: bool) -> None:
    """Predict the schedules of a results file again, with the current model or with simpler ones as well."""
    from gpusim.validation.again import anchored_again, predict_again, traces_in
    from gpusim.validation.again_table import again_document, print_again
    from gpusim.validation.models import choices, choices_document, predicted_by_models, print_choices

    traces = None if traces_folder is None else traces_in(traces_folder)
    if models:
        rows = choices(predicted_by_models(results, traces))
        if as_json:
            print_json(choices_document(rows))
        else:
            print_choices(rows)
        return
    then, now = predict_again(results, traces)
    anew = anchored_again(results, traces)
    if as_json:
        print_json(again_document(then, now, anew))
    else:
        print_again(then, now, anew)
