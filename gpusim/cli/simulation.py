"""`gpusim explore` and `gpusim simulate`: predictions without a GPU."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import click

from gpusim.cli.common import (
    check_output,
    chosen_schedule,
    command_line,
    hardware_option,
    json_option,
    launch_option,
    load_step,
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
from gpusim.cli.sizes import size_option
from gpusim.defaults import DEFAULT_BUDGET_S, DEFAULT_ENGINE, DEFAULT_STREAMS, MAX_EVALUATIONS
from gpusim.errors import OptionError
from gpusim.text import short_value
from gpusim.units import counted

if TYPE_CHECKING:
    from gpusim import Simulated, Step


@click.command()
@click.argument("trace")
@hardware_option
@click.option("--streams", type=int, default=DEFAULT_STREAMS, show_default=True, help="Maximum number of streams.")
@click.option(
    "--budget", type=float, default=DEFAULT_BUDGET_S, show_default=True, metavar="SECONDS", help="Time for the search."
)
@click.option(
    "--evaluations",
    type=click.IntRange(1, MAX_EVALUATIONS),
    default=None,
    metavar="N",
    help="End the search after N simulations, in whole batches, for a result that does not depend on time.",
)
@click.option(
    "--partitions",
    default=None,
    metavar="auto|SPLITS",
    help="Also search schedules with SM partitions: auto, or splits, for example 64+68,96+36.",
)
@size_option(
    "--memory", "memory_limit", "Only schedules with at most this predicted peak memory: 8GiB, or a number of MiB."
)
@click.option(
    "--measure",
    type=click.IntRange(min=1),
    default=None,
    metavar="N",
    help="Replay the N schedules predicted best on this GPU; the result is the fastest one, with outputs checked.",
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
    memory_limit: int | None,
    measure: int | None,
    trust_code: bool,
    seed: int,
    output: str | None,
    as_json: bool,
) -> None:
    """Find the fastest schedule of TRACE (a .json[.gz] file or a bundled name) and tell whether it is worth it."""
    import gpusim
    from gpusim.api.gpu import check_gpu
    from gpusim.api.other_tools import searchable
    from gpusim.api.resolve import check_json_name
    from gpusim.report.tables import explored_document, print_explored
    from gpusim.report.trial_table import print_trial, trial_document

    target = check_output(output)
    if target is not None:
        check_json_name(target, "schedule")
    step = load_step(trace, hardware)
    if measure is not None:
        check_gpu(step, trust_code)
    if not searchable(step):
        _explore_imported(step, output, as_json)
        return
    with progress_bar(not as_json) as report:
        explored = gpusim.explore(
            step,
            streams=streams,
            budget_s=budget,
            seed=seed,
            evaluations=evaluations,
            partitions=partitions,
            memory_limit=memory_limit,
            progress=report,
        )
    trial = None
    if measure is not None:
        from gpusim.api.commands import try_best

        explored, trial = try_best(explored, measure, command=command_line(), say=say, trust_code=trust_code)
    if target is not None:
        explored.save(target)
    if as_json:
        document = explored_document(explored)
        print_json(document if trial is None else {**document, "measured": trial_document(trial)})
        return
    print_explored(explored, tried=trial is not None)
    if trial is not None:
        print_trial(trial, step.trace)
    if target is not None:
        tell(f"schedule written to {target}")


def _explore_imported(step: Step, output: str | None, as_json: bool) -> None:
    """Report on an imported trace without data dependencies."""
    from gpusim.api.other_tools import as_imported
    from gpusim.report.as_imported_text import as_imported_lines

    imported = as_imported(step)
    if output is not None:
        raise OptionError(
            f"-o {short_value(output)}: no schedule is searched without data dependencies; {imported.more}"
        )
    if as_json:
        print_json(imported.document())
        return
    for line in as_imported_lines(imported):
        tell(line)


@click.command()
@click.argument("trace")
@hardware_option
@policy_option("Simulate")
@streams_option
@click.option("--schedule", "schedule_file", metavar="FILE", help="Simulate this schedule instead of a policy's.")
@click.option("--engine", "engine_name", default=DEFAULT_ENGINE, show_default=True, metavar="fast|reference")
@launch_option
@click.option("--perfetto", "perfetto_file", metavar="OUT", help="Write the timeline for ui.perfetto.dev (.json[.gz]).")
@figure_options
@click.option(
    "--measured",
    "measured_file",
    metavar="FILE",
    help="Also draw this replay: its -o or --perfetto file, or the name of a bundled one.",
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
    """Predict one schedule of TRACE, of a policy or from a file."""
    import gpusim

    schedule, most_streams = chosen_schedule(policy, streams, schedule_file)
    target = check_output(perfetto_file)
    figures = check_figures(html_file, png_file)
    if measured_file is not None and not figures:
        raise OptionError("--measured goes with --html or --png: it is drawn under the simulated timeline")
    step = load_step(trace, hardware)
    measured = None
    if measured_file is not None:
        from gpusim.report.measured import load_measured

        measured = load_measured(measured_file, step.trace)
    with progress_bar(not as_json) as report:
        simulated = gpusim.simulate(
            step, schedule, streams=most_streams, launch=launch, engine=engine_name, progress=report
        )
    title = f"simulated: {simulated.policy}, {counted(simulated.streams, 'stream')}"
    if target is not None:
        gpusim.write_perfetto(simulated, target)
    if figures:
        from gpusim.report.figures.timeline import timeline_figure

        figure = timeline_figure(
            simulated.recorded,
            simulated.ran.trace,
            simulated.graph.hardware,
            title=title,
            measured=measured.run if measured else None,
            measured_ns=measured.timed_ns if measured else None,
        )
        figures.write(figure, f"{step.name}, {title}")
    document = _document(step, simulated, engine_name)
    if measured is not None:
        from gpusim.report.measured import not_comparable

        why = not_comparable(measured, step.hardware, simulated.mode, simulated.policy, simulated.streams)
        document["measured"] = {
            "time_ns": measured.makespan_ns,
            "error": None if why else simulated.makespan_ns / measured.makespan_ns - 1,
            "not_compared": why or None,
        }
    if as_json:
        print_json(document)
        return
    from gpusim.report.tables import print_simulated

    print_simulated(document)
    if target is not None:
        tell(f"timeline written to {target}; open it at ui.perfetto.dev")
    figures.announce()


def _document(step: Step, simulated: Simulated, engine: str) -> dict[str, Any]:
    from gpusim.api.commands import predicted_eager_ns

    truth = step.trace.ground_truth
    eager = {
        "predicted_ns": predicted_eager_ns(step, engine),
        "measured_ns": truth.eager.median_ns if truth else None,
    }
    return {
        "trace": step.name,
        "policy": simulated.policy,
        "streams": simulated.streams,
        "makespan_ns": simulated.makespan_ns,
        "sequential_ns": simulated.sequential_ns,
        "speedup": simulated.speedup,
        "calibrated": step.hardware.calibrated,
        "bounds": simulated.bounds.document(),
        "peak_bytes": simulated.peak_bytes,
        "launch": simulated.mode,
        "engine": engine,
        "hardware": step.hardware.label,
        "captured_on": step.trace.provenance.gpu.name,
        "eager": {key: time_ns for key, time_ns in eager.items() if time_ns is not None},
    }
