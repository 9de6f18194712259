"""Compilation with numba and its cache on disk.

`jit` marks a function called only by compiled functions, `entry` one called by Python. Entries are compiled at their
first call, not at import. numba caches them in the package's `__pycache__` if that is writable, else in the user's
cache directory (`NUMBA_CACHE_DIR` precedes both), else not at all. `rule` compiles a function that the reference engine
calls as it is, so each rule is written once.

numba invalidates its cache when the entry's own file changes, not when a file of a called function does. The names of
cached files therefore include a digest of the sources of the engine and the rules.
"""

from __future__ import annotations

import contextlib
import dis
import functools
import hashlib
import threading
from collections.abc import Callable
from pathlib import Path
from types import FunctionType
from typing import Any, Final, TypeVar, cast

import numba
import numpy as np

Function = TypeVar("Function", bound=Callable[..., Any])

#: Division by zero gives infinity instead of raising: no rule divides by zero, and the checks cost time. References to
#: arrays are not counted (numba's own option for functions that allocate nothing): each slice passed on would cost two
#: locked instructions.
OPTIONS = {"error_model": "numpy", "_nrt": False}

#: Packages with compiled functions.
SOURCES: Final = ("engine", "rules")

#: Package of the rules: plain functions, which may call each other.
RULES: Final = "gpusim.rules"

#: A 64-bit integer. Passing constants and narrower fields as this type avoids compiling a function twice.
int64 = cast(Callable[[int], int], np.int64)

#: A time within the range of 64-bit integers, in ns.
END_OF_TIME: Final = 2.0**62

#: A non-negative number. As an index it needs no check for counting from the end.
uint32 = cast(Callable[[int], int], np.uint32)


def jit(function: Function) -> Function:
    """Compile `function` inline into the entries that call it."""
    return cast(
        Function, numba.njit(forceinline=True, no_cpython_wrapper=True, no_cfunc_wrapper=True, **OPTIONS)(function)
    )


def jit_apart(function: Function) -> Function:
    """Compile `function` with the entries that call it, but leave inlining to the compiler, for large functions."""
    return cast(Function, numba.njit(no_cpython_wrapper=True, no_cfunc_wrapper=True, **OPTIONS)(function))


@functools.cache
def rule(function: Function) -> Function:
    """Compile a function of `gpusim.rules`, and the rules that it calls, as `jit` does."""
    read = (step.argval for step in dis.get_instructions(function) if step.opname == "LOAD_GLOBAL")
    called = {name: function.__globals__.get(name) for name in read}
    compiled = {
        name: rule(value)
        for name, value in called.items()
        if isinstance(value, FunctionType) and value.__module__.startswith(RULES)
    }
    same = FunctionType(function.__code__, {**function.__globals__, **compiled}, function.__name__)
    return cast(Function, jit(functools.wraps(function)(same)))


def entry(function: Function) -> Function:
    """Compile `function` at its first call and cache it on disk; it runs without the GIL.

    Arrays must be writable and contiguous: numba compiles again for each other kind of array.
    """
    lock = threading.Lock()  # else each thread of a batch would compile

    @functools.cache
    def compiled() -> Any:
        function.__qualname__ += f"-{sources_digest()}"  # numba builds file names from it
        dispatcher: Any = numba.njit(nogil=True, **OPTIONS)(function)
        with contextlib.suppress(RuntimeError):  # no directory to write to: compile at every start
            dispatcher.enable_caching()
            _forget_others(Path(dispatcher.stats.cache_path), function.__name__)
        return dispatcher

    def ready() -> Any:
        with lock:
            return compiled()

    @functools.wraps(function)
    def call(*arguments: Any) -> Any:
        return ready()(*arguments)

    call.dispatcher = ready  # type: ignore[attr-defined]
    return cast(Function, call)


def is_kept(function: Callable[..., Any]) -> bool | None:
    """Return True if an entry is cached on disk for any arguments; None if there is no cache."""
    folder = function.dispatcher().stats.cache_path  # type: ignore[attr-defined]
    if folder is None:
        return None
    return any(Path(folder).glob(f"*.{function.__name__}-{sources_digest()}*.nbi"))


def _forget_others(folder: Path, name: str) -> None:
    """Remove cached files of other versions of the sources; a process that runs one of them compiles again."""
    for path in folder.glob(f"*.{name}-*.nb[ci]"):
        if sources_digest() not in path.name:
            with contextlib.suppress(OSError):
                path.unlink()


@functools.cache
def sources_digest() -> str:
    """Return a digest of the sources of `gpusim.engine` and `gpusim.rules`, which contain all compiled functions."""
    digest = hashlib.sha256()
    package = Path(__file__).parents[2]
    for path in sorted(path for name in SOURCES for path in (package / name).rglob("*.py")):
        digest.update(path.read_bytes())
    return digest.hexdigest()[:16]
