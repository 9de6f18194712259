"""Properties of any plan that an engine runs in graph mode."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpusim.bounds.bounds import bounds
from gpusim.formats.hardware import HardwareModel
from gpusim.formats.trace import Trace
from gpusim.plan.graph import OpGraph
from gpusim.plan.tasks import Plan
from tests.support.helpers import (
    build_graph,
    hardware_models,
    lowered,
    make_hardware,
    make_trace,
    memset,
    op,
    plans,
    traces_with_schedules,
)
from tests.support.timelines import ROUNDING_NS, assert_legal, longest_chain_ns, run


def upper_bound_ns(tested: Plan, hardware: HardwareModel) -> float:
    """Return all work and all costs in sequence, as if nothing ever overlapped.

    At any time the oldest kernel runs at full speed, DRAM is saturated, a copy runs, or a fixed delay passes.
    """
    costs, copies = hardware.graph, hardware.copies
    total = 0.0
    for each in tested.tasks:
        total += each.dur_ns * (1 + 2 * copies.kernel_slowdown) + each.extra_ns + costs.chain_ns + costs.front_end_ns
        total += copies.switch_ns + max(copies.memset_d2h_ns, copies.memset_h2d_ns)
        total += costs.fork_ns * len(tested)
        total += costs.product_frac * each.dur_ns
        total += costs.join_ns + costs.busy_ns + costs.branch_ns
        total += each.dram_bytes / hardware.memory.dram_bytes_per_ns
        if each.kind in ("h2d", "d2h"):
            slowest = min(copies.h2d_bytes_per_ns, copies.d2h_bytes_per_ns)
            shared = copies.both_bytes_per_ns / (copies.h2d_bytes_per_ns + copies.d2h_bytes_per_ns)
            alone_ns = (each.copy_bytes + copies.latency_ns * slowest) / (slowest * min(1.0, shared))
            total += alone_ns * (1 + copies.copy_slowdown)
    return total


@given(plans(), hardware_models())
def test_any_graph_plan_is_run_legally_between_its_longest_chain_and_everything_in_a_row(
    tested: Plan, hardware: HardwareModel
) -> None:
    timeline = run(tested, hardware)
    assert_legal(timeline)
    assert timeline.makespan_ns >= longest_chain_ns(tested) - ROUNDING_NS
    assert timeline.makespan_ns <= upper_bound_ns(tested, hardware) + ROUNDING_NS


@given(plans(), hardware_models())
def test_front_end_never_starts_two_kernels_too_close(tested: Plan, hardware: HardwareModel) -> None:
    timeline = run(tested, hardware)
    kernels = [i for i, each in enumerate(tested.tasks) if each.kind not in ("h2d", "d2h")]
    starts = sorted(timeline.start_ns[i] for i in kernels)
    pairs = pairwise(starts)
    assert all(later - earlier >= hardware.graph.front_end_ns - ROUNDING_NS for earlier, later in pairs)


@given(plans(), hardware_models())
def test_memory_is_never_negative_and_ends_with_what_is_kept(tested: Plan, hardware: HardwareModel) -> None:
    memory = run(tested, hardware).memory
    assert memory[-1][1] == tested.kept_bytes
    assert min(level for _, level in memory) >= 0
    assert [time for time, _ in memory] == sorted({time for time, _ in memory})


@given(plans(max_queues=1), hardware_models())
def test_doubling_all_durations_never_shortens_a_plan_of_one_queue(tested: Plan, hardware: HardwareModel) -> None:
    doubled = replace(
        tested, tasks=tuple(msgspec.structs.replace(each, dur_ns=2 * each.dur_ns) for each in tested.tasks)
    )
    assert run(doubled, hardware).makespan_ns >= run(tested, hardware).makespan_ns


@given(plans(max_queues=1), st.sampled_from((0.0, 100.0, 405.3)))
def test_plan_of_one_queue_takes_the_sum_of_its_times_and_gaps(tested: Plan, chain_ns: float) -> None:
    kernels = tuple(msgspec.structs.replace(each, deps=()) for each in tested.tasks if each.kind == "kernel")
    expected = sum(each.dur_ns for each in kernels) + chain_ns * max(0, len(kernels) - 1)
    timeline = run(replace(tested, tasks=kernels, buffers=()), make_hardware(chain_ns=chain_ns, slowdown=0.8))
    assert timeline.makespan_ns == pytest.approx(expected, abs=ROUNDING_NS)


@given(plans(), hardware_models())
def test_recorded_residency_and_traffic_stay_within_the_gpu(tested: Plan, hardware: HardwareModel) -> None:
    timeline = run(tested, hardware)
    assert all(0 <= level <= 1 for _, level in timeline.occupied)
    limit = hardware.memory.dram_bytes_per_ns * (1 + 1e-9)
    assert all(0 <= level <= limit for _, level in timeline.bandwidth)
    for series in (timeline.occupied, timeline.bandwidth):
        assert [time for time, _ in series] == sorted({time for time, _ in series})


@given(traces_with_schedules(), hardware_models())
def test_no_schedule_is_faster_than_any_bound(
    case: tuple[Trace, list[int], list[int]], hardware: HardwareModel
) -> None:
    trace, order, streams = case
    graph = OpGraph.build(trace, hardware)
    makespan_ns = run(lowered(graph, order, streams), graph.hardware).makespan_ns
    limits = bounds(graph)
    for bound_ns, name in limits.named:
        assert makespan_ns >= bound_ns - ROUNDING_NS, name
    assert limits.largest[0] == max(bound_ns for bound_ns, _ in limits.named)


def test_critical_path_bound_has_no_delay_before_its_first_task() -> None:
    fill = replace(op("m"), kernels=(memset(1000),))
    graph = build_graph(make_trace([fill, op("b", "m", dur_ns=1000)]), make_hardware(memory_node_ns=700, chain_ns=100))
    assert bounds(graph).critical_path_ns == run(lowered(graph, [0, 1], [0, 0]), graph.hardware).makespan_ns == 2100


@given(traces_with_schedules(), hardware_models())
def test_lowered_schedule_keeps_the_dependencies_between_ops(
    case: tuple[Trace, list[int], list[int]], hardware: HardwareModel
) -> None:
    trace, order, streams = case
    graph = OpGraph.build(trace, hardware)
    timeline = run(lowered(graph, order, streams), graph.hardware)
    assert_legal(timeline)
    starts: dict[int, int] = {}
    ends: dict[int, int] = {}
    for each, start, end in zip(timeline.plan.tasks, timeline.start_ns, timeline.end_ns, strict=True):
        starts.setdefault(each.op, start)
        ends[each.op] = end
    reach: list[int] = []  # by op, its end, and for a view, the end of all its sources
    for index, before in enumerate(graph.preds):
        ready = max((reach[p] for p in before), default=0)
        if index in starts:
            assert ready <= starts[index]
            ready = ends[index]
        reach.append(ready)
    assert sorted((each.op, each.kernel) for each in timeline.plan.tasks) == [
        (index, number) for index, tasks in enumerate(graph.tasks) for number in range(len(tasks))
    ]
