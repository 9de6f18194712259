"""Read sweep files, and expand their names, globs and files into lists."""

from __future__ import annotations

import fnmatch
import glob
import os
from collections.abc import Callable, Collection, Sequence
from pathlib import Path

from gpusim import HardwareModel
from gpusim.api.sweeps import (
    ALL,
    TRACE_SUFFIXES,
    Sweep,
    bundled_hardware,
    bundled_traces,
    check_engine,
    read_hardware,
    read_sweep_file,
    registered_policies,
)
from gpusim.errors import FileError, HardwareError, SweepError, TraceError, UnknownNameError

HARDWARE_SUFFIX = ".json"


def read_sweep(path: Path) -> Sweep:
    """Read a sweep file and check its names. Raises `SweepError` with file, place and reason."""
    sweep = read_sweep_file(path)
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
        check_engine(sweep.engine)
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
    policies = registered_policies()
    quick = [name for name, policy in policies.items() if not policy.slow]
    return list(dict.fromkeys(known for name in names for known in _matching_names("policy", name, policies, quick)))


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
