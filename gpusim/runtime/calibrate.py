"""`gpusim calibrate`: the constants of a hardware model, measured on the GPU at hand.

What cannot be measured from outside (granularities, limits of a block) stays as in the base model, with its source.
"""

from __future__ import annotations

import datetime
import math
import statistics
from collections.abc import Callable

import msgspec
import torch

from gpusim.engine.reference import ReferenceEngine
from gpusim.errors import GpuError
from gpusim.hardware.model import Contention, Copies, GraphCosts, HardwareModel, StreamCosts
from gpusim.hardware.occupancy import kernel_demand
from gpusim.plan.tasks import Plan, Task
from gpusim.runtime import microbench as bench
from gpusim.runtime.device import gpu_facts, require_gpu
from gpusim.trace.schema import Kernel

#: Widths at which the slow-down of kernels beside others is fitted.
CONTENTION_WIDTHS = (2, 3, 4, 6, 8)
LIMITS_FROM_DRIVER = {
    "sms": "multi_processor_count",
    "threads_per_sm": "max_threads_per_multi_processor",
    "regs_per_sm": "regs_per_multiprocessor",
    "smem_per_sm_bytes": "shared_memory_per_multiprocessor",
}


def calibrate(base: HardwareModel, command: str, say: Callable[[str], None] = lambda _: None) -> HardwareModel:
    """Measure everything that `gpusim` can measure. Raises `GpuError` where the GPU is not the base model's."""
    require_gpu()
    facts = gpu_facts()
    if facts.name != base.gpu:
        raise GpuError(f"this GPU is '{facts.name}', the base model '{base.name}' is of '{base.gpu}'; choose --base")
    properties = torch.cuda.get_device_properties(torch.cuda.current_device())
    for field, name in LIMITS_FROM_DRIVER.items():
        found = getattr(properties, name, None)
        if found is not None and found != getattr(base.limits, field):
            raise GpuError(f"the driver says {name} = {found}, the base model {getattr(base.limits, field)}")
    when = f"measured {datetime.date.today().isoformat()} by `{command}`, torch {facts.torch}, driver {facts.driver}"
    when += f", SM clock {facts.sm_clock_mhz} MHz"
    sources = {k: v for k, v in base.sources.items() if not k.startswith(("graph", "stream", "copies", "contention"))}
    say("CUDA graphs: chains, forks, joins, front end")
    graph, notes = graph_costs()
    sources |= {f"graph.{field}": f"{when}; {note}" for field, note in notes.items()}
    say("streams: launches, events, hardware queues")
    stream, notes = stream_costs()
    sources |= {f"stream.{field}": f"{when}; {note}" for field, note in notes.items()}
    say("memory and copies")
    h2d, d2h, both, latency_ns = bench.host_copy_rates()
    copies = Copies(h2d_bytes_per_ns=h2d, d2h_bytes_per_ns=d2h, both_bytes_per_ns=both, latency_ns=latency_ns)
    sources["copies"] = f"{when}; pinned copies of 512 MiB, and 4 KiB in a graph for the latency"
    memory = msgspec.structs.replace(
        base.memory,
        dram_bytes=properties.total_memory,
        dram_bytes_per_ns=bench.copy_bandwidth(),
        l2_bytes=properties.L2_cache_size,
    )
    sources["memory"] = f"{when}; sizes from the driver, bandwidth of a 2 GiB copy, bytes read and written"
    model = msgspec.structs.replace(
        base, calibrated=True, memory=memory, copies=copies, graph=graph, stream=stream, sources=sources
    )
    say("kernels beside kernels")
    slowdown, residual, points = fit_slowdown(model)
    sources["contention"] = (
        f"{when}; fitted to {points} widths of parallel chains of small kernels, median residual {residual:.1%}"
    )
    return msgspec.structs.replace(model, contention=Contention(younger_slowdown=slowdown), sources=sources)


