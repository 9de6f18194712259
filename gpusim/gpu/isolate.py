"""Functions run in a process of their own: torch allows one profiler session per process, and a crash stays there."""

from __future__ import annotations

import multiprocessing
import sys
import types
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from time import perf_counter
from typing import TypeVar

from gpusim.errors import GpuError
from gpusim.io.processes import end_with_parent

Result = TypeVar("Result")


def alone(work: Callable[..., Result], *args: object) -> Result:
    """Run a module-level function in a new process, which frees the GPU at its end. Raises the function's errors.

    Raises `GpuError` where the process died without an error (killed for memory, a crash in a library).
    """
    try:
        spawn = multiprocessing.get_context("spawn")
        with ProcessPoolExecutor(1, mp_context=spawn, initializer=end_with_parent) as pool:
            with _without_main():
                future = pool.submit(work, *args)
            return future.result()
    except BrokenProcessPool as cause:
        raise GpuError(f"the process of this step died (out of memory, or a crash in a library): {cause}") from cause


@contextmanager
def _without_main() -> Iterator[None]:
    """Start processes that do not run the user's script again, which may lack `if __name__ == "__main__"`."""
    main = sys.modules["__main__"]
    sys.modules["__main__"] = types.ModuleType("__main__")
    try:
        yield
    finally:
        sys.modules["__main__"] = main


def stopwatch() -> Callable[[str], None]:
    """Return a function that prints progress on standard error, with the seconds since its creation."""
    begin = perf_counter()

    def say(text: str) -> None:
        sys.stderr.write(f"  {perf_counter() - begin:6.1f} s {text}\n")
        sys.stderr.flush()

    return say
