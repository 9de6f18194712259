"""Estimates of a kernel's L2 traffic and instructions without counters: by hand, and against counters of a real
step.
"""

from __future__ import annotations

import json
import math
import statistics
from pathlib import Path
from typing import Any

import msgspec
import pytest
from click.testing import CliRunner

from gpusim.cli import cli
from gpusim.formats.trace import Counters, Kernel, Trace
from gpusim.plan import traffic
from gpusim.plan.traffic import (
    BN_INFERENCE,
    BN_TRAINING,
    FMA,
    LAYOUT,
    LEAST_L2_BYTES,
    MMA_PRODUCTS,
    MOST_INSTRUCTIONS_PER_NS,
    MOST_L2_BYTES_PER_NS,
    OTHER,
    POOLING,
    RATES,
    REDUCTION,
    SPLIT_SUM,
    STRIDED,
    TENSOR,
    TRANSFORM,
    VECTORS,
    WGMMA_PRODUCTS,
    Product,
    family,
    features,
    op_counters,
    peak_shares,
    product_of,
)
from gpusim.trace.store import read_trace
from tests.support.helpers import Step, make_trace, memset

COUNTED = Path(__file__).parents[2] / "research" / "data" / "counters" / "googlenet-infer-b1.json.gz"
GEMM = "void cutlass::Kernel2<cutlass_80_tensorop_s1688gemm_64x64_16x6_nn_align4>(Params)"


def launch(name: str, grid: tuple[int, int, int] = (1, 1, 1), threads: int = 128, dur_ns: int = 100_000) -> Kernel:
    return Kernel(name=name, dur_ns=dur_ns, grid=grid, block=(threads, 1, 1))


def one_op(
    target: str, reads: list[tuple[int, ...]], made: tuple[int, ...], *kernels: Kernel, args: tuple[Any, ...] = ()
) -> Trace:
    """Make a trace of one op, with tensors of the given shapes."""
    names = " ".join(f"t{place}" for place in range(len(reads)))
    trace = make_trace([Step("op", names, "y", target=target, kernels=kernels, args=args)])
    tensors = (msgspec.structs.replace(t, shape=shape) for t, shape in zip(trace.tensors, (*reads, made), strict=True))
    return msgspec.structs.replace(trace, tensors=tuple(tensors))


def product(trace: Trace) -> Product | None:
    return product_of(trace, trace.ops[0])


# --- Products ---


def test_products_of_matrices_and_convolutions() -> None:
    """m, n, k and batch from the shapes of the op's tensors."""
    assert product(one_op("aten.mm.default", [(6, 5), (5, 7)], (6, 7))) == Product(6, 7, 5)
    assert product(one_op("aten.bmm.default", [(3, 6, 5), (3, 5, 7)], (3, 6, 7))) == Product(6, 7, 5, 3)
    assert product(one_op("aten.addmm.default", [(7,), (6, 5), (5, 7)], (6, 7))) == Product(6, 7, 5)
    conv = one_op("aten.convolution.default", [(2, 8, 10, 10), (16, 8, 3, 3)], (2, 16, 5, 5))
    assert product(conv) == Product(25, 16, 72, 2)
    assert product(one_op("aten.relu.default", [(6, 5)], (6, 5))) is None
    assert product(one_op("relu", [(6, 5)], (6, 5))) is None


