"""Our own planner: within every budget, never slower than the compared policies, and clear about impossible budgets."""

from __future__ import annotations

import math
import re

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gpusim.errors import PlanError
from gpusim.formats.trace import Trace
from gpusim.memplan.evaluate import MemoryEvaluator
from gpusim.memplan.memory import needs_at_once
from gpusim.memplan.pinned import within_pinned
from gpusim.memplan.plan import MemoryPlan
from gpusim.memplan.policies.base import Setting
from gpusim.memplan.policies.layrub import weights_first
from gpusim.memplan.policies.least_time import LeastTime, least_time
from gpusim.memplan.policies.orders import lean_order
from gpusim.memplan.policies.registry import MEMORY_POLICIES
from gpusim.memplan.policies.vdnn import vdnn_all
from gpusim.memplan.profile import BytesProfile
from gpusim.memplan.storages import Storages
from gpusim.memplan.times import Link, OpTimes, Room, first_needs, last_forward_places, place_copies
from gpusim.plan.graph import OpGraph
from gpusim.trace.store import load_trace
from gpusim.units import MIB, parse_bytes
from tests.support.helpers import Step, kernel, make_hardware, make_trace
from tests.support.memory_steps import SIZE, chain_step, graph_of, op_of, storage_of, with_bytes

COPY_NS = SIZE // 50


def setting_of(trace: Trace, budget: int | None = None, pinned: int | None = None) -> Setting:
    return Setting.of(graph_of(trace), budget, pinned)


def test_copies_that_hide_cost_nothing() -> None:
    # Ops of 200 us, copies of 84 us: one tensor less at the peak moves without cost.
    trace = chain_step(6, dur_ns=200_000)
    setting = setting_of(trace)
    evaluator = MemoryEvaluator(setting.graph)
    keep_all = evaluator.evaluate(MemoryPlan())
    outcome = evaluator.evaluate(least_time(setting_of(trace, keep_all.peak_bytes - SIZE)))
    assert outcome.peak_bytes <= keep_all.peak_bytes - SIZE
    assert outcome.step_ns == keep_all.step_ns
    assert outcome.plan.offloads
    assert not outcome.plan.redos


def test_cheap_ops_run_again_where_copies_would_be_waited_for() -> None:
    # Ops of 1 us: recomputing a tensor takes less than the latency of a copy.
    trace = chain_step(6, dur_ns=1_000)
    setting = setting_of(trace)
    evaluator = MemoryEvaluator(setting.graph)
    keep_all = evaluator.evaluate(MemoryPlan())
    outcome = evaluator.evaluate(least_time(setting_of(trace, keep_all.peak_bytes - 2 * SIZE)))
    assert outcome.peak_bytes <= keep_all.peak_bytes - 2 * SIZE
    assert not outcome.plan.offloads
    assert outcome.step_ns <= keep_all.step_ns + 3_000


def test_budget_that_everything_fits_changes_no_time() -> None:
    trace = chain_step(5)
    setting = setting_of(trace, 1 << 40)
    plan = least_time(setting)
    assert not plan.offloads
    assert not plan.redos


def test_budget_below_all_plans_names_the_smallest_and_the_tensor_that_decides_it() -> None:
    trace = chain_step(5)
    with pytest.raises(PlanError) as caught:
        least_time(setting_of(trace, SIZE))
    text = str(caught.value)
    found = re.search(r"no plan keeps 4 MiB; the smallest budget .* found here is (.*?): op '(.*?)'", text)
    assert found is not None
    assert "with the result of '" in text
    least = parse_bytes(found[1])
    assert LeastTime(setting_of(trace)).smallest.peak_bytes == least
    least_time(setting_of(trace, least))  # and that one works
    with pytest.raises(PlanError):
        least_time(setting_of(trace, least - 1))


def test_pinned_memory_is_kept_to() -> None:
    trace = chain_step(8, dur_ns=200_000)
    setting = setting_of(trace)
    evaluator = MemoryEvaluator(setting.graph)
    peak = evaluator.evaluate(MemoryPlan()).peak_bytes
    for pinned in (0, SIZE, 3 * SIZE):
        outcome = evaluator.evaluate(least_time(setting_of(trace, peak - 3 * SIZE, pinned)))
        assert outcome.pinned_bytes <= pinned
        assert outcome.peak_bytes <= peak - 3 * SIZE


