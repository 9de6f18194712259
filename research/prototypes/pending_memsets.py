"""Experiment: how long small memsets take in a CUDA graph by the number of its copies that have yet to start.

    python research/prototypes/pending_memsets.py OUT.json

Each graph has 300 memsets of 96 bytes in turns with short kernels. Its copies wait for the last kernel, in a row on one
stream or each on a branch of its own; or some of them run beside the memsets, and the rest wait. OUT has, per
graph, its time without the profiler, and gaps and durations from a profiled replay. The graphs without memsets
("memsets of 0") have what kernels and copies alone take.
"""

from __future__ import annotations

import json
import sys
from functools import partial
from pathlib import Path
from typing import Any

import torch
from slow_copies import Bench, Work, profile_of, record

from gpusim.gpu.calibrate.copies import DIRECTIONS, Direction
from gpusim.gpu.calibrate.microbench import event_ns
from gpusim.gpu.device import provenance, require_gpu
from gpusim.units import KIB, MIB

MEMSETS, MEMSET_BYTES = 300, (96, 4 * KIB, 64 * KIB, 256 * KIB)
PENDING = (0, 1, 2, 3, 4, 8, 16, 44)
SIZE = 6 * MIB


def memsets_before(count: int, direction: Direction, branches: bool, size: int, running: int = 0) -> Work:
    """Memsets in turns with kernels beside `running` copies to the host, then `count` copies that wait for them all."""

    def work(bench: Bench) -> None:
        if running:
            bench.row("d2h", running)
        for _ in range(MEMSETS):
            if size:
                bench.memset(size)
            bench.short()
        lanes = bench.branches[:count] if branches else [bench.backs if direction == "h2d" else bench.outs] * count
        used = list(dict.fromkeys(lanes))
        bench.fork(*used)
        for stream, copy in zip(lanes, bench.copies(SIZE, count, direction), strict=True):
            with torch.cuda.stream(stream):
                copy()
        if running:
            used.append(bench.outs)
        if used:
            bench.join(*used)

    return work


def cases() -> dict[str, Work]:
    """All graphs by name. Size 0 has no memsets: what the copies and kernels take."""
    found: dict[str, Work] = {}
    for direction in DIRECTIONS:
        for branches in (False, True):
            for count in PENDING:
                name = f"{count} pending {direction}{', branches' if branches else ''}"
                for size in (0, MEMSET_BYTES[0]):
                    found[f"{name}, memsets of {size}"] = memsets_before(count, direction, branches, size)
    for size in MEMSET_BYTES[1:]:
        found[f"16 pending h2d, branches, memsets of {size}"] = memsets_before(16, "h2d", True, size)
    for count in (0, 2, 16):
        for size in (0, MEMSET_BYTES[0]):
            name = f"{count} pending h2d, branches, 20 running d2h, memsets of {size}"
            found[name] = memsets_before(count, "h2d", True, size, running=20)
    return found


def main() -> None:
    """Write all cases."""
    out = Path(sys.argv[1])
    require_gpu()
    command = f"python research/prototypes/pending_memsets.py {out}"
    result: dict[str, Any] = provenance(command, partial(torch.cuda._sleep, 2_000_000))
    bench = Bench()
    bench.pairs(SIZE, max(PENDING))
    bench.short()
    bench.memset(MEMSET_BYTES[0])
    torch.cuda.synchronize()
    result["cases"] = {}
    for name, work in cases().items():
        graph = record(bench, work)
        graph_ns = round(event_ns(graph.replay, calls=1, rounds=7))
        result["cases"][name] = {"graph_ns": graph_ns} | profile_of(graph.replay)
        print(f"{name}: {graph_ns / 1e3:,.1f} us", flush=True)
        out.write_text(json.dumps(result), encoding="utf-8")
        del graph


if __name__ == "__main__":
    main()
