"""`gpusim explore` and `gpusim simulate`: everything that needs no GPU."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from gpusim.cli.common import (
    check_gpu,
    check_output,
    choose_hardware,
    command_line,
    hardware_option,
    json_option,
    naming,
    one_of,
    policy_option,
    print_json,
    progress_bar,
    say,
    seed_option,
    streams_option,
    tell,
    trust_option,
)
from gpusim.cli.figures import check_figures, figure_options
from gpusim.errors import OptionError
from gpusim.policies import DEFAULT_POLICY, DEFAULT_STREAMS

if TYPE_CHECKING:
    from gpusim.hardware.model import HardwareModel
    from gpusim.plan.graph import OpGraph
    from gpusim.plan.tasks import LaunchMode
    from gpusim.search.bounds import Bounds
    from gpusim.trace.schema import Trace

LAUNCH_MODES = ("graph", "stream")


@click.command()
@click.argument("trace")
@hardware_option
@click.option("--streams", type=int, default=DEFAULT_STREAMS, show_default=True, help="Most streams to use.")
@click.option("--budget", type=float, default=9.0, show_default=True, metavar="SECONDS", help="Time for the search.")
@click.option(
    "--evaluations",
    type=click.IntRange(min=1),
    default=None,
    metavar="N",
    help="End the search after N schedules at the latest: what a seed finds then depends on no clock.",
)
@click.option(
    "--partitions",
    default=None,
    metavar="auto|SPLITS",
    help="Search schedules on partitions of the SMs, too: auto, or splits such as 64+68,96+36.",
)
@click.option(
    "--memory",
    "memory_mib",
    type=click.FloatRange(min=0, min_open=True),
    default=None,
    metavar="MIB",
    help="Only schedules whose predicted peak memory is at most this.",
)
@click.option(
    "--measure",
    type=click.IntRange(min=1),
    default=None,
    metavar="N",
    help="Try the N schedules predicted best on this GPU; the fastest, replayed and checked, is the result.",
)
@trust_option
@seed_option
@click.option("-o", "output", metavar="SCHEDULE", help="Write the best schedule here (.json).")
@json_option
def explore(
    trace: str,
    hardware: str | None,
    streams: int,
    budget: float,
    evaluations: int | None,
    partitions: str | None,
    memory_mib: float | None,
    measure: int | None,
    trust_code: bool,
    seed: int,
    output: str | None,
    as_json: bool,
) -> None:
    """Find the fastest schedule of TRACE (a .json[.gz] file or a bundled name) and say whether it is worth it."""
    from gpusim.plan.schedule import check_streams, write_schedule
    from gpusim.report.tables import explored_document, print_explored
    from gpusim.report.trial_table import print_trial, trial_document
    from gpusim.search.as_imported import searchable
    from gpusim.search.choices import parse_splits
    from gpusim.search.explore import MAX_BUDGET_S
    from gpusim.search.explore import explore as run
    from gpusim.trace.store import load_trace

    check_streams(streams)
    if not 0 < budget <= MAX_BUDGET_S:
        raise OptionError(f"--budget {budget}: the search takes between 0 and {MAX_BUDGET_S:.0f} seconds")
    target = check_output(output)
    step = load_trace(trace)
    model = choose_hardware(hardware, step)
    if measure is not None:
        check_gpu(step, trace, trust_code)
    if not searchable(step):
        _explore_imported(step, model, trace, hardware, output, as_json)
        return
    splits = [] if partitions is None else parse_splits(partitions, streams, model.limits.sms)
    with naming(trace, hardware), progress_bar(not as_json) as report:
        explored = run(
            step,
            model,
            streams=streams,
            budget_s=budget,
            seed=seed,
            evaluations=evaluations,
            splits=splits,
            memory_limit_bytes=None if memory_mib is None else int(memory_mib * 2**20),
            report=report,
        )
    trial = None
    if measure is not None:
        from gpusim.recipes.trial import try_best

        explored, trial = try_best(explored, measure, command=command_line(), say=say, trust_code=trust_code)
    if target is not None:
        write_schedule(explored.schedule, target)
    if as_json:
        document = explored_document(explored)
        print_json(document if trial is None else {**document, "measured": trial_document(trial)})
        return
    print_explored(explored, tried=trial is not None)
    if trial is not None:
        print_trial(trial)
    if target is not None:
        tell(f"schedule written to {target}")


def _explore_imported(
    step: Trace, model: HardwareModel, trace: str, hardware: str | None, output: str | None, as_json: bool
) -> None:
    """What can be said of an imported trace without data dependencies."""
    from gpusim.report.as_imported_text import as_imported_lines
    from gpusim.search.as_imported import MORE, as_imported

    if output is not None:
        raise OptionError(f"-o {output}: no schedule is searched without data dependencies; {MORE}")
    with naming(trace, hardware):
        found = as_imported(step, model)
    if as_json:
        print_json(found.document())
        return
    for line in as_imported_lines(found):
        tell(line)


@click.command()
@click.argument("trace")
@hardware_option
@policy_option("Simulate")
@streams_option
@click.option("--schedule", "schedule_file", metavar="FILE", help="Simulate this schedule instead of a policy's.")
@click.option("--engine", "engine_name", default="fast", show_default=True, metavar="fast|reference")
@click.option(
    "--launch",
    default="graph",
    show_default=True,
    metavar="graph|stream",
    callback=one_of("launch mode", LAUNCH_MODES),
    help="In one CUDA graph, or kernel by kernel from the host.",
)
@click.option("--perfetto", "perfetto_file", metavar="OUT", help="Write the timeline for ui.perfetto.dev (.json[.gz]).")
@figure_options
@click.option(
    "--measured",
    "measured_file",
    metavar="FILE",
    help="Draw this replay, too: its -o or --perfetto file, or the name of one that ships with gpusim.",
)
@json_option
def simulate(
    trace: str,
    hardware: str | None,
    policy: str | None,
    streams: int | None,
    schedule_file: str | None,
    engine_name: str,
    launch: str,
    perfetto_file: str | None,
    html_file: str | None,
    png_file: str | None,
    measured_file: str | None,
    as_json: bool,
) -> None:
    """Predict one schedule of TRACE: a policy's or one from a file."""
    from gpusim.engine.base import engine_by_name
    from gpusim.engine.compiled.warm import COMPILING, needs_compiling
    from gpusim.plan.graph import OpGraph
    from gpusim.plan.lower import lower
    from gpusim.plan.schedule import check_streams, chosen_variants, lower_schedule, read_schedule
    from gpusim.policies.registry import POLICIES
    from gpusim.report.tables import print_simulated
    from gpusim.search.bounds import bounds
    from gpusim.search.eager import predict_eager
    from gpusim.search.explore import assignment_of, check_policy
    from gpusim.trace.store import load_trace

    if schedule_file is not None and (policy is not None or streams is not None):
        raise OptionError("--schedule goes without --policy and --streams: the file has both")
    mode: LaunchMode = "stream" if launch == "stream" else "graph"
    engine = engine_by_name(engine_name)
    wanted = policy or DEFAULT_POLICY
    check_policy(wanted)
    check_streams(DEFAULT_STREAMS if streams is None else streams)
    target = check_output(perfetto_file)
    figures = check_figures(html_file, png_file)
    if measured_file is not None and not figures:
        raise OptionError("--measured goes with --html or --png: it is drawn beside the simulated timeline")
    step = load_trace(trace)
    measured = None
    if measured_file is not None:
        from gpusim.report.measured import load_measured

        measured = load_measured(measured_file, step)
    model = choose_hardware(hardware, step)
    with naming(trace, hardware):
        graph = OpGraph.build(step, model)
    if schedule_file is not None:
        schedule = read_schedule(Path(schedule_file))
        plan = lower_schedule(schedule, graph, mode, schedule_file)
        name, used = schedule.policy, schedule.streams
        chosen = graph.choosing(chosen_variants(schedule, step, schedule_file))
    else:
        with progress_bar(not as_json) as report:
            name, assignment = assignment_of(graph, model, wanted, streams or DEFAULT_STREAMS, report)
        plan = assignment.lowered(graph, mode)
        used, chosen = max(assignment.streams) + 1, graph.choosing(assignment.variants)
    with progress_bar(not as_json) as report:
        if engine_name == "fast" and needs_compiling():
            report(COMPILING, 0.0, 0)
        timeline = engine.run(plan, graph.hardware)
    alone = POLICIES["sequential"](graph, 1)
    sequential = engine.run(lower(graph, alone.order, alone.streams, memory=False), graph.hardware)
    title = f"simulated: {name}, {used} streams"
    if target is not None or figures:
        # What SMs and DRAM do over time, only the reference engine records.
        seen = timeline if timeline.occupied else engine_by_name("reference").run(timeline.plan, graph.hardware)
    if target is not None:
        from gpusim.report.perfetto import run_from_timeline, write_perfetto

        write_perfetto(target, [run_from_timeline(seen, chosen.trace, title, model)])
    if figures:
        from gpusim.report.figures.timeline import timeline_figure

        run = measured.run if measured else None
        timed_ns = measured.timed_ns if measured else None
        figure = timeline_figure(seen, chosen.trace, graph.hardware, title=title, measured=run, measured_ns=timed_ns)
        figures.write(figure, f"{step.name}, {title}")
    document = _document(graph, name, used, timeline.makespan_ns, sequential.makespan_ns, bounds(chosen))
    document |= {"peak_bytes": timeline.peak_bytes, "launch": launch, "engine": engine_name, "hardware": model.label}
    document["captured_on"] = step.provenance.gpu.name
    eager = {
        "predicted_ns": predict_eager(graph, engine),
        "measured_ns": step.ground_truth.eager.median_ns if step.ground_truth else None,
    }
    document["eager"] = {key: time_ns for key, time_ns in eager.items() if time_ns is not None}
    if measured is not None:
        from gpusim.report.measured import not_comparable

        why = not_comparable(measured, model, mode, name, used)
        document["measured"] = {
            "time_ns": measured.makespan_ns,
            "error": None if why else timeline.makespan_ns / measured.makespan_ns - 1,
            "not_compared": why or None,
        }
    if as_json:
        print_json(document)
        return
    print_simulated(document)
    if target is not None:
        tell(f"timeline written to {target}; open it at ui.perfetto.dev")
    figures.announce()


def _document(
    graph: OpGraph, policy: str, streams: int, makespan_ns: int, sequential_ns: int, bound: Bounds
) -> dict[str, Any]:
    return {
        "trace": graph.trace.name,
        "policy": policy,
        "streams": streams,
        "makespan_ns": makespan_ns,
        "sequential_ns": sequential_ns,
        "speedup": sequential_ns / makespan_ns,
        "calibrated": graph.hardware.calibrated,
        "bounds": bound.document(),
    }
