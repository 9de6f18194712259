"""What stays for recomputation, and changes of single storages: both hold the budget and make plans no slower."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gpusim.formats.hardware import default_hardware
from gpusim.formats.trace import Trace
from gpusim.memplan.evaluate import MemoryEvaluator
from gpusim.memplan.policies.base import Setting
from gpusim.memplan.policies.exchange import Exchange
from gpusim.memplan.policies.least_time import LeastTime
from gpusim.memplan.policies.orders import Choice, worth_keeping
from gpusim.plan.graph import OpGraph
from gpusim.trace.store import load_trace
from tests.support.helpers import Step, kernel, make_trace
from tests.support.memory_steps import SIZE, chain_step, graph_of, storage_of, with_bytes


def dense_step(small: int = SIZE // 4) -> Trace:
    """The result of a long op, `small` bytes and not saved, goes into two short ones, whose results are saved."""
    relu = "aten.relu.default"
    steps = [
        Step("makes_u", "x", "u", kernels=(kernel(900_000),), target=relu),
        Step("makes_s", "u", "s", kernels=(kernel(1_000),), target=relu),
        Step("makes_t", "u", "t", kernels=(kernel(1_000),), target=relu),
        Step("loss", "s t", "g", kernels=(kernel(1_000),)),
        Step("back_t", "g t", "h", kernels=(kernel(1_000),), phase="backward"),
        Step("back_s", "h s", "w", kernels=(kernel(1_000),), phase="backward"),
    ]
    return with_bytes(make_trace(steps, outputs="w", elements=SIZE // 4), {"u": small})


@pytest.mark.parametrize(("small", "worth"), [(SIZE // 4, True), (SIZE, True), (SIZE + 1, False)])
def test_what_much_is_computed_from_is_worth_keeping(small: int, worth: bool) -> None:
    """Two tensors come from u, so it is worth keeping as long as it is no larger than either."""
    trace = dense_step(small)
    setting = Setting.of(graph_of(trace))
    found = worth_keeping(setting.storages, setting.chains)
    assert found == ({storage_of(trace, "u")} if worth else set())


def test_recomputation_from_what_stays_leaves_out_the_long_op() -> None:
    """Freeing s and t, of 4 MiB each, costs 2 us where u stays for it; computing u again would take 900 us."""
    trace = dense_step()
    setting = Setting.of(graph_of(trace), pinned_bytes=0)
    evaluator = MemoryEvaluator(setting.graph)
    planner = LeastTime(setting, evaluator)
    u, s = (storage_of(trace, name) for name in ("u", "s"))
    plan = planner.plan(Choice((), (s,), kept=frozenset((u,))), 0)
    assert plan is not None
    assert [trace.ops[op].name for redo in plan.redos for op in redo.ops] == ["makes_s"]
    outcome = evaluator.evaluate(plan)
    assert outcome.recompute_ns < 5_000
    choice = Choice((), (s,), kept=frozenset((u,)))
    assert planner.floor_bytes(choice) == outcome.peak_bytes
    without = planner.plan(Choice((), (s,)), 0)
    assert without is not None
    assert evaluator.evaluate(without).recompute_ns > 900_000


def test_a_cheaper_storage_takes_the_place_of_a_dear_one() -> None:
    """Both are 4 MiB; recomputing a takes 900 us and b 1 us. The budget asks for one of them."""
    steps = [
        Step("makes_a", "x", "a", kernels=(kernel(900_000),), target="aten.relu.default"),
        Step("makes_b", "x", "b", kernels=(kernel(1_000),), target="aten.relu.default"),
        Step("loss", "x", "g", kernels=(kernel(1_000),)),
        Step("other", "g", "h", kernels=(kernel(1_000),), phase="backward"),
        Step("back_a", "h a", "i", kernels=(kernel(1_000),), phase="backward"),
        Step("back_b", "i b", "w", kernels=(kernel(1_000),), phase="backward"),
    ]
    trace = with_bytes(make_trace(steps, outputs="w", elements=SIZE // 4), {"g": 3 * SIZE})
    a, b = storage_of(trace, "a"), storage_of(trace, "b")
    planner = LeastTime(Setting.of(graph_of(trace), pinned_bytes=0))
    budget = planner.floor_bytes(Choice((), (a,)))
    assert planner.floor_bytes(Choice((), (b,))) == budget < planner.floor_bytes(Choice((), ()))
    found = Exchange(planner, planner.orders, budget, 100).improved(Choice((), (a,)))
    assert found == Choice((), (b,))
    assert Exchange(planner, planner.orders, budget, 1).improved(Choice((), (a,))) == Choice((), (a,))


def test_more_is_recomputed_where_the_budget_is_exceeded() -> None:
    planner = LeastTime(Setting.of(graph_of(chain_step(6, dur_ns=1_000)), pinned_bytes=0))
    budget = planner.setting.keep_all_bytes - SIZE
    exchange = Exchange(planner, planner.orders, budget, 100)
    assert exchange.estimate_ns(Choice((), ())) == float("inf")
    found = exchange.improved(Choice((), ()))
    assert found.again
    assert planner.floor_bytes(found) <= budget


def test_changes_without_copies_leave_all_on_the_gpu() -> None:
    """Ops of 200 us, copies of 84 us: moving takes nothing, recomputation much, so copies are added where they may."""
    trace = chain_step(6, dur_ns=200_000)
    planner = LeastTime(Setting.of(graph_of(trace)))
    budget = planner.setting.keep_all_bytes - SIZE
    start = Choice((), (storage_of(trace, "a1"), storage_of(trace, "a2")))
    found = {moving: Exchange(planner, planner.orders, budget, 200, moving=moving) for moving in (True, False)}
    choices = {moving: exchange.improved(start) for moving, exchange in found.items()}
    assert choices[True].moved
    assert not choices[False].moved
    assert len(choices[False].again) < len(start.again)


@settings(max_examples=15, deadline=None)
@given(layers=st.integers(3, 8), dur_ns=st.sampled_from((1_000, 60_000)), share=st.floats(0.1, 0.9))
def test_changes_keep_every_budget_and_make_no_plan_slower(layers: int, dur_ns: int, share: float) -> None:
    setting = Setting.of(graph_of(chain_step(layers, dur_ns=dur_ns)))
    evaluator = MemoryEvaluator(setting.graph)
    planner = LeastTime(setting, evaluator)
    least = planner.least_peak.peak_bytes
    budget = round(least + share * (setting.keep_all_bytes - least))
    quick, changed = (evaluator.evaluate(planner.plan_for(budget, quick=each)) for each in (True, False))
    assert max(quick.peak_bytes, changed.peak_bytes) <= budget
    assert changed.step_ns <= quick.step_ns


def test_changes_make_a_whole_step_faster_within_its_budget() -> None:
    graph = OpGraph.build(load_trace("googlenet-train-b8"), default_hardware(""))
    evaluator = MemoryEvaluator(graph)
    planner = LeastTime(Setting(graph, evaluator.storages), evaluator)
    budget = round(0.6 * planner.setting.keep_all_bytes)
    quick, changed = (evaluator.evaluate(planner.plan_for(budget, quick=each)) for each in (True, False))
    assert max(quick.peak_bytes, changed.peak_bytes) <= budget
    assert changed.step_ns < quick.step_ns
