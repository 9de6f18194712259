"""Occupancy: the number of blocks of a kernel that an SM holds, and the limiting resource.

Rules: CUDA C++ Programming Guide, "Compute Capabilities", and NVIDIA's occupancy calculator. A block takes whole warps,
registers in steps of `reg_granularity` per warp within one of `sub_partitions` register files, and shared memory in
steps of `smem_granularity_bytes`, including the driver's `smem_reserved_bytes`.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import prod

from gpusim.errors import LimitError
from gpusim.formats.hardware import Limits
from gpusim.formats.trace import Kernel
from gpusim.units import KIB

#: Blocks allowed by a resource that the kernel does not use.
UNLIMITED = 1 << 30


#: Parts of the names of cuDNN's implicit GEMMs, which request the largest carve-out if they use more shared memory than
#: a kernel may without opt-in: 46 of 46 launches in GoogLeNet, counted with Nsight Compute
#: (tests/engine/test_smem_splits.py).
ASK_FOR_ALL = ("_xmma_", "implicit_gemm")
ASKING_SMEM_BYTES = 48 * KIB


@dataclass(frozen=True, slots=True)
class Occupancy:
    """Blocks of a kernel that an SM can hold, by limit; `blocks` is the least of them."""

    by_threads: int
    by_regs: int
    by_smem: int
    by_slots: int

    @property
    def blocks(self) -> int:
        return min(self.by_threads, self.by_regs, self.by_smem, self.by_slots)

    @property
    def limiter(self) -> str:
        """The first limit that binds: `threads`, `registers`, `shared memory` or `block slots`."""
        named = {
            "threads": self.by_threads,
            "registers": self.by_regs,
            "shared memory": self.by_smem,
            "block slots": self.by_slots,
        }
        return next(name for name, blocks in named.items() if blocks == self.blocks)


def occupancy(
    limits: Limits, block_threads: int, regs_per_thread: int, smem_bytes: int, smem_config_bytes: int | None = None
) -> Occupancy:
    """Return the occupancy of a kernel with this block; `smem_config_bytes` is the carve-out (default: the largest)."""
    warps = _warps(limits, block_threads)
    max_warps = limits.threads_per_sm // limits.warp_threads
    by_regs = by_smem = UNLIMITED
    if regs_per_thread:
        regs_per_warp = _round_up(regs_per_thread * limits.warp_threads, limits.reg_granularity)
        warps_per_partition = (limits.regs_per_sm // limits.sub_partitions) // regs_per_warp
        by_regs = warps_per_partition * limits.sub_partitions // warps
    smem_per_block = smem_footprint(limits, smem_bytes)
    if smem_per_block:
        by_smem = (smem_config_bytes or limits.smem_per_sm_bytes) // smem_per_block
    return Occupancy(by_threads=max_warps // warps, by_regs=by_regs, by_smem=by_smem, by_slots=limits.blocks_per_sm)


def smem_footprint(limits: Limits, smem_bytes: int) -> int:
    """Return the shared memory that a block takes, in bytes, with the driver's share and rounding."""
    return _round_up(smem_bytes + limits.smem_reserved_bytes, limits.smem_granularity_bytes)


@dataclass(frozen=True, slots=True)
class Demand:
    """Resource demand of a kernel, as shares of the whole GPU in [0, 1]."""

    threads: float
    regs: float
    smem: float
    slots: float
    residency: float
    """Resident share of the maximum number of blocks: min(1, blocks / (SMs x blocks per SM))."""
    cover: float
    """Warps per SM, at most 1: a kernel of a few warps is alone on its SMs and undisturbed."""

    @property
    def resources(self) -> tuple[float, float, float, float]:
        """Demands for threads, registers, shared memory and block slots."""
        return self.threads, self.regs, self.smem, self.slots


@dataclass(frozen=True, slots=True)
class Footprint:
    """Resources that a block takes of its SM; all 0 for tasks without SMs."""

    threads: int
    regs: int
    smem_bytes: int
    """Shared memory of a block, with the driver's share and rounding."""
    carveout_bytes: int
    """Minimum carve-out: room for as many blocks as the SM can hold."""
    own_carveout_bytes: int
    """Carve-out that an empty SM gets for the kernel."""


NO_FOOTPRINT = Footprint(threads=0, regs=0, smem_bytes=0, carveout_bytes=0, own_carveout_bytes=0)
NO_DEMAND = Demand(threads=0.0, regs=0.0, smem=0.0, slots=0.0, residency=0.0, cover=0.0)


