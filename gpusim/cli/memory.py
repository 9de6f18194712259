"""`gpusim memory`: comparison of memory policies, and a plan within a byte budget."""

from __future__ import annotations

from pathlib import Path

import click

from gpusim.cli.common import (
    check_output,
    hardware_option,
    json_option,
    load_step,
    named,
    one_of,
    print_json,
    progress_bar,
    tell,
)
from gpusim.cli.figures import check_figures, figure_options
from gpusim.cli.sizes import size_option

SYNC = {"layers": True, "events": False}


@click.command()
@click.argument("trace")
@hardware_option
@click.option(
    "--policy",
    "policies",
    multiple=True,
    metavar="P",
    help="Only this memory policy, besides keep_all; repeatable.",
)
@size_option("--budget", "--memory", "memory_limit", "Limit on allocated memory: 8GiB, or a number of MiB.")
@size_option("--pinned", "pinned_limit", "Limit on pinned host memory; other tensors stay on the GPU.", least=0)
@click.option(
    "--sync",
    default=None,
    metavar="|".join(SYNC),
    callback=one_of("synchronisation", tuple(SYNC)),
    help="Synchronisation of ops and copies [default: that of each system].",
)
@click.option("-o", "output", metavar="PLAN", help="Write the plan of --policy, or the fastest that fits (.json).")
@click.option("--snapshot", metavar="FILE", help="Write that plan's memory over time for PyTorch's memory viewer.")
@click.option(
    "--measured", metavar="FILE", help="Compare keep_all with a measured snapshot (torch.cuda.memory._dump_snapshot)."
)
@json_option
@figure_options
def memory(
    trace: str,
    hardware: str | None,
    policies: tuple[str, ...],
    memory_limit: int | None,
    pinned_limit: int | None,
    sync: str | None,
    output: str | None,
    snapshot: str | None,
    measured: str | None,
    as_json: bool,
    html_file: str | None,
    png_file: str | None,
) -> None:
    """Compare memory policies for TRACE: peak memory, step time, copies, recomputation; needs no GPU."""
    import gpusim
    from gpusim.api import commands
    from gpusim.report.memory_table import memory_document, print_memory

    figures = check_figures(html_file, png_file)
    target, viewer = check_output(output), check_output(snapshot)
    run = None if measured is None else commands.read_memory_snapshot(Path(measured))
    step = load_step(trace, hardware)
    with progress_bar(not as_json) as report, named("memory_limit", "--budget"):
        comparison = gpusim.memory(
            step,
            memory_limit=memory_limit,
            policies=policies or None,
            pinned_limit=pinned_limit,
            synchronous=None if sync is None else SYNC[sync],
            progress=report,
        )
    if target is not None:
        comparison.save(target, policies[-1] if policies else None)
    if viewer is not None:
        comparison.save_snapshot(viewer, policies[-1] if policies else None)
    if figures:
        from gpusim.report.figures.memory_front import memory_front_figure

        figures.write(memory_front_figure(comparison), f"memory of {step.name}")
    if as_json:
        print_json(memory_document(comparison, run))
        return
    print_memory(comparison, run)
    for content, path in (("plan", target), ("memory over time", viewer)):
        if path is not None:
            tell(f"{content} written to {path}")
    figures.announce()
