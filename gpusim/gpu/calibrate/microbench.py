"""Micro-benchmarks, each for one constant of the hardware model. All need a GPU.

The work is torch's spin kernel (`torch.cuda._sleep`: one block of one thread that counts cycles), which uses no
bandwidth, and small real kernels where the kind of work matters. GPU times are medians of CUDA-event timings, host
times the 10th percentile.
"""

from __future__ import annotations

import os
import statistics
import subprocess
import sys
from collections.abc import Callable, Sequence
from time import perf_counter_ns

import torch

from gpusim.errors import CaptureError
from gpusim.formats.trace import Gpu, Kernel
from gpusim.gpu.launch_state import make_launches_slow
from gpusim.gpu.profiling import exported_events, kernel_of, profiled
from gpusim.units import GIB, KIB, NS_PER_US

SPIN_US = 5
ROUNDS = 15
#: Profiler categories of GPU work.
GPU_CATEGORIES = ("kernel", "gpu_memset", "gpu_memcpy")

Branches = Sequence[Sequence[Callable[[], object]]]


def undisturbed(times: Sequence[float]) -> float:
    """Return the 10th percentile, the host time on an otherwise idle processor. Medians differ between runs."""
    return sorted(times)[len(times) // 10]


def event_ns(run: Callable[[], object], calls: int = 1, rounds: int = ROUNDS) -> float:
    """Return the median GPU time of one of `calls` calls of `run`, in ns, with launches in their slow state."""
    make_launches_slow()
    run()
    torch.cuda.synchronize()
    times = []
    for _ in range(rounds):
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begin.record()
        for _ in range(calls):
            run()
        end.record()
        end.synchronize()
        times.append(begin.elapsed_time(end) * 1e6 / calls)
    return statistics.median(times)


def spin_cycles(target_us: float) -> int:
    """Return the spin kernel's cycles for about `target_us`."""
    long = 4_000_000
    per_cycle = (event_ns(lambda: torch.cuda._sleep(2 * long)) - event_ns(lambda: torch.cuda._sleep(long))) / long
    return round(target_us * NS_PER_US / per_cycle)


def clock_mhz(facts: Gpu) -> int:
    """Return the SM clock that the driver reports under load, or where it reports none, that of a spin kernel."""
    return facts.sm_clock_mhz or round(spin_cycles(1000) / 1000)


def graph_of(stages: Sequence[Branches]) -> torch.cuda.CUDAGraph:
    """Return a CUDA graph of stages in sequence; a stage is parallel branches, a branch a list of calls."""
    width = max(len(stage) for stage in stages)
    streams = [torch.cuda.Stream() for _ in range(width)]
    for stage in stages[:1]:
        for branch in stage:
            branch[0]()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=streams[0], capture_error_mode="thread_local"):
        for stage in stages:
            for stream in streams[1 : len(stage)]:
                stream.wait_stream(streams[0])
            for stream, branch in zip(streams, stage, strict=False):
                with torch.cuda.stream(stream):
                    for call in branch:
                        call()
            for stream in streams[1 : len(stage)]:
                streams[0].wait_stream(stream)
    return graph


def graph_ns(stages: Sequence[Branches]) -> float:
    """Return the time of one replay, in ns."""
    graph = graph_of(stages)
    return event_ns(graph.replay, calls=10)


def profiled_kernel(call: Callable[[], object], repeats: int = 50) -> Kernel:
    """Return the single kernel of a call, launched back to back, from the profiler: shape and median duration."""
    call()
    torch.cuda.synchronize()
    with profiled() as session:
        for _ in range(repeats):
            call()
        torch.cuda.synchronize()
    kernels = [event for event in exported_events(session) if event.get("cat") == "kernel"]
    names = {event["name"] for event in kernels}
    if len(names) != 1:
        raise CaptureError(f"a micro-benchmark expected one kernel per call, the profiler saw {len(names)}")
    return kernel_of(kernels)