def test_what_pinned_memory_has_no_room_for_stays() -> None:
    trace = chain_step(6, target="aten.convolution.default")
    setting = setting_of(trace)
    whole = vdnn_all(setting)
    part, kept = within_pinned(setting.storages, whole, 2 * SIZE)
    assert len(part.offloads) == 2
    assert kept == len(whole.offloads) - 2
    assert within_pinned(setting.storages, whole, None) == (whole, 0)
    MemoryEvaluator(setting.graph).evaluate(part)


@settings(max_examples=25, deadline=None)
@given(
    layers=st.integers(2, 9),
    dur_ns=st.sampled_from((1_000, 20_000, 60_000, 200_000)),
    share=st.floats(0.0, 1.0),
)
def test_any_budget_between_least_and_most_is_kept_and_nobody_compared_is_faster(
    layers: int, dur_ns: int, share: float
) -> None:
    trace = chain_step(layers, dur_ns=dur_ns)
    setting = setting_of(trace)
    evaluator = MemoryEvaluator(setting.graph)
    least, most = LeastTime(setting).least_peak.peak_bytes, setting.keep_all_bytes
    budget = round(least + share * (most - least))
    outcome = evaluator.evaluate(least_time(setting_of(trace, budget)))
    assert outcome.peak_bytes <= budget
    for policy in MEMORY_POLICIES.values():
        try:
            other = evaluator.evaluate(policy(setting_of(trace, budget)))
        except PlanError:  # of policies that take a budget
            continue
        if other.peak_bytes <= budget:
            assert outcome.step_ns <= other.step_ns


@settings(max_examples=40, deadline=None)
@given(layers=st.integers(2, 8), dur_ns=st.sampled_from((1_000, 60_000, 200_000)), chosen=st.sets(st.integers(0, 6)))
def test_quick_estimate_is_the_allocators_peak_where_nothing_is_rounded(
    layers: int, dur_ns: int, chosen: set[int]
) -> None:
    trace = chain_step(layers, dur_ns=dur_ns)
    storages, times = Storages.of(trace), OpTimes.of(graph_of(trace))
    moved = [s for n, s in enumerate(storages.saved) if n in chosen]
    needs = first_needs(storages, times, moved)
    level = BytesProfile(storages, times).level_bytes(last_forward_places(storages, times, storages.saved), needs, ())
    room = Room(level.tolist(), int(level.max()))
    offloads = place_copies(storages, times, Link.of(graph_of(trace)), moved, needs, room)
    setting = setting_of(trace)
    # Where a tensor in transit has no room, ops wait for it; only one op's release and the next op's allocation may
    # overlap.
    assert setting.peak_bytes(MemoryPlan(offloads=offloads)) <= int(level.max()) + SIZE


def test_copies_are_placed_where_they_end_in_time() -> None:
    # a0 is last used by f1, which ends at 400 us; its copy of 84 us ends during f2, so f3 is the first op without it.
    trace = chain_step(5, dur_ns=200_000)
    storages, times = Storages.of(trace), OpTimes.of(graph_of(trace))
    a0 = storage_of(trace, "a0")
    (offload,) = place_copies(storages, times, Link.of(graph_of(trace)), [a0], first_needs(storages, times, [a0]))
    assert [trace.ops[op].name for op in (offload.after, offload.free, offload.back)] == ["f1", "f3", "b2"]


def test_placing_waits_only_where_memory_asks_for_it() -> None:
    trace = chain_step(6, dur_ns=10_000)  # a copy takes as long as eight ops
    storages, times = Storages.of(trace), OpTimes.of(graph_of(trace))
    moved = [storage_of(trace, name) for name in ("a0", "a1")]
    needs = first_needs(storages, times, moved)
    free = Room([0] * len(trace.ops), 1 << 40)
    tight = Room([0] * len(trace.ops), 0)
    link = Link.of(graph_of(trace))
    late = {o.storage: o.free for o in place_copies(storages, times, link, moved, needs, free)}
    soon = {o.storage: o.free for o in place_copies(storages, times, link, moved, needs, tight)}
    assert late[moved[0]] == op_of(trace, "b5")  # late: at the turn, not before
    assert soon[moved[0]] == op_of(trace, "f2")  # at once


