"""Measure launches into many streams (`gpusim.plan.hyper_q`): each number of queues in a process of its own."""

from __future__ import annotations

import datetime
import json
import os
import statistics
import subprocess
import sys
from collections.abc import Callable
from time import perf_counter_ns
from typing import TypedDict

import torch

from gpusim.errors import GpuError
from gpusim.plan.hyper_q import CONNECTIONS, SCHEMA, SHAPES, SPIN_US, HyperQ, HyperQCell, launch_order
from gpusim.runtime.device import require_gpu
from gpusim.runtime.microbench import event_ns, spin_cycles

#: Streams that exist, in use or not.
STREAMS = 64
RUNS = 5
PROCESS_TIMEOUT_S = 180


class _Found(TypedDict):
    """What one process measured."""

    units: list[float]
    spin_ns: float
    launch_ns: float


def measure_hyper_q(command: str, say: Callable[[str], None] = lambda _: None) -> HyperQ:
    """The whole table, on the current GPU. Raises `GpuError` without one or where a process fails."""
    require_gpu()
    cells: list[HyperQCell] = []
    spins, paces = [], []
    for connections in CONNECTIONS:
        say(f"launches into streams with {connections} hardware queues")
        found = _in_process(connections)
        spins.append(found["spin_ns"])
        paces.append(found["launch_ns"])
        cells += [
            HyperQCell(connections=connections, streams=k, depth=d, depth_first=depth_first, units=units)
            for (k, d, depth_first), units in zip(SHAPES, found["units"], strict=True)
        ]
    return HyperQ(
        schema=SCHEMA,
        gpu=torch.cuda.get_device_name(),
        date=datetime.date.today().isoformat(),
        source=f"`{command}`, torch {torch.__version__}, medians of {RUNS}",
        spin_ns=round(statistics.median(spins)),
        launch_ns=round(statistics.median(paces)),
        cells=tuple(cells),
    )


def _in_process(connections: int) -> _Found:
    """One number of queues: it is set for a process before it first uses the GPU."""
    environment = {**os.environ, "CUDA_DEVICE_MAX_CONNECTIONS": str(connections)}
    program = "import json; from gpusim.runtime.hyper_q import units; print(json.dumps(units()))"
    done = subprocess.run(
        [sys.executable, "-c", program], env=environment, capture_output=True, text=True, timeout=PROCESS_TIMEOUT_S
    )
    if done.returncode:
        last = (done.stderr.strip().splitlines() or ["no message"])[-1]
        raise GpuError(f"measuring streams with CUDA_DEVICE_MAX_CONNECTIONS={connections} failed: {last}")
    found: _Found = json.loads(done.stdout.splitlines()[-1])
    return found


def units() -> _Found:
    """Time of each of `SHAPES` over that of one kernel; time of a kernel and of a launch in ns. In this process."""
    cycles = spin_cycles(SPIN_US)
    lanes = [torch.cuda.Stream() for _ in range(STREAMS)]
    for lane in lanes:
        with torch.cuda.stream(lane):
            torch.cuda._sleep(1000)
    paces: list[float] = []

    def wall_ns(streams: int, depth: int, depth_first: bool) -> float:
        times = []
        order = list(launch_order(streams, depth, depth_first))
        for _ in range(RUNS + 1):
            torch.cuda.synchronize()
            begin = perf_counter_ns()
            for stream in order:
                with torch.cuda.stream(lanes[stream]):
                    torch.cuda._sleep(cycles)
            launched = perf_counter_ns()
            torch.cuda.synchronize()
            times.append(perf_counter_ns() - begin)
            if len(order) >= 16:
                paces.append((launched - begin) / len(order))
        return statistics.median(times[1:])

    one_ns = wall_ns(1, 1, False)
    found = [wall_ns(*shape) / one_ns for shape in SHAPES]
    spin_ns = event_ns(lambda: torch.cuda._sleep(cycles), calls=5, rounds=5)
    return {"units": found, "spin_ns": spin_ns, "launch_ns": statistics.median(paces)}
