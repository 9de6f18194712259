"""Files of other tools: what `gpusim import`, `doctor` and `export` call, and the answers for imported traces."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from gpusim.api import AnyStep, Progress, ignore
from gpusim.errors import OptionError
from gpusim.files import compress, write_bytes
from gpusim.step import as_step
from gpusim.trace.store import TRACE_SUFFIXES, write_trace

if TYPE_CHECKING:
    from gpusim.importers.build import Imported
    from gpusim.importers.doctor import Report
    from gpusim.search.as_imported import AsImported
    from gpusim.search.simulation import Simulated


def import_trace(
    files: Sequence[str],
    output: Path,
    *,
    step: str | None = None,
    device: int | None = None,
    rank: int | None = None,
    gpu: str | None = None,
    command: str = "gpusim.foreign.import_trace",
    progress: Progress = ignore,
) -> Imported:
    """Read the files of one run as a trace of one step, and write it.

    `step` is a name, a number or `all`. `device` is a GPU of the file, `rank` one of several profiles, and `gpu` the
    GPU's name where the file does not say. Raises `TraceError` for a file, `OptionError`, `UnknownNameError`,
    `OutputError`.
    """
    from gpusim.importers import import_files

    if not output.name.endswith(TRACE_SUFFIXES):
        raise OptionError(f"-o {output}: a trace's name ends in {' or '.join(TRACE_SUFFIXES)}")
    if output.exists() and any(Path(file).exists() and output.samefile(file) for file in files):
        raise OptionError(f"-o {output}: is one of the files to import")
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
    """The contents and faults of one file, or of the files of one run. Raises `TraceError` for an unreadable one."""
    from gpusim.importers import examine

    return examine(files, lambda share: progress("read", share, 0))


def searchable(step: AnyStep) -> bool:
    """Whether the dependencies of a step are those of its program, so that other schedules can be searched."""
    from gpusim.search.as_imported import searchable as ask

    return ask(as_step(step).trace)


def as_imported(step: AnyStep) -> AsImported:
    """The answers for an imported step that keep its streams and order. Raises `OptionError` for a captured one."""
    from gpusim.search.as_imported import as_imported as ask

    step = as_step(step)
    with step.naming():
        return ask(step.graph)


def write_kineto(simulated: Simulated, path: Path) -> None:
    """Write the predicted timeline as torch.profiler writes one (`.json`, `.json.gz`). Raises `OutputError`."""
    from gpusim.report.export import kineto_document, kineto_text

    title = f"simulated: {simulated.policy}"
    document = kineto_document(simulated.recorded, simulated.ran.trace, title, simulated.graph.hardware)
    _write(path, kineto_text(document))


def write_execution_trace(simulated: Simulated, path: Path) -> None:
    """Write the ops and their tensors as an execution trace of PyTorch (`.json`, `.json.gz`). Raises `OutputError`."""
    from gpusim.report.export import execution_trace_document

    _write(path, msgspec.json.encode(execution_trace_document(simulated.ran.trace)))


def write_chakra(simulated: Simulated, path: Path) -> None:
    """Write the predicted kernels, with their data dependencies, as a Chakra `.et`. Raises `OutputError`."""
    from gpusim.report.export import chakra_bytes

    _write(path, chakra_bytes(simulated.recorded, simulated.ran.trace))


def _write(path: Path, data: bytes) -> None:
    write_bytes(path, compress(data) if path.name.endswith(".gz") else data)
