"""What makes a recorded CUDA graph fast or slow: 0.18 us a kernel, 0.34 us where launches miss the L2 cache.

    python research/prototypes/graph_states.py OUT.json

Each case makes graphs with the same kernels and prints the time of each graph for one kernel, in the order in which
they were made: one at a time, all alive together, or in threes that live together, as recordings of a schedule do; one
captured graph instantiated again, with other flags, and uploaded before its first launch; with other numbers of
kernels; with a kernel that touches more than the cache; with branches. All graphs that live together are timed again at
the end of their case.
"""

from __future__ import annotations

import argparse
import ctypes
import gc
import json
import statistics
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import torch

from gpusim.gpu.device import provenance, require_gpu
from gpusim.units import MIB

SPIN_CYCLES, COUNT, REPLAYS = 1500, 12, 25
TOGETHER = (1, 3, COUNT)
#: Cycles that the GPU waits before a replay, so that the host is done with the launch when the graph begins.
AHEAD_CYCLES, AHEAD_CYCLES_A_KERNEL = 2_000_000, 4_000
KERNELS = 120
SIZES = (15, 30, 60, 120, 240, 480, 960, 1920)
SWEEP_MIB = 128
#: Flags of cuGraphInstantiateWithFlags: free on launch (torch's), upload, launch from the device, priorities of nodes.
FLAGS = {"none": 0, "auto free": 1, "upload": 2, "device launch": 4, "priorities": 8, "auto free, priorities": 9}

Launch = Callable[[], object]


def captured(kernels: int, sweep: Launch | None = None, branches: int = 1, keep: bool = False) -> Any:
    """Capture a graph of spin kernels, in a chain or in several; `sweep` runs after them."""
    graph = torch.cuda.CUDAGraph(keep_graph=keep)
    lanes = [torch.cuda.Stream() for _ in range(branches)]
    torch.cuda.synchronize()
    with torch.cuda.graph(graph, stream=lanes[0], capture_error_mode="thread_local"):
        for lane in lanes[1:]:
            lane.wait_stream(lanes[0])
        for _ in range(kernels // branches):
            for lane in lanes:
                with torch.cuda.stream(lane):
                    torch.cuda._sleep(SPIN_CYCLES)
        for lane in lanes[1:]:
            lanes[0].wait_stream(lane)
        if sweep is not None:
            sweep()
    return graph


def replay_ns(launch: Launch, kernels: int) -> float:
    """Return the median time of a replay in ns, from events around each; the first replays do not count."""
    times: list[float] = []
    for _ in range(REPLAYS):
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        torch.cuda._sleep(AHEAD_CYCLES + kernels * AHEAD_CYCLES_A_KERNEL)
        begin.record()
        launch()
        end.record()
        end.synchronize()
        times.append(begin.elapsed_time(end) * 1e6)
    return statistics.median(times[5:])


def made(make: Callable[[], Launch], kernels: int, together: int) -> tuple[list[float], list[float]]:
    """Return the ns a kernel of each graph, and of all that are alive at the end, again.

    Graphs live until `together` of them do, then all of these go.
    """
    kept: list[Launch] = []
    first: list[float] = []
    for _ in range(COUNT):
        if len(kept) == together:
            kept.clear()
            gc.collect()
        kept.append(make())
        first.append(replay_ns(kept[-1], kernels) / kernels)
    return first, [replay_ns(launch, kernels) / kernels for launch in kept]


class Driver:
    """Instantiation of a captured graph by the driver, with flags of choice."""

    def __init__(self) -> None:
        self.library = ctypes.CDLL("libcuda.so.1")

    def call(self, name: str, *arguments: Any) -> None:
        code = getattr(self.library, name)(*arguments)
        if code:
            raise RuntimeError(f"error {code} of {name}")

    def launcher(self, graph: Any, flags: int, upload: bool) -> Launch:
        """Instantiate a graph; the result launches it on the current stream. It is never destroyed."""
        execution = ctypes.c_void_p()
        raw = ctypes.c_void_p(graph.raw_cuda_graph())
        self.call("cuGraphInstantiateWithFlags", ctypes.byref(execution), raw, ctypes.c_ulonglong(flags))
        stream = ctypes.c_void_p(torch.cuda.current_stream().cuda_stream)
        if upload:
            self.call("cuGraphUpload", execution, stream)
        return lambda: self.call("cuGraphLaunch", execution, stream)


def cases(sweep: Launch) -> Iterator[tuple[str, Callable[[], Launch], int, int]]:
    """Yield name, maker, number of kernels, and how many graphs live together."""
    driver = Driver()

    def plain(**options: Any) -> Launch:
        graph = captured(**options)
        return lambda: graph.replay()

    for touched, name in ((None, ""), (sweep, ", beyond the cache")):
        for together in TOGETHER:
            yield f"{together} together{name}", partial(plain, kernels=KERNELS, sweep=touched), KERNELS, together
    for flags, value in FLAGS.items():
        for upload in (False, True):
            graph = captured(KERNELS, keep=True)
            again = partial(driver.launcher, graph, value, upload)
            yield f"instantiated again, flags {flags}{', uploaded' if upload else ''}", again, KERNELS, COUNT
    for branches in (2, 4, 8):
        yield f"{branches} branches", partial(plain, kernels=KERNELS, branches=branches), KERNELS, COUNT
    for kernels in SIZES:
        yield f"{kernels} kernels", partial(plain, kernels=kernels), kernels, COUNT
    for together in TOGETHER:
        yield f"{together} together, last", partial(plain, kernels=KERNELS), KERNELS, together


def main() -> None:
    """Write the times of all graphs, after each case."""
    arguments = argparse.ArgumentParser()
    arguments.add_argument("out", type=Path)
    out: Path = arguments.parse_args().out
    require_gpu()
    result: dict[str, Any] = provenance(
        "python research/prototypes/graph_states.py OUT.json", partial(torch.cuda._sleep, 2_000_000)
    )
    result["ns"] = {}
    memory = torch.zeros(SWEEP_MIB * MIB // 4, device="cuda")
    sweep = partial(memory.add_, 1.0)
    for call in (sweep, partial(torch.cuda._sleep, SPIN_CYCLES)):
        call()
    with torch.no_grad(), torch.cuda.stream(torch.cuda.Stream()):
        for name, make, kernels, together in cases(sweep):
            try:
                first, again = made(make, kernels, together)
            except RuntimeError as cause:  # flags that this driver does not take
                print(f"{name}: {cause}", flush=True)
                continue
            result["ns"][name] = {"first": first, "again": again}
            print(name, [round(ns) for ns in first], [round(ns) for ns in again], flush=True)
            out.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
