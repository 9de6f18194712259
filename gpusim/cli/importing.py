"""`gpusim import` and `gpusim doctor`: traces that people already have."""

from __future__ import annotations

import sys
from pathlib import Path

import click

from gpusim.cli.common import (
    check_output,
    choose_hardware,
    command_line,
    hardware_option,
    json_option,
    naming,
    policy_option,
    print_json,
    progress_bar,
    streams_option,
    tell,
)
from gpusim.errors import OptionError
from gpusim.policies import DEFAULT_POLICY, DEFAULT_STREAMS

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
    from gpusim.importers.build import import_files
    from gpusim.report.doctor_text import imported_lines
    from gpusim.trace.store import TRACE_SUFFIXES, write_trace

    target = check_output(output)
    assert target is not None
    if not output.endswith(TRACE_SUFFIXES):
        raise OptionError(f"-o {output}: a trace's name ends in {' or '.join(TRACE_SUFFIXES)}")
    if any(Path(file).exists() and target.exists() and target.samefile(file) for file in files):
        raise OptionError(f"-o {output}: is one of the files to import")
    with progress_bar(not as_json) as report:
        imported = import_files(
            files, step=step, device=device, rank=rank, gpu=gpu, command=command_line(),
            report=lambda share: report("read", share, 0),
        )  # fmt: skip
    write_trace(imported.trace, target)
    if as_json:
        source = imported.source
        print_json(
            {
                "trace": output,
                "gpu": imported.trace.provenance.gpu.name,
                "kernels": sum(kernel.kind == "kernel" for op in imported.trace.ops for kernel in op.kernels),
                "streams": source.streams,
                "step": source.step,
                "steps": imported.steps,
                "dependency_quality": source.dependency_quality,
                "observed_ns": source.observed_ns,
                "busy_ns": source.busy_ns,
                "concurrent_ns": source.concurrent_ns,
                "resimulated_ns": source.resimulated_ns,
                "error": imported.error,
                "findings": [{"code": f.code, "text": f.text, "action": f.action} for f in imported.findings],
            }
        )
        return
    for line in imported_lines(imported):
        tell(line)
    tell(f"trace written to {target}; ask it with `gpusim explore {target}`")


@click.command()
@click.argument("files", nargs=-1, required=True, metavar="FILE...")
@json_option
def doctor(files: tuple[str, ...], as_json: bool) -> None:
    """Say what FILE is, what is in it, and what is wrong or missing; exit code 1 where there is anything to say."""
    from gpusim.importers.doctor import examine
    from gpusim.report.doctor_text import doctor_lines

    with progress_bar(not as_json) as report:
        found = examine(files, lambda share: report("read", share, 0))
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
    import msgspec

    from gpusim.engine.reference import ReferenceEngine
    from gpusim.plan.graph import OpGraph
    from gpusim.report.export import chakra_bytes, execution_trace_document, kineto_document, kineto_text
    from gpusim.search.explore import assignment_of, check_policy
    from gpusim.trace.store import load_trace

    if not (kineto or operators or chakra):
        raise OptionError("nothing to write: give --kineto, --execution-trace or --chakra")
    wanted = policy or DEFAULT_POLICY
    check_policy(wanted)
    targets = [check_output(path) for path in (kineto, operators, chakra)]
    step = load_trace(trace)
    model = choose_hardware(hardware, step)
    with naming(trace, hardware):
        graph = OpGraph.build(step, model)
    with progress_bar(True) as report:
        name, assignment = assignment_of(graph, model, wanted, streams or DEFAULT_STREAMS, report)
    timeline = ReferenceEngine().run(assignment.lowered(graph), graph.hardware)
    chosen = graph.choosing(assignment.variants).trace
    if targets[0] is not None:
        _write(targets[0], kineto_text(kineto_document(timeline, chosen, f"simulated: {name}", model)))
    if targets[1] is not None:
        _write(targets[1], msgspec.json.encode(execution_trace_document(chosen)))
    if targets[2] is not None:
        _write(targets[2], chakra_bytes(timeline, chosen))


def _write(target: Path, data: bytes) -> None:
    from gpusim.files import compress, write_bytes

    write_bytes(target, compress(data) if target.name.endswith(".gz") else data)
    tell(f"written to {target}")
