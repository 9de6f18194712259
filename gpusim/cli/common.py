"""Code shared by several commands: options, default hardware, progress, JSON output."""

from __future__ import annotations

import gc
import os
import re
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import click

from gpusim.defaults import DEFAULT_HARDWARE, DEFAULT_POLICY, DEFAULT_SEED, DEFAULT_STREAMS, LAUNCH_MODES, RECOMMENDED
from gpusim.errors import GpusimError, OptionError, OutputError, UnknownNameError
from gpusim.io.file_limits import MAX_INTEGER
from gpusim.text import VALUE_CHARACTERS, json_ascii, message, short_value, shortened, visible

if TYPE_CHECKING:
    from gpusim import Step

Function = TypeVar("Function", bound=Callable[..., Any])

#: Options whose names differ from the arguments in Python.
OPTIONS = {"budget_s": "--budget", "memory_limit": "--memory"}

#: Maximum length of a line about a wrong command line: a value, a suggestion, and words.
USAGE_CHARACTERS = 3 * VALUE_CHARACTERS

#: Folders of an absolute path, by itself or after `--option=`.
_FOLDERS = re.compile(r"(?:^|(?<==))/.*/")

json_option = click.option("--json", "as_json", is_flag=True, help="One JSON document on standard output; times in ns.")
seed_option = click.option(
    "--seed", type=click.IntRange(min=0, max=MAX_INTEGER), default=DEFAULT_SEED, show_default=True
)


def hardware_option(function: Function) -> Function:
    """Add `--hw NAME`."""
    text = f"Hardware model, bundled name or .json file [default: the GPU of the trace, else {DEFAULT_HARDWARE}]."
    return click.option("--hw", "hardware", metavar="NAME", default=None, help=text)(function)


def load_step(trace: str, hardware: str | None) -> Step:
    """Load the step of TRACE on `--hw`; for imported and estimated traces, print a note on standard error."""
    import gpusim

    # Files contain no reference cycles, and these objects live to the end, so garbage collection is useless here.
    gc.disable()
    try:
        step = gpusim.load(trace, hardware)
        gc.freeze()
    finally:
        gc.enable()
    gpu, source = step.trace.provenance.gpu.name, step.trace.provenance.imported_from
    if source is not None:
        other = "" if step.hardware.gpu == gpu else f"; its times are of {gpu}, the rest is {step.hardware.label}"
        files = ", ".join(source.files)
        tell(f"note: imported from {files}, dependencies: {source.dependency_quality}{other}", err=True)
    if step.trace.provenance.estimated:
        basis = short_value(step.trace.provenance.estimated)
        tell(f"note: no GPU has run this step; its kernels are estimated from {basis}", err=True)
    return step


def in_words_of_the_command_line(error: GpusimError) -> str:
    """Return the line of an error, with the option in place of Python's argument: `--streams 300: ...`."""
    if not isinstance(error, OptionError) or not error.argument:
        return str(error)
    option = OPTIONS.get(error.argument, f"--{error.argument.replace('_', '-')}")
    return str(OptionError(f"{option} {error.value}: {error.problem}"))


@contextmanager
def named(argument: str, option: str) -> Iterator[None]:
    """Within the context, errors about an argument of Python name this option."""
    try:
        yield
    except OptionError as error:
        if error.argument != argument:
            raise
        raise OptionError(f"{option} {error.value}: {error.problem}") from error


def usage_line(problem: str, words: Iterable[str]) -> str:
    """Return click's message about a wrong command line, with its words shortened like other values in messages.

    click repeats words, and parts of `--option=value` and `-ovalue`, with any quotes or none.
    """
    parts = {part for word in words for part in (word, word[2:], word.partition("=")[2])}
    for part in sorted(parts, key=len, reverse=True):
        for said in (part, repr(part)[1:-1]):
            if len(said) > VALUE_CHARACTERS:
                problem = problem.replace(said, short_value(part))
    return shortened(message(problem), USAGE_CHARACTERS)


def tell(*words: str, err: bool = False) -> None:
    """Print one line on standard output or standard error, with control characters made visible."""
    click.echo(visible(" ".join(words)), err=err)


def print_json(document: Any) -> None:
    """Print one JSON document, and nothing else, on standard output."""
    import msgspec

    click.echo(json_ascii(msgspec.json.format(msgspec.json.encode(document), indent=1).decode()))


def trace_either_way(function: Function) -> Function:
    """Add TRACE as an argument and as `--trace`, for older scripts; `one_trace` merges them."""
    function = click.option("--trace", default=None, metavar="TRACE", help="The same as the argument TRACE.")(function)
    return click.argument("trace_argument", metavar="TRACE", required=False)(function)


def one_trace(argument: str | None, option: str | None, default: str | None = None) -> str:
    """Return the trace given either way. Raises `OptionError` for none and for two."""
    if argument is not None and option is not None:
        raise OptionError(f"give the trace once: {short_value(argument)}, or --trace {short_value(option)}")
    trace = argument or option or default
    if trace is None:
        raise OptionError("give a TRACE: a file or a bundled name (gpusim traces)")
    return trace


def policy_option(verb: str) -> Callable[[Function], Function]:
    """Return a decorator that adds `--policy P`; `verb` is what the command does with its schedule."""
    text = f"{verb} this policy's schedule; `{RECOMMENDED}`: the one recommended by explore (gpusim policies)"
    return click.option("--policy", default=None, metavar="P", help=f"{text}.")