def kernel_occupancy(limits: Limits, kernel: Kernel) -> Occupancy:
    """Return the occupancy of a traced kernel. Raises `LimitError` if a block breaks a limit of the GPU."""
    threads = prod(kernel.block)
    checks = (
        ("threads a block", threads, limits.threads_per_block),
        ("registers a thread", kernel.regs_per_thread, limits.regs_per_thread),
        (
            "registers a block",
            kernel.regs_per_thread * _warps(limits, threads) * limits.warp_threads,
            limits.regs_per_block,
        ),
        ("bytes of shared memory a block", kernel.smem_bytes, limits.smem_per_block_bytes),
    )
    for what, value, limit in checks:
        if value > limit:
            raise LimitError(f"kernel '{kernel.name[:60]}' has {value} {what}; the GPU's limit is {limit}")
    resident = occupancy(limits, threads, kernel.regs_per_thread, kernel.smem_bytes)
    if resident.blocks < 1:
        raise LimitError(f"kernel '{kernel.name[:60]}' does not fit an SM: its {resident.limiter} are over the limit")
    return resident


def kernel_demand(limits: Limits, kernel: Kernel) -> Demand:
    """Return the demand of a traced kernel, limited to its resident blocks."""
    if kernel.kind != "kernel":
        return NO_DEMAND
    resident = kernel_occupancy(limits, kernel).blocks
    blocks = min(prod(kernel.grid), resident * limits.sms)
    warps = _warps(limits, prod(kernel.block))
    regs = _round_up(kernel.regs_per_thread * limits.warp_threads, limits.reg_granularity) * warps
    per_sm = blocks / limits.sms
    return Demand(
        threads=per_sm * warps * limits.warp_threads / limits.threads_per_sm,
        regs=per_sm * regs / limits.regs_per_sm,
        smem=per_sm * smem_footprint(limits, kernel.smem_bytes) / limits.smem_per_sm_bytes,
        slots=per_sm / limits.blocks_per_sm,
        residency=per_sm / resident,
        cover=min(1.0, per_sm * warps),
    )


#: The driver leaves room for more blocks than an SM can hold, up to this size of shared memory:
SPARE_SMEM_BYTES = 132 << 10
#: twice as many, for blocks of at most this number of threads,
SPARE_BLOCKS, SPARE_THREADS = 2, 512
#: and as many as four SMs could hold by threads, for blocks without own shared memory.
SPARE_EMPTY_BLOCKS = 4


def kernel_footprint(limits: Limits, kernel: Kernel) -> Footprint:
    """Return the resources that a block of a traced kernel takes of its SM.

    The carve-outs agree with 290 launches on an H200 counted with Nsight Compute (launch__shared_mem_config_size), and
    with which of 625 pairs of kernels share SMs (docs/hardware-rules.md). Libraries may request other carve-outs: the
    counted ones (`gpusim capture --counters`), else those of `ASK_FOR_ALL`.
    """
    if kernel.kind != "kernel":
        return NO_FOOTPRINT
    resident = kernel_occupancy(limits, kernel).blocks
    warps = _warps(limits, prod(kernel.block))
    threads = warps * limits.warp_threads
    smem_bytes = smem_footprint(limits, kernel.smem_bytes)
    if not kernel.smem_bytes:
        wanted = SPARE_EMPTY_BLOCKS * limits.threads_per_sm // threads
    else:
        wanted = SPARE_BLOCKS * resident if threads <= SPARE_THREADS else resident
    spare = min(min(wanted, limits.blocks_per_sm) * smem_bytes, SPARE_SMEM_BYTES)
    needed = resident * smem_bytes
    return Footprint(
        threads=threads,
        regs=_round_up(kernel.regs_per_thread * limits.warp_threads, limits.reg_granularity) * warps,
        smem_bytes=smem_bytes,
        carveout_bytes=_carveout_for(limits, needed),
        own_carveout_bytes=_asked_carveout(limits, kernel)
        or _carveout_for(limits, max(needed, spare) if kernel.smem_bytes else spare),
    )


def _asked_carveout(limits: Limits, kernel: Kernel) -> int | None:
    """Return the carve-out requested by the library instead of the driver's choice, or None if unknown."""
    if kernel.counters is not None and kernel.counters.smem_config_bytes:
        return kernel.counters.smem_config_bytes
    if kernel.smem_bytes > ASKING_SMEM_BYTES and all(part in kernel.name for part in ASK_FOR_ALL):
        return limits.smem_per_sm_bytes
    return None


def _carveout_for(limits: Limits, smem_bytes: int) -> int:
    """Return the smallest carve-out with room for `smem_bytes`."""
    return min((size for size in limits.smem_splits_bytes if size >= smem_bytes), default=limits.smem_per_sm_bytes)


def _warps(limits: Limits, threads: int) -> int:
    return -(-threads // limits.warp_threads)


def _round_up(value: int, step: int) -> int:
    return -(-value // step) * step
