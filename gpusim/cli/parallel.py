"""`gpusim parallel`: a step on several GPUs, with a split per layer."""

from __future__ import annotations

import click

from gpusim.api.predict import OBJECTIVES
from gpusim.cli.common import (
    check_output,
    hardware_option,
    json_option,
    load_step,
    one_of,
    print_json,
    progress_bar,
    tell,
)
from gpusim.cli.figures import check_figures, figure_options
from gpusim.cli.sizes import size_option
from gpusim.defaults import BATCH_NORMS, DEFAULT_BATCH_NORM
from gpusim.units import counted


@click.command()
@click.argument("trace")
@click.option(
    "--gpus", type=int, required=True, metavar="N", help="Number of GPUs; the trace has the batch of one GPU."
)
@click.option("--topology", metavar="FILE", help="Links: a bundled name or a .json file [default: that of the GPU].")
@hardware_option
@click.option(
    "--plan", "plans", multiple=True, metavar="FILE", help="Further plan to compare, from gpusim or autoparallel."
)
@click.option(
    "--batch-norm",
    default=DEFAULT_BATCH_NORM,
    show_default=True,
    metavar="|".join(BATCH_NORMS),
    callback=one_of("batch norm", BATCH_NORMS),
    help="Statistics of each part of the batch, or of the whole batch.",
)
@size_option("--memory", "Memory limit per GPU: 80GiB, or in MiB.")
@click.option(
    "--by",
    default=OBJECTIVES[0],
    show_default=True,
    metavar="|".join(OBJECTIVES),
    callback=one_of("objective", OBJECTIVES),
    help="Objective of the plan: the simulated time, or the sum of costs.",
)
@click.option("-o", "--output", metavar="FILE", help="Write the layer-wise plan.")
@json_option
@figure_options
def parallel(
    trace: str,
    gpus: int,
    topology: str | None,
    hardware: str | None,
    plans: tuple[str, ...],
    batch_norm: str,
    memory: int | None,
    by: str,
    output: str | None,
    as_json: bool,
    html_file: str | None,
    png_file: str | None,
) -> None:
    """Split TRACE over several GPUs, layer by layer, compared with data, model and "one weird trick" parallelism.

    The search is exact for the sum of costs; each plan is then simulated. docs/commands/parallel.md has the rules.
    """
    import gpusim
    from gpusim.report.parallel_table import parallel_document, print_parallel

    figures, file = check_figures(html_file, png_file), check_output(output)
    step = load_step(trace, hardware)
    with progress_bar(not as_json) as report:
        explored = gpusim.parallel(
            step,
            gpus=gpus,
            topology=topology,
            plans=plans,
            batch_norm=batch_norm,
            memory_limit=memory,
            by=by,
            progress=report,
        )
    if file is not None:
        gpusim.write_parallel_plan(explored, file)
    if figures:
        from gpusim.report.figures.parallel import parallel_figure

        figures.write(parallel_figure(explored), f"{explored.name} on {counted(explored.gpus, 'GPU')}")
    if as_json:
        print_json(parallel_document(explored))
        return
    print_parallel(explored)
    if file is not None:
        tell(f"plan written to {file}")
    figures.announce()
