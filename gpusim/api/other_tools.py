"""Files of other tools: functions of `gpusim import`, `doctor` and `export`, and reports on imported traces."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Final

import msgspec

from gpusim.api.resolve import AnyStep, Progress, check_json_name, ignore
from gpusim.errors import OptionError
from gpusim.io.files import compress, write_bytes
from gpusim.step import as_step
from gpusim.text import short_value
from gpusim.trace.store import write_trace

if TYPE_CHECKING:
    from gpusim.analysis.as_imported import AsImported
    from gpusim.analysis.simulation import Simulated
    from gpusim.importers.build import Imported
    from gpusim.importers.doctor import Report


def import_trace(
    files: Sequence[str],
    output: Path,
    *,
    step: str | None = None,
    device: int | None = None,
    rank: int | None = None,
    gpu: str | None = None,
    command: str = "gpusim.api.other_tools.import_trace",
    progress: Progress = ignore,
) -> Imported:
    """Import the files of one run as a trace of one step, and write it.

    `step` is a name, a number or `all`. `device` is a GPU of the file, `rank` one of several profiles, and `gpu` the
    GPU's name if the file has none. Raises `TraceError` for a file, `OptionError`, `UnknownNameError`, `OutputError`.
    """
    from gpusim.importers import import_files

    check_json_name(output, "trace")
    if os.path.exists(output) and any(os.path.exists(file) and os.path.samefile(output, file) for file in files):
        raise OptionError(f"-o {short_value(output)}: is one of the files to import")
    imported = import_files(
        files,
        step=step,
        device=device,
        rank=rank,
        gpu=gpu,
        command=command,
        report=lambda share: progress("read", share, 0),
    )
    write_trace(imported.trace, output)
    return imported


def doctor(files: Sequence[str], progress: Progress = ignore) -> Report:
    """Report contents and faults of a file, or of the files of one run. Raises `TraceError` for an unreadable one."""
    from gpusim.importers import examine

    return examine(files, lambda share: progress("read", share, 0))


def searchable(step: AnyStep) -> bool:
    """Return True if the dependencies of a step are those of its program, so that schedules can be searched."""
    from gpusim.analysis.as_imported import searchable as ask

    return ask(as_step(step).trace)


def as_imported(step: AnyStep) -> AsImported:
    """Return the report on an imported step with its own streams and order. Raises `OptionError` for a captured one."""
    from gpusim.analysis.as_imported import as_imported as ask

    step = as_step(step)
    with step.naming():
        return ask(step.graph)


def export(simulated: Simulated, outputs: Mapping[str, Path], file: str = "") -> None:
    """Write a simulated schedule for other tools and people: all files, or none if one cannot be made.

    `outputs` has the files by kind: `kineto`, the timeline in the format of torch.profiler; `execution_trace`, ops and
    tensors in the format of PyTorch; `chakra`, kernels with data dependencies (`.et`); `table`, each op with stream and
    waits (`.csv`, `.md`); `python`, code with `torch.cuda.Stream` (`.py`). Names in `.gz` are compressed. `file` is the
    trace's, for messages. Raises `OptionError` for another kind or suffix and for code of an estimated step,
    `OperatorError` for an operator that replay would refuse, and `OutputError`.
    """
    makers = _makers(file)
    for kind, path in outputs.items():
        if kind not in makers:
            raise OptionError(f"one of {', '.join(makers)}", argument="outputs", value=kind)
        ends = _ENDS.get(kind, ())
        if ends and path.suffix not in ends:
            raise OptionError(f"{path}: the name ends in {' or '.join(ends)}", argument=kind, value=str(path))
    contents = {path: makers[kind](simulated, path) for kind, path in outputs.items()}
    for path, data in contents.items():
        write_bytes(path, compress(data) if path.name.endswith(".gz") else data)


_ENDS: Final = {"table": (".csv", ".md"), "python": (".py",)}


def _makers(file: str) -> dict[str, Callable[[Simulated, Path], bytes]]:
    """Return the function that makes the content of each kind of file."""
    from gpusim.report import export as exported
    from gpusim.report.schedule_python import schedule_python
    from gpusim.report.schedule_table import schedule_csv, schedule_markdown

    def kineto(simulated: Simulated, _: Path) -> bytes:
        title, anew = f"simulated: {simulated.policy}", any(simulated.schedule.variants)
        hardware = simulated.graph.hardware
        return exported.kineto_text(
            exported.kineto_document(simulated.recorded, simulated.ran.trace, title, hardware, anew=anew)
        )

    def python(simulated: Simulated, path: Path) -> bytes:
        trace = simulated.graph.trace
        if trace.provenance.estimated and trace.provenance.imported_from is None:
            problem = f"{file or trace.name} is estimated, without the values that its tensors begin with"
            raise OptionError(f"{problem}; capture the step on its GPU", argument="python", value=str(path))
        return schedule_python(simulated, file).encode()

    return {
        "kineto": kineto,
        "execution_trace": lambda simulated, _: msgspec.json.encode(
            exported.execution_trace_document(simulated.ran.trace)
        ),
        "chakra": lambda simulated, _: exported.chakra_bytes(simulated.recorded, simulated.ran.trace),
        "table": lambda simulated, path: (
            schedule_csv(simulated) if path.suffix == ".csv" else schedule_markdown(simulated)
        ).encode(),
        "python": python,
    }
