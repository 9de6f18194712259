"""What slows copies of a graph: kernels, waits, waiting branches, the host, or buffers; and how long memsets take.

    python research/prototypes/slow_copies.py OUT.json [TRACE PLANS NAME]...

Each case is a CUDA graph with copies of 6 MiB in a row, and one thing beside them. OUT has, per case, the graph's time
without the profiler, and from one profiled replay the copies (direction, start and duration in ns, bytes), when the
host's launch ended, and what kernels and memsets took. TRACE is a trace of `gpusim capture`, PLANS the file of its
plans (`gpusim validate --stage predict`); the plan NAME is profiled alike.
"""

from __future__ import annotations

import ctypes
import gzip
import itertools
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch

from gpusim.gpu.calibrate.copies import CopyBench, Direction
from gpusim.gpu.calibrate.microbench import event_ns, spin_cycles
from gpusim.gpu.device import provenance, require_gpu
from gpusim.gpu.profiling import exported_events, profiled
from gpusim.units import KIB, MIB

COPIES, SIZE = 40, 6 * MIB
#: Kernels that outlast the copies: 5.2 ms at 47 GB/s.
SHORT_US, SHORT = 5.0, 1000
LONG_US, LONG = 500.0, 11
REPLAYS = 3
Work = Callable[["Bench"], None]
KINDS = ("kernel", "gpu_memset", "gpu_memcpy")


class Bench(CopyBench):
    """Streams for many branches, kernels of a given length, memsets."""

    def __init__(self) -> None:
        super().__init__()
        self.branches = [torch.cuda.Stream(priority=p) for p in (0, -1) for _ in range(32)]
        self.driver = ctypes.CDLL("libcuda.so.1")
        self.short, self.long = (partial(torch.cuda._sleep, spin_cycles(us)) for us in (SHORT_US, LONG_US))
        self.small = torch.ones(16 * KIB, dtype=torch.uint8, device="cuda")
        self.words = torch.ones(MIB, device="cuda")
        self.large = torch.ones(8 * MIB, device="cuda")
        self.square = torch.randn(1024, 1024, device="cuda")
        self.product = torch.empty(1024, 1024, device="cuda")
        self.shared = torch.empty(SIZE, dtype=torch.uint8, pin_memory=True)
        self.tiny = torch.empty(4 * KIB, dtype=torch.uint8, pin_memory=True)

    def memset(self, size: int) -> None:
        """Set `size` bytes on the current stream."""
        stream = ctypes.c_void_p(torch.cuda.current_stream().cuda_stream)
        pointer = ctypes.c_uint64(self.words.data_ptr())
        code = self.driver.cuMemsetD8Async(pointer, ctypes.c_ubyte(0), ctypes.c_size_t(size), stream)
        if code:
            raise RuntimeError(f"error {code} of cuMemsetD8Async")

    def fork(self, *streams: torch.cuda.Stream) -> None:
        for stream in streams:
            stream.wait_stream(self.ops)

    def row(self, direction: Direction, count: int = COPIES, size: int = SIZE) -> None:
        """Copies in a row on the stream of their direction, from the graph's start."""
        stream = self.backs if direction == "h2d" else self.outs
        self.fork(stream)
        with torch.cuda.stream(stream):
            for copy in self.copies(size, count, direction):
                copy()

    def join(self, *streams: torch.cuda.Stream) -> None:
        for stream in streams or (self.outs, self.backs):
            self.ops.wait_stream(stream)


def beside(direction: Direction, kernel: str, count: int) -> Work:
    """Copies in a row beside a chain of kernels without waits between them."""

    def work(bench: Bench) -> None:
        bench.row(direction)
        for _ in range(count):
            KERNELS[kernel](bench)
        bench.join(bench.backs if direction == "h2d" else bench.outs)

    return work


def before_kernels(direction: Direction, count: int) -> Work:
    """Copies in a row, then kernels that wait for all of them: nodes are pending, none runs."""

    def work(bench: Bench) -> None:
        bench.row(direction)
        bench.join(bench.backs if direction == "h2d" else bench.outs)
        for _ in range(count):
            bench.short()

    return work


def after_each(direction: Direction, wait: int | None, kernels: int = 24) -> Work:
    """A copy after each `kernels` kernels; with `wait`, kernels wait for the copy that many copies before."""

    def work(bench: Bench) -> None:
        stream = bench.backs if direction == "h2d" else bench.outs
        ends: list[torch.cuda.Event] = []
        for number, copy in enumerate(bench.copies(SIZE, COPIES, direction)):
            for _ in range(kernels):
                bench.short()
            stream.wait_stream(bench.ops)
            with torch.cuda.stream(stream):
                copy()
            ends.append(stream.record_event())
            if wait is not None and number >= wait:
                bench.ops.wait_event(ends[number - wait])
        bench.join(stream)

    return work


