"""Computation of one point, in local worker processes and on Dask workers alike."""

from __future__ import annotations

import functools
import os
import socket
import time
import traceback
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from gpusim.api.sweeps import Simulations, step_of_contents
from gpusim.errors import GpusimError, WorkerError
from gpusim.sweep.grid import Point, code_version

if TYPE_CHECKING:
    from gpusim import Bounds

#: Steps cached by a worker. Points arrive group by group, so it needs one or two at a time.
KEPT_STEPS = 4


@dataclass(frozen=True, slots=True)
class Outcome:
    """Numbers of a point."""

    makespan_ns: int
    sequential_ns: int
    bounds: Bounds
    peak_bytes: int


@dataclass(frozen=True, slots=True)
class Result:
    """Result of a point: an outcome, a user's error, or the traceback of a bug in gpusim."""

    key: str
    outcome: Outcome | None
    seconds: float
    worker: str
    error: str | None = None
    bug: str | None = None


def compute(point: Point, trace: bytes, hardware: bytes, version: str) -> Result:
    """Simulate a point from the contents of its trace and hardware model; never raises for the point itself.

    Raises `WorkerError` if this process runs other code than the calling one (`version`).
    """
    if version != code_version():
        raise WorkerError(
            f"worker {_worker()} runs gpusim {code_version()}, this sweep {version}; the two must be the same"
        )
    begin = time.perf_counter()
    outcome, error, bug = None, None, None
    try:
        outcome = _simulate(point, trace, hardware)
    except GpusimError as cause:
        error = str(cause)
    except Exception:
        bug = traceback.format_exc()
    return Result(point.key, outcome, time.perf_counter() - begin, _worker(), error, bug)


def compute_some(points: Sequence[Point], trace: bytes, hardware: bytes, version: str, limit_s: float) -> list[Result]:
    """Compute the first point of a group and as many more as can start within `limit_s`; see `compute`."""
    deadline = time.monotonic() + limit_s
    results: list[Result] = []
    for point in points:
        if results and time.monotonic() > deadline:
            break
        results.append(compute(point, trace, hardware, version))
    return results


def _simulate(point: Point, trace: bytes, hardware: bytes) -> Outcome:
    prepared = _prepare(trace, hardware, point.engine)
    if isinstance(prepared, GpusimError):
        raise prepared
    simulated = prepared.simulate(point.policy, point.streams)
    return Outcome(simulated.makespan_ns, prepared.sequential_ns, prepared.bounds, simulated.peak_bytes)


@functools.lru_cache(maxsize=KEPT_STEPS)
def _prepare(trace: bytes, hardware: bytes, engine: str) -> Simulations | GpusimError:
    """Return what the points of a group share; an error is cached like a value, since it holds for all points."""
    try:
        prepared = Simulations(step_of_contents(trace, hardware), engine)
        _ = prepared.sequential_ns, prepared.bounds
        return prepared
    except GpusimError as cause:
        return cause


def _worker() -> str:
    return f"{socket.gethostname()}:{os.getpid()}"