def profiled_names(call: Callable[[], object]) -> list[str]:
    """Return the profiler's names of the kernels, memsets and copies of one call."""
    call()
    torch.cuda.synchronize()
    with profiled() as session:
        call()
        torch.cuda.synchronize()
    return [str(event["name"]) for event in exported_events(session) if event.get("cat") in GPU_CATEGORIES]


def profiled_ns(call: Callable[[], object]) -> float:
    """Return the profiler's median duration of a call's single kernel, in ns."""
    return float(profiled_kernel(call).dur_ns)


def memset_gap_ns(length: int = 40) -> float:
    """Return the gap around a memset node between small kernels in a CUDA graph, in ns, without their profiled
    times.
    """
    data, out = torch.randn(150_000, device="cuda"), torch.empty(20_000, device="cuda")

    def kernel() -> None:
        torch.relu_(data)

    def memset() -> None:
        out.zero_()

    both = graph_ns([[[kernel, memset] * length]]) / length
    with profiled() as session:
        for _ in range(length):
            kernel()
            memset()
        torch.cuda.synchronize()
    events = exported_events(session)
    solo = [
        statistics.median(e["dur"] for e in events if e.get("cat") == kind) * NS_PER_US
        for kind in ("kernel", "gpu_memset")
        if any(e.get("cat") == kind for e in events)
    ]
    return (both - sum(solo)) / 2


def idle_sync_ns() -> float:
    """Return the host time of waiting for an idle GPU, in ns."""
    times = []
    for _ in range(200):
        begin = perf_counter_ns()
        torch.cuda.synchronize()
        times.append(perf_counter_ns() - begin)
    return undisturbed(times)


def parallel_chains_ns(width: int, call: Callable[[], object], length: int = 40) -> float:
    """Return the time of one step of `width` independent chains in one graph, in ns."""
    return graph_ns([[[call] * length] * width]) / length


#: Rounds of a host time; each is short, so that some are undisturbed.
HOST_ROUNDS = 100


def host_launch_ns(launches: int = 50) -> float:
    """Return the host time of launching an almost empty kernel, in ns."""
    times = []
    for _ in range(HOST_ROUNDS):
        torch.cuda.synchronize()
        begin = perf_counter_ns()
        for _ in range(launches):
            torch.cuda._sleep(1)
        times.append((perf_counter_ns() - begin) / launches)
    return undisturbed(times)


def event_host_ns(pairs: int = 50) -> float:
    """Return the host time of recording an event and making another stream wait for it, in ns."""
    one, other = torch.cuda.Stream(), torch.cuda.Stream()
    events = [torch.cuda.Event() for _ in range(pairs)]
    times = []
    for _ in range(HOST_ROUNDS):
        torch.cuda.synchronize()
        begin = perf_counter_ns()
        for event in events:
            event.record(one)
            other.wait_event(event)
        times.append((perf_counter_ns() - begin) / pairs)
    return undisturbed(times)


def stream_chain_ns(cycles: int, length: int = 200, streams: int = 1) -> float:
    """Return the time per kernel, in ns, of a chain launched ahead of time by the host, over `streams` streams with
    events.
    """
    lanes = [torch.cuda.Stream() for _ in range(streams)]
    hold = cycles * 3 * length  # the head start: meanwhile the host launches the whole chain
    times = []
    for _ in range(ROUNDS):
        make_launches_slow()
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        with torch.cuda.stream(lanes[0]):
            torch.cuda._sleep(hold)
            begin.record()
        for number in range(length):
            lane = lanes[number % streams]
            if streams > 1:
                lane.wait_stream(lanes[(number - 1) % streams])
            with torch.cuda.stream(lane):
                torch.cuda._sleep(cycles)
        last = lanes[(length - 1) % streams]
        end.record(last)
        end.synchronize()
        times.append(begin.elapsed_time(end) * 1e6 / length)
    return statistics.median(times)