def waiting(direction: Direction, branches: int, copies: bool, kernel: str = "long", count: int = LONG) -> Work:
    """Copies in a row beside kernels, and branches that wait for all of it."""

    def work(bench: Bench) -> None:
        beside(direction, kernel, count)(bench)
        streams = bench.branches[:branches]
        bench.fork(*streams)
        for number, stream in enumerate(streams):
            with torch.cuda.stream(stream):
                if copies:
                    bench.small[number * 256 : number * 256 + 256].copy_(bench.tiny[:256], non_blocking=True)
                else:
                    torch.cuda._sleep(1000)
        bench.join(*streams)

    return work


def one_by_one(direction: Direction, branches: int) -> Work:
    """Copies in a row beside kernels; branches wait for one kernel after the other, as copies back do."""

    def work(bench: Bench) -> None:
        bench.row(direction)
        used = bench.branches[:branches]
        for number in range(2 * branches):
            for _ in range(24):
                bench.short()
            if number >= branches:
                stream = used[number - branches]
                stream.wait_stream(bench.ops)
                with torch.cuda.stream(stream):
                    at = 256 * (number - branches)
                    bench.small[at : at + 256].copy_(bench.tiny[:256], non_blocking=True)
        bench.join(bench.outs if direction == "d2h" else bench.backs, *used)

    return work


def turns(direction: Direction, size: int, count: int, forked: bool, kernel: str = "short") -> Work:
    """Copies in turns with kernels; `forked`: the next kernel runs beside the copy, and what follows waits for both."""

    def work(bench: Bench) -> None:
        stream = bench.backs if direction == "h2d" else bench.outs
        for copy in bench.copies(size, count, direction):
            KERNELS[kernel](bench)
            stream.wait_stream(bench.ops)
            with torch.cuda.stream(stream):
                copy()
            if forked:
                KERNELS[kernel](bench)
            bench.ops.wait_stream(stream)

    return work


def with_memsets(directions: tuple[Direction, ...], size: int, count: int = 300) -> Work:
    """A memset before each short kernel, beside copies in a row."""

    def work(bench: Bench) -> None:
        for direction in directions:
            bench.row(direction)
        for _ in range(count):
            bench.memset(size)
            bench.short()
        if directions:
            bench.join(*(bench.backs if d == "h2d" else bench.outs for d in directions))

    return work


def same_buffer(direction: Direction) -> Work:
    """Copies in a row of one host buffer."""

    def work(bench: Bench) -> None:
        stream = bench.backs if direction == "h2d" else bench.outs
        bench.fork(stream)
        with torch.cuda.stream(stream):
            for device, _ in bench.pairs(SIZE, COPIES):
                to, source = (device, bench.shared) if direction == "h2d" else (bench.shared, device)
                to.copy_(source, non_blocking=True)
        bench.join(stream)

    return work


def in_a_row(direction: Direction, size: int = SIZE, count: int = COPIES) -> Work:
    """Copies in a row, alone."""

    def work(bench: Bench) -> None:
        bench.row(direction, count, size)
        bench.join(bench.backs if direction == "h2d" else bench.outs)

    return work


KERNELS: dict[str, Callable[[Bench], object]] = {
    "short": lambda b: b.short(),
    "long": lambda b: b.long(),
    "elementwise": lambda b: b.large.add_(1),
    "product": lambda b: torch.mm(b.square, b.square, out=b.product),
}


def cases() -> dict[str, Work]:
    """Return the graphs by name, in the order of their worth."""
    out: dict[str, Work] = {}
    for d in ("d2h", "h2d"):
        out |= {
            f"{d} alone": in_a_row(d),
            f"{d} beside {SHORT} short kernels": beside(d, "short", SHORT),
            f"{d} beside {LONG} long kernels": beside(d, "long", LONG),
            f"{d} before {SHORT} short kernels": before_kernels(d, SHORT),
            f"{d} beside elementwise": beside(d, "elementwise", 260),
            f"{d} beside products": beside(d, "product", 260),
            f"{d} each after 24 kernels": after_each(d, None),
            f"{d} each after 24 kernels, waits 4 later": after_each(d, 4),
            f"{d}, 40 MiB, in turns": turns(d, 40 * MIB, 16, False),
            f"{d}, 40 MiB, forked turns": turns(d, 40 * MIB, 16, True),
            f"{d}, 40 MiB, forked turns, long": turns(d, 40 * MIB, 16, True, "long"),
            f"{d}, 6 MiB, forked turns": turns(d, SIZE, COPIES, True),
        }
    for branches in (1, 4, 16, 64):
        out[f"d2h, {branches} copies back wait"] = waiting("d2h", branches, True)
    for branches in (4, 64):
        out[f"d2h, {branches} kernels wait"] = waiting("d2h", branches, False)
        out[f"h2d, {branches} copies back wait"] = waiting("h2d", branches, True)
    for branches in (4, 16, 32):
        out[f"d2h, {branches} branches one by one"] = one_by_one("d2h", branches)
    for size in (96, MIB):
        for directions in ((), ("d2h",), ("h2d",), ("d2h", "h2d")) if size < MIB else ((), ("d2h", "h2d")):
            out[f"memsets of {size} beside {'+'.join(directions) or 'nothing'}"] = with_memsets(directions, size)
    out["d2h one host buffer"] = same_buffer("d2h")
    out["d2h of 3211264"] = in_a_row("d2h", 3211264, 80)
    return out