@pytest.mark.parametrize(
    ("mask", "expected"),
    [([True, False, False], Product(100, 8, 36, 2)), ([False, True, True], Product(16, 72, 50))],
)  # fmt: skip
def test_backward_of_a_convolution_is_one_of_two_products(mask: list[bool], expected: Product) -> None:
    """Both take as many multiplications as forward: 25 x 16 x 72 x 2 = 57,600."""
    rest = ([16], [2, 2], [1, 1], [1, 1], False, [0, 0], 1, mask)
    shapes: list[tuple[int, ...]] = [(2, 16, 5, 5), (2, 8, 10, 10), (16, 8, 3, 3)]
    trace = one_op("aten.convolution_backward.default", shapes, (2, 8, 10, 10), args=rest)
    found = product(trace)
    assert found == expected
    assert found.products == 57_600


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        (GEMM, TENSOR),
        ("nvjet_sm90_tst_112x64_64x9_1x4_h_bz_TNN", TENSOR),
        ("sm80_xmma_fprop_implicit_gemm_tf32f32_tf32f32_f32_nhwckrsc_nchw_tilesize64x32x64_g1_tensor16x8x8", TENSOR),
        ("_ZN17cutlass__5x_cudnn6KernelINS_4gemm9GemmShapeILi64ELi128ELi16EEE13MmaTensorOpEEv", TENSOR),
        ("sm80_xmma_fprop_implicit_gemm_f32f32_f32f32_f32_nchwkcrs_nchw_tilesize32x32x8_g1_ffma", FMA),
        ("void implicit_convolve_sgemm<float, 5>(int)", FMA),
        ("void splitKreduce_kernel<32, 16>(int)", SPLIT_SUM),
        ("void cudnn::engines_precompiled::nchwToNhwcKernel<float>(int)", LAYOUT),
        ("void cudnn::winograd_nonfused::winogradWgradDelta4x4<float>(int)", TRANSFORM),
        ("void at::native::vectorized_elementwise_kernel<4, tensor_convert>(int)", VECTORS),
        ("std::enable_if<true>::type internal::gemvx::kernel<int>(int)", OTHER),
    ],
)
def test_families_of_kernels_in_products(name: str, expected: str) -> None:
    assert family(launch(name), product=True) == expected


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("void cudnn::bn_fw_inf_1C11_kernel_NCHW<float>(int)", BN_INFERENCE),
        ("void at::native::batch_norm_backward_elemt<float>(int)", BN_TRAINING),
        ("max_pool_forward_nchw", POOLING),
        ("void at::native::reduce_kernel<512>(int)", REDUCTION),
        ("void at::native::vectorized_elementwise_kernel<4>(int)", VECTORS),
        ("void at::native::elementwise_kernel<128, 2>(int)", STRIDED),
        ("cutlass_looks_like_a_product_but_its_op_is_none", OTHER),
    ],
)
def test_families_of_other_kernels(name: str, expected: str) -> None:
    assert family(launch(name), product=False) == expected


# --- Features by hand ---


