"""What several commands share: options, hardware by default, progress, JSON output."""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import click

from gpusim.errors import GpuError, PlanError, TraceError, UnknownNameError
from gpusim.file_limits import MAX_INTEGER

if TYPE_CHECKING:
    from gpusim.hardware.model import HardwareModel
    from gpusim.trace.schema import Trace

Function = TypeVar("Function", bound=Callable[..., Any])

DEFAULT_HARDWARE = "h200"
MISSING_TORCH = (
    "no GPU: torch is not installed, and this command runs kernels on a CUDA GPU (pip install 'gpusim[gpu]')"
)

#: The folders of an absolute path, by itself or after `--option=`.
_FOLDERS = re.compile(r"(?:^|(?<==))/.*/")

json_option = click.option("--json", "as_json", is_flag=True, help="One JSON document on standard output; times in ns.")
seed_option = click.option("--seed", type=click.IntRange(min=0, max=MAX_INTEGER), default=0, show_default=True)


def hardware_option(function: Function) -> Function:
    """`--hw NAME`."""
    text = f"Hardware model, bundled name or .json file [default: the GPU of the trace, else {DEFAULT_HARDWARE}]."
    return click.option("--hw", "hardware", metavar="NAME", default=None, help=text)(function)


def choose_hardware(name: str | None, trace: Trace) -> HardwareModel:
    """The hardware model asked for, or the one of the GPU that the trace was captured on."""
    from gpusim.hardware.model import hardware_for_gpu, load_hardware

    if name is not None:
        return load_hardware(name)
    return hardware_for_gpu(trace.provenance.gpu.name) or load_hardware(DEFAULT_HARDWARE)


def print_json(document: Any) -> None:
    """One JSON document on standard output, and nothing else there."""
    import msgspec

    click.echo(msgspec.json.format(msgspec.json.encode(document), indent=1).decode())


def check_output(path: str | None) -> Path | None:
    """The output path, known to be writable before long work begins. Raises `OutputError`."""
    from gpusim.files import check_writable

    if path is None:
        return None
    check_writable(Path(path))
    return Path(path)


def one_of(what: str, known: tuple[str, ...]) -> Callable[[click.Context, click.Parameter, str], str]:
    """A callback that holds an option to a few words and suggests the nearest."""

    def check(_context: click.Context, _parameter: click.Parameter, value: str) -> str:
        if value not in known:
            raise UnknownNameError(what, value, known)
        return value

    return check


@contextmanager
def progress_bar(enabled: bool) -> Iterator[Callable[[str, float, int], None]]:
    """A progress bar on standard error, where that is a terminal; called with what, share done and best time so far."""
    if not enabled or not sys.stderr.isatty():
        yield lambda what, share, best_ns: None
        return
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

    from gpusim.units import format_ns

    columns = (TextColumn("{task.description}"), BarColumn(), TextColumn("{task.fields[best]}"), TimeElapsedColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task("explore", total=1.0, best="")

        def report(what: str, share: float, best_ns: int) -> None:
            bar.update(task, description=what, completed=share, best=f"best {format_ns(best_ns)}")

        yield report


@contextmanager
def naming(file: str) -> Iterator[None]:
    """Put the file's name before a plan's error: the kernel at fault came out of that file."""
    try:
        yield
    except PlanError as cause:
        raise TraceError(file, str(cause)) from cause


@contextmanager
def needs_torch() -> Iterator[None]:
    """Turn a missing torch into one line. Raises `GpuError`."""
    try:
        yield
    except ModuleNotFoundError as cause:
        if cause.name is None or cause.name.partition(".")[0] != "torch":
            raise
        raise GpuError(MISSING_TORCH) from cause


def check_gpu(step: Trace, file: str) -> None:
    """Refuse a replay before long work: no torch, no GPU, or an operator not allowed. Raises `GpusimError`."""
    with needs_torch():
        from gpusim.runtime.device import require_gpu
    from gpusim.runtime.allowlist import check_operators

    check_operators(step, file)
    require_gpu()


def say(text: str) -> None:
    """One line of progress on standard error."""
    click.echo(f"  {text} ...", err=True)


def command_line() -> str:
    """The command as the user gave it, for provenance; absolute paths without folders, which say nothing elsewhere."""
    return " ".join(["gpusim", *(_FOLDERS.sub("", word) for word in sys.argv[1:])])