def start_latency_ns() -> float:
    """Return the time from launch call to noticed completion of an almost empty kernel, from an idle host, in ns."""
    make_launches_slow()
    times = []
    for _ in range(200):
        torch.cuda.synchronize()
        begin = perf_counter_ns()
        torch.cuda._sleep(1)
        torch.cuda.synchronize()
        times.append(perf_counter_ns() - begin)
    return undisturbed(times)


def depth_first_units(streams: int, depth: int, spin_us: float = 2000.0) -> float:
    """Return the time of `streams` streams with `depth` one-block kernels each, launched depth first, in kernel
    times.
    """
    cycles = spin_cycles(spin_us)
    lanes = [torch.cuda.Stream() for _ in range(streams)]
    one = event_ns(lambda: torch.cuda._sleep(cycles), rounds=5)

    def run() -> float:
        torch.cuda.synchronize()
        begin = perf_counter_ns()
        for lane in lanes:
            with torch.cuda.stream(lane):
                for _ in range(depth):
                    torch.cuda._sleep(cycles)
        torch.cuda.synchronize()
        return (perf_counter_ns() - begin) / one

    run()
    return statistics.median(run() for _ in range(5))


QUEUE_STREAMS, QUEUE_DEPTH = 32, 4


def queue_count(connections: int | None) -> float:
    """Return the number of hardware queues in a new process with CUDA_DEVICE_MAX_CONNECTIONS set (None: default).

    k streams of d kernels over q queues take (k / q)(d - 1) + 1 kernel times depth first: a queue's head, waiting for
    its stream, blocks the launches behind it.
    """
    environment = dict(os.environ)
    if connections is not None:
        environment["CUDA_DEVICE_MAX_CONNECTIONS"] = str(connections)
    program = (
        "from gpusim.gpu.calibrate.microbench import depth_first_units as d, QUEUE_STREAMS as k, QUEUE_DEPTH as n;"
        "print(d(k, n))"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], env=environment, capture_output=True, text=True, check=True, timeout=120
    )
    units = float(done.stdout.split()[-1])
    return QUEUE_STREAMS * (QUEUE_DEPTH - 1) / max(units - 1.0, 1e-9)


def copy_bandwidth() -> float:
    """Return the bytes per ns that a large device-to-device copy reads and writes."""
    source = torch.empty(2 * GIB, dtype=torch.uint8, device="cuda")
    target = torch.empty_like(source)
    return 2 * source.numel() / event_ns(lambda: target.copy_(source), calls=5)


def host_copy_rates() -> tuple[float, float, float, float]:
    """Return bytes per ns host to device, device to host, both at once in total, and the fixed ns of a small copy
    (pinned).
    """
    size = GIB // 2
    host_in, host_out = (torch.empty(size, dtype=torch.uint8, pin_memory=True) for _ in range(2))
    device_in, device_out = (torch.empty(size, dtype=torch.uint8, device="cuda") for _ in range(2))
    one, other = torch.cuda.Stream(), torch.cuda.Stream()

    def copy_in() -> None:
        device_in.copy_(host_in, non_blocking=True)

    def copy_out() -> None:
        host_out.copy_(device_out, non_blocking=True)

    def both() -> None:
        current = torch.cuda.current_stream()
        for stream in (one, other):
            stream.wait_stream(current)
        for stream, copy in ((one, copy_in), (other, copy_out)):
            with torch.cuda.stream(stream):
                copy()
        for stream in (one, other):
            current.wait_stream(stream)

    small_host = torch.empty(4 * KIB, dtype=torch.uint8, pin_memory=True)
    small_device = torch.empty(4 * KIB, dtype=torch.uint8, device="cuda")
    small = graph_ns([[[lambda: small_device.copy_(small_host, non_blocking=True)] * 50]]) / 50
    return size / event_ns(copy_in, 2, 7), size / event_ns(copy_out, 2, 7), 2 * size / event_ns(both, 2, 7), small


def small_kernel() -> Callable[[], object]:
    """Return a real kernel of a microsecond, as in networks at small batch: ReLU of 150,000 elements."""
    small = torch.randn(1, 192, 28, 28, device="cuda")
    return lambda: torch.relu(small)
