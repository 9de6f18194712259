"""`gpusim import` and `gpusim doctor`: traces that people already have."""

from __future__ import annotations

import sys

import click

from gpusim.cli.common import (
    check_output,
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
from gpusim.defaults import DEFAULT_POLICY, DEFAULT_STREAMS
from gpusim.errors import OptionError

EXIT_FINDINGS = 1


@click.command(name="import")
@click.argument("files", nargs=-1, required=True, metavar="FILE...")
@click.option("-o", "output", required=True, metavar="TRACE", help="Write the trace here (.json[.gz]).")
@click.option("--step", default=None, metavar="NAME|N|all", help="This step, range or number, in place of a usual one.")
@click.option("--device", type=click.IntRange(min=0), default=None, metavar="N", help="This GPU of the file.")
@click.option("--rank", type=click.IntRange(min=0), default=None, metavar="N", help="This profile of several.")
@click.option("--gpu", default=None, metavar="NAME", help="The GPU's name, where the file does not say.")
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
    """Make a trace of profiles: Kineto, nsys SQLite, ncu CSV, execution traces, Chakra .et, dumps of CUDA graphs.

    Several FILEs are joined as files of one run: a profile with its execution trace, ncu table or CUDA graph.
    """
    from gpusim.foreign import import_trace
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
    """Say what FILE is, what is in it, and what is wrong or missing; exit code 1 where there is anything to say."""
    from gpusim.foreign import doctor as examine
    from gpusim.report.doctor_text import doctor_lines

    with progress_bar(not as_json) as report:
        found = examine(files, report)
    if as_json:
        print_json(found.document())
    else:
        for line in doctor_lines(found, ", ".join(files)):
            tell(line)
    if found.findings:
        sys.exit(EXIT_FINDINGS)


@click.command()
@click.argument("trace")
@hardware_option
@policy_option("Export")
@streams_option
@click.option("--kineto", metavar="OUT", help="Timeline as torch.profiler writes one (.json[.gz]).")
@click.option(
    "--execution-trace", "operators", metavar="OUT", help="Ops and their tensors, to join with it (.json[.gz])."
)
@click.option("--chakra", metavar="OUT", help="Kernels with true data dependencies (.et).")
def export(
    trace: str,
    hardware: str | None,
    policy: str | None,
    streams: int | None,
    kineto: str | None,
    operators: str | None,
    chakra: str | None,
) -> None:
    """Write the predicted timeline of TRACE for other tools: Perfetto, HTA, TraceLens, Chakra's readers."""
    import gpusim
    from gpusim.foreign import write_chakra, write_execution_trace, write_kineto

    if not (kineto or operators or chakra):
        raise OptionError("nothing to write: give --kineto, --execution-trace or --chakra")
    writers = (write_kineto, write_execution_trace, write_chakra)
    targets = [check_output(path) for path in (kineto, operators, chakra)]
    step = load_step(trace, hardware)
    with progress_bar(True) as report:
        most_streams = DEFAULT_STREAMS if streams is None else streams
        simulated = gpusim.simulate(step, policy or DEFAULT_POLICY, streams=most_streams, progress=report)
    for target, write in zip(targets, writers, strict=True):
        if target is not None:
            write(simulated, target)
            tell(f"written to {target}")
