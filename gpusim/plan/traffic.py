"""Estimated L2 traffic and instructions of kernels without counters, from tensor sizes and kernel family.

The family follows from the kernel's name. Products and convolutions are computed from their shape (m, n, k) and the
tile in the name: every tile loads its rows and columns once, and a tensor core instruction has a fixed number of
multiplications. Other kernels stream their tensors once; the kernels of one op share them in proportion to their time.
The constants were fitted to the counters of GoogLeNet on an H200; research/2026-11-23-capture-and-replay.md has the
residuals.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from math import ceil, prod
from typing import Any, Final

from gpusim.formats.trace import Counters, Kernel, Op, Trace
from gpusim.trace.element_sizes import DTYPE_BYTES

TENSOR, FMA, LAYOUT, TRANSFORM, SPLIT_SUM = (
    "tensor cores", "FMA products", "layout change", "Winograd transform", "split-K sum",
)  # fmt: skip
VECTORS, STRIDED, BN_TRAINING, BN_INFERENCE, POOLING, REDUCTION, OTHER = (
    "elementwise, vectors", "elementwise, strided", "batch norm, training", "batch norm, inference", "pooling",
    "reduction", "other",
)  # fmt: skip

Patterns = tuple[tuple[str, re.Pattern[str]], ...]
#: Families by name, the first match counts; these only in ops that are products.
_PRODUCTS: Final[Patterns] = (
    (SPLIT_SUM, re.compile(r"splitKreduce|ReduceSplitK|reduce_wgrad|_nhwc_reduce")),
    (LAYOUT, re.compile(r"nchwToNhwc|nhwcToNchw|tensorTransform|AddPadding")),
    (TRANSFORM, re.compile(r"winograd_nonfused|fft2d")),
    (VECTORS, re.compile(r"elementwise_kernel|multi_tensor_apply|scalePacked")),
    (OTHER, re.compile(r"workspace|gemv")),
    (TENSOR, re.compile(r"[Tt]ensor[Oo]p|tensor\d+x|tf32f32|bf16bf16|s1688|s16816|nvjet|hmma")),
    (FMA, re.compile(r"gemm|conv|cutlass|xmma|grad")),
)
_STREAMING: Final[Patterns] = (
    (BN_INFERENCE, re.compile(r"\bbn_fw_inf")),
    (BN_TRAINING, re.compile(r"\bbn_|batch_norm")),
    (POOLING, re.compile(r"pool")),
    (REDUCTION, re.compile(r"reduce_kernel|softmax|SoftMax|layer_norm|LayerNorm|Moments")),
    (VECTORS, re.compile(r"vectorized_elementwise|CatArray|copy|fill|Fill|upsample")),
    (STRIDED, re.compile(r"elementwise|multi_tensor_apply|dropout")),
)
_TILE = re.compile(r"tilesize(\d+)x(\d+)x|_(\d+)x(\d+)_\d+x\d+|GemmShapeILi(\d+)ELi(\d+)ELi")
_WARPGROUP = re.compile(r"sm90|nvjet")
#: Tile of kernels without one in their name.
DEFAULT_TILE = (32, 32)


@dataclass(frozen=True, slots=True)
class FamilyConstants:
    """Fitted constants of a family."""

    l2: float
    """L2 bytes per byte of the tensors, or per byte loaded and stored by tiles."""
    warp: float
    """Instructions per warp besides its work."""
    work: float
    """Instructions per unit of work: 32 values streamed, 32 multiplications, or a tensor instruction."""


#: Fitted by scripts/fit_traffic.py; `OTHER` has the L2 bytes of elementwise kernels.
RATES: Final[dict[str, FamilyConstants]] = {
    TENSOR: FamilyConstants(1.17, 925.8, 5.68),
    FMA: FamilyConstants(1.49, 599.3, 1.98),
    LAYOUT: FamilyConstants(1.42, 121.5, 0.0),
    TRANSFORM: FamilyConstants(8.25, 6.3, 50.69),
    SPLIT_SUM: FamilyConstants(1.46, 72.3, 1.97),
    VECTORS: FamilyConstants(1.45, 40.5, 0.0),
    STRIDED: FamilyConstants(1.56, 103.1, 1.29),
    BN_INFERENCE: FamilyConstants(1.56, 50.5, 8.72),
    BN_TRAINING: FamilyConstants(1.67, 252.9, 19.32),
    POOLING: FamilyConstants(1.44, 98.8, 71.03),
    REDUCTION: FamilyConstants(2.45, 151.2, 6.14),
    OTHER: FamilyConstants(1.45, 102.5, 0.0),
}
#: L2 bytes of a kernel without data: its code and constants.
LEAST_L2_BYTES = 70_000
#: Multiplications per counted tensor instruction on 4-byte values; twice as many on 2-byte ones. `mma` is m16n8k8 of a
#: warp; 34 `wgmma` kernels counted on an H200 had 2,700 to 21,500, half of them below 8,000.
MMA_PRODUCTS, WGMMA_PRODUCTS = 1024, 8192
#: GPU on which these constants were measured.
MEASURED_ON: Final = "NVIDIA H200"
#: Its peaks: the highest measured L2 read rate (validate/results/rules_h200_20261121.json, 9,403 bytes per ns) as
#: counted, and one instruction per cycle from each of four schedulers of 132 SMs at 1.98 GHz.
MOST_L2_BYTES_PER_NS, MOST_INSTRUCTIONS_PER_NS = 9403 * 1.5, 132 * 4 * 1.98
#: Winograd's transform for 4 x 4 outputs of 3 x 3 filters divides the number of products by this.
WINOGRAD_LESS = 4


@dataclass(frozen=True, slots=True)
class Product:
    """A matrix product, or a convolution as one: `batch` x m x n sums of k products each."""

    m: int
    n: int
    k: int
    batch: int = 1

    @property
    def products(self) -> int:
        return self.m * self.n * self.k * self.batch


@dataclass(frozen=True, slots=True)
class Features:
    """Features of a kernel from which its counters are estimated."""

    family: str
    moved_bytes: float
    """Bytes of its tensors, or bytes loaded and stored by its tiles."""
    least_bytes: float
    """Bytes of its tensors if `moved_bytes` counts tiles, else 0."""
    warps: int
    work: float
    tensor_instructions: float
    dur_ns: float


def op_counters(trace: Trace, op: Op, kernels: tuple[Kernel, ...] | None = None) -> tuple[Counters, ...]:
    """Return the counters of an op's kernels (or a variant's): those of the trace if present, else estimates.

    Estimates have 0 DRAM bytes: `gpusim.rules.l2_cache.missed_bytes` estimates those.
    """
    kernels = op.kernels if kernels is None else kernels
    known_features = features(trace, op, kernels)
    return tuple(kernel.counters or estimated(known) for kernel, known in zip(kernels, known_features, strict=True))


def estimated(known: Features) -> Counters:
    """Return counters estimated from features, limited to the GPU's peaks in the kernel's time."""
    rates = RATES[known.family]
    l2_bytes = LEAST_L2_BYTES + max(rates.l2 * known.moved_bytes, RATES[VECTORS].l2 * known.least_bytes)
    instructions = rates.warp * known.warps + rates.work * known.work
    return Counters(
        dram_bytes=0,
        l2_bytes=round(min(l2_bytes, MOST_L2_BYTES_PER_NS * known.dur_ns)),
        instructions=round(min(instructions, MOST_INSTRUCTIONS_PER_NS * known.dur_ns)),
        tensor_instructions=round(min(known.tensor_instructions, MOST_INSTRUCTIONS_PER_NS * known.dur_ns)),
    )


def peak_shares(counters: Counters, dur_ns: float) -> tuple[float, float]:
    """Return the shares of an H200's L2 bandwidth and issue slots that a kernel uses, each at most 1."""
    peaks = (MOST_L2_BYTES_PER_NS * dur_ns, MOST_INSTRUCTIONS_PER_NS * dur_ns)
    l2, issue = (
        min(1.0, count / peak) if peak else 0.0
        for count, peak in zip((counters.l2_bytes, counters.instructions), peaks, strict=True)
    )
    return l2, issue