def test_tiles_load_their_rows_and_columns_once() -> None:
    """256 x 256 x 256 in 4 x 4 tiles of 64: each loads 2 x 64 x 256 values; 16 blocks of 4 warps."""
    trace = one_op("aten.mm.default", [(256, 256), (256, 256)], (256, 256), launch(GEMM, (16, 1, 1)))
    (found,) = features(trace, trace.ops[0], trace.ops[0].kernels)
    assert found.moved_bytes == 16 * 2 * 64 * 256 * 4 + 256 * 256 * 4
    assert (found.warps, found.least_bytes) == (64, 3 * 256 * 256 * 4)
    assert found.work == found.tensor_instructions == 256**3 / MMA_PRODUCTS
    (counters,) = op_counters(trace, trace.ops[0])
    rates = RATES[TENSOR]
    assert counters.l2_bytes == round(LEAST_L2_BYTES + rates.l2 * found.moved_bytes)
    assert counters.instructions == round(rates.warp * 64 + rates.work * found.work)
    assert (counters.dram_bytes, counters.tensor_instructions) == (0, 256**3 // MMA_PRODUCTS)


def test_rims_of_tiles_are_multiplied_but_not_loaded() -> None:
    """100 x 60 in 2 x 1 tiles of 64: 128 x 64 x 256 products, loads of 100 rows once and 60 columns twice."""
    trace = one_op("aten.mm.default", [(100, 256), (256, 60)], (100, 60), launch(GEMM, (2, 1, 1)))
    (found,) = features(trace, trace.ops[0], trace.ops[0].kernels)
    assert found.tensor_instructions == 128 * 64 * 256 / MMA_PRODUCTS
    assert found.moved_bytes == (100 + 2 * 60) * 256 * 4 + 100 * 60 * 4


def test_parts_of_a_split_k_store_their_sums_which_are_added_up() -> None:
    """One tile in 8 blocks: 8 parts of k, 8 sums stored, 8 read and one written."""
    kernels = (launch(GEMM, (1, 1, 8)), launch("splitKreduce_kernel", (2, 1, 1)))
    trace = one_op("aten.mm.default", [(64, 512), (512, 64)], (64, 64), *kernels)
    product_kernel, total = features(trace, trace.ops[0], kernels)
    assert product_kernel.moved_bytes == 2 * 64 * 512 * 4 + 8 * 64 * 64 * 4
    assert total.moved_bytes == 9 * 64 * 64 * 4
    assert total.family == SPLIT_SUM


def test_kernels_of_hopper_and_of_two_bytes_make_more_of_an_instruction() -> None:
    def tensor_instructions(name: str, dtype: str = "float32") -> float:
        trace = one_op("aten.mm.default", [(256, 256), (256, 256)], (256, 256), launch(name, (16, 1, 1)))
        tensors = tuple(msgspec.structs.replace(tensor, dtype=dtype) for tensor in trace.tensors)
        trace = msgspec.structs.replace(trace, tensors=tensors)
        return features(trace, trace.ops[0], trace.ops[0].kernels)[0].tensor_instructions

    assert tensor_instructions(GEMM) == 256**3 / MMA_PRODUCTS
    assert tensor_instructions(GEMM, "bfloat16") == 256**3 / MMA_PRODUCTS / 2
    assert tensor_instructions("nvjet_sm90_tst_64x64_64x9_1x4_h_bz_TNN") == 256**3 / WGMMA_PRODUCTS


def test_streaming_kernels_share_the_tensors_of_their_op_by_time() -> None:
    """A fill of 1 us and the main kernel of 3 us: a quarter and three quarters of the op's reads and writes."""
    kernels = (launch("elementwise_kernel", dur_ns=1000), launch("max_pool_backward", dur_ns=3000))
    trace = one_op("aten.pool.default", [(1000,)], (3000,), *kernels)
    assert [found.moved_bytes for found in features(trace, trace.ops[0], kernels)] == [4000, 12_000]


def test_fill_writes_what_its_op_writes_or_what_its_threads_can() -> None:
    """16 values per thread; a kernel that fills one counter of a large op moves little."""
    name = "void at::native::vectorized_elementwise_kernel<4, at::native::FillFunctor<float>>(int)"
    for blocks, moved_bytes in ((1, 16 * 128 * 4), (1000, 4 * 100_000)):
        trace = one_op("aten.pool.default", [(1000,)], (100_000,), launch(name, (blocks, 1, 1)))
        assert features(trace, trace.ops[0], trace.ops[0].kernels)[0].moved_bytes == moved_bytes


def test_winograd_leaves_a_quarter_of_the_products() -> None:
    name = "sm80_xmma_gemm_f32f32_f32f32_f32_nt_n_tilesize64x64x8_ffma"
    alone, beside = (launch(name, (1, 1, 36)),), (launch("winograd_nonfused::x"), launch(name, (1, 1, 36)))
    shapes: list[tuple[int, ...]] = [(1, 64, 8, 8), (64, 64, 1, 1)]
    work = []
    for kernels in (alone, beside):
        trace = one_op("aten.convolution.default", shapes, (1, 64, 8, 8), *kernels)
        work.append(features(trace, trace.ops[0], kernels)[-1].work)
    assert work == [64**3 / 32, 64**3 / 32 / 4]


def test_layout_change_moves_no_more_than_its_blocks_can_or_its_op_has() -> None:
    """A block of 256 threads moves 1,024 values, read and written."""
    name = "nchwToNhwcKernel"
    for blocks, moved_bytes in ((1, 8 * 1024), (10_000, 2 * 4 * 140_000)):
        trace = one_op(
            "aten.convolution.default", [(1, 10, 100, 100), (1, 10, 10, 100)], (1, 1, 100, 300),
            launch(name, (blocks, 1, 1), threads=256),
        )  # fmt: skip
        (found,) = features(trace, trace.ops[0], trace.ops[0].kernels)
        assert found.moved_bytes == moved_bytes


def test_nothing_moves_or_issues_faster_than_the_gpu() -> None:
    """The estimate of a kernel is limited to an H200's capability in its time."""
    shape = (1 << 24,)
    (counters,) = op_counters(
        trace := one_op("aten.relu.default", [shape], shape, launch("elementwise_kernel", (65_536, 1, 1), dur_ns=10)),
        trace.ops[0],
    )
    assert counters.l2_bytes == round(10 * MOST_L2_BYTES_PER_NS)
    assert counters.instructions == round(10 * MOST_INSTRUCTIONS_PER_NS)
    assert peak_shares(counters, 10) == pytest.approx((1.0, 1.0), rel=1e-4)
    assert peak_shares(counters, 40) == pytest.approx((0.25, 0.25), rel=1e-4)
    assert peak_shares(counters, 0) == (0.0, 0.0)


def test_memset_issues_nothing() -> None:
    trace = one_op("aten.zero_.default", [(256,)], (256,), memset(500))
    (counters,) = op_counters(trace, trace.ops[0])
    assert (counters.l2_bytes, counters.instructions) == (round(LEAST_L2_BYTES + RATES[OTHER].l2 * 1024), 0)


def test_counters_come_before_estimates() -> None:
    counted = Counters(dram_bytes=1, l2_bytes=2, instructions=3, tensor_instructions=4)
    kernels = (msgspec.structs.replace(launch("elementwise_kernel"), counters=counted), launch("elementwise_kernel"))
    trace = one_op("aten.relu.default", [(256,)], (256,), *kernels)
    first, second = op_counters(trace, trace.ops[0])
    assert first == counted
    assert second != counted


# --- Who asks ---


def test_pairs_are_told_what_they_ask_of_l2_and_issue_slots_on_the_gpu_of_the_constants() -> None:
    """`gpusim explain --ops` has both, which its cause "issue and L2" does not separate."""

    def needs(hardware: str) -> tuple[dict[str, Any], str]:
        words = ["explain", str(COUNTED), "--policy", "sequential", "--ops", "convolution_5,convolution_7", "--json"]
        result = CliRunner().invoke(cli, [*words, "--hw", hardware], catch_exceptions=False)
        document = json.loads(result.stdout)
        return document["needs"], document["traffic"]

    found, traffic_from = needs("h200")
    trace = read_trace(COUNTED)
    kernels = next(op for op in trace.ops if op.name == "convolution_5").kernels
    shares = [peak_shares(kernel.counters, kernel.dur_ns)[0] for kernel in kernels if kernel.counters]
    assert len(shares) == len(kernels)
    # Not exactly: the plan's times are anchored to the sequential graph.
    assert found["L2 bandwidth"]["first"] == pytest.approx(max(shares), rel=0.05)
    assert 0 < found["issue slots"]["second"] < 1
    assert traffic_from == "ncu 2025.3.1.0"
    assert not {"L2 bandwidth", "issue slots"} & set(needs("a100-80gb")[0])


# --- Against counters ---


@pytest.mark.parametrize(
    ("name", "kernels", "l2", "instructions"),
    [("googlenet-infer-b1", 246, (1.20, 1.50), (1.20, 1.50)), ("googlenet-train-b8", 824, (1.15, 2.60), (1.20, 2.20))],
)
def test_estimates_against_counters(
    name: str, kernels: int, l2: tuple[float, float], instructions: tuple[float, float]
) -> None:
    """Medians and 90th percentiles of the estimate over the counter (research/2026-11-23-capture-and-replay.md)."""
    trace = read_trace(COUNTED.parent / f"{name}.json.gz")
    off: tuple[list[float], list[float]] = ([], [])
    tensor = []
    for op in trace.ops:
        uncounted = tuple(msgspec.structs.replace(kernel, counters=None) for kernel in op.kernels)
        for kernel, found in zip(op.kernels, op_counters(trace, op, uncounted), strict=True):
            if kernel.counters is None:
                continue
            off[0].append(abs(math.log(found.l2_bytes / kernel.counters.l2_bytes)))
            off[1].append(abs(math.log(found.instructions / kernel.counters.instructions)))
            if family(kernel, product_of(trace, op) is not None) == TENSOR and "sm90" not in kernel.name:
                tensor.append(found.tensor_instructions / kernel.counters.tensor_instructions)
    for found_off, (median, most) in zip(off, (l2, instructions), strict=True):
        assert len(found_off) == kernels
        assert math.exp(statistics.median(found_off)) < median
        assert math.exp(sorted(found_off)[int(0.9 * kernels)]) < most
    assert statistics.median(tensor) == pytest.approx(1.0, rel=1e-6)


def test_family_constants_are_complete() -> None:
    names = {name for name, _ in (*traffic._PRODUCTS, *traffic._STREAMING)}
    assert set(RATES) == names | {OTHER}
