"""`gpusim import`, `doctor` and `export`: files of other tools."""

from __future__ import annotations

import sys

import click

from gpusim.cli.common import (
    Function,
    check_output,
    chosen_schedule,
    command_line,
    hardware_option,
    json_option,
    load_step,
    policy_option,
    print_json,
    progress_bar,
    streams_option,
    tell,
)
from gpusim.errors import OptionError

EXIT_FINDINGS = 1


@click.command(name="import")
@click.argument("files", nargs=-1, required=True, metavar="FILE...")
@click.option("-o", "output", required=True, metavar="TRACE", help="Write the trace here (.json[.gz]).")
@click.option(
    "--step", default=None, metavar="NAME|N|all", help="Step name, range or number, in place of a typical step."
)
@click.option("--device", type=click.IntRange(min=0), default=None, metavar="N", help="GPU number in the file.")
@click.option(
    "--rank", type=click.IntRange(min=0), default=None, metavar="N", help="Rank, if there are several profiles."
)
@click.option("--gpu", default=None, metavar="NAME", help="Name of the GPU, if the file has none.")
@json_option
def import_command(
    files: tuple[str, ...],
    output: str,
    step: str | None,
    device: int | None,
    rank: int | None,
    gpu: str | None,
    as_json: bool,
) -> None:
    """Make a trace from profiles: Kineto, nsys SQLite, ncu CSV, execution traces, Chakra .et, CUDA graph dumps.

    Several FILEs are joined as one run: a profile with its execution trace, ncu table or CUDA graph.
    """
    from gpusim.api.other_tools import import_trace
    from gpusim.report.doctor_text import imported_document, imported_lines

    target = check_output(output)
    assert target is not None
    with progress_bar(not as_json) as report:
        imported = import_trace(
            files,
            target,
            step=step,
            device=device,
            rank=rank,
            gpu=gpu,
            command=command_line(),
            progress=report,
        )
    if as_json:
        print_json({"trace": output, **imported_document(imported)})
        return
    for line in imported_lines(imported):
        tell(line)
    tell(f"trace written to {target}; ask it with `gpusim explore {target}`")


@click.command()
@click.argument("files", nargs=-1, required=True, metavar="FILE...")
@json_option
def doctor(files: tuple[str, ...], as_json: bool) -> None:
    """Identify FILE, describe its contents, and report what is wrong or missing; exit code 1 if there are findings."""
    from gpusim.api.other_tools import doctor as examine
    from gpusim.report.doctor_text import doctor_lines

    with progress_bar(not as_json) as report:
        examined = examine(files, report)
    if as_json:
        print_json(examined.document())
    else:
        for line in doctor_lines(examined, ", ".join(files)):
            tell(line)
    if examined.findings:
        sys.exit(EXIT_FINDINGS)


#: Outputs of `export` by option, with help texts.
EXPORTS = {
    "--kineto": "Timeline in the format of torch.profiler (.json[.gz]).",
    "--execution-trace": "Ops and tensors, to join with the timeline (.json[.gz]).",
    "--chakra": "Kernels with true data dependencies (.et).",
    "--table": "The schedule as a table (.csv, .md).",
    "--python": "The schedule as Python with torch.cuda.Stream (.py).",
}


def _export_options(function: Function) -> Function:
    for option, text in reversed(EXPORTS.items()):
        function = click.option(option, metavar="OUT", help=text)(function)
    return function


@click.command()
@click.argument("trace")
@hardware_option
@policy_option("Export")
@click.option("--schedule", "schedule_file", metavar="FILE", help="Export this schedule instead of a policy's.")
@streams_option
@_export_options
@json_option
def export(
    trace: str,
    hardware: str | None,
    policy: str | None,
    schedule_file: str | None,
    streams: int | None,
    as_json: bool,
    **outputs: str | None,
) -> None:
    """Write a schedule of TRACE for other tools and people: Perfetto, HTA, TraceLens, Chakra, a table, Python."""
    import gpusim
    from gpusim.api.other_tools import export as write

    written = {kind: path for kind, path in outputs.items() if path is not None}
    if not written:
        *others, last = EXPORTS
        raise OptionError(f"nothing to write: give {', '.join(others)} or {last}")
    targets = {kind: target for kind, path in written.items() if (target := check_output(path)) is not None}
    step = load_step(trace, hardware)
    with progress_bar(not as_json) as report:
        chosen, most_streams = chosen_schedule(policy, streams, schedule_file)
        simulated = gpusim.simulate(step, chosen, streams=most_streams, progress=report)
    write(simulated, targets, step.file)
    if not as_json:
        for target in targets.values():
            tell(f"written to {target}")
        return
    print_json(
        {
            "trace": step.name,
            "hardware": step.hardware.label,
            "policy": simulated.policy,
            "streams": simulated.streams,
            "makespan_ns": simulated.makespan_ns,
            "sequential_ns": simulated.sequential_ns,
            "files": written,
        }
    )
