"""`gpusim limits`: concurrency of a step, and the limits that keep the GPU from using it."""

from __future__ import annotations

import click

from gpusim.cli.common import check_output, hardware_option, json_option, load_step, print_json, progress_bar, tell
from gpusim.cli.figures import check_figures, figure_options
from gpusim.defaults import DEFAULT_STREAMS


@click.command()
@click.argument("trace")
@hardware_option
@click.option(
    "--streams",
    type=int,
    default=DEFAULT_STREAMS,
    show_default=True,
    help="Maximum number of streams of the compared schedules.",
)
@json_option
@figure_options
@click.option("--csv", "csv_file", metavar="FILE", help="Write the losses as CSV, one row per scope and limit.")
def limits(
    trace: str,
    hardware: str | None,
    streams: int,
    as_json: bool,
    html_file: str | None,
    png_file: str | None,
    csv_file: str | None,
) -> None:
    """Show the parallelism of TRACE, and its loss to each limit: dependencies, gaps, SMs, bandwidth ...

    Covers forward pass, backward pass, optimizer and the whole step; docs/commands/limits.md explains the limits.
    """
    import gpusim
    from gpusim.io.files import write_bytes
    from gpusim.report.limits_table import limits_csv, limits_document, print_limits

    figures = check_figures(html_file, png_file)
    table = check_output(csv_file)
    step = load_step(trace, hardware)
    with progress_bar(not as_json) as report:
        analysed = gpusim.limits(step, streams=streams, progress=report)
    if table is not None:
        write_bytes(table, limits_csv(analysed).encode())
    if figures:
        from gpusim.report.figures.limits import limits_figure

        figures.write(limits_figure(analysed), f"limits of {analysed.trace}")
    if as_json:
        print_json(limits_document(analysed))
        return
    print_limits(analysed)
    if table is not None:
        tell(f"losses written to {table}")
    figures.announce()