def streams_option(function: Function) -> Function:
    """Add `--streams N` to a command that takes a policy or a schedule."""
    text = f"Maximum number of streams for the policy [default: {DEFAULT_STREAMS}]."
    return click.option("--streams", type=int, default=None, help=text)(function)


def launch_option(function: Function) -> Function:
    """Add `--launch graph|stream`."""
    return click.option(
        "--launch",
        default=LAUNCH_MODES[0],
        show_default=True,
        metavar="|".join(LAUNCH_MODES),
        callback=one_of("launch mode", LAUNCH_MODES),
        help="In one CUDA graph, or kernel by kernel from the host.",
    )(function)


def chosen_schedule(policy: str | None, streams: int | None, schedule_file: str | None) -> tuple[str | Path, int]:
    """Return the policy or file of --policy and --schedule, and the streams for a policy. Raises `OptionError`."""
    if schedule_file is None:
        return policy or DEFAULT_POLICY, DEFAULT_STREAMS if streams is None else streams
    if policy is not None or streams is not None:
        raise OptionError("--schedule goes without --policy and --streams: the file has both")
    return Path(schedule_file), DEFAULT_STREAMS


def check_output(path: str | None) -> Path | None:
    """Return the output path after checking, before long work, that it is writable. Raises `OutputError`.

    An output that the command line names twice is refused: it would replace an input, or another output.
    """
    from gpusim.io.files import check_writable

    if path is None:
        return None
    check_writable(Path(path))
    if _is_named_twice(path):
        raise OutputError(path, "cannot be written: the command line names this file twice")
    return Path(path)


def _is_named_twice(path: str) -> bool:
    """Whether two words of the command line name the output `path`. A name without a suffix may be a bundled one."""
    context = click.get_current_context(silent=True)
    is_name = not os.path.splitext(path)[1] and os.sep not in path
    if context is None or is_name or (os.path.exists(path) and not os.path.isfile(path)):  # a device
        return False
    file = os.path.realpath(path)
    return sum(os.path.realpath(word) == file for word in _words(tuple(context.params.values()))) > 1


def _words(value: Any) -> Iterator[str]:
    """Yield the words of an argument: itself, those of a repeated option, and the file of `FILE:FUNCTION`."""
    if isinstance(value, tuple):
        for part in value:
            yield from _words(part)
    elif isinstance(value, str) and "\0" not in value:  # with a NUL it names no file
        file, _, function = value.partition(":")
        yield file if function and file.endswith(".py") else value


def check_output_folder(path: str) -> Path:
    """Return the output folder after checking, before long work, that it is or can be made. Raises `OutputError`."""
    folder = Path(path)
    try:
        with suppress(FileNotFoundError, NotADirectoryError):
            os.stat(folder)  # a name may be too long
    except (OSError, ValueError) as cause:  # ValueError: a NUL in the name
        raise OutputError(path, f"cannot be a folder: {getattr(cause, 'strerror', None) or cause}") from cause
    there = next(part for part in (folder, *folder.absolute().parents) if part.exists())
    if not there.is_dir():
        raise OutputError(path, f"cannot be a folder: '{there}' is a file")
    if not os.access(there, os.W_OK | os.X_OK):
        raise OutputError(path, f"cannot be written: no permission in folder '{there}'")
    return folder


def one_of(kind: str, known: tuple[str, ...]) -> Callable[[click.Context, click.Parameter, str | None], str | None]:
    """Return a callback that limits an option to known words and suggests the nearest; None if not given."""

    def check(_context: click.Context, _parameter: click.Parameter, value: str | None) -> str | None:
        if value is not None and value not in known:
            raise UnknownNameError(kind, value, known)
        return value

    return check


@contextmanager
def progress_bar(enabled: bool) -> Iterator[Callable[[str, float, int], None]]:
    """Show a progress bar if standard error is a terminal; call it with stage, share done and best time so far."""
    if not enabled or not sys.stderr.isatty():
        yield lambda stage, share, best_ns: None
        return
    from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

    from gpusim.report.terminal import console
    from gpusim.units import format_ns

    texts = [TextColumn(text, markup=False) for text in ("{task.description}", "{task.fields[best]}")]
    columns = (texts[0], BarColumn(), texts[1], TimeElapsedColumn())
    with Progress(*columns, console=console(stderr=True), transient=True) as bar:
        task = bar.add_task("explore", total=1.0, best="")

        def report(stage: str, share: float, best_ns: int) -> None:
            best = f"best {format_ns(best_ns)}" if best_ns else ""
            bar.update(task, description=visible(stage), completed=share, best=best)

        yield report


def trust_option(function: Function) -> Function:
    """Add `--trust-code`, which allows code in a file to run."""
    text = "Allow code in the file to run, with all your rights (docs/security.md)."
    return click.option("--trust-code", "trust_code", is_flag=True, help=text)(function)


def say(text: str) -> None:
    """Print one line of progress on standard error."""
    tell(f"  {text} ...", err=True)


def command_line() -> str:
    """Return the user's command for provenance, with absolute paths reduced to file names."""
    return " ".join(["gpusim", *(_FOLDERS.sub("", word) for word in sys.argv[1:])])
