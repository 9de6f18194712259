"""How functions here are compiled, and how what was compiled is kept from one start to the next.

`jit` marks a function that only compiled functions call; `entry` one that Python calls. Entries are compiled at their
first call, not at import, and kept on disk by numba: in the package's `__pycache__` where that is writable, else in the
user's cache directory (`NUMBA_CACHE_DIR` goes before both), else not at all. `rule` compiles a function that the
reference engine calls as it is, so that a rule is written once.

numba looks at the entry's own file when it decides whether what it kept is still good, not at those of the functions
that the entry calls. So what is kept here has a digest of the sources of the engine and the rules in its name.
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

#: Dividing by zero gives infinity instead of raising: no rule divides by zero, and the checks cost time. Nor are
#: references to arrays counted (numba's own option for functions that allocate nothing): each part of an array that is
#: passed on would cost two locked instructions.
OPTIONS = {"error_model": "numpy", "_nrt": False}

#: Packages whose functions are compiled.
SOURCES: Final = ("engine", "rules")

#: Where rules are: plain functions, which call each other.
RULES: Final = "gpusim.rules"

#: A 64-bit integer. Where a constant or a narrower field is passed on, this keeps functions from being compiled twice.
int64 = cast(Callable[[int], int], np.int64)

#: A time that 64-bit integers still have.
END_OF_TIME: Final = 2.0**62

#: A number that is not negative. As an index, compiled code need not look whether it counts from the end.
uint32 = cast(Callable[[int], int], np.uint32)


def jit(function: Function) -> Function:
    """Compile `function` as part of whatever entry calls it."""
    return cast(
        Function, numba.njit(forceinline=True, no_cpython_wrapper=True, no_cfunc_wrapper=True, **OPTIONS)(function)
    )


def jit_apart(function: Function) -> Function:
    """Compile `function` as part of whatever entry calls it, but as a function by itself where it is large."""
    return cast(Function, numba.njit(no_cpython_wrapper=True, no_cfunc_wrapper=True, **OPTIONS)(function))


@functools.cache
def rule(function: Function) -> Function:
    """Compile a function of `gpusim.rules`, and the functions of it that this one calls, as `jit` does."""
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
    """Compile `function` at its first call and keep the result on disk; it runs without Python's lock.

    Arrays have to be writable and contiguous: numba compiles again for each other kind of array.
    """
    lock = threading.Lock()  # threads of a batch would each compile

    @functools.cache
    def compiled() -> Any:
        function.__qualname__ += f"-{sources_digest()}"  # numba makes file names of it
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
    """Whether an entry, compiled for any arguments, is kept on disk; None where nothing can be."""
    folder = function.dispatcher().stats.cache_path  # type: ignore[attr-defined]
    if folder is None:
        return None
    return any(Path(folder).glob(f"*.{function.__name__}-{sources_digest()}*.nbi"))


def _forget_others(folder: Path, name: str) -> None:
    """Remove what other versions of the sources left behind; who still runs one of them compiles again."""
    for path in folder.glob(f"*.{name}-*.nb[ci]"):
        if sources_digest() not in path.name:
            with contextlib.suppress(OSError):
                path.unlink()


@functools.cache
def sources_digest() -> str:
    """A digest of `gpusim.engine` and `gpusim.rules`: it changes when any compiled function may have changed."""
    digest = hashlib.sha256()
    package = Path(__file__).parents[2]
    for path in sorted(path for name in SOURCES for path in (package / name).rglob("*.py")):
        digest.update(path.read_bytes())
    return digest.hexdigest()[:16]