def graph_costs() -> tuple[GraphCosts, dict[str, str]]:
    """Costs of CUDA graphs, with a note on how each was found."""
    cycles = bench.spin_cycles(bench.SPIN_US)

    def spin() -> None:
        torch.cuda._sleep(cycles)

    gaps = {}
    for name, call in bench.small_kernels().items():
        gaps[name] = bench.parallel_chains_ns(1, call) - bench.profiled_ns(call)
    chain_ns = statistics.median(gaps.values())
    wide, wider = (bench.parallel_chains_ns(width, spin, length=20) for width in (64, 96))
    front_end_ns = (wider - wide) / 32
    one, four = (bench.fork_join_ns(width, spin) for width in (1, 4))
    join_ns = max(0.0, (four - one) / 3 - front_end_ns)
    memory_node_ns = max(0.0, bench.memset_gap_ns() - chain_ns)
    listed = ", ".join(f"{name} {gap:.0f}" for name, gap in gaps.items())
    notes = {
        "chain_ns": f"gap in chains of small kernels over their profiled time, median of: {listed} ns",
        "fork_ns": "not told apart from the front end's rate",
        "join_ns": "stage of 4 parallel spin kernels over a stage of 1, for each branch, less the front end's time",
        "front_end_ns": "64 against 96 parallel chains of spin kernels",
        "memory_node_ns": "chain of memsets between small kernels, less the usual gaps",
    }
    costs = GraphCosts(
        chain_ns=chain_ns, fork_ns=0.0, join_ns=join_ns, front_end_ns=front_end_ns, memory_node_ns=memory_node_ns
    )
    return costs, notes


def stream_costs() -> tuple[StreamCosts, dict[str, str]]:
    """Costs of streams, with a note on how each was found."""
    cycles = bench.spin_cycles(bench.SPIN_US * 2)
    solo_ns = bench.profiled_ns(lambda: torch.cuda._sleep(cycles))
    launch_ns = bench.host_launch_ns()
    idle_ns = bench.idle_sync_ns()
    queues = {n: bench.queue_count(n) for n in (None, 1, 32)}
    counted = round(queues[None])
    notes = {
        "launch_ns": "500 launches of an almost empty kernel from Python",
        "start_ns": "one launch and a wait for it, less the launch call and an idle wait",
        "chain_ns": "chain of spin kernels launched ahead of time, over their profiled time",
        "event_ns": "the same over two streams in turns, with an event for each kernel",
        "event_host_ns": "record and wait from Python",
        "queues": f"depth-first launches of {bench.QUEUE_STREAMS} streams: {queues[None]:.2f} queues found",
        "max_queues": f"the same with CUDA_DEVICE_MAX_CONNECTIONS=32: {queues[32]:.1f} found (=1: {queues[1]:.2f}); "
        "the CUDA C++ Programming Guide allows 1 to 32",
    }
    costs = StreamCosts(
        launch_ns=launch_ns,
        start_ns=max(0.0, bench.start_latency_ns() - launch_ns - idle_ns),
        chain_ns=max(0.0, bench.stream_chain_ns(cycles) - solo_ns),
        event_ns=max(0.0, bench.stream_chain_ns(cycles, streams=2) - solo_ns),
        event_host_ns=bench.event_host_ns(),
        queues=max(1, counted),
        max_queues=32,
    )
    return costs, notes


def fit_slowdown(model: HardwareModel) -> tuple[float, float, int]:
    """The slow-down of younger kernels that best explains parallel chains of small kernels.

    Returns it with the median residual and the number of points. One-dimensional search over a grid: the sum of squared log
    errors is smooth and has one minimum.
    """
    points = []
    for call in bench.small_kernels().values():
        kernel = bench.profiled_kernel(call)
        alone = bench.parallel_chains_ns(1, call)
        for width in CONTENTION_WIDTHS:
            points.append((kernel, alone, width, bench.parallel_chains_ns(width, call)))
    best = min(
        (step / 50 for step in range(101)),
        key=lambda a: sum(_log_error(model, a, *point) ** 2 for point in points),
    )
    residuals = [abs(_log_error(model, best, *point)) for point in points]
    return best, statistics.median(residuals), len(points)


def _log_error(
    model: HardwareModel, slowdown: float, kernel: Kernel, alone: float, width: int, measured: float
) -> float:
    """Log of predicted over measured time of a step of `width` parallel chains."""
    return math.log(predict_chains_ns(model, slowdown, kernel, alone, width) / measured)


def predict_chains_ns(model: HardwareModel, slowdown: float, kernel: Kernel, alone: float, width: int) -> float:
    """What the engine says of a step of parallel chains, with the gap that makes one chain alone exact."""
    length = 12
    gap = max(0.0, alone - kernel.dur_ns)
    model = msgspec.structs.replace(
        model,
        contention=Contention(younger_slowdown=slowdown),
        graph=msgspec.structs.replace(model.graph, chain_ns=gap),
    )
    demand = kernel_demand(model.limits, kernel)
    tasks = tuple(
        Task(name=kernel.name, dur_ns=float(kernel.dur_ns), demand=demand, queue=chain)
        for _ in range(length)
        for chain in range(width)
    )
    return ReferenceEngine().run(Plan(tasks), model, record=False).makespan_ns / length
