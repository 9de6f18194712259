"""What-if on a GPU that a trace was not captured on: times scale with the trend, kernels are cut to fit."""

from __future__ import annotations

import pytest

from gpusim.hardware.model import bundled_hardware, load_hardware
from gpusim.hardware.occupancy import kernel_occupancy
from gpusim.plan.graph import OpGraph
from gpusim.plan.kernels import Scaling, fit_to, op_dram_bytes
from gpusim.search.explore import explore
from gpusim.trace.schema import Kernel
from tests.helpers import chain_trace, wide_trace

H200, K40 = load_hardware("h200"), load_hardware("k40")


def big_kernel(blocks: int = 132) -> Kernel:
    return Kernel(
        name="k", dur_ns=10_000, grid=(blocks, 1, 1), block=(256, 1, 1), regs_per_thread=200, smem_bytes=200_000
    )


def test_trace_on_its_own_gpu_keeps_its_measured_times() -> None:
    graph = OpGraph.build(chain_trace(3, 1000), H200)
    assert [task.dur_ns for tasks in graph.tasks for task in tasks] == [1000, 1000, 1000]


def test_kernel_bound_by_dram_scales_with_bandwidth() -> None:
    # 10 us at full bandwidth: all of its time is traffic
    moved = 10_000 * H200.memory.dram_bytes_per_ns
    scaled = Scaling(H200, K40, "tf32").dur_ns(big_kernel(), moved)
    assert scaled == pytest.approx(10_000 * H200.memory.dram_bytes_per_ns / K40.memory.dram_bytes_per_ns)


def test_kernel_bound_by_arithmetic_scales_with_the_rate_of_an_sm_and_with_waves() -> None:
    # one block: one wave on either GPU, so only the rate of one SM counts
    rate = (H200.rates.tf32 / H200.limits.sms) / (K40.rates.tf32 / K40.limits.sms)
    assert Scaling(H200, K40, "tf32").dur_ns(big_kernel(1), 0.0) == pytest.approx(10_000 * rate)
    # 132 blocks, one an SM: one wave on 132 SMs; on 15 SMs with r blocks each, 132 / (15 r) waves
    resident = kernel_occupancy(K40.limits, fit_to(big_kernel(), K40)).blocks
    waves = max(1.0, 132 / (15 * resident))
    assert Scaling(H200, K40, "tf32").dur_ns(big_kernel(), 0.0) == pytest.approx(10_000 * rate * waves)


@pytest.mark.parametrize("name", sorted(bundled_hardware()))
def test_kernel_cut_to_fit_runs_on_every_gpu(name: str) -> None:
    hardware = load_hardware(name)
    assert kernel_occupancy(hardware.limits, fit_to(big_kernel(), hardware)).blocks >= 1


@pytest.mark.parametrize("name", sorted(set(bundled_hardware()) - {"h200"}))
def test_every_uncalibrated_gpu_says_so_in_the_verdict(name: str) -> None:
    found = explore(wide_trace(4, 9000, 2), load_hardware(name), streams=2, budget_s=0.2)
    assert "uncalibrated" in found.hardware.label
    assert "uncalibrated" in found.verdict.text
    assert "uncalibrated" in found.schedule.made_by


def test_dram_traffic_is_what_the_cache_does_not_hold() -> None:
    trace = chain_trace(2, 1000)  # ops read and write tensors of 1024 bytes each
    assert op_dram_bytes(trace, trace.ops[1], 0) == 2048
    assert op_dram_bytes(trace, trace.ops[1], 2000) == 48
    assert op_dram_bytes(trace, trace.ops[1], 4096) == 0


def test_time_measured_on_another_gpu_is_no_part_of_the_attribution() -> None:
    trace = chain_trace(3, 1000, graph_ns=4000)
    assert explore(trace, H200, streams=2, budget_s=0.2).attribution.eager_ns is not None
    assert explore(trace, K40, streams=2, budget_s=0.2).attribution.eager_ns is None