def record(bench: Bench, work: Work) -> torch.cuda.CUDAGraph:
    """Return a graph of this work."""
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=bench.ops, capture_error_mode="thread_local"):
        work(bench)
    return graph


def profile_of(replay: Callable[[], None]) -> dict[str, Any]:
    """Return copies, launch and kernels of the second of some profiled replays."""
    replay()
    torch.cuda.synchronize()
    with profiled() as session:
        for _ in range(REPLAYS):
            replay()
            torch.cuda.synchronize()
    events = exported_events(session)
    gpu = sorted((e for e in events if e.get("cat") in KINDS), key=lambda e: e["ts"])
    count = len(gpu) // REPLAYS
    one = gpu[count : 2 * count]
    begin = one[0]["ts"]
    launches = [e for e in events if "GraphLaunch" in e.get("name", "") and e["ts"] <= begin]
    last = max(launches, key=lambda e: e["ts"], default=None)
    copies = [_copy_of(e, begin) for e in one if e["cat"] == "gpu_memcpy"]
    result: dict[str, Any] = {"nodes": count, "copies": copies, "streams": _streams_of(one, begin)}
    if last is not None:
        result["launch_ns"] = [_ns(last["ts"] - begin), _ns(last["ts"] + last["dur"] - begin)]
    for kind in ("kernel", "gpu_memset"):
        mine = [e for e in one if e["cat"] == kind]
        if mine:
            result[kind] = {"count": len(mine), "median_ns": _ns(statistics.median(e["dur"] for e in mine))}
    ops = [e for e in one if e["cat"] != "gpu_memcpy"]
    waits: dict[str, list[float]] = {}
    for first, second in itertools.pairwise(ops):
        waits.setdefault(f"{first['cat']}, {second['cat']}", []).append(second["ts"] - first["ts"] - first["dur"])
    result["gap_ns"] = {k: [_ns(x) for x in statistics.quantiles(v, n=4)] for k, v in waits.items() if len(v) > 1}
    return result


def _streams_of(events: list[dict[str, Any]], begin_us: float) -> dict[str, list[int]]:
    """Return of each stream its numbers of kernels, memsets and copies, its first start and its last end in ns."""
    streams: dict[str, list[int]] = {}
    for event in events:
        at = _ns(event["ts"] - begin_us)
        row = streams.setdefault(str(event["args"].get("stream")), [0, 0, 0, at, at])
        row[KINDS.index(event["cat"])] += 1
        row[4] = max(row[4], at + _ns(event["dur"]))
    return streams


def _copy_of(event: dict[str, Any], begin_us: float) -> list[Any]:
    direction = "d2h" if "DtoH" in event["name"] else "h2d"
    args = event["args"]
    return [direction, args.get("stream"), _ns(event["ts"] - begin_us), _ns(event["dur"]), args.get("bytes", 0)]


def _ns(us: float) -> int:
    return round(us * 1e3)


def by_host(replay: Callable[[], None]) -> dict[str, float]:
    """Return the graph's time by what the host does meanwhile."""

    def time_ns(meanwhile: Callable[[torch.cuda.Event], object]) -> float:
        times = []
        for _ in range(5):
            torch.cuda.synchronize()
            begin, end = (torch.cuda.Event(enable_timing=True, blocking=True) for _ in range(2))
            begin.record()
            replay()
            end.record()
            meanwhile(end)
            end.synchronize()
            times.append(begin.elapsed_time(end) * 1e6)
        return float(statistics.median(times))

    def busy(_: torch.cuda.Event) -> None:
        until = time.perf_counter() + 0.012
        while time.perf_counter() < until:
            pass

    return {
        "spins in synchronize": time_ns(lambda _: torch.cuda.synchronize()),
        "blocks": time_ns(torch.cuda.Event.synchronize),
        "sleeps": time_ns(lambda _: time.sleep(0.012)),
        "computes": time_ns(busy),
        "queries": time_ns(lambda end: [end.query() for _ in range(20000)]),
    }


