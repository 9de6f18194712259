"""From traced kernels to GPU tasks of one hardware model: demand, memory traffic, and time on another GPU."""

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
from gpusim.rules import other_gpus
from gpusim.rules.l2_cache import missed_bytes
from gpusim.rules.launch import extra_ns
from gpusim.rules.occupancy import Demand, Footprint, kernel_demand, kernel_footprint, kernel_occupancy
from gpusim.trace.element_sizes import DTYPE_BYTES
from gpusim.trace.kernel_names import multiplies_matrices

NO_ARITHMETIC = Arithmetic(0.0, False)


def kernel_tasks(trace: Trace, hardware: HardwareModel, scale: float = 1.0) -> tuple[tuple[Task, ...], ...]:
    """For each op its tasks, not yet placed (no queue, no dependencies); `scale` multiplies their durations.

    Raises `LimitError`, naming op and kernel, where a kernel breaks a limit of the GPU.
    """
    maker = _TaskMaker.of(trace, hardware, scale)
    return tuple([maker.tasks(index, op, op.kernels) for index, op in enumerate(trace.ops)])


def variant_tasks(
    trace: Trace, hardware: HardwareModel, scale: float = 1.0
) -> tuple[tuple[tuple[Task, ...], ...], ...]:
    """For each op the tasks of each of its variants, as `kernel_tasks` gives those of the captured kernels."""
    maker = _TaskMaker.of(trace, hardware, scale)
    return tuple(
        tuple(maker.tasks(index, op, variant.kernels, number) for number, variant in enumerate(op.variants))
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
    """How a kernel fits a GPU; `resident` is how many of its `blocks` an SM holds, `extra_ns` the delay before it."""

    demand: Demand
    blocks: int
    resident: int
    footprint: Footprint
    matrix: bool
    extra_ns: float


class Fits:
    """How kernels fit one GPU. A step launches few different ones, so each is looked at once."""

    def __init__(self, hardware: HardwareModel) -> None:
        self.hardware = hardware
        self._known: dict[tuple[object, ...], Fit] = {}

    def of(self, kernel: Kernel) -> Fit:
        """Raises `LimitError` where a block breaks a limit of the GPU."""
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
"""What tells kernels apart that fit a GPU otherwise, besides the shared memory that they ask for."""


@dataclass(frozen=True, slots=True)
class _TaskMaker:
    """What the tasks of all ops of a trace need."""

    trace: Trace
    sizes: list[int]
    """Bytes of each tensor."""
    hardware: HardwareModel
    fits: Fits
    scaling: Scaling | None
    scale: float

    @classmethod
    def of(cls, trace: Trace, hardware: HardwareModel, scale: float) -> _TaskMaker:
        return cls(trace, tensor_bytes(trace), hardware, Fits(hardware), _scaling(trace, hardware), scale)

    def tasks(self, index: int, op: Op, kernels: Sequence[Kernel], variant: int | None = None) -> tuple[Task, ...]:
        """The tasks of an op with these kernels, its own or those of a variant."""
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
            try:
                fit = self.fits.of(kernel)
            except LimitError as cause:
                where = f"$.ops[{index}]" if variant is None else f"$.ops[{index}].variants[{variant}]"
                raise LimitError(f"{where}.kernels[{number}]: {cause} on '{hardware.name}'") from cause
            tasks.append(
                Task(
                    name=kernel.name,
                    kind=kernel.kind,
                    dur_ns=dur_ns,
                    extra_ns=fit.extra_ns,
                    demand=fit.demand,
                    dram_bytes=dram_bytes,
                    copy_bytes=kernel.bytes,
                    host_ns=op.host_ns if number == 0 else 0.0,
                    blocks=fit.blocks,
                    blocks_per_sm=fit.resident,
                    footprint=fit.footprint,
                    matrix=fit.matrix,
                    op=index,
                    kernel=number,
                )
            )
        return tuple(tasks)


def tensor_bytes(trace: Trace) -> list[int]:
    """Bytes of each tensor."""
    return [prod(tensor.shape) * DTYPE_BYTES[tensor.dtype] for tensor in trace.tensors]


def op_moved_bytes(sizes: Sequence[int], op: Op) -> int:
    """Bytes of the tensors that an op reads, each once, and of those that it writes; as imported where it has none.

    `sizes` are the bytes of each tensor.
    """
    moved = op.moved_bytes
    for some in (op.reads, op.writes):
        for index in some if len(some) < 2 else dict.fromkeys(some):
            moved += sizes[index]
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


@dataclass(frozen=True, slots=True)
class Scaling:
    """How kernels captured on one GPU scale to another (`gpusim.rules.other_gpus`).

    Where the target has no unit for a dtype, its model gives the rate at which it runs that dtype (FP32 for TF32 on a
    V100).
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
        """Peak of the SMs that the kernel's blocks reach, in FLOP per ns."""
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
