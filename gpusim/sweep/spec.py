"""The sweep file (TOML), and expansion of its names, globs and files into lists."""

from __future__ import annotations

import fnmatch
import glob
import os
from collections.abc import Callable, Collection, Sequence
from pathlib import Path
from typing import Annotated

from msgspec import Meta

from gpusim.defaults import DEFAULT_ENGINE, DEFAULT_SEED
from gpusim.engine.base import engine_by_name
from gpusim.errors import FileError, HardwareError, SweepError, TraceError, UnknownNameError
from gpusim.formats.hardware import HardwareModel, bundled_hardware, read_hardware
from gpusim.io.files import Count, Document, read_toml
from gpusim.plan.schedule import MAX_STREAMS
from gpusim.policies.registry import POLICIES
from gpusim.trace.store import TRACE_SUFFIXES, bundled_traces

ALL = "all"
DEFAULT_STREAMS = (2, 4, 8)
HARDWARE_SUFFIX = ".json"

StreamCount = Annotated[int, Meta(ge=1, le=MAX_STREAMS)]


class Sweep(Document, frozen=True, kw_only=True):
    """The lists of a sweep, whose product gives its points. Names may be globs over bundled names, or `all`."""

    traces: Annotated[tuple[str, ...], Meta(min_length=1)]
    """Bundled names, or trace files from the working directory; the trace determines model and batch."""
    hardware: tuple[str, ...] = ()
    """Bundled names or `.json` files; if empty, the model of the GPU of each trace."""
    policies: Annotated[tuple[str, ...], Meta(min_length=1)] = (ALL,)
    """Policy names; `all` leaves out slow policies (seconds per call), which must be named."""
    streams: Annotated[tuple[StreamCount, ...], Meta(min_length=1)] = DEFAULT_STREAMS
    """Stream counts for every policy; counts above the maximum of a policy are replaced by it, once."""
    engine: str = DEFAULT_ENGINE
    seed: Count = DEFAULT_SEED
    """Seed, part of every point's identity; no registered policy draws random numbers today."""


def read_sweep(path: Path) -> Sweep:
    """Read a sweep file and check its names. Raises `SweepError` with file, place and reason."""
    sweep = read_toml(path, Sweep, SweepError)
    checks: tuple[tuple[str, Sequence[str], Callable[[Sequence[str]], object]], ...] = (
        ("traces", sweep.traces, trace_files),
        ("hardware", sweep.hardware, _read_models),
        ("policies", sweep.policies, policy_names),
    )
    for field, names, expand in checks:
        for index, name in enumerate(names):
            try:
                expand((name,))
            except (UnknownNameError, FileError) as cause:
                raise SweepError(str(path), str(cause), place=f"$.{field}[{index}]") from cause
    try:
        engine_by_name(sweep.engine)
    except UnknownNameError as cause:
        raise SweepError(str(path), str(cause), place="$.engine") from cause
    return sweep


def trace_files(names: Sequence[str]) -> list[Path]:
    """Expand names, globs and paths to trace files, each once. Raises `UnknownNameError`, `TraceError`."""
    bundled = bundled_traces()
    files: list[Path] = []
    for name in names:
        if name.endswith(TRACE_SUFFIXES):
            files += _matching_files(name)
        elif os.path.isfile(name):
            files.append(Path(name))
        else:
            files += [bundled[known] for known in _matching_names("trace", name, bundled)]
    return list(dict.fromkeys(files))


def hardware_files(names: Sequence[str]) -> list[Path]:
    """Expand names and paths to hardware model files, each once. Raises `UnknownNameError`, `HardwareError`."""
    bundled = bundled_hardware()
    files: list[Path] = []
    for name in names:
        if name.endswith(HARDWARE_SUFFIX):
            _check_there(name, HardwareError)
            files.append(Path(name))
        else:
            files += [bundled[known] for known in _matching_names("hardware", name, bundled)]
    return list(dict.fromkeys(files))


def policy_names(names: Sequence[str]) -> list[str]:
    """Expand names and globs to policies, each once; slow ones only by name. Raises `UnknownNameError`."""
    quick = [name for name, policy in POLICIES.items() if not policy.slow]
    return list(dict.fromkeys(known for name in names for known in _matching_names("policy", name, POLICIES, quick)))


def _matching_names(kind: str, name: str, known: Collection[str], by_glob: Collection[str] | None = None) -> list[str]:
    """Return the names that `name` matches; a glob matches only names in `by_glob`, if given."""
    if name in known:
        return [name]
    choices = known if by_glob is None else by_glob
    matching = [choice for choice in choices if name == ALL or fnmatch.fnmatchcase(choice, name)]
    if not matching:
        raise UnknownNameError(kind, name, known)
    return matching


def _matching_files(pattern: str) -> list[Path]:
    if glob.escape(pattern) == pattern or os.path.exists(pattern):
        _check_there(pattern, TraceError)
        return [Path(pattern)]
    files = sorted(glob.glob(pattern))
    if not files:
        raise TraceError(pattern, "no file matches")
    return [Path(file) for file in files]


def _check_there(name: str, error: type[FileError]) -> None:
    try:
        os.stat(name)
    except (OSError, ValueError) as cause:  # ValueError: a NUL in the name
        raise error(name, f"cannot be read: {getattr(cause, 'strerror', None) or cause}") from cause


def _read_models(names: Sequence[str]) -> list[HardwareModel]:
    return [read_hardware(path) for path in hardware_files(names)]
