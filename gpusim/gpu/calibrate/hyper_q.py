"""Measurement of launches into many streams (`gpusim.formats.hyper_q`), with one process per number of queues."""

from __future__ import annotations

import datetime
import gc
import json
import os
import statistics
import subprocess
import sys
from collections.abc import Callable, Sequence
from time import perf_counter_ns
from typing import TypedDict

import torch

from gpusim.errors import GpuError
from gpusim.formats.hyper_q import CONNECTIONS, SCHEMA, SHAPES, SPIN_US, HyperQ, HyperQCell, launch_order
from gpusim.gpu.calibrate.microbench import event_ns, idle_sync_ns, spin_cycles
from gpusim.gpu.device import require_gpu
from gpusim.version import code_version

#: Number of streams, used or not.
STREAMS = 64
RUNS = 9
#: Runs of the single kernel that is the unit of time.
RUNS_ALONE = 45
#: Interval between launches, in ns. Unpaced, Python takes 10 to 30 us, and varies between runs; so launches follow the
#: clock, and a late one delays none after it.
PACE_NS = 20_000
PROCESS_TIMEOUT_S = 180


class _Units(TypedDict):
    """Results of one process: time and host pace for each of `SHAPES`, in ns except `units`."""

    units: list[float]
    launch_ns: list[float]
    first_launch_ns: float
    spin_ns: float


def measure_hyper_q(command: str, say: Callable[[str], None] = lambda _: None) -> HyperQ:
    """Measure the whole table on the current GPU. Raises `GpuError` without one or where a process fails."""
    require_gpu()
    cells: list[HyperQCell] = []
    spins, firsts = [], []
    for connections in CONNECTIONS:
        say(f"launches into streams with {connections} hardware queues")
        measured = _in_process(connections)
        spins.append(measured["spin_ns"])
        firsts.append(measured["first_launch_ns"])
        cells += [
            HyperQCell(
                connections=connections, streams=k, depth=d, depth_first=depth_first, units=units, launch_ns=round(pace)
            )
            for (k, d, depth_first), units, pace in zip(SHAPES, measured["units"], measured["launch_ns"], strict=True)
        ]
    return HyperQ(
        schema=SCHEMA,
        gpu=torch.cuda.get_device_name(),
        date=datetime.date.today().isoformat(),
        source=f"`{command}`, gpusim {code_version()}, torch {torch.__version__}, medians of {RUNS}, "
        f"a launch every {PACE_NS // 1000} us",
        spin_ns=round(statistics.median(spins)),
        launch_ns=round(statistics.median(cell.launch_ns for cell in cells)),
        first_launch_ns=round(statistics.median(firsts)),
        cells=tuple(cells),
    )


def _in_process(connections: int) -> _Units:
    """Measure one number of queues, which must be set before a process first uses the GPU."""
    environment = {**os.environ, "CUDA_DEVICE_MAX_CONNECTIONS": str(connections)}
    program = "import json; from gpusim.gpu.calibrate.hyper_q import units; print(json.dumps(units()))"
    done = subprocess.run(
        [sys.executable, "-c", program], env=environment, capture_output=True, text=True, timeout=PROCESS_TIMEOUT_S
    )
    if done.returncode:
        last = (done.stderr.strip().splitlines() or ["no message"])[-1]
        raise GpuError(f"measuring streams with CUDA_DEVICE_MAX_CONNECTIONS={connections} failed: {last}")
    printed: _Units = json.loads(done.stdout.splitlines()[-1])
    return printed


def units() -> _Units:
    """Measure, in this process, the time of each of `SHAPES` in units of one kernel, and the host's pace."""
    cycles = spin_cycles(SPIN_US)
    lanes = [torch.cuda.Stream() for _ in range(STREAMS)]
    for lane in lanes:
        with torch.cuda.stream(lane):
            torch.cuda._sleep(1000)
    idle_ns = idle_sync_ns()
    firsts: list[float] = []

    def run(order: Sequence[int]) -> tuple[float, float]:
        """Return the total time, without the host's delay in noticing the end, and the interval between launches, in
        ns.
        """
        torch.cuda.synchronize()
        begin = perf_counter_ns()
        first = last = 0
        for number, stream in enumerate(order):
            while perf_counter_ns() - begin < number * PACE_NS:
                pass
            torch.cuda.set_stream(lanes[stream])
            torch.cuda._sleep(cycles)
            last = perf_counter_ns()
            first = first or last
        torch.cuda.synchronize()
        wall = perf_counter_ns() - begin - idle_ns
        firsts.append(first - begin)
        return wall, (last - first) / max(1, len(order) - 1)

    def medians(streams: int, depth: int, depth_first: bool, runs: int = RUNS) -> tuple[float, float]:
        order = list(launch_order(streams, depth, depth_first))
        walls, paces = zip(*(run(order) for _ in range(runs + 1)), strict=True)
        return statistics.median(walls[1:]), statistics.median(paces[1:])

    gc.disable()
    one_ns, _ = medians(1, 1, False, RUNS_ALONE)
    timed = [medians(*shape) for shape in SHAPES]
    gc.enable()
    torch.cuda.set_stream(torch.cuda.default_stream())
    return {
        "units": [wall / one_ns for wall, _ in timed],
        "launch_ns": [pace for _, pace in timed],
        "first_launch_ns": statistics.median(firsts),
        "spin_ns": event_ns(lambda: torch.cuda._sleep(cycles), calls=5, rounds=5),
    }
