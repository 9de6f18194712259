"""Whether launches on streams that were idle are late where much memory was touched meanwhile, in graphs with branches.

    python research/prototypes/idle_forks.py OUT.json

A turn is a kernel on the first stream, then a fork of 1 to 8 short kernels on as many streams, and a join. The kernel
touches 4 to 128 MiB; or it counts cycles for as long and touches nothing. What a turn with branches takes longer than
with one, where memory was touched and where not, are launches that miss.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch

from gpusim.gpu.calibrate.microbench import spin_cycles
from gpusim.gpu.calibrate.stamps import Stamps
from gpusim.gpu.device import provenance, require_gpu
from gpusim.units import MIB

SIZES_MIB, BRANCHES = (4, 16, 32, 48, 64, 96, 128), (1, 2, 4, 8)
TURNS, REPLAYS, UNUSED = 24, 40, 8
SPIN_CYCLES = 3000

Call = Callable[[], object]


def turn_ns(stamps: Stamps, first: Call, short: Call, lanes: list[torch.cuda.Stream]) -> float:
    """Return the median time of a turn with a branch on each stream, in ns."""
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=lanes[0], capture_error_mode="thread_local"):
        stamps.begin(0)
        for _ in range(TURNS):
            first()
            for lane in lanes[1:]:
                lane.wait_stream(lanes[0])
            for lane in lanes:
                with torch.cuda.stream(lane):
                    short()
            for lane in lanes[1:]:
                lanes[0].wait_stream(lane)
        stamps.end(0)
    return float(stamps.replayed_ns(graph, REPLAYS, UNUSED).double().median()) / TURNS


def main() -> None:
    """Write the time of a turn by branches and memory, after each size."""
    arguments = argparse.ArgumentParser()
    arguments.add_argument("out", type=Path)
    out: Path = arguments.parse_args().out
    require_gpu()
    command = "python research/prototypes/idle_forks.py OUT.json"
    result: dict[str, Any] = provenance(command, partial(torch.cuda._sleep, 2_000_000))
    memory = torch.zeros(max(SIZES_MIB) * MIB // 4, device="cuda")
    stamps = Stamps(1, torch.device("cuda"))
    short = partial(torch.cuda._sleep, SPIN_CYCLES)
    lanes = [torch.cuda.Stream() for _ in range(max(BRANCHES))]
    result["ns"] = {}
    with torch.no_grad():
        for size in SIZES_MIB:
            touch = partial(memory[: size * MIB // 4].add_, 1.0)
            touch()
            short()
            alone_ns = turn_ns(stamps, touch, short, lanes[:1]) - turn_ns(stamps, short, short, lanes[:1]) / 2
            spin = partial(torch.cuda._sleep, spin_cycles(alone_ns / 1e3))
            for name, first in (("touched", touch), ("cycles", spin)):
                times = {count: turn_ns(stamps, first, short, lanes[:count]) for count in BRANCHES}
                result["ns"][f"{size} MiB, {name}"] = times
                print(f"{size} MiB, {name}", {count: round(ns) for count, ns in times.items()}, flush=True)
            out.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
