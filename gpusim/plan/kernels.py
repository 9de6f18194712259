"""From traced kernels to GPU tasks of one hardware model: demand, memory traffic, and time on another GPU."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod

import msgspec

from gpusim.errors import LimitError
from gpusim.hardware.model import HardwareModel, hardware_for_gpu
from gpusim.hardware.occupancy import Demand, Footprint, kernel_demand, kernel_footprint, kernel_occupancy
from gpusim.plan.tasks import Task
from gpusim.plan.traffic import Arithmetic, arithmetic
from gpusim.trace.check import DTYPE_BYTES
from gpusim.trace.names import multiplies_matrices
from gpusim.trace.schema import Dtype, Kernel, Op, Trace

NO_ARITHMETIC = Arithmetic(0.0, False)


def kernel_tasks(trace: Trace, hardware: HardwareModel, scale: float = 1.0) -> tuple[tuple[Task, ...], ...]:
    """For each op its tasks, not yet placed (no queue, no dependencies); `scale` multiplies their durations.

    Raises `LimitError`, naming op and kernel, where a kernel breaks a limit of the GPU.
    """
    scaling, fits = _scaling(trace, hardware), Fits(hardware)
    return tuple(
        _op_tasks(trace, index, op.kernels, f"$.ops[{index}]", fits, scaling, scale)
        for index, op in enumerate(trace.ops)
    )


def variant_tasks(
    trace: Trace, hardware: HardwareModel, scale: float = 1.0
) -> tuple[tuple[tuple[Task, ...], ...], ...]:
    """For each op the tasks of each of its variants, as `kernel_tasks` gives those of the captured kernels."""
    scaling, fits = _scaling(trace, hardware), Fits(hardware)
    return tuple(
        tuple(
            _op_tasks(trace, index, variant.kernels, f"$.ops[{index}].variants[{number}]", fits, scaling, scale)
            for number, variant in enumerate(op.variants)
        )
        for index, op in enumerate(trace.ops)
    )


def _scaling(trace: Trace, hardware: HardwareModel) -> Scaling | None:
    """How kernels captured on another GPU scale to this one; None for its own, and for a GPU without a model."""
    if trace.provenance.gpu.name == hardware.gpu:
        return None
    source = hardware_for_gpu(trace.provenance.gpu.name)
    return None if source is None else Scaling(source, hardware, trace.model.dtype)


@dataclass(frozen=True, slots=True)
class Fit:
    """How a kernel fits a GPU; `resident` is how many of its blocks an SM holds."""

    demand: Demand
    resident: int
    footprint: Footprint
    matrix: bool


class Fits:
    """How kernels fit one GPU. A step launches few different ones, so each is looked at once."""

    def __init__(self, hardware: HardwareModel) -> None:
        self.hardware = hardware
        self._known: dict[tuple[object, ...], Fit] = {}

    def of(self, kernel: Kernel) -> Fit:
        """Raises `LimitError` where a block breaks a limit of the GPU."""
        asked_bytes = kernel.counters.smem_config_bytes if kernel.counters else None
        launch = (kernel.kind, kernel.grid, kernel.block, kernel.regs_per_thread, kernel.smem_bytes)
        key = (kernel.name, *launch, asked_bytes)
        found = self._known.get(key)
        if found is None:
            limits = self.hardware.limits
            found = self._known[key] = Fit(
                demand=kernel_demand(limits, kernel),
                resident=0 if kernel.kind != "kernel" else kernel_occupancy(limits, kernel).blocks,
                footprint=kernel_footprint(limits, kernel),
                matrix=multiplies_matrices(kernel.name),
            )
        return found


def _op_tasks(
    trace: Trace,
    index: int,
    kernels: Sequence[Kernel],
    where: str,
    fits: Fits,
    scaling: Scaling | None,
    scale: float,
) -> tuple[Task, ...]:
    op, hardware = trace.ops[index], fits.hardware
    total_ns = sum(kernel.dur_ns for kernel in kernels) or 1
    source_l2_bytes = hardware.memory.l2_bytes if scaling is None else scaling.source.memory.l2_bytes
    moved_bytes = op_moved_bytes(trace, op)
    op_bytes = max(0, moved_bytes - source_l2_bytes)
    more_bytes = max(0, max(0, moved_bytes - hardware.memory.l2_bytes) - op_bytes)
    work = arithmetic(trace, op, kernels) if scaling is not None else ()
    tasks = []
    for number, kernel in enumerate(kernels):
        dram_bytes = kernel.counters.dram_bytes if kernel.counters else op_bytes * kernel.dur_ns / total_ns
        dur_ns = kernel.dur_ns * scale
        if scaling is not None:
            dur_ns = scaling.dur_ns(kernel, dram_bytes, work[number], more_bytes * kernel.dur_ns / total_ns)
            kernel = fit_to(kernel, hardware)
        try:
            fit = fits.of(kernel)
        except LimitError as cause:
            raise LimitError(f"{where}.kernels[{number}]: {cause} on '{hardware.name}'") from cause
        memory_node = kernel.kind != "kernel"
        tasks.append(
            Task(
                name=kernel.name,
                kind=kernel.kind,
                dur_ns=dur_ns,
                extra_ns=hardware.graph.memory_node_ns if memory_node else 0.0,
                demand=fit.demand,
                dram_bytes=dram_bytes,
                copy_bytes=kernel.bytes,
                host_ns=op.host_ns if number == 0 else 0.0,
                blocks=0 if memory_node else prod(kernel.grid),
                blocks_per_sm=fit.resident,
                footprint=fit.footprint,
                matrix=fit.matrix,
                op=index,
                kernel=number,
            )
        )
    return tuple(tasks)


def op_dram_bytes(trace: Trace, op: Op, l2_bytes: int) -> int:
    """Estimated DRAM traffic of an op: the bytes of the tensors it reads and writes, beyond what the L2 cache holds.

    What fits the cache is taken to be there, written just before and read again soon, so this is a lower limit.
    Counters, where a trace has them, replace it.
    """
    return max(0, op_moved_bytes(trace, op) - l2_bytes)


def op_moved_bytes(trace: Trace, op: Op) -> int:
    """Bytes of the tensors that an op reads, each once, and of those that it writes."""
    tensors, moved = trace.tensors, 0
    for some in (op.reads, op.writes):
        for index in some if len(some) < 2 else dict.fromkeys(some):
            tensor = tensors[index]
            moved += prod(tensor.shape) * DTYPE_BYTES[tensor.dtype]
    return moved


def fit_to(kernel: Kernel, hardware: HardwareModel) -> Kernel:
    """The kernel as another GPU would run it: a library would pick tiles that fit, so what is over a limit is cut.

    Only for what-if questions about a GPU that the kernel was not captured on.
    """
    limits = hardware.limits
    kernel = msgspec.structs.replace(
        kernel,
        regs_per_thread=min(kernel.regs_per_thread, limits.regs_per_thread),
        smem_bytes=min(kernel.smem_bytes, limits.smem_per_block_bytes),
        cluster=None,
    )
    threads = prod(kernel.block)
    while kernel.regs_per_thread and kernel_regs(kernel, threads, hardware) > limits.regs_per_sm:
        kernel = msgspec.structs.replace(kernel, regs_per_thread=kernel.regs_per_thread // 2)
    return kernel


def kernel_regs(kernel: Kernel, threads: int, hardware: HardwareModel) -> int:
    """Registers of one block, without rounding."""
    return -(-threads // hardware.limits.warp_threads) * hardware.limits.warp_threads * kernel.regs_per_thread


#: FP32 multiply-adds an SM starts in a clock cycle, by compute capability. Source: CUDA C++ Programming Guide, table
#: "Throughput of Native Arithmetic Instructions", row "32-bit floating-point add, multiply, multiply-add".
FP32_LANES = {"3.5": 192, "3.7": 192, "5.0": 128, "5.2": 128, "6.0": 64, "6.1": 128, "7.0": 64, "7.5": 64, "8.0": 64}
#: From compute capability 8.6 on.
NEWER_FP32_LANES = 128


def clock_ghz(hardware: HardwareModel) -> float:
    """The SM clock that the data sheet's FP32 peak stands for: two operations a lane and cycle."""
    lanes = FP32_LANES.get(hardware.limits.compute_capability, NEWER_FP32_LANES)
    return hardware.rates.fp32 / (2 * lanes * hardware.limits.sms)


