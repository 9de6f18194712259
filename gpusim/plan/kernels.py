"""GPU tasks of traced kernels on one hardware model: demand, DRAM traffic, and time on another GPU."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod
from operator import attrgetter

import msgspec

from gpusim.errors import LimitError
from gpusim.formats.hardware import HardwareModel, hardware_for_gpu
from gpusim.formats.trace import Dtype, Kernel, Op, Trace
from gpusim.plan.tasks import Task
from gpusim.plan.traffic import Arithmetic, arithmetic
from gpusim.plan.working_blocks import working_blocks
from gpusim.rules import idle_blocks, other_gpus
from gpusim.rules.copies import on_copy_engine
from gpusim.rules.l2_cache import missed_bytes
from gpusim.rules.launch import extra_ns
from gpusim.rules.occupancy import Demand, Footprint, kernel_demand, kernel_footprint, kernel_occupancy
from gpusim.trace.element_sizes import DTYPE_BYTES
from gpusim.trace.kernel_names import convolves, multiplies_matrices
from gpusim.trace.op_names import UNKNOWN_OP

NO_ARITHMETIC = Arithmetic(0.0, False)


def kernel_tasks(trace: Trace, hardware: HardwareModel, scale: float = 1.0) -> tuple[tuple[Task, ...], ...]:
    """Return the tasks of each op, without queues and dependencies; `scale` multiplies their durations.

    Raises `LimitError` with op and kernel if a kernel breaks a limit of the GPU.
    """
    maker = _TaskMaker.of(trace, hardware, scale)
    return tuple([maker.tasks(index, op, op.kernels) for index, op in enumerate(trace.ops)])


def variant_tasks(
    trace: Trace, hardware: HardwareModel, scale: float = 1.0
) -> tuple[tuple[tuple[Task, ...], ...], ...]:
    """Return the tasks of each variant of each op, as `kernel_tasks` does for the captured kernels."""
    maker = _TaskMaker.of(trace, hardware, scale)
    return tuple(
        tuple(maker.tasks(index, op, variant.kernels, number) for number, variant in enumerate(op.variants))
        for index, op in enumerate(trace.ops)
    )


def _scaling(trace: Trace, hardware: HardwareModel) -> Scaling | None:
    """Return the scaling from the GPU of the trace to this one; None for the same GPU, or one without a model."""
    if trace.provenance.gpu.name == hardware.gpu:
        return None
    source = hardware_for_gpu(trace.provenance.gpu.name)
    return None if source is None else Scaling(source, hardware, trace.model.dtype)


@dataclass(frozen=True, slots=True)
class Fit:
    """Occupancy of a kernel on a GPU: an SM holds `resident` of its `blocks`; `extra_ns` is the delay before it."""

    demand: Demand
    blocks: int
    resident: int
    footprint: Footprint
    matrix: bool
    extra_ns: float


class Fits:
    """Cache of `Fit` for one GPU, since a step launches few different kernels."""

    def __init__(self, hardware: HardwareModel) -> None:
        self.hardware = hardware
        self._known: dict[tuple[object, ...], Fit] = {}

    def of(self, kernel: Kernel) -> Fit:
        """Return the fit of a kernel. Raises `LimitError` if a block breaks a limit of the GPU."""
        key: tuple[object, ...] = _launch(kernel)
        if kernel.counters:
            key = (*key, kernel.counters.smem_config_bytes)
        known = self._known.get(key)
        if known is None:
            limits, memory_node = self.hardware.limits, kernel.kind != "kernel"
            known = self._known[key] = Fit(
                demand=kernel_demand(limits, kernel),
                blocks=0 if memory_node else prod(kernel.grid),
                resident=0 if memory_node else kernel_occupancy(limits, kernel).blocks,
                footprint=kernel_footprint(limits, kernel),
                matrix=multiplies_matrices(kernel.name),
                extra_ns=extra_ns(self.hardware.graph, memory_node),
            )
        return known


_launch = attrgetter("name", "kind", "grid", "block", "regs_per_thread", "smem_bytes")
"""Key of kernels with equal fits, together with the carve-out in their counters."""


@dataclass(frozen=True, slots=True)
class _TaskMaker:
    """Builder of the tasks of a trace on one GPU."""

    trace: Trace
    sizes: list[int]
    """Size of each tensor, in bytes."""
    hardware: HardwareModel
    fits: Fits
    scaling: Scaling | None
    scale: float

    @classmethod
    def of(cls, trace: Trace, hardware: HardwareModel, scale: float) -> _TaskMaker:
        return cls(trace, tensor_bytes(trace), hardware, Fits(hardware), _scaling(trace, hardware), scale)

    def tasks(self, index: int, op: Op, kernels: Sequence[Kernel], variant: int | None = None) -> tuple[Task, ...]:
        """Return the tasks of an op with its own kernels or those of a variant."""
        hardware, scaling = self.hardware, self.scaling
        total_ns = (kernels[0].dur_ns if len(kernels) == 1 else sum([kernel.dur_ns for kernel in kernels])) or 1
        moved_bytes = op_moved_bytes(self.sizes, op)
        op_bytes = missed_bytes(hardware.memory if scaling is None else scaling.source.memory, moved_bytes)
        more_bytes = max(0, missed_bytes(hardware.memory, moved_bytes) - op_bytes) if scaling is not None else 0
        work = arithmetic(self.trace, op, kernels) if scaling is not None else ()
        tasks = []
        for number, kernel in enumerate(kernels):
            dram_bytes = kernel.counters.dram_bytes if kernel.counters else op_bytes * kernel.dur_ns / total_ns
            dur_ns = kernel.dur_ns * self.scale
            if scaling is not None:
                dur_ns = scaling.dur_ns(kernel, dram_bytes, work[number], more_bytes * kernel.dur_ns / total_ns)
                kernel = fit_to(kernel, hardware)
            blocks, working = prod(kernel.grid), working_blocks(kernel, op, self.trace.tensors)
            if working < blocks:
                kernel = msgspec.structs.replace(kernel, grid=(working, 1, 1))
            try:
                fit = self.fits.of(kernel)
            except LimitError as cause:
                where = f"$.ops[{index}]" if variant is None else f"$.ops[{index}].variants[{variant}]"
                raise LimitError(f"{where}.kernels[{number}]: {cause} on '{hardware.name}'") from cause
            idle_ns = 0.0
            if working < blocks:
                shape = (blocks, fit.resident, hardware.limits.sms)
                idle_ns = self.scale * idle_blocks.time_ns(hardware.contention, *shape)
            tasks.append(
                Task(
                    name=kernel.name,
                    kind=kernel.kind,
                    dur_ns=dur_ns,
                    extra_ns=fit.extra_ns,
                    idle_ns=min(idle_ns, dur_ns),
                    demand=fit.demand,
                    dram_bytes=dram_bytes,
                    copy_bytes=kernel.bytes,
                    on_copy_engine=on_copy_engine(kernel.kind == "memset", kernel.bytes),
                    host_ns=op.host_ns if number == 0 else 0.0,
                    blocks=fit.blocks,
                    blocks_per_sm=fit.resident,
                    footprint=fit.footprint,
                    matrix=fit.matrix,
                    product=fit.matrix and is_of_product(op.target, kernel.name),
                    op=index,
                    kernel=number,
                )
            )
        return tuple(tasks)


def is_of_product(target: str, name: str) -> bool:
    """Return True if a GEMM-like kernel `name` of the operator `target` is of no convolution.

    False for an unknown operator: names of convolutions' kernels do not always say so.
    """
    return not (target.startswith(UNKNOWN_OP) or convolves(target) or convolves(name))


def tensor_bytes(trace: Trace) -> list[int]:
    """Return the size of each tensor, in bytes."""
    return [prod(tensor.shape) * DTYPE_BYTES[tensor.dtype] for tensor in trace.tensors]


def op_moved_bytes(sizes: Sequence[int], op: Op) -> int:
    """Return the bytes of the tensors that an op reads and writes, each once, plus its imported `moved_bytes`.

    `sizes` has the bytes of each tensor.
    """
    moved = op.moved_bytes
    for some in (op.reads, op.writes):
        for index in some if len(some) < 2 else dict.fromkeys(some):
            moved += sizes[index]
    return moved


def fit_to(kernel: Kernel, hardware: HardwareModel) -> Kernel:
    """Return a kernel with its resources cut to the limits of another GPU, where a library would pick smaller tiles.

    For what-if questions only, about a GPU other than the kernel's own.
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
    """Return the registers of one block, without rounding to granularities."""
    return -(-threads // hardware.limits.warp_threads) * hardware.limits.warp_threads * kernel.regs_per_thread


@dataclass(frozen=True, slots=True)
class Scaling:
    """Scaling of kernels captured on one GPU to another (`gpusim.rules.other_gpus`).

    If the target has no unit for a dtype, its model has the rate at which it runs that dtype (FP32 for TF32 on a V100).
    """

    source: HardwareModel
    target: HardwareModel
    dtype: Dtype

    def dur_ns(
        self, kernel: Kernel, dram_bytes: float, work: Arithmetic = NO_ARITHMETIC, more_dram_bytes: float = 0.0
    ) -> float:
        """Return the scaled duration, in ns, of a kernel that moves `dram_bytes` on the source and does `work`.

        `more_dram_bytes` is traffic that hits in the source's L2 cache but not in the target's.
        """
        measured = float(kernel.dur_ns)
        if not measured:
            return 0.0
        before, after = self.source, self.target
        return other_gpus.scaled_ns(
            measured,
            before.memory,
            after.memory,
            dram_bytes,
            more_dram_bytes,
            work.flops,
            self._rate(before, kernel, work),
            self._rate(after, kernel, work),
            other_gpus.clock_ghz(before) / other_gpus.clock_ghz(after),
            self._waves(kernel),
        )

    def _rate(self, hardware: HardwareModel, kernel: Kernel, work: Arithmetic) -> float:
        """Return the peak rate of the SMs that the kernel's blocks use, in FLOP per ns."""
        peak = hardware.rates.of(self.dtype) if work.on_tensor_cores else hardware.rates.fp32
        return other_gpus.reached_rate(peak, prod(kernel.grid), hardware.limits.sms)

    def _waves(self, kernel: Kernel) -> float:
        if kernel.kind != "kernel":
            return 1.0
        counts = []
        for hardware in (self.source, self.target):
            resident = kernel_occupancy(hardware.limits, fit_to(kernel, hardware)).blocks
            counts.append(other_gpus.waves(prod(kernel.grid), resident, hardware.limits.sms))
        return counts[1] / counts[0]
