"""`gpusim calibrate`: constants of a hardware model, measured on the current GPU.

Constants that cannot be measured from outside (granularities, limits of a block) are copied from the base model, with
their source.
"""

from __future__ import annotations

import datetime
import statistics
from collections.abc import Callable, Iterable
from itertools import pairwise

import msgspec
import torch

from gpusim.errors import GpuError
from gpusim.formats.hardware import Copies, GraphCosts, HardwareModel, StreamCosts, Uncertainty
from gpusim.gpu.calibrate import microbench as bench
from gpusim.gpu.calibrate.block_kernels import BlockBench, Hold
from gpusim.gpu.calibrate.cache import cache_figures, launch_miss_ns, read_rates
from gpusim.gpu.calibrate.contention import fit, measure_points, with_contention
from gpusim.gpu.calibrate.copies import CopyBench, costs_with_kernels
from gpusim.gpu.calibrate.memsets import memset_waits_ns
from gpusim.gpu.calibrate.start_interference import NETWORK, half_starts, measure, subjects
from gpusim.gpu.device import gpu_facts, require_gpu
from gpusim.version import code_version

REMEASURED = ("graph", "stream", "copies", "contention", "memory", "uncertainty")
#: Constants that calibration keeps: measured by an experiment of its own, or chosen with the others fitted for each
#: value (research/2026-11-23-fidelity.md, research/2026-11-23-calibration.md).
KEPT = (
    "uncertainty.less_known_frac",
    "uncertainty.saving_frac",
    "uncertainty.variants_frac",
    "uncertainty.searched_frac",
    "contention.cross_load",
    "graph.join_ns",
    "graph.product_frac",
    "graph.turnover_ns",
    "copies.copy_slowdown",
    "memory.miss_ns",
)
LIMITS_FROM_DRIVER = {
    "sms": "multi_processor_count",
    "threads_per_sm": "max_threads_per_multi_processor",
    "regs_per_sm": "regs_per_multiprocessor",
    "smem_per_sm_bytes": "shared_memory_per_multiprocessor",
}


def calibrate(base: HardwareModel, command: str, say: Callable[[str], None] = lambda _: None) -> HardwareModel:
    """Measure every measurable constant. Raises `GpuError` where the GPU is not the base model's."""
    require_gpu()
    facts = gpu_facts(lambda: torch.cuda._sleep(2_000_000))
    if facts.name != base.gpu:
        raise GpuError(
            f"this GPU is '{facts.name}', the base model '{base.name}' is of '{base.gpu}'; choose another base"
        )
    properties = torch.cuda.get_device_properties(torch.cuda.current_device())
    for field, name in LIMITS_FROM_DRIVER.items():
        limit = getattr(properties, name, None)
        if limit is not None and limit != getattr(base.limits, field):
            raise GpuError(f"the driver says {name} = {limit}, the base model {getattr(base.limits, field)}")
    when = f"measured {datetime.date.today().isoformat()} by `{command}`, gpusim {code_version()}"
    when += f", torch {facts.torch}, driver {facts.driver}, SM clock {facts.sm_clock_mhz} MHz"
    sources = {k: v for k, v in base.sources.items() if not k.startswith(REMEASURED) or k in KEPT}
    say("CUDA graphs: chains, forks, joins, front end")
    graph, notes = graph_costs(base.graph)
    sources |= {f"graph.{field}": f"{when}; {note}" for field, note in notes.items()}
    say("streams: launches, events, hardware queues")
    stream, notes = stream_costs()
    sources |= {f"stream.{field}": f"{when}; {note}" for field, note in notes.items()}
    say("memory and copies")
    h2d, d2h, both, latency_ns = bench.host_copy_rates()
    switch_ns, kernel_slowdown = costs_with_kernels()
    memset_ns = memset_waits_ns(CopyBench())
    copies = Copies(
        h2d_bytes_per_ns=h2d,
        d2h_bytes_per_ns=d2h,
        both_bytes_per_ns=both,
        latency_ns=latency_ns,
        switch_ns=switch_ns,
        copy_slowdown=base.copies.copy_slowdown,
        kernel_slowdown=kernel_slowdown,
        memset_d2h_ns=memset_ns["d2h"],
        memset_h2d_ns=memset_ns["h2d"],
    )
    sources["copies"] = f"{when}; pinned copies of 512 MiB, and 4 KiB in a graph for the latency"
    sources["copies.switch_ns"] = f"{when}; copies of 1 MiB in turns with kernels in a graph, mean of both directions"
    for direction, field in (("out", "copies.memset_d2h_ns"), ("back", "copies.memset_h2d_ns")):
        sources[field] = f"{when}; memsets of 96 bytes in turns with kernels, profiled, beside copies {direction}"
    sources["copies.kernel_slowdown"] = f"{when}; five kinds of kernels beside copies, mean of both directions"
    memory = msgspec.structs.replace(
        base.memory,
        dram_bytes=properties.total_memory,
        dram_bytes_per_ns=bench.copy_bandwidth(),
        l2_bytes=properties.L2_cache_size,
    )
    sources["memory"] = f"{when}; sizes from the driver, bandwidth of a 2 GiB copy, bytes read and written"
    say("L2 cache")
    missed_ns = launch_miss_ns(memory.l2_bytes)
    memory, notes = cache_figures(memory, read_rates(BlockBench(bench.clock_mhz(facts))), missed_ns)
    sources |= {f"memory.{field}": f"{when}; {note}" for field, note in notes.items()}
    model = msgspec.structs.replace(
        base, calibrated=True, memory=memory, copies=copies, graph=graph, stream=stream, sources=sources
    )
    steps = measure_points(model, say)
    say("fitting contention")
    best_fit = fit(steps.points, steps.gaps_ns)
    note = (
        f"{when}; fitted to {len(steps.points)} schedules of the calibration network "
        f"(gpusim/gpu/calibrate/network.py), GoogLeNet and DenseNet-121 (list: gpusim/gpu/calibrate/contention.py), "
        f"residual median {best_fit.median:.1%}, 90 % within {best_fit.p90:.1%}"
    )
    pooled = statistics.median(best_fit.pooled_residuals)
    fitted = ("contention.sharing_exponent", "contention.matrix_exponent")
    sources |= dict.fromkeys(fitted, note)
    sources["contention.younger_slowdown"] = (
        f"{when}; to the same schedules with the SMs as one pool, median {pooled:.1%}"
    )
    sources["graph.chain_ns"] = f"{when}; median over the calibration steps: {_listed(steps.gaps_ns)} ns"
    sources["graph.branch_ns"] = (
        f"{when}; each calibration step on one stream, with and without one tiny kernel in a branch of its own, "
        f"over its gaps, median of {_listed(steps.branches_ns)} ns"
    )
    sources["uncertainty"] = f"{when}; the residuals of that fit, until validation replaces them"
    model = with_contention(model, best_fit.sharing_exponent, best_fit.matrix_exponent, best_fit.younger_slowdown)
    return msgspec.structs.replace(
        model,
        graph=msgspec.structs.replace(model.graph, chain_ns=best_fit.chain_ns, branch_ns=steps.branch_ns),
        uncertainty=Uncertainty(
            sequential_frac=best_fit.p90,
            schedule_frac=best_fit.p90,
            less_known_frac=base.uncertainty.less_known_frac,
            saving_frac=base.uncertainty.saving_frac,
            variants_frac=base.uncertainty.variants_frac,
            searched_frac=base.uncertainty.searched_frac,
        ),
        sources=sources,
    )


