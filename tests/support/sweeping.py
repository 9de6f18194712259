"""Shared parts of the sweep tests: small grids, workers in this process, and a spy that other processes load."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Generator, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

from gpusim.formats.sweep import Sweep
from gpusim.formats.trace import Trace
from gpusim.sweep.grid import Grid, Point, build_grid
from gpusim.sweep.point import Result, compute
from gpusim.sweep.run import run_sweep
from gpusim.sweep.store import COLUMNS, PointRow, Store
from gpusim.trace.store import write_trace
from tests.support.helpers import Step, kernel, make_trace, wide_trace

ROOT = Path(__file__).parents[2]
PATIENCE_S = 60.0
#: Worker processes start faster without numba.
ENGINE = "reference"

# Python imports `sitecustomize` at its start, so that the spy reaches worker processes, which import gpusim anew.
SPY = """
import functools, os, signal, sys, time

if os.environ.get("SPY_DIE_AT_START") and "spawn_main" in " ".join(sys.orig_argv):
    os.kill(os.getpid(), signal.SIGKILL)

import gpusim.sweep.point as module

real = module.compute

def note(what, point):
    file = os.open(os.environ["SPY_LOG"], os.O_WRONLY | os.O_APPEND | os.O_CREAT)
    os.write(file, f"{what} {os.getpid()} {point.key}\\n".encode())
    os.close(file)

@functools.wraps(real)
def compute(point, *contents):
    note("start", point)
    if point.policy == os.environ.get("SPY_KILLER"):
        os.kill(os.getpid(), signal.SIGKILL)
    if not os.path.exists(os.environ["SPY_LOG"] + ".hurry"):
        time.sleep(float(os.environ.get("SPY_SLEEP", "0")))
    result = real(point, *contents)
    note("end", point)
    return result

module.compute = compute
"""


class Spy:
    """Log of workers: each point they begin and each they finish."""

    def __init__(self, folder: Path) -> None:
        (folder / "sitecustomize.py").write_text(SPY)
        self.log = folder / "spy.log"
        self.environment = {
            "PYTHONPATH": os.pathsep.join((str(folder), str(ROOT))),
            "PYTHONDONTWRITEBYTECODE": "1",
            "SPY_LOG": str(self.log),
        }

    def _notes(self, kind: str) -> list[tuple[int, str]]:
        lines = self.log.read_text().splitlines() if self.log.exists() else []
        return [(int(pid), key) for word, pid, key in (line.split() for line in lines) if word == kind]

    def starts(self) -> Counter[str]:
        """Return the number of starts of each point."""
        return Counter(key for _, key in self._notes("start"))

    def ends(self) -> Counter[str]:
        """Return the number of ends of each point."""
        return Counter(key for _, key in self._notes("end"))

    def workers(self) -> list[int]:
        """Return the processes that have begun a point, in order."""
        return list(dict.fromkeys(pid for pid, _ in self._notes("start")))

    def latest(self, pid: int) -> str:
        """Return the point that a process has begun last; it may have finished it."""
        return [key for worker, key in self._notes("start") if worker == pid][-1]

    def hurry(self) -> None:
        """From now on no point sleeps."""
        Path(f"{self.log}.hurry").touch()

    def wait(self, count: int) -> None:
        """Wait until `count` points were finished."""
        wait_until(lambda: self.ends().total() >= count, f"{count} points")


class InThisProcess:
    """Workers that compute in this process, in batches of three."""

    description = "this process"

    def run(self, grid: Grid, points: Sequence[Point]) -> Generator[list[Result], None, None]:
        contents = grid.contents
        for first in range(0, len(points), 3):
            yield [
                compute(point, contents[point.trace_hash], contents[point.hardware_hash], grid.version)
                for point in points[first : first + 3]
            ]


def wait_until(condition: Callable[[], bool], awaited: str) -> None:
    """Poll until the condition holds; fails after a minute."""
    deadline = time.monotonic() + PATIENCE_S
    while not condition():
        if time.monotonic() > deadline:
            pytest.fail(f"waited {PATIENCE_S} s for {awaited}")
        time.sleep(0.02)


def write_traces(folder: Path, widths: Sequence[int] = (3, 5)) -> list[Path]:
    """Small traces that gain from streams, `wide3.json` and so on."""
    paths = [folder / f"wide{width}.json" for width in widths]
    for path, width in zip(paths, widths, strict=True):
        write_trace(wide_trace(width), path)
    return paths


def numbers(rows: Sequence[PointRow]) -> dict[str, tuple[object, ...]]:
    """Return the part of the rows that does not depend on the worker: everything except time and worker."""
    differing = ("key", "seconds", "worker")
    return {row.key: tuple(getattr(row, name) for name in COLUMNS if name not in differing) for row in rows}


@contextlib.contextmanager
def gpusim(*arguments: str | Path, environment: dict[str, str]) -> Iterator[subprocess.Popen[str]]:
    """Run the command line in a process group of its own, as a shell would; ended with the block."""
    command = [sys.executable, "-m", "gpusim", *map(str, arguments)]
    output = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    with subprocess.Popen(
        command, env=os.environ | environment, text=True, start_new_session=True, **output
    ) as process:
        try:
            yield process
        finally:
            process.kill()


def finished(*arguments: str | Path, environment: dict[str, str]) -> tuple[int, str, str]:
    """Return exit code, output and errors of the command line."""
    with gpusim(*arguments, environment=environment) as process:
        out, err = process.communicate()
        return process.returncode, out, err


# --- Small sweeps ---

STEPS = ("wavefront", "round_robin", "critical_path")


@pytest.fixture
def spy(tmp_path: Path) -> Spy:
    """Return a spy with a folder of its own."""
    folder = tmp_path / "spy"
    folder.mkdir()
    return Spy(folder)


@pytest.fixture
def grid(tmp_path: Path) -> Grid:
    """Return two traces, one GPU, four policies: 2 x (1 + 3 x 3) points."""
    return small_grid(tmp_path)


def small_grid(folder: Path, **fields: Any) -> Grid:
    lists = {"policies": ("sequential", *STEPS), "streams": (2, 3, 4), "hardware": ("h200",)}
    given = lists | {"engine": ENGINE} | fields
    return build_grid(Sweep(traces=tuple(map(str, write_traces(folder))), **given))


def over_the_limit() -> Trace:
    """Make a trace of a GPU without a model, with a kernel beyond the register limit."""
    trace = make_trace([Step("big", "x", "big", kernels=(kernel(1000, regs=300),))])
    provenance = replace(trace.provenance, gpu=replace(trace.provenance.gpu, name="GPU of tomorrow"))
    return replace(trace, provenance=provenance)


def computed(grid: Grid, path: Path) -> list[PointRow]:
    """Return the rows of an undisturbed sweep."""
    with Store(path) as store:
        run_sweep(grid, store, InThisProcess())
        return store.rows()


def rows_of(path: Path) -> list[PointRow]:
    with Store(path, write=False) as store:
        return store.rows()


def arguments(folder: Path) -> tuple[str | Path, ...]:
    """Return the arguments of a sweep of 20 points on two processes."""
    traces = [word for path in write_traces(folder) for word in ("--trace", path)]
    policies = [word for name in ("sequential", *STEPS) for word in ("--policy", name)]
    rest = ("--engine", ENGINE, "--streams", "2,3,4", "--workers", "2", "-o", folder / "s.sqlite")
    return ("sweep", *traces, *policies, *rest)


def write(folder: Path, text: str | bytes) -> Path:
    path = folder / "sweep.toml"
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    return path