def test_copies_that_have_ended_are_freed_together_once_memory_is_needed() -> None:
    # Copies of 84 us beside ops of 200 us: a0's has ended when f3 starts, a1's when f4 does. Memory is short at f5.
    trace = chain_step(7, dur_ns=200_000)
    storages, times = Storages.of(trace), OpTimes.of(graph_of(trace))
    moved = [storage_of(trace, name) for name in ("a0", "a1")]
    level = [0] * len(trace.ops)
    level[times.place[op_of(trace, "f5")]] = SIZE
    placed = place_copies(
        storages, times, Link.of(graph_of(trace)), moved, first_needs(storages, times, moved), Room(level, 2 * SIZE)
    )
    assert {trace.ops[each.free].name for each in placed} == {"f5"}


def test_link_of_a_plan_is_the_one_beside_kernels() -> None:
    hardware = make_hardware(d2h=8.0, h2d=4.0)
    copies = msgspec.structs.replace(hardware.copies, copy_slowdown=1.0, switch_ns=5.0)
    link = Link.of(OpGraph.build(chain_step(2), msgspec.structs.replace(hardware, copies=copies)))
    assert (link.out_bytes_per_ns, link.back_bytes_per_ns, link.wait_ns) == (4.0, 2.0, 5.0)


def test_op_that_decides_is_the_one_that_needs_most_and_its_workspace_may_be_named() -> None:
    """Guards the message: a tensor that could be moved decides nothing, however large it is."""
    trace = chain_step(5)
    heavy = len(trace.ops) - 2
    ops = [
        msgspec.structs.replace(op, workspace_bytes=8 * SIZE if number == heavy else 0)
        for number, op in enumerate(trace.ops)
    ]
    trace = msgspec.structs.replace(trace, ops=tuple(ops))
    setting = setting_of(trace)
    planner = LeastTime(setting)
    with pytest.raises(PlanError, match=re.escape(f"op '{ops[heavy].name}' decides it, with its workspace, 32 MiB")):
        planner.plan_for(SIZE)
    needs = needs_at_once(setting.storages)
    assert needs[heavy] == max(needs) <= planner.least_peak.peak_bytes


def test_another_order_counts_only_where_it_saves_memory() -> None:
    setting = setting_of(chain_step(6))
    assert lean_order(setting) == weights_first(setting.storages)  # a chain has one order
    large_gradient = [
        Step("f", "x", "a", kernels=(kernel(1_000),)),
        Step("loss", "a", "g", kernels=(kernel(1_000),)),
        Step("weights", "g x", "w", kernels=(kernel(1_000),), phase="backward"),
        Step("data", "g", "d", kernels=(kernel(1_000),), phase="backward"),
        Step("rest", "d", "r", kernels=(kernel(1_000),), phase="backward"),
    ]
    trace = with_bytes(make_trace(large_gradient, outputs="w r", elements=SIZE // 4), {"d": MIB, "r": MIB, "x": MIB})
    ops = [
        msgspec.structs.replace(op, workspace_bytes=8 * SIZE if op.name == "data" else 0) for op in trace.ops
    ]  # with the gradient of the weights, which stays, it needs 4 MiB more
    setting = setting_of(msgspec.structs.replace(trace, ops=tuple(ops)))
    assert lean_order(setting) == (0, 1, 3, 2, 4)
    needs = needs_at_once(setting.storages)
    assert needs[3] == MIB + SIZE + SIZE + MIB + 8 * SIZE  # x, w, g, d, workspace
    assert max(needs_at_once(setting.storages, (0, 1, 3, 2, 4))) == needs[3] - SIZE


def test_smallest_budget_without_pinned_memory_counts_published_recomputation() -> None:
    """Guards the message: a policy's plan kept 431 MiB where 454 was named as the smallest."""
    graph = OpGraph.build(load_trace("resnet50-train-b8"), make_hardware())
    planner = LeastTime(Setting(graph, Storages.of(graph.trace), pinned_bytes=0))
    assert planner.smallest.peak_bytes < planner.least_peak.peak_bytes
    published = list(planner.of_others(planner.smallest.peak_bytes, math.inf))
    assert planner.smallest.peak_bytes <= min(each.peak_bytes for each in published)
    assert planner.best(planner.smallest.peak_bytes)