def _listed(values: Iterable[float]) -> str:
    return ", ".join(f"{value:.0f}" for value in values)


def graph_costs(base: GraphCosts) -> tuple[GraphCosts, dict[str, str]]:
    """Return the costs of CUDA graphs, with a note on each measurement; those of `KEPT` are those of `base`."""
    cycles = bench.spin_cycles(bench.SPIN_US)

    def spin() -> None:
        torch.cuda._sleep(cycles)

    wide, wider = (bench.parallel_chains_ns(width, spin, length=20) for width in (64, 96))
    front_end_ns = (wider - wide) / 32
    small = bench.small_kernel()
    chain_ns = bench.parallel_chains_ns(1, small) - bench.profiled_ns(small)
    memory_node_ns = max(0.0, bench.memset_gap_ns() - chain_ns)
    lost = measure(subjects()[NETWORK])
    half = half_starts(lost)
    notes = {
        "chain_ns": "gap in a chain of small elementwise kernels over their profiled time",
        "fork_ns": "between the starts of 4, 5 or 6 kernels of one block that wait for one, but the last two",
        "busy_ns": "the calibration network at batch 1 beside chains of kernels of one thread, a kernel",
        "busy_starts": "the calibration network at batch 1 beside chains of kernels of one thread",
        "branch_ns": "of the calibration steps",
        "front_end_ns": "64 against 96 parallel chains of spin kernels",
        "memory_node_ns": "chain of memsets between small kernels, less the usual gaps",
    }
    costs = GraphCosts(
        chain_ns=chain_ns,
        fork_ns=fork_ns(),
        join_ns=base.join_ns,
        busy_ns=lost.limit_ns(half),
        busy_starts=half,
        product_frac=base.product_frac,
        turnover_ns=base.turnover_ns,
        front_end_ns=front_end_ns,
        memory_node_ns=memory_node_ns,
    )
    return costs, notes


def fork_ns() -> float:
    """Return the time between successive starts of a kernel's successors in a CUDA graph, without the last two, in ns.

    The rule is in docs/hardware-rules.md. At most six successors are used: wider forks start in another order, and
    later, on an H200.
    """
    blocks = BlockBench(sm_clock_mhz=0)
    gaps: list[int] = []
    for width in (4, 5, 6):
        for _ in range(5):
            starts = [kernel.start_ns[0] for kernel in blocks.fork(width, Hold(1, 32, 10))]
            gaps += [after - before for before, after in pairwise(starts[:-2])]
    return float(max(0.0, statistics.mean(gaps)))


def stream_costs() -> tuple[StreamCosts, dict[str, str]]:
    """Return the costs of streams, with a note on each measurement."""
    cycles = bench.spin_cycles(bench.SPIN_US * 2)
    solo_ns = bench.profiled_ns(lambda: torch.cuda._sleep(cycles))
    launch_ns = bench.host_launch_ns()
    idle_ns = bench.idle_sync_ns()
    queues = {n: bench.queue_count(n) for n in (None, 1, 32)}
    counted = round(queues[None])
    notes = {
        "launch_ns": "50 launches of an almost empty kernel from Python; 10th percentile of 100, as all host times",
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
