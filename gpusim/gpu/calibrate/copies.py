"""Measurements of host-device copies: by size and direction, concurrently, with kernels, and between kernels.

Everything runs in a CUDA graph, on the streams of a memory plan. All need a GPU.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import Any, Final, Literal

import torch

from gpusim.errors import GpuError
from gpusim.formats.hardware import Copies
from gpusim.formats.trace import HostLink
from gpusim.gpu.calibrate.microbench import GPU_CATEGORIES, event_ns, spin_cycles
from gpusim.gpu.device import require_gpu
from gpusim.gpu.launch_state import make_launches_slow
from gpusim.gpu.profiling import exported_events, profiled
from gpusim.units import KIB, MIB

Direction = Literal["h2d", "d2h"]
Calls = Sequence[Callable[[], object]]
Lanes = Mapping[Direction, Calls]
#: A kernel, and a copy that waits for it.
Turn = tuple[Callable[[], object], Direction, Callable[[], object]]
DIRECTIONS: tuple[Direction, Direction] = ("h2d", "d2h")
#: Sizes of the sweep, in bytes: from shorter than a launch to the most that a layer saves.
SIZES = (4 * KIB, 64 * KIB, 256 * KIB, MIB, 4 * MIB, 16 * MIB, 64 * MIB, 256 * MIB)
#: Bytes that one graph of the sweep moves, with at least `FEWEST` and at most `MOST` copies.
SWEPT_BYTES, FEWEST, MOST = 512 * MIB, 4, 64
#: Size of large copies, where only the rate matters, in bytes.
LARGE_BYTES = 64 * MIB
SPIN_US = 50.0
#: Replays of a profiled graph; the second one counts.
PROFILED = 3
#: Copy sizes typical of a layer, in bytes; the rate of a plan's link is from their difference.
LINK_BYTES: Final = (8 * MIB, 40 * MIB)
#: Copies per direction in that graph.
LINK_COPIES: Final = 8
#: A process whose link is below this share of the GPU's usual rates is not trusted, up to `MOST_PROCESSES` of them: one
#: of four captures measured 20.8 instead of 55 GB/s in both directions (research/2026-11-24-slow-link.md). One at 95 %
#: made plans that copy 5 to 6 % too slow; the nine others were at 99 % or more (research/2026-11-27-memory.md).
USUAL_SHARE, MOST_PROCESSES = 0.97, 3


@dataclass(frozen=True)
class Concurrent:
    """Times of one kind of kernels and of copies in some directions, alone and concurrently."""

    kernels_alone_ns: float
    kernels_ns: float
    """Time of the kernels with copies that outlast them, in ns."""
    copies_alone_ns: float
    copies_ns: float
    """Time of the copies with kernels that outlast them, in ns."""

    @property
    def slowdown(self) -> float:
        """Slow-down of the kernels, as a fraction of their time alone."""
        return self.kernels_ns / self.kernels_alone_ns - 1.0

    @property
    def copy_slowdown(self) -> float:
        """Slow-down of the copies, as a fraction of their time alone."""
        return self.copies_ns / self.copies_alone_ns - 1.0


def _copy(to: torch.Tensor, source: torch.Tensor) -> None:
    to.copy_(source, non_blocking=True)


class CopyBench:
    """Reusable buffers and streams for copies."""

    def __init__(self) -> None:
        self.ops, self.outs, self.backs = (torch.cuda.Stream() for _ in range(3))
        self._pairs: dict[int, list[tuple[torch.Tensor, torch.Tensor]]] = {}

    def pairs(self, size: int, count: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """Return device and pinned host buffers of this size, a pair per copy: a plan gives each tensor its own."""
        have = self._pairs.setdefault(size, [])
        while len(have) < count:
            device = torch.empty(size, dtype=torch.uint8, device="cuda")
            have.append((device, torch.empty(size, dtype=torch.uint8, pin_memory=True)))
        return have[:count]

    def forget(self) -> None:
        """Free the buffers."""
        self._pairs.clear()

    def copies(self, size: int, count: int, direction: Direction) -> list[Callable[[], object]]:
        """Return calls that each copy another pair."""
        pairs = self.pairs(size, count)
        return [partial(_copy, *(pair if direction == "h2d" else pair[::-1])) for pair in pairs]

    def graph_ns(self, ops: Calls, lanes: Lanes) -> float:
        """Return the time of a graph with these calls in sequence on each stream, all from its start, in ns."""
        return event_ns(self._graph(ops, lanes).replay, calls=2, rounds=7)

    def _graph(self, ops: Calls, lanes: Lanes) -> torch.cuda.CUDAGraph:
        for call in (*ops[:1], *(calls[0] for calls in lanes.values() if calls)):
            call()
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=self.ops, capture_error_mode="thread_local"):
            for direction, calls in lanes.items():
                stream = self.backs if direction == "h2d" else self.outs
                stream.wait_stream(self.ops)
                with torch.cuda.stream(stream):
                    for call in calls:
                        call()
            for call in ops:
                call()
            for direction in lanes:
                self.ops.wait_stream(self.backs if direction == "h2d" else self.outs)
        return graph

    def profiled_events(self, ops: Calls, lanes: Lanes) -> list[dict[str, Any]]:
        """Return the profiler's kernels, memsets and copies of a replay of a graph as in `graph_ns`, by start."""
        graph = self._graph(ops, lanes)
        graph.replay()
        torch.cuda.synchronize()
        with profiled() as session:
            for _ in range(PROFILED):
                graph.replay()
                torch.cuda.synchronize()
        events = [event for event in exported_events(session) if event.get("cat") in GPU_CATEGORIES]
        events.sort(key=lambda event: float(event["ts"]))
        count = len(events) // PROFILED
        return events[count : 2 * count]  # a session can lose its first

    def in_turns_ns(self, turns: Sequence[Turn]) -> float:
        """Return the time of a graph of kernel, copy, kernel, copy ..., each waiting for the previous on another
        stream, in ns.
        """
        for kernel, _, copy in (turns[0], turns[-1]):
            kernel()
            copy()
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=self.ops, capture_error_mode="thread_local"):
            for kernel, direction, copy in turns:
                kernel()
                stream = self.backs if direction == "h2d" else self.outs
                stream.wait_stream(self.ops)
                with torch.cuda.stream(stream):
                    copy()
                self.ops.wait_stream(stream)
        return event_ns(graph.replay, calls=2, rounds=7)