@dataclass(frozen=True, slots=True)
class Scaling:
    """Time of a kernel on a GPU it was not captured on, by what it achieves on the one it was captured on.

    Its measured time has three shares. What its DRAM traffic takes at the source's bandwidth scales with bandwidth.
    What its arithmetic takes at the peak of the SMs that its blocks reach scales with that peak. The rest is latency,
    issue and caches: it scales with the SM clock and the number of waves. So a small kernel does not pay for tensor
    cores that it never filled. Where the target has no unit for a dtype, its model gives the rate at which it runs
    that dtype (FP32 for TF32 on a V100).

    The idea of waves is Habitat's (Yu et al., ATC 2021). The shares are those of a roofline (Williams et al., CACM
    2009), taken one after the other. Uncalibrated: a trend.
    """

    source: HardwareModel
    target: HardwareModel
    dtype: Dtype

    def dur_ns(
        self, kernel: Kernel, dram_bytes: float, work: Arithmetic = NO_ARITHMETIC, more_dram_bytes: float = 0.0
    ) -> float:
        """Scaled duration of a traced kernel that moves `dram_bytes` on the source and does `work`.

        `more_dram_bytes` is traffic that the source's L2 cache holds and the target's does not.
        """
        measured = float(kernel.dur_ns)
        if not measured:
            return 0.0
        before, after = self.source, self.target
        memory = min(1.0, dram_bytes / before.memory.dram_bytes_per_ns / measured)
        bandwidth = before.memory.dram_bytes_per_ns / after.memory.dram_bytes_per_ns
        rate = self._rate(before, kernel, work)
        compute = min(1.0 - memory, work.flops / rate / measured)
        clock = clock_ghz(before) / clock_ghz(after)
        rest = (1.0 - memory - compute) * clock * self._waves(kernel)
        scaled = measured * (memory * bandwidth + compute * rate / self._rate(after, kernel, work) + rest)
        least = measured * memory * bandwidth + more_dram_bytes / after.memory.dram_bytes_per_ns
        return max(scaled, least)

    def _rate(self, hardware: HardwareModel, kernel: Kernel, work: Arithmetic) -> float:
        """Peak of the SMs that the kernel's blocks reach, in FLOP per ns."""
        peak = hardware.rates.of(self.dtype) if work.on_tensor_cores else hardware.rates.fp32
        return peak * min(1.0, prod(kernel.grid) / hardware.limits.sms)

    def _waves(self, kernel: Kernel) -> float:
        if kernel.kind != "kernel":
            return 1.0
        counts = []
        for hardware in (self.source, self.target):
            resident = kernel_occupancy(hardware.limits, fit_to(kernel, hardware)).blocks * hardware.limits.sms
            counts.append(max(1.0, prod(kernel.grid) / resident))
        return counts[1] / counts[0]
