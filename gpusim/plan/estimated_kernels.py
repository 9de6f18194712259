"""Estimated kernels of a step that no GPU has run: launch shapes and times from tensor sizes and the data sheet.

Each op becomes one kernel. Its time is the sum of a fixed part, its arithmetic at a share of the peak, and its bytes at
a share of the DRAM bandwidth. The constants were fitted, family by family, to captured steps of an H200
(scripts/fit_estimates.py; research/2026-11-23-estimates.md has the errors for networks left out of the fit).
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from math import ceil, prod
from typing import Final

import msgspec

from gpusim.formats.hardware import HardwareModel
from gpusim.formats.trace import Kernel, Op, Trace
from gpusim.plan.traffic import product_of
from gpusim.trace.element_sizes import DTYPE_BYTES

BASIS: Final = "tensor sizes and the data sheet"
"""Source of the times, for messages."""

#: Error of the predicted gain of streams with estimated kernels: 14 of 15 steps are within it, compared with the same
#: steps as captured (research/2026-11-23-estimates.md).
ESTIMATED_GAIN_FRAC: Final = 0.4
#: Side of the output tile that a block of a matrix product or convolution computes.
TILE: Final = 64
#: Filter sizes that identify depthwise convolutions, whose filters read one channel.
DEPTHWISE_VALUES: Final = (9, 25, 49)


@dataclass(frozen=True, slots=True)
class Constants:
    """Fitted constants of one family of ops."""

    fixed_ns: float
    """Time independent of the amount of work."""
    dram_frac: float
    """Reached share of the DRAM bandwidth for tensors larger than half of the L2 cache."""
    l2_frac: float
    """The same for smaller tensors; above 1 if the cache serves them."""
    arithmetic_frac: float
    """Share of the data sheet's arithmetic peak that a grid reaches if it fills the GPU."""
    fill_exponent: float
    """Loss of a grid that leaves SMs idle: 1 loses their whole share, 0 nothing."""


@dataclass(frozen=True, slots=True)
class Shape:
    """Typical launch of a family: medians over captured kernels."""

    threads: int
    regs: int
    smem_bytes: int
    values_per_thread: float
    """Tensor values per thread; 0 if the grid follows from the tiles of the product."""


#: Families by operator name without namespace and overload; the first match counts.
_FAMILIES: Final = tuple(
    (name, re.compile(pattern))
    for name, pattern in (
        ("batch norm, backward", r"batch_norm.*backward"),
        ("batch norm", r"batch_norm"),
        ("attention, backward", r"attention.*backward"),
        ("attention", r"attention"),
        ("norm, backward", r"(layer|group)_norm.*backward"),
        ("norm", r"(layer|group)_norm"),
        ("pooling, backward", r"pool.*backward"),
        ("pooling", r"pool"),
        ("lists", r"^_(foreach|fused)_"),
        ("index", r"embedding|index|scatter|gather|select_backward"),
        ("reduction", r"^(sum|mean|amax|amin|max|prod|cumsum|var_mean|linalg_vector_norm|argmax)$|softmax"),
    )
)
#: Fitted by scripts/fit_estimates.py; families without a product do not use the last two.
CONSTANTS: Final[dict[str, Constants]] = {
    "convolution": Constants(4740.0, 1.2, 2.2, 0.27, 1.0),
    "convolution, input gradient": Constants(5390.0, 1.2, 3.0, 0.292, 1.0),
    "convolution, weight gradient": Constants(8800.0, 1.2, 0.724, 0.249, 0.254),
    "convolution, depthwise": Constants(2120.0, 1.2, 0.759, 0.00873, 0.346),
    "product": Constants(3820.0, 1.05, 1.27, 0.627, 0.798),
    "attention": Constants(12300.0, 1.2, 0.123, 0.215, 0.672),
    "attention, backward": Constants(3020.0, 0.0525, 0.0396, 0.013, 0.859),
    "batch norm": Constants(2060.0, 0.51, 0.552, 0.194, 0.496),
    "batch norm, backward": Constants(3380.0, 0.3, 0.322, 0.0861, 0.0571),
    "norm": Constants(2840.0, 0.125, 0.571, 0.0831, 0.027),
    "norm, backward": Constants(4980.0, 0.0601, 0.299, 0.0149, 0.94),
    "pooling": Constants(2670.0, 0.405, 0.503, 0.0804, 0.768),
    "pooling, backward": Constants(2910.0, 0.212, 0.188, 0.464, 0.494),
    "lists": Constants(2360.0, 0.862, 0.276, 0.0552, 0.251),
    "index": Constants(1820.0, 0.448, 0.523, 0.244, 0.711),
    "reduction": Constants(3530.0, 0.54, 0.459, 0.261, 0.955),
    "elementwise": Constants(1130.0, 1.03, 1.34, 0.567, 0.293),
}
SHAPES: Final[dict[str, Shape]] = {
    "convolution": Shape(256, 92, 49152, 0),
    "convolution, input gradient": Shape(256, 92, 49152, 0),
    "convolution, weight gradient": Shape(256, 92, 49152, 16.1),
    "convolution, depthwise": Shape(1024, 32, 0, 2.0),
    "product": Shape(384, 168, 147456, 0),
    "attention": Shape(128, 168, 36352, 128.5),
    "attention, backward": Shape(512, 168, 36352, 16.0),
    "batch norm": Shape(512, 32, 0, 6.9),
    "batch norm, backward": Shape(512, 48, 16656, 36.8),
    "norm": Shape(128, 39, 24, 6.0),
    "norm, backward": Shape(128, 32, 16, 9.0),
    "pooling": Shape(1024, 32, 0, 3.0),
    "pooling, backward": Shape(256, 32, 0, 3.0),
    "lists": Shape(512, 32, 0, 125.6),
    "index": Shape(128, 16, 0, 8.0),
    "reduction": Shape(128, 54, 16, 64.0),
    "elementwise": Shape(128, 28, 0, 15.9),
}