def family(kernel: Kernel, product: bool) -> str:
    """Return the family of a kernel; `product` is True if its op is a matrix product or convolution."""
    for name, pattern in (*(_PRODUCTS if product else ()), *_STREAMING):
        if pattern.search(kernel.name):
            return name
    return FMA if product else OTHER


def product_of(trace: Trace, op: Op) -> Product | None:
    """Return the matrix product equivalent to an op, or None."""
    name = op.target.split(".")[1] if "." in op.target else ""
    shapes = [_shape(trace, argument) for argument in (*op.args[:3], None, None, None)]
    outputs = [trace.tensors[index].shape for index in op.outputs if index is not None]
    if name == "convolution" and shapes[1] and outputs:
        return Product(prod(outputs[0][2:]), shapes[1][0], prod(shapes[1][1:]), outputs[0][0])
    if name == "convolution_backward" and all(shapes[:3]):
        grad, before, weight = shapes[:3]
        filters, depth, pixels = weight[0], prod(weight[1:]), grad[0] * prod(grad[2:])
        input_only = len(op.args) > 10 and list(op.args[10][:2]) == [True, False]
        if not input_only:
            return Product(filters, depth, pixels)
        return Product(prod(before[2:]), before[1], pixels * filters * depth // max(1, prod(before)), before[0])
    operands = {"mm": shapes[:2], "bmm": shapes[:2], "addmm": shapes[1:3], "baddbmm": shapes[1:3]}.get(name)
    if operands is not None and all(operands):
        one, other = operands
        return Product(one[-2], other[-1], one[-1], prod(one[:-2]))
    return None


@dataclass(frozen=True, slots=True)
class Arithmetic:
    """Floating-point operations of a kernel, on tensor cores or not."""

    flops: float
    on_tensor_cores: bool


def arithmetic(trace: Trace, op: Op, kernels: Sequence[Kernel]) -> list[Arithmetic]:
    """Return the arithmetic of each kernel of an op: products and convolutions, in proportion to time; otherwise 0.

    A multiplication counts as two operations. The backward pass of a convolution has one product per requested
    gradient.
    """
    product = product_of(trace, op)
    if product is None:
        return [Arithmetic(0.0, False)] * len(kernels)
    families = [family(kernel, True) for kernel in kernels]
    main_ns = sum(k.dur_ns for k, name in zip(kernels, families, strict=True) if name in (TENSOR, FMA))
    gradients = 1
    if "convolution_backward" in op.target and len(op.args) > 10:
        gradients = max(1, sum(1 for wanted in op.args[10][:2] if wanted is True))
    flops = 2.0 * product.products * gradients / (WINOGRAD_LESS if TRANSFORM in families else 1)
    return [
        Arithmetic(flops * kernel.dur_ns / main_ns if name in (TENSOR, FMA) and main_ns else 0.0, name == TENSOR)
        for kernel, name in zip(kernels, families, strict=True)
    ]


def features(trace: Trace, op: Op, kernels: Sequence[Kernel]) -> list[Features]:
    """Return the features of the kernels of an op, which share its tensors and its product."""
    product = product_of(trace, op)
    families = [family(kernel, product is not None) for kernel in kernels]
    values, sizes, written = _tensors(trace, op)
    value_bytes = sizes / max(1, values)
    main_ns = sum(k.dur_ns for k, name in zip(kernels, families, strict=True) if name in (TENSOR, FMA))
    all_ns = sum(kernel.dur_ns for kernel in kernels)
    described, splits = [], 1
    for kernel, name in zip(kernels, families, strict=True):
        warps_per_block, least, tensor = ceil(prod(kernel.block) / 32), 0.0, 0.0
        warps = prod(kernel.grid) * warps_per_block
        threads = prod(kernel.grid) * prod(kernel.block)
        if kernel.kind != "kernel":
            moved, warps, work = float(kernel.bytes), 0, 0.0
        elif name in (TENSOR, FMA) and product is not None:
            share = kernel.dur_ns / main_ns if main_ns else 1.0
            tiles = _tiling(kernel, product, less=WINOGRAD_LESS if TRANSFORM in families else 1)
            splits = tiles.splits
            moved = tiles.loads * share * value_bytes + written * splits
            least, warps = sizes * share, min(warps, tiles.blocks * warps_per_block)
            work = tiles.products * share / 32
            if name == TENSOR:
                wide = WGMMA_PRODUCTS if _WARPGROUP.search(kernel.name) else MMA_PRODUCTS
                tensor = tiles.products * share / (wide * 4 / value_bytes)
                work = tensor
        else:
            if name in (LAYOUT, TRANSFORM):  # 256 threads move 32 x 32 values, at most those of the op
                moved = min(8.0 * threads * value_bytes, 2.0 * sizes)
            elif name == SPLIT_SUM:
                moved = float(written * (splits + 1))
            elif "FillFunctor" in kernel.name:
                moved = min(float(written), 16.0 * threads * value_bytes)
            elif "workspace" in kernel.name:
                moved = 0.0
            else:
                moved = sizes * kernel.dur_ns / all_ns if all_ns else 0.0
                if name == VECTORS and product is not None:
                    moved = min(moved, threads * value_bytes)
            work = moved / max(1.0, value_bytes) / 32
        described.append(Features(name, moved, least, warps, work, tensor, kernel.dur_ns))
    return described


@dataclass(frozen=True, slots=True)
class _Tiling:
    """A product cut into tiles: multiplications with padding, values loaded, splits of k, busy blocks."""

    products: float
    loads: float
    splits: int
    blocks: int


def _tiling(kernel: Kernel, product: Product, less: int = 1) -> _Tiling:
    named = _TILE.search(kernel.name)
    rows, columns = (int(size) for size in named.groups() if size) if named else DEFAULT_TILE
    m, batch = product.m, product.batch
    if kernel.grid[2] != batch:  # images stacked along m
        m, batch = m * batch, 1
    across = [(ceil(m / a), ceil(product.n / b), a, b) for a, b in ((rows, columns), (columns, rows))]
    down, right, high, wide = min(across, key=lambda cut: cut[0] * cut[1])
    tiles = down * right * batch
    splits = max(1, prod(kernel.grid) // tiles) if named and less == 1 else 1
    if splits == 2 and tiles * 2 != prod(kernel.grid):
        splits = 1  # more likely idle blocks at the rim
    products = tiles * high * wide * product.k / less
    loads = (right * m + down * product.n) * product.k * batch / less
    return _Tiling(products, loads, splits, tiles * splits)


def _tensors(trace: Trace, op: Op) -> tuple[int, int, int]:
    """Return values and bytes of all tensors that an op reads and writes, and the bytes that it writes."""
    reads, writes = ([trace.tensors[index] for index in dict.fromkeys(some)] for some in (op.reads, op.writes))
    values = sum(prod(tensor.shape) for tensor in (*reads, *writes))
    read, written = (sum(prod(t.shape) * DTYPE_BYTES[t.dtype] for t in some) for some in (reads, writes))
    return values, read + written, written


def _shape(trace: Trace, argument: Any) -> tuple[int, ...]:
    """Return the shape of an encoded tensor argument, else ()."""
    if isinstance(argument, dict) and "tensor" in argument:
        return trace.tensors[argument["tensor"]].shape
    return ()
