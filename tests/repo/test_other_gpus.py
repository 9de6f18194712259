"""What-if on a GPU other than the trace's: times scale with the trend, kernels are fitted to its limits."""

from __future__ import annotations

from statistics import median

import msgspec
import pytest

from gpusim.formats.hardware import HardwareModel, bundled_hardware, load_hardware
from gpusim.formats.trace import Kernel
from gpusim.plan.graph import OpGraph
from gpusim.plan.kernels import Scaling, fit_to, op_moved_bytes, tensor_bytes
from gpusim.plan.traffic import Arithmetic, arithmetic
from gpusim.rules.l2_cache import missed_bytes
from gpusim.rules.occupancy import kernel_occupancy
from gpusim.rules.other_gpus import clock_ghz
from gpusim.search.explore import explore
from gpusim.trace.store import load_trace
from tests.repo.test_readme import script
from tests.support.helpers import build_graph, chain_trace, wide_trace

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


def full_work(hardware: HardwareModel, blocks: int, tensor: bool) -> Arithmetic:
    """Return the work that the SMs of `big_kernel` can compute in its 10 us."""
    peak = hardware.rates.tf32 if tensor else hardware.rates.fp32
    return Arithmetic(10_000 * peak * min(1.0, blocks / hardware.limits.sms), tensor)


def test_kernel_at_the_peak_of_its_sms_scales_with_that_peak() -> None:
    # one block reaches one SM on either GPU
    rate = (H200.rates.tf32 / H200.limits.sms) / (K40.rates.tf32 / K40.limits.sms)
    one = Scaling(H200, K40, "tf32").dur_ns(big_kernel(1), 0.0, full_work(H200, 1, True))
    assert one == pytest.approx(10_000 * rate)
    # 132 blocks reach all of both
    whole = Scaling(H200, K40, "tf32").dur_ns(big_kernel(), 0.0, full_work(H200, 132, True))
    assert whole == pytest.approx(10_000 * H200.rates.tf32 / K40.rates.tf32)
    # and what runs on FP32 units never pays for tensor cores
    plain = Scaling(H200, K40, "tf32").dur_ns(big_kernel(), 0.0, full_work(H200, 132, False))
    assert plain == pytest.approx(10_000 * H200.rates.fp32 / K40.rates.fp32)


def test_latency_bound_kernel_scales_with_clock_and_waves_and_not_with_tensor_cores() -> None:
    clocks = 1.983 / 0.745  # GHz: boost clock of the H200, base clock of the K40, in their data sheets
    one = Scaling(H200, K40, "tf32").dur_ns(big_kernel(1), 0.0)
    assert one == pytest.approx(10_000 * clocks, rel=2e-3)
    # 132 blocks, one an SM: one wave on 132 SMs; on 15 SMs with r blocks each, 132 / (15 r) waves
    resident = kernel_occupancy(K40.limits, fit_to(big_kernel(), K40)).blocks
    waves = max(1.0, 132 / (15 * resident))
    assert Scaling(H200, K40, "tf32").dur_ns(big_kernel(), 0.0) == pytest.approx(one * waves)


def test_kernel_far_from_the_peak_pays_for_a_lower_one_by_its_share_of_it() -> None:
    """A tenth of the peak: a tenth of the time scales with the peak, the rest with the clock."""
    tenth = Arithmetic(full_work(H200, 1, True).flops / 10, True)
    found = Scaling(H200, K40, "tf32").dur_ns(big_kernel(1), 0.0, tenth)
    rate = (H200.rates.tf32 / H200.limits.sms) / (K40.rates.tf32 / K40.limits.sms)
    assert found == pytest.approx(1_000 * rate + 9_000 * clock_ghz(H200) / clock_ghz(K40))


def test_traffic_that_the_smaller_cache_cannot_hold_takes_its_time_in_dram() -> None:
    more = 1e9
    found = Scaling(H200, K40, "tf32").dur_ns(big_kernel(1), 0.0, more_dram_bytes=more)
    assert found == pytest.approx(more / K40.memory.dram_bytes_per_ns)