def sweep(bench: CopyBench) -> dict[Direction, dict[int, float]]:
    """Return direction -> size -> ns per copy, for many copies in a row."""
    times_ns: dict[Direction, dict[int, float]] = {"h2d": {}, "d2h": {}}
    for size in SIZES:
        count = max(FEWEST, min(MOST, SWEPT_BYTES // size))
        for direction in DIRECTIONS:
            times_ns[direction][size] = bench.graph_ns((), {direction: bench.copies(size, count, direction)}) / count
        bench.forget()
    return times_ns


def line(points: dict[int, float]) -> tuple[float, float]:
    """Return the fixed ns and the bytes per ns of copies from their times by size; the largest two give the rate."""
    sizes = sorted(points)
    rate = (sizes[-1] - sizes[-2]) / (points[sizes[-1]] - points[sizes[-2]])
    return max(0.0, points[sizes[0]] - sizes[0] / rate), rate


def link(bench: CopyBench) -> HostLink | None:
    """Return the rates that copies of a memory plan reach, or None without enough pinned memory.

    Copies run in turns with kernels that change what is copied, both directions in one graph, each tensor in a host
    buffer of its own.
    """
    try:
        costs_ns = {size: turn_costs_ns(bench, size) for size in LINK_BYTES}
    except RuntimeError:  # torch has no error class for unavailable pinned memory
        return None
    finally:
        bench.forget()
    return link_of(costs_ns)


def own_link() -> HostLink | None:
    """Return the link that this process has. Raises `GpuError` without a GPU."""
    require_gpu()
    reached = link(CopyBench())
    torch.cuda.empty_cache()  # of the buffers, whose memory is not the caller's
    empty_host_cache = getattr(torch._C, "_host_emptyCache", None)  # torch 2.11 and 2.13 with CUDA
    if empty_host_cache is not None:
        empty_host_cache()  # pinned memory is scarce
    return reached


def fastest_link(
    first: HostLink | None, usual: Copies, measure_again: Callable[[], HostLink | None]
) -> HostLink | None:
    """Return the fastest link of a few processes: other ones are asked while none reaches the usual rates.

    `usual` has the rates of the GPU's hardware model, `measure_again` measures in another process. None without enough
    pinned memory.
    """
    fastest = first
    for _ in range(1, MOST_PROCESSES):
        if fastest is None or _rate(fastest) >= USUAL_SHARE * _rate(usual):
            break
        other = None
        with suppress(GpuError):  # a link less well measured is better than no trace
            other = measure_again()
        if other is not None:
            fastest = max(fastest, other, key=_rate)
    return fastest


def _rate(rates: HostLink | Copies) -> float:
    return rates.h2d_bytes_per_ns + rates.d2h_bytes_per_ns


def turn_costs_ns(bench: CopyBench, size: int) -> dict[Direction, float]:
    """Return the cost of one more copy per direction in such a graph, without its kernel, in ns."""
    pairs = bench.pairs(size, LINK_COPIES)
    kernels = [partial(device.add_, 1) for device, _ in pairs]
    turns: dict[Direction, list[Turn]] = {
        direction: list(
            zip(kernels, [direction] * LINK_COPIES, bench.copies(size, LINK_COPIES, direction), strict=True)
        )
        for direction in DIRECTIONS
    }
    kernels_ns = bench.graph_ns(kernels, {})
    base_ns = bench.in_turns_ns([*turns["d2h"], *turns["h2d"]])
    more_ns: dict[Direction, float] = {
        "d2h": bench.in_turns_ns([*turns["d2h"], *turns["d2h"], *turns["h2d"]]),
        "h2d": bench.in_turns_ns([*turns["d2h"], *turns["h2d"], *turns["h2d"]]),
    }
    return {direction: (time_ns - base_ns - kernels_ns) / LINK_COPIES for direction, time_ns in more_ns.items()}


def link_of(costs_ns: Mapping[int, Mapping[Direction, float]]) -> HostLink | None:
    """Return the link rates from the costs of copies of two sizes; None where the larger one costs no more."""
    small, large = sorted(costs_ns)
    more_ns = {direction: costs_ns[large][direction] - costs_ns[small][direction] for direction in DIRECTIONS}
    if min(more_ns.values()) <= 0.0:
        return None
    return HostLink(
        h2d_bytes_per_ns=(large - small) / more_ns["h2d"], d2h_bytes_per_ns=(large - small) / more_ns["d2h"]
    )


def both_ways(bench: CopyBench, count: int = 8) -> dict[Direction, float]:
    """Return the bytes per ns of each direction while the other one, with twice as many copies, is busy."""
    rates: dict[Direction, float] = {}
    for direction, other in zip(DIRECTIONS, DIRECTIONS[::-1], strict=True):
        lanes = {
            direction: bench.copies(LARGE_BYTES, count, direction),
            other: bench.copies(LARGE_BYTES, 2 * count, other),
        }
        rates[direction] = count * LARGE_BYTES / ends_ns(bench, (), lanes)[direction]
    bench.forget()
    return rates


def switch_ns(bench: CopyBench, direction: Direction, count: int = 32) -> float:
    """Return the extra time to switch from a kernel to a copy and back, in ns; each switch costs half."""
    cycles = spin_cycles(SPIN_US)

    def spin() -> None:
        torch.cuda._sleep(cycles)

    copies = bench.copies(MIB, count, direction)
    turns = bench.in_turns_ns([(spin, direction, copy) for copy in copies])
    alone = bench.graph_ns([spin] * count, {}) + bench.graph_ns((), {direction: copies})
    bench.forget()
    return (turns - alone) / count / 2


def kernels_by_kind() -> dict[str, Callable[[], object]]:
    """Return a call for each kind of kernel to measure with copies; the kinds have different bottlenecks."""
    a, b = (torch.randn(4096, 4096, device="cuda") for _ in range(2))
    c, d = (torch.randn(8192, 8192, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    large, out = torch.randn(64 * MIB, device="cuda"), torch.empty(64 * MIB, device="cuda")
    image, weight = torch.randn(32, 128, 56, 56, device="cuda"), torch.randn(128, 128, 3, 3, device="cuda")
    scale, shift = torch.ones(128, device="cuda"), torch.zeros(128, device="cuda")
    mean, var = torch.zeros(128, device="cuda"), torch.ones(128, device="cuda")
    return {
        "matmul_tf32": lambda: torch.mm(a, b),
        "matmul_bf16": lambda: torch.mm(c, d),
        "convolution_tf32": lambda: torch.conv2d(image, weight, padding=1),
        "elementwise": lambda: torch.neg(large, out=out),
        "batch_norm": lambda: torch.batch_norm(image, scale, shift, mean, var, True, 0.1, 1e-5, True),
    }


def concurrent(bench: CopyBench, kernel: Callable[[], object], directions: Sequence[Direction]) -> Concurrent:
    """Measure kernels with copies that outlast them, then copies with kernels that outlast them."""
    one_ns = bench.graph_ns([kernel] * 8, {}) / 8
    copy_ns = max(bench.graph_ns((), {d: bench.copies(LARGE_BYTES, 8, d)}) for d in directions) / 8
    copies = 16
    kernels = max(4, round(0.6 * copies * copy_ns / one_ns))
    lanes: Lanes = {d: bench.copies(LARGE_BYTES, copies, d) for d in directions}
    few: Lanes = {d: bench.copies(LARGE_BYTES, 8, d) for d in directions}
    many = max(8, round(1.6 * 8 * copy_ns / one_ns))

    def last(ops: Calls, lanes: Lanes) -> float:
        return max(time for name, time in ends_ns(bench, ops, lanes).items() if name != "ops")

    return Concurrent(
        kernels_alone_ns=ends_ns(bench, [kernel] * kernels, {})["ops"],
        kernels_ns=ends_ns(bench, [kernel] * kernels, lanes)["ops"],
        copies_alone_ns=last((), few),
        copies_ns=last([kernel] * many, few),
    )


def ends_ns(bench: CopyBench, ops: Calls, lanes: Lanes, rounds: int = 7) -> dict[str, float]:
    """Return the end times of the ops and of each copy stream, launched behind a kernel that outlasts the launches.

    Medians in ns, by `ops` or the direction.
    """
    cycles = spin_cycles(SPIN_US) * 300
    times: dict[str, list[float]] = {}
    for _ in range(rounds):
        make_launches_slow()
        begin = torch.cuda.Event(enable_timing=True)
        ends: dict[str, torch.cuda.Event] = {}
        with torch.cuda.stream(bench.ops):
            torch.cuda._sleep(cycles)
            begin.record(bench.ops)
        for direction, calls in lanes.items():
            stream = bench.backs if direction == "h2d" else bench.outs
            stream.wait_event(begin)
            ends[direction] = _issue(stream, calls)
        ends["ops"] = _issue(bench.ops, ops)
        torch.cuda.synchronize()
        for name, end in ends.items():
            times.setdefault(name, []).append(begin.elapsed_time(end) * 1e6)
    return {name: statistics.median(each) for name, each in times.items()}


def _issue(stream: torch.cuda.Stream, calls: Calls) -> torch.cuda.Event:
    """Issue calls on a stream, and return the event of their end."""
    with torch.cuda.stream(stream):
        for call in calls:
            call()
        end = torch.cuda.Event(enable_timing=True)
        end.record(stream)
    return end


def costs_with_kernels() -> tuple[float, float]:
    """Return `switch_ns` and `kernel_slowdown` of `gpusim/rules/copies.py`: means over directions and kinds."""
    bench = CopyBench()
    switches_ns = [switch_ns(bench, direction) for direction in DIRECTIONS]
    slowdowns = [concurrent(bench, kernel, [d]).slowdown for kernel in kernels_by_kind().values() for d in DIRECTIONS]
    bench.forget()
    return max(0.0, statistics.mean(switches_ns)), max(0.0, statistics.mean(slowdowns))


def measure() -> dict[str, object]:
    """Run all measurements, as numbers for a file."""
    bench = CopyBench()
    points = sweep(bench)
    result: dict[str, object] = {
        "sweep_ns": {d: {str(size): ns for size, ns in times_ns.items()} for d, times_ns in points.items()},
        "lines": {d: line(times_ns) for d, times_ns in points.items()},
        "both_bytes_per_ns": both_ways(bench),
        "switch_ns": {d: switch_ns(bench, d) for d in DIRECTIONS},
        "link": link(bench),
    }
    rows = {}
    for name, kernel in kernels_by_kind().items():
        choices: tuple[tuple[Direction, ...], ...] = (("d2h",), ("h2d",), DIRECTIONS)
        for directions in choices:
            slowed = concurrent(bench, kernel, directions)
            rows[f"{name} beside {'+'.join(directions)}"] = {
                "kernels_alone_ns": slowed.kernels_alone_ns,
                "kernels_ns": slowed.kernels_ns,
                "slowdown": slowed.slowdown,
                "copies_alone_ns": slowed.copies_alone_ns,
                "copies_ns": slowed.copies_ns,
                "copy_slowdown": slowed.copy_slowdown,
            }
            torch.cuda.empty_cache()
        bench.forget()
    result["beside"] = rows
    return result
