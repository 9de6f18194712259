"""`gpusim whatif` and `gpusim figure`: questions and figures of the dashboard on the command line."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from gpusim.cli.common import hardware_option, json_option, launch_option, load_step, named, one_of, print_json, tell
from gpusim.cli.figures import check_figures, figure_options
from gpusim.defaults import DEFAULT_LAUNCH, DEFAULT_POLICY, DEFAULT_STREAMS, QUICK_BUDGET_S, QUICK_EVALUATIONS
from gpusim.errors import OptionError
from gpusim.units import counted, format_peak, format_times_ns

if TYPE_CHECKING:
    from gpusim import Simulated, Step

OP_HELP = "X times as fast: an op by name or number, `LAYER OPERATOR` as printed, or all ops of a LAYER."
EXPLORED = ("bounds", "gain", "front")
FIGURES = ("breakdown", *EXPLORED, "memory")
FIDELITY = "fidelity"

policy_option = click.option("--policy", default=DEFAULT_POLICY, show_default=True, metavar="P")
streams_option = click.option("--streams", type=int, default=DEFAULT_STREAMS, show_default=True)


@click.command()
@click.argument("trace")
@hardware_option
@policy_option
@streams_option
@launch_option
@click.option("--sms", type=int, default=None, metavar="N", help="Number of SMs.")
@click.option("--bandwidth", type=float, default=1.0, metavar="X", help="Factor on DRAM bandwidth.")
@click.option("--launch-cost", type=float, default=1.0, metavar="X", help="Factor on gaps, forks, joins and launches.")
@click.option(
    "--contention", type=float, default=1.0, metavar="X", help="Factor on the slowdown of concurrent kernels."
)
@click.option("--queues", type=int, default=None, metavar="N", help="Hardware queues, for --launch stream.")
@click.option("--op", "ops", type=(str, float), multiple=True, metavar="NAME X", help=OP_HELP)
@figure_options
@json_option
def whatif(
    trace: str,
    hardware: str | None,
    policy: str,
    streams: int,
    launch: str,
    sms: int | None,
    bandwidth: float,
    launch_cost: float,
    contention: float,
    queues: int | None,
    ops: tuple[tuple[str, float], ...],
    html_file: str | None,
    png_file: str | None,
    as_json: bool,
) -> None:
    """Predict TRACE with other SMs, bandwidth, costs or a faster op; --html draws the sensitivities."""
    import gpusim

    figures = check_figures(html_file, png_file)
    step = load_step(trace, hardware)
    with named("ops", "--op"):
        answer = gpusim.whatif(
            step,
            policy,
            streams=streams,
            launch=launch,
            sms=sms,
            bandwidth=bandwidth,
            launch_cost=launch_cost,
            contention=contention,
            queues=queues,
            ops=ops,
        )
    baseline, result, rows = answer.baseline, answer.changed, answer.sensitivities()
    changed = result.graph.hardware.label
    if figures:
        from gpusim.report.figures.comparisons import tornado_figure

        figures.write(tornado_figure(rows, title=f"What {step.name} on {changed} is sensitive to"), "")
    if as_json:
        print_json(
            {
                "trace": step.name,
                "policy": policy,
                "baseline": _document(baseline),
                "whatif": _document(result),
                "sensitivities": [
                    {"parameter": name, "low_ns": round(low), "high_ns": round(high)} for name, low, high, _ in rows
                ],
            }
        )
        return
    launched = launch if launch == DEFAULT_LAUNCH else f"{launch}, the baseline by {DEFAULT_LAUNCH}"
    tell(f"{step.name}: {policy}, {counted(result.streams, 'stream')}, launched by {launched}")
    before, after = format_times_ns((baseline.makespan_ns, result.makespan_ns))
    tell(f"  baseline  {before} on {step.hardware.label}")
    more = result.makespan_ns / baseline.makespan_ns - 1
    tell(f"  what if   {after} on {changed} ({more:+.1%} time)")
    tell(f"  speed-up  {result.speedup:.2f}x over its own sequential graph (baseline {baseline.speedup:.2f}x)")
    tell(f"  memory    {format_peak(result.peak_bytes)} at the peak")
    tell("Sensitivities: the same schedule, one parameter at a time")
    times = format_times_ns(time for _, low, high, _ in rows for time in (low, high))
    for (name, *_), low_text, high_text in zip(rows, times[::2], times[1::2], strict=True):
        tell(f"  {name}: {low_text} to {high_text}")
    figures.announce()


@click.command()
@click.argument("kind", metavar="|".join((*FIGURES, FIDELITY)), callback=one_of("figure", (*FIGURES, FIDELITY)))
@click.argument("source", metavar="[TRACE|RESULTS]", required=False)
@hardware_option
@policy_option
@streams_option
@figure_options
def figure(
    kind: str,
    source: str | None,
    hardware: str | None,
    policy: str,
    streams: int,
    html_file: str | None,
    png_file: str | None,
) -> None:
    """Draw a figure of the dashboard; `simulate`, `limits` and `whatif` draw their own.

    `fidelity` draws RESULTS, a file or folder of `gpusim validate` [default: the bundled ones]; all others draw TRACE.
    Without --html and --png the page is TRACE-KIND.html, for example googlenet-train-b8-gain.html.
    """
    if html_file is None and png_file is None:
        html_file = f"{_name_of(source)}-{kind}.html" if source and kind != FIDELITY else f"{kind}.html"
    files = check_figures(html_file, png_file)
    if kind == FIDELITY:
        from gpusim.api.commands import validation_results
        from gpusim.report.figures.comparisons import measured_figure

        files.write(measured_figure(validation_results(source)), "predicted against measured")
        files.announce()
        return
    if source is None:
        raise OptionError(f"figure {kind}: give a trace")

    step = load_step(source, hardware)
    files.write(_draw(kind, step, policy, streams), f"{kind} of {step.name}")
    files.announce()


def _name_of(source: str) -> str:
    """Return the name of a trace or of its file, without folders and suffixes."""
    return Path(source).name.removesuffix(".gz").removesuffix(".json")


def _draw(kind: str, step: Step, policy: str, streams: int) -> Any:
    import gpusim
    from gpusim.report.breakdown import breakdown
    from gpusim.report.figures.breakdown import breakdown_figure, front_figure
    from gpusim.report.figures.comparisons import memory_figure
    from gpusim.report.figures.explored import bounds_figure, gain_figure

    title = f"{step.name} on {step.hardware.label}"
    if kind in EXPLORED:
        explored = gpusim.explore(step, streams=streams, budget_s=QUICK_BUDGET_S, evaluations=QUICK_EVALUATIONS)
        if kind == "front":
            return front_figure(explored.rows, title)
        return bounds_figure(explored) if kind == "bounds" else gain_figure(explored)
    if kind == "breakdown":
        return breakdown_figure(breakdown(step.graph), title)
    alone, run = gpusim.simulate(step, "sequential", streams=1), gpusim.simulate(step, policy, streams=streams)
    named = [("sequential", alone.timeline), (f"{policy}, {counted(run.streams, 'stream')}", run.timeline)]
    return memory_figure(named if policy != "sequential" else named[:1], title=f"Memory over time: {title}")


def _document(simulated: Simulated) -> dict[str, Any]:
    return {
        "hardware": simulated.graph.hardware.label,
        "calibrated": simulated.graph.hardware.calibrated,
        "streams": simulated.streams,
        "launch": simulated.mode,
        "makespan_ns": simulated.makespan_ns,
        "sequential_ns": simulated.sequential_ns,
        "speedup": simulated.speedup,
        "peak_bytes": simulated.peak_bytes,
    }
