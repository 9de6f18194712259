"""Scaling of sweeps: points per second in one process, on local workers, and on a Dask cluster over loopback.

    python benchmarks/sweep.py [--workers 1,2] [--rounds 3] [--engine fast] [-o research/2026-11-23-sweeps.md]

All are measured in one run, in turns, into a new store each; the fastest round counts. Local rates include the start of
the worker processes, cluster rates do not (a cluster exists before the sweep); both include reading the traces on the
workers and every write to the store. CPU seconds are of all processes, including the start of the cluster's; unlike the
times they hardly depend on other load of the machine.
"""

from __future__ import annotations

import argparse
import datetime
import functools
import os
import platform
import resource
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import msgspec
from page import fill

from gpusim.defaults import DEFAULT_ENGINE
from gpusim.engine.threads import cores
from gpusim.formats.sweep import Sweep
from gpusim.sweep.cluster import ClusterWorkers
from gpusim.sweep.grid import Grid, Point, build_grid
from gpusim.sweep.local import LocalWorkers
from gpusim.sweep.point import Result, compute
from gpusim.sweep.run import Workers, run_sweep
from gpusim.sweep.store import Store

SWEEP = Sweep(
    traces=("squeezenet*", "googlenet-infer-b1", "googlenet-train-b8", "resnet50-train-b8", "inception_v3-*"),
    hardware=("h200", "a100-80gb"),
    policies=("sequential", "wavefront", "round_robin", "nimble", "turbodl", "opara", "torchsched", "critical_path"),
    streams=(2, 3, 4, 5, 6, 7, 8, 10, 12, 16, 24, 32),
)
THIS_PROCESS = "this process, no workers"


class ThisProcess:
    """Baseline of the workers: the same points one after the other."""

    description = THIS_PROCESS

    def run(self, grid: Grid, points: Sequence[Point]) -> Generator[list[Result], None, None]:
        contents = grid.contents
        for point in points:
            yield [compute(point, contents[point.trace_hash], contents[point.hardware_hash], grid.version)]


@contextmanager
def cluster(count: int) -> Iterator[str]:
    """Start a scheduler and `count` workers of one thread; yield the address."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    address = f"tcp://127.0.0.1:{port}"
    quiet = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
    dask = [sys.executable, "-m"]
    words = ["--host", "127.0.0.1", "--port", str(port), "--no-dashboard"]
    processes = [subprocess.Popen([*dask, "distributed.cli.dask_scheduler", *words], **quiet)]
    words = [address, "--nthreads", "1", "--no-nanny", "--no-dashboard"]
    processes += [subprocess.Popen([*dask, "distributed.cli.dask_worker", *words], **quiet) for _ in range(count)]
    try:
        yield address
    finally:
        for process in processes:
            process.kill()
            process.wait()


def cpu_seconds() -> float:
    """Return the CPU time of this process and of its ended children, in s."""
    used = (resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
    return sum(usage.ru_utime + usage.ru_stime for usage in used)


def seconds(grid: Grid, workers: Workers) -> float:
    """Return the time of the whole grid into a new store, in s."""
    with tempfile.TemporaryDirectory() as folder, Store(Path(folder) / "s.sqlite") as store:
        swept = run_sweep(grid, store, workers)
    assert (swept.computed, swept.failed) == (len(grid.points), 0)
    return swept.seconds


def on_cluster(grid: Grid, count: int) -> float:
    """Return the time of the whole grid on a new cluster of `count` workers, in s."""
    with cluster(count) as address:
        deadline = time.monotonic() + 60.0
        while True:
            try:
                workers = ClusterWorkers(address)
                break
            except Exception:
                if time.monotonic() > deadline:
                    raise
                time.sleep(0.5)
        with workers:
            while workers.look() < count:
                time.sleep(0.2)
            return seconds(grid, workers)


def table(times: dict[str, list[tuple[float, float]]], points: int) -> list[str]:
    """Return Markdown rows: the fastest round of each, its ratio to this process, and the least CPU time of any
    round.
    """
    alone = min(wall for wall, _ in times[THIS_PROCESS])
    lines = [f"| workers | seconds for {points} points | points/s | ratio | CPU seconds |", "|---|--:|--:|--:|--:|"]
    for name, rounds in times.items():
        best, cpu = min(wall for wall, _ in rounds), min(cpu for _, cpu in rounds)
        lines.append(f"| {name} | {best:.2f} | {points / best:.1f} | {alone / best:.2f} | {cpu:.1f} |")
    return lines


def main() -> None:
    """Measure, print the table, and write it where asked to."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--workers", default="1,2", help="worker counts, separated by commas [default: 1,2]")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--engine", default=DEFAULT_ENGINE)
    parser.add_argument("-o", dest="output", type=Path, help="the page whose part is replaced")
    given = parser.parse_args()
    counts = [int(count) for count in given.workers.split(",")]
    sweep = msgspec.structs.replace(SWEEP, engine=given.engine)
    grid = build_grid(sweep)
    times: dict[str, list[tuple[float, float]]] = {}
    load = os.getloadavg()[0]

    def measure(name: str, run: Callable[[], float]) -> None:
        before = cpu_seconds()
        times.setdefault(name, []).append((run(), cpu_seconds() - before))

    for number in range(given.rounds):
        print(f"round {number + 1} of {given.rounds} ...", file=sys.stderr)
        measure(THIS_PROCESS, lambda: seconds(grid, ThisProcess()))
        for count in counts:
            measure(f"{count} local", functools.partial(seconds, grid, LocalWorkers(count)))
        for count in counts:
            measure(f"{count} Dask, loopback", functools.partial(on_cluster, grid, count))
    lines = [
        f"{datetime.date.today()}, {cores()} CPUs, Python {platform.python_version()}, gpusim {grid.version}, "
        f"engine `{sweep.engine}`, fastest of {given.rounds} rounds. The machine had other work at the same time (load "
        f"{load:.1f} before, {os.getloadavg()[0]:.1f} after): CPU seconds are sounder than times.",
        "",
        *table(times, len(grid.points)),
    ]
    print("\n".join(lines))
    if given.output is not None:
        fill(given.output, "scaling", "\n".join(lines))


if __name__ == "__main__":
    main()