@pytest.mark.parametrize("name", sorted(bundled_hardware()))
def test_scaling_to_the_same_gpu_changes_nothing(name: str) -> None:
    hardware = load_hardware(name)
    for work in (Arithmetic(0.0, False), full_work(hardware, 132, True), full_work(hardware, 132, False)):
        for moved in (0.0, 1e6, 1e9):
            assert Scaling(hardware, hardware, "tf32").dur_ns(big_kernel(), moved, work) == pytest.approx(10_000)


#: GHz. Data sheets of each GPU: boost clock, for the K40 the base clock.
CLOCKS = {
    "h200": 1.98, "h100-sxm": 1.98, "a100-80gb": 1.41, "v100": 1.53, "rtx4090": 2.52, "p100": 1.48, "k40": 0.745,
}  # fmt: skip


@pytest.mark.parametrize("name", sorted(bundled_hardware()))
def test_clock_is_that_of_the_data_sheet(name: str) -> None:
    assert clock_ghz(load_hardware(name)) == pytest.approx(CLOCKS[name], rel=0.01)


def test_small_training_step_on_an_older_gpu_is_slower_by_a_believable_factor() -> None:
    """A V100 has a fifth of an H200's bandwidth, a quarter of its FP32 peak, 3/4 of its clock: not 28 times slower."""
    trace = load_trace("googlenet-train-b8")
    times = {}
    for name in ("h200", "v100"):
        graph = OpGraph.build(trace, load_hardware(name))
        times[name] = sum(task.dur_ns for tasks in graph.tasks for task in tasks)
    assert 67_000 / 15_700 * 1.98 / 1.53 > times["v100"] / times["h200"] > 1.98 / 1.53


def test_steps_scaled_to_other_gpus_are_near_what_others_measured_there() -> None:
    """Aims: on each GPU at least three networks, median within 1.5 times, none beyond 2."""
    page = script("compare_other_gpus")
    rows = page.compared()
    assert {row.published.hardware for row in rows} == {"v100", "a100-80gb", "rtx4090"}
    for hardware in ("v100", "a100-80gb", "rtx4090"):
        there = [row for row in rows if row.published.hardware == hardware]
        assert len({row.published.network for row in there}) >= 3
        assert median(row.factor for row in there) < 1.5
    assert max(row.factor for row in rows) < 2
    assert page.page(rows) == page.PAGE.read_text(encoding="utf-8")


def test_operations_of_a_network_are_those_known_of_it() -> None:
    """VGG-16 has 15.5 billion multiply-adds per image of 224 x 224 (Simonyan and Zisserman, 2015)."""
    trace = load_trace("vgg16-infer-b1")
    flops = sum(work.flops for op in trace.ops for work in arithmetic(trace, op, op.kernels))
    assert flops == pytest.approx(2 * 15.5e9, rel=0.02)


@pytest.mark.parametrize("name", sorted(bundled_hardware()))
def test_kernel_cut_to_fit_runs_on_every_gpu(name: str) -> None:
    hardware = load_hardware(name)
    assert kernel_occupancy(hardware.limits, fit_to(big_kernel(), hardware)).blocks >= 1


@pytest.mark.parametrize("name", sorted(set(bundled_hardware()) - {"h200"}))
def test_every_uncalibrated_gpu_says_so_in_the_verdict(name: str) -> None:
    found = explore(build_graph(wide_trace(4, 9000, 2), load_hardware(name)), streams=2, budget_s=0.2)
    assert "uncalibrated" in found.hardware.label
    assert "uncalibrated" in found.verdict.text
    assert "uncalibrated" in found.schedule.made_by


def test_dram_traffic_is_what_the_cache_does_not_hold() -> None:
    trace = chain_trace(2, 1000)  # ops read and write tensors of 1024 bytes each
    moved_bytes = op_moved_bytes(tensor_bytes(trace), trace.ops[1])
    for l2_bytes, missed in ((0, 2048), (2000, 48), (4096, 0)):
        memory = msgspec.structs.replace(H200.memory, l2_bytes=l2_bytes)
        assert missed_bytes(memory, moved_bytes) == missed


def test_time_measured_on_another_gpu_is_no_part_of_the_attribution() -> None:
    trace = chain_trace(3, 1000, graph_ns=4000)
    assert explore(build_graph(trace, H200), streams=2, budget_s=0.2).attribution.eager_ns is not None
    assert explore(build_graph(trace, K40), streams=2, budget_s=0.2).attribution.eager_ns is None