def host_facts() -> dict[str, Any]:
    """Return what is known of the host's memory and the link."""

    def said(command: str) -> str:
        try:
            return subprocess.run(command, shell=True, capture_output=True, text=True, timeout=10).stdout.strip()
        except subprocess.SubprocessError:
            return ""

    return {
        "cpus": sorted(os.sched_getaffinity(0)),
        "nodes": said("cat /sys/devices/system/node/node*/cpulist"),
        "cpu": said("lscpu | grep -E 'Model name|NUMA|L3'"),
        "gpu": said("nvidia-smi --query-gpu=pcie.link.gen.current,pcie.link.width.current,pci.bus_id --format=csv"),
        "topology": said("nvidia-smi topo -m | head -8"),
        "pinned": said(f"grep -E 'nvidia|N[0-9]=' /proc/{os.getpid()}/numa_maps | sort -t= -k5 | tail -30"),
    }


def of_plan(trace_path: str, plans_path: str, wanted: str) -> dict[str, Any]:
    """Return the same of a step's plan."""
    import gpusim
    from gpusim.gpu.device import set_precision
    from gpusim.gpu.replay.memory_replay import ProgramRecorder, state_on_gpu, with_buffers
    from gpusim.gpu.replay.memory_run import MemoryRunner
    from gpusim.memplan.evaluate import MemoryEvaluator
    from gpusim.memplan.plan import read_memory_plan

    graph = gpusim.load(trace_path).graph
    device = require_gpu()
    set_precision(graph.trace.model.dtype)
    evaluator, runner = MemoryEvaluator(graph), MemoryRunner(graph.trace, device)
    state, initial_bytes = state_on_gpu(graph.trace, device, 0)
    runner.bind(state.tensors)
    recorder = ProgramRecorder(evaluator, runner, initial_bytes)
    result: dict[str, Any] = {}
    for entry in json.loads(gzip.decompress(Path(plans_path).read_bytes()))["plans"]:
        name = entry["plan"]["policy"]
        if name != wanted:
            continue
        path = Path(f"/tmp/{name}.memory.json")
        path.write_text(json.dumps(entry["plan"]), encoding="utf-8")
        plan = read_memory_plan(path, graph.trace)
        outcome = with_buffers(recorder, evaluator, evaluator.evaluate(plan), print)
        recorded = recorder.record(outcome.program, warm=True)
        replay_ns = round(event_ns(recorded.replay, calls=1, rounds=7))
        print(f"{graph.trace.name} {name}: {replay_ns / 1e6:.3f} ms, predicted {outcome.step_ns / 1e6:.3f}", flush=True)
        times = {"replay_ns": replay_ns, "predicted_ns": outcome.step_ns}
        result[f"{graph.trace.name} {name}"] = times | profile_of(recorded.replay)
        del recorded
    return result


def main() -> None:
    """Write all cases, and where given those of plans."""
    out, *more = sys.argv[1:]
    require_gpu()
    command = "python research/prototypes/slow_copies.py " + " ".join(sys.argv[1:])
    result: dict[str, Any] = provenance(command, partial(torch.cuda._sleep, 2_000_000))
    if more:
        result["plans"] = {}
        for first in range(0, len(more), 3):
            result["plans"] |= of_plan(*more[first : first + 3])
            Path(out).write_text(json.dumps(result), encoding="utf-8")
        return
    bench = Bench()
    for size, count in ((SIZE, COPIES), (40 * MIB, 16), (3211264, 80)):
        bench.pairs(size, count)
    for kernel in KERNELS.values():
        kernel(bench)
    torch.cuda.synchronize()
    result["host"] = host_facts()
    result["cases"], result["by_host"] = {}, {}
    for name, work in cases().items():
        begin = time.perf_counter()
        try:
            graph = record(bench, work)
            replay_ns = round(event_ns(graph.replay, calls=1, rounds=7))
            result["cases"][name] = {"replay_ns": replay_ns} | profile_of(graph.replay)
            if name.startswith("d2h") and ("alone" in name or "short kernels" in name or "waits" in name):
                result["by_host"][name] = by_host(graph.replay)
        except Exception as error:
            result["cases"][name] = {"failed": f"{type(error).__name__}: {error}"}
            torch.cuda.synchronize()
        case = result["cases"][name]
        rates = [c[4] / c[3] for c in case.get("copies", []) if c[4] > MIB]
        spread = f"{min(rates):.1f} {statistics.median(rates):.1f} {max(rates):.1f} GB/s" if rates else "no copies"
        took = time.perf_counter() - begin
        print(
            f"{name}: {case.get('replay_ns', 0) / 1e3:.1f} us, {spread}, {case.get('failed', '')} {took:.1f} s",
            flush=True,
        )
        Path(out).write_text(json.dumps(result), encoding="utf-8")


if __name__ == "__main__":
    main()
