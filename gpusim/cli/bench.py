"""`gpusim bench`: speed of the engines on this machine."""

from __future__ import annotations

import click

from gpusim.cli.common import hardware_option, json_option, load_step, one_trace, print_json, say, trace_either_way
from gpusim.defaults import DEFAULT_TRACE


@click.command()
@trace_either_way
@hardware_option
@click.option(
    "--seconds",
    type=click.FloatRange(min=0.001, max=60.0),
    default=0.2,
    show_default=True,
    help="Time for each measurement of a round.",
)
@json_option
def bench(trace_argument: str | None, trace: str | None, hardware: str | None, seconds: float, as_json: bool) -> None:
    """Measure the schedules and kernels that each engine simulates per second, and whether the engines agree.

    TRACE defaults to googlenet-train-b8.
    """
    trace = one_trace(trace_argument, trace, DEFAULT_TRACE)
    from gpusim.api import commands
    from gpusim.report.bench_table import bench_document, print_bench

    measured = commands.bench(load_step(trace, hardware), seconds, say)
    if as_json:
        print_json(bench_document(measured))
    else:
        print_bench(measured)
