"""`gpusim transfer`: schedules tuned for one batch or GPU, used on another."""

from __future__ import annotations

import click

from gpusim.cli.common import json_option, load_step, print_json, progress_bar, seed_option
from gpusim.cli.figures import check_figures, figure_options
from gpusim.defaults import DEFAULT_STREAMS, MAX_EVALUATIONS, QUICK_EVALUATIONS
from gpusim.errors import OptionError


def _batches(_context: click.Context, _parameter: click.Parameter, text: str | None) -> list[int] | None:
    """Parse the numbers of `--batch`."""
    if text is None:
        return None
    parts = [part.strip() for part in text.split(",")]
    if not all(part.isascii() and part.isdigit() and len(part) <= 9 for part in parts):
        raise OptionError(f"--batch '{text}': whole numbers with commas between them, such as 8,32")
    return [int(part) for part in parts]


def _names(_context: click.Context, _parameter: click.Parameter, text: str | None) -> list[str] | None:
    """Parse the names of `--hw`."""
    if text is None:
        return None
    names = [part.strip() for part in text.split(",")]
    if not all(names):
        raise OptionError(f"--hw '{text}': names with commas between them, such as h200,a100-80gb")
    return names


@click.command()
@click.argument("traces", nargs=-1, required=True, metavar="TRACE...")
@click.option(
    "--hw",
    "hardware",
    callback=_names,
    default=None,
    metavar="A,B",
    help="Hardware models, names or files [default: each trace's own].",
)
@click.option(
    "--batch",
    "batches",
    callback=_batches,
    default=None,
    metavar="N,M",
    help="Batches to compare, from the given traces or bundled traces of the same network.",
)
@click.option("--streams", type=int, default=DEFAULT_STREAMS, show_default=True, help="Maximum number of streams.")
@click.option(
    "--evaluations",
    type=click.IntRange(1, MAX_EVALUATIONS),
    default=QUICK_EVALUATIONS,
    show_default=True,
    metavar="N",
    help="Simulations per search.",
)
@seed_option
@figure_options
@json_option
def transfer(
    traces: tuple[str, ...],
    hardware: list[str] | None,
    batches: list[int] | None,
    streams: int,
    evaluations: int,
    seed: int,
    html_file: str | None,
    png_file: str | None,
    as_json: bool,
) -> None:
    """Show the loss of a schedule of TRACE tuned for one batch or GPU on another; --html draws it as a heat map."""
    import gpusim
    from gpusim.report.transfer_table import print_transfer, transfer_document

    figures = check_figures(html_file, png_file)
    steps = [load_step(trace, None) for trace in traces]
    with progress_bar(not as_json) as report:
        transferred = gpusim.transfer(
            steps,
            hw=hardware,
            batch=batches,
            streams=streams,
            evaluations=evaluations,
            seed=seed,
            progress=report,
        )
    if figures:
        from gpusim.report.figures.transfer import transfer_figure

        figures.write(transfer_figure(transferred), "a schedule tuned here, used there")
    if as_json:
        print_json(transfer_document(transferred))
        return
    print_transfer(transferred)
    figures.announce()