@dataclass(frozen=True, slots=True)
class OpWork:
    """Amount of work of an op."""

    family: str
    flops: float
    bytes: int
    values: int
    tiles: int
    """Blocks of a product; 0 for other ops."""


def work_of(trace: Trace, op: Op) -> OpWork:
    """Return the work and the family of an op, from its tensors."""
    tensors = [trace.tensors[index] for some in (op.reads, op.writes) for index in dict.fromkeys(some)]
    values = sum(prod(tensor.shape) for tensor in tensors)
    moved = sum(prod(tensor.shape) * DTYPE_BYTES[tensor.dtype] for tensor in tensors)
    name = op.target.split(".")[1] if "." in op.target else op.target
    product = product_of(trace, op)
    if product is None:
        kind = next((family for family, pattern in _FAMILIES if pattern.search(name)), "elementwise")
        return OpWork(kind, 0.0, moved, values, 0)
    images = product.batch if name.startswith("convolution") else 1
    tiles = ceil(product.m * images / TILE) * ceil(product.n / TILE) * (product.batch // images)
    if name == "convolution":
        kind = "convolution, depthwise" if product.k in DEPTHWISE_VALUES and product.n > 1 else "convolution"
    elif name == "convolution_backward":
        of_input = len(op.args) > 10 and list(op.args[10][:2]) == [True, False]
        kind = "convolution, input gradient" if of_input else "convolution, weight gradient"
        if (product.k if of_input else product.n) in DEPTHWISE_VALUES:
            kind = "convolution, depthwise"
    else:
        kind = "product"
    return OpWork(kind, 2.0 * product.products, moved, values, max(1, tiles))


def estimated_ns(work: OpWork, constants: Constants, hardware: HardwareModel, dtype: str) -> float:
    """Return the time of an op's kernel, in ns: fixed part plus arithmetic plus memory traffic."""
    memory = hardware.memory
    share = constants.l2_frac if work.bytes < memory.l2_bytes / 2 else constants.dram_frac
    moving_ns = work.bytes / (memory.dram_bytes_per_ns * share)
    computing_ns = 0.0
    if work.flops:
        waves = work.tiles / hardware.limits.sms
        fill = (waves / ceil(waves)) ** constants.fill_exponent
        computing_ns = work.flops / (hardware.rates.of(dtype) * constants.arithmetic_frac * fill)  # type: ignore[arg-type]
    return constants.fixed_ns + computing_ns + moving_ns


def estimated_kernel(trace: Trace, op: Op, hardware: HardwareModel) -> Kernel:
    """Return the one kernel that stands for an op."""
    work = work_of(trace, op)
    shape, limits = SHAPES[work.family], hardware.limits
    threads = min(shape.threads, limits.threads_per_block)
    blocks = (
        work.tiles
        if work.tiles and not shape.values_per_thread
        else ceil(work.values / (threads * (shape.values_per_thread or 1.0)))
    )
    smem_bytes = min(shape.smem_bytes, limits.smem_per_block_bytes)
    return Kernel(
        name=f"estimated {work.family}",
        dur_ns=max(1, round(estimated_ns(work, CONSTANTS[work.family], hardware, trace.model.dtype))),
        grid=(max(1, blocks), 1, 1),
        block=(threads, 1, 1),
        regs_per_thread=min(shape.regs, limits.regs_per_block // threads),
        smem_bytes=smem_bytes,
    )


def with_estimated_kernels(trace: Trace, hardware: HardwareModel) -> Trace:
    """Return the trace with one kernel per op that writes a tensor; views cost nothing."""
    ops = tuple(
        msgspec.structs.replace(op, kernels=(estimated_kernel(trace, op, hardware),) if op.writes else ())
        for op in trace.ops
    )
    return msgspec.structs.replace(trace, ops=ops)
