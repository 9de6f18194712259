"""Copies between two uses, for plans that exceed a budget at a few ops."""

from __future__ import annotations

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from gpusim.errors import PlanError
from gpusim.formats.hardware import load_hardware
from gpusim.formats.trace import Trace
from gpusim.memplan.evaluate import MemoryEvaluator
from gpusim.memplan.lower_bound import LowerBound
from gpusim.memplan.plan import MemoryPlan, Offload
from gpusim.memplan.policies import gaps
from gpusim.memplan.policies.base import Setting
from gpusim.memplan.policies.least_time import ROOM, LeastTime
from gpusim.plan.graph import OpGraph
from gpusim.trace.store import read_trace
from gpusim.units import MIB, format_bytes_up
from gpusim.validation.again import trace_files
from tests.support.helpers import Step, kernel, make_trace
from tests.support.memory_steps import SIZE, chain_step, graph_of, op_of, storage_of, with_bytes
from tests.validation.test_memory_again import FIRST

SMALL = 1024


def step() -> Trace:
    """`a` is made first and read last; `f2` needs `b` and `c` beside it, the ops behind it little."""
    ops = [
        Step("f0", "x", "a", kernels=(kernel(1000),)),
        Step("f1", "x", "b", kernels=(kernel(1000),)),
        Step("f2", "b", "c", kernels=(kernel(1000),)),
        Step("f3", "c", "d", kernels=(kernel(1000),)),
        Step("f4", "a d", "w", kernels=(kernel(1000),)),
    ]
    return with_bytes(make_trace(ops, outputs="w", elements=SIZE // 4), {"d": SMALL, "w": SMALL})


def test_what_an_op_does_not_use_leaves_before_it_and_is_fetched_behind_it() -> None:
    # Beside x, f2 has a, b and c, 12 MiB; f3 has a, c and d, 8 MiB and a KiB.
    trace = step()
    setting = Setting.of(graph_of(trace))
    plan = gaps.within(setting, MemoryPlan(), setting.keep_all_bytes - SIZE + MIB)
    assert plan is not None
    first, second, third = (op_of(trace, name) for name in ("f0", "f2", "f3"))
    assert plan.offloads == (Offload(storage_of(trace, "a"), after=first, free=second, back=third),)
    assert MemoryEvaluator(setting.graph).evaluate(plan).peak_bytes == setting.keep_all_bytes - SIZE + SMALL


def test_budget_below_what_an_op_uses_itself_has_no_plan() -> None:
    setting = Setting.of(graph_of(step()))
    assert gaps.within(setting, MemoryPlan(), setting.keep_all_bytes - SIZE - 512) is None


def test_plan_that_keeps_the_budget_stays_as_it_is() -> None:
    setting = Setting.of(graph_of(step()))
    assert gaps.within(setting, MemoryPlan(), setting.keep_all_bytes) == MemoryPlan()


def test_the_copy_that_ops_wait_for_least_is_chosen() -> None:
    # a is read again 10 ms behind f2, b 1 us behind it; either one is enough.
    ops = [
        Step("f0", "x", "a", kernels=(kernel(1000),)),
        Step("f1", "x", "b", kernels=(kernel(1000),)),
        Step("idle", "x", "s", kernels=(kernel(10_000_000),)),
        Step("f2", "s", "c", kernels=(kernel(1000),)),
        Step("f3", "c", "d", kernels=(kernel(1000),)),
        Step("f4", "b d", "e", kernels=(kernel(10_000_000),)),
        Step("f5", "a e", "w", kernels=(kernel(1000),)),
    ]
    trace = with_bytes(make_trace(ops, outputs="w", elements=SIZE // 4), dict.fromkeys("sdew", SMALL))
    setting = Setting.of(graph_of(trace))
    plan = gaps.within(setting, MemoryPlan(), setting.keep_all_bytes - MIB)
    assert plan is not None
    assert [offload.storage for offload in plan.offloads] == [storage_of(trace, "a")]


@settings(max_examples=25, deadline=None)
@given(layers=st.integers(2, 8), dur_ns=st.sampled_from((1_000, 200_000)), share=st.floats(0.2, 1.0))
def test_plans_run_and_keep_the_budget(layers: int, dur_ns: int, share: float) -> None:
    setting = Setting.of(graph_of(chain_step(layers, dur_ns=dur_ns)))
    budget = round(share * setting.keep_all_bytes)
    plan = gaps.within(setting, MemoryPlan(), budget)
    assume(plan is not None)
    assert plan is not None
    assert MemoryEvaluator(setting.graph).evaluate(plan).peak_bytes <= budget


def residual_step(layers: int) -> Trace:
    """The gradient `s` is made first, and read by the first and the last op of the backward pass."""
    ops = [Step(f"f{i}", f"a{i - 1}" if i else "x", f"a{i}", kernels=(kernel(1000),)) for i in range(layers)]
    ops.append(Step("loss", f"a{layers - 1}", "s", kernels=(kernel(1000),)))
    for i in reversed(range(layers)):
        reads = f"{f'g{i}' if i < layers - 1 else 's'} {f'a{i - 1}' if i else 'x s'}"
        ops.append(Step(f"b{i}", reads, f"g{i - 1}" if i else "w", kernels=(kernel(2000),), phase="backward"))
    return make_trace(ops, outputs="w", elements=SIZE // 4)


def test_planner_moves_a_gradient_that_waits_near_the_least_peak() -> None:
    # With it moved, one activation moves beside it; the plan of a published policy that has this peak moves three.
    trace = residual_step(4)
    setting = Setting.of(graph_of(trace))
    planner = LeastTime(setting)
    outcome = MemoryEvaluator(setting.graph).evaluate(planner.best(planner.least_peak.peak_bytes))
    moved = [offload.storage for offload in outcome.plan.offloads]
    assert storage_of(trace, "s") in moved
    assert len(moved) < len(planner.least_peak.plan.offloads)
    assert outcome.peak_bytes <= planner.least_peak.peak_bytes
    assert outcome.step_ns < planner.time_ns(planner.least_peak)


def test_without_a_budget_that_half_the_peak_keeps_there_is_room_above_the_least() -> None:
    planner = LeastTime(Setting.of(graph_of(residual_step(2))))
    least = planner.least_peak.peak_bytes
    assert least > planner.setting.keep_all_bytes // 2
    assert planner.plan_for(None) == planner.best(round((1 + ROOM) * least))


def test_smallest_budget_is_found_with_copies_between_two_uses() -> None:
    """VGG-16: tensors that wait for an op with a large workspace move out. A refusal names that size."""
    trace = read_trace(trace_files(FIRST)["vgg16-train-b16"])
    planner = LeastTime(Setting.of(OpGraph.build(trace, load_hardware("h200"))))
    smallest, bound = planner.smallest.peak_bytes, LowerBound(planner.evaluator).least_bytes
    assert bound <= smallest < 0.95 * planner.least_peak.peak_bytes
    assert planner.setting.peak_bytes(planner.best(smallest, quick=True)) <= smallest
    with pytest.raises(PlanError, match=f"a plan found here is {format_bytes_up(smallest)}: op "):
        planner.best(bound - 1)
