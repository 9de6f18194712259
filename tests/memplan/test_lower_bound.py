"""No plan of any policy is faster than the bound for its peak; and the bound by hand."""

from __future__ import annotations

import math

import pytest

from gpusim.errors import PlanError
from gpusim.formats.hardware import default_hardware
from gpusim.memplan.compare import compare_policies
from gpusim.memplan.evaluate import MemoryEvaluator
from gpusim.memplan.lower_bound import LowerBound, cheapest_ns, prices
from gpusim.memplan.plan import MemoryPlan
from gpusim.memplan.policies.base import Setting
from gpusim.memplan.policies.registry import MEMORY_POLICIES
from gpusim.memplan.storages import Storages
from gpusim.plan.graph import OpGraph
from gpusim.trace.store import load_trace

#: Simulated times are whole ns for each task.
ROUNDING_NS = 2_000


def test_copies_cost_nothing_as_long_as_they_fit_beside_ops() -> None:
    """100 bytes over at 10 bytes a ns: 10 ns of copies, 4 of them free; recomputing 40 at 0.05 ns each is cheaper."""
    assert cheapest_ns([], 100, 10.0, 10.0) == 0.0
    assert cheapest_ns([], 100, 10.0, 4.0) == pytest.approx(6.0)
    assert cheapest_ns([(40, 0.05)], 100, 10.0, 4.0) == pytest.approx(40 * 0.05 + 2.0)
    assert cheapest_ns([(40, 0.05), (40, 0.2)], 100, 10.0, 4.0) == pytest.approx(40 * 0.05 + 2.0)
    assert cheapest_ns([(40, 0.05), (40, math.inf)], 30, 10.0, 0.0) == pytest.approx(1.5)


@pytest.mark.parametrize("name", ["googlenet-train-b8", "resnet50-train-b8"])
def test_no_plan_is_faster_than_its_bound(name: str) -> None:
    graph = OpGraph.build(load_trace(name), default_hardware(""))
    evaluator = MemoryEvaluator(graph)
    bound = LowerBound(evaluator)
    keep_all = evaluator.evaluate(MemoryPlan())
    setting = Setting(graph, evaluator.storages)
    held = 0
    for policy in MEMORY_POLICIES.values():
        for share in (None, 0.8, 0.6) if policy.takes_budget else (None,):
            budget = None if share is None else round(share * keep_all.peak_bytes)
            try:
                outcome = evaluator.evaluate(policy(Setting(graph, evaluator.storages, budget)))
            except PlanError:
                continue
            if bound.holds_for(outcome.plan):
                least = bound.step_ns(outcome.peak_bytes)
                assert least is not None, f"{policy.name} reaches what is said to be impossible"
                assert outcome.step_ns >= least - ROUNDING_NS, policy.name
                held += 1
    assert held > len(MEMORY_POLICIES)
    assert setting.keep_all_bytes == keep_all.peak_bytes


def test_bound_falls_with_the_budget_and_begins_at_keeping_all() -> None:
    graph = OpGraph.build(load_trace("resnet50-train-b8"), default_hardware(""))
    evaluator = MemoryEvaluator(graph)
    keep_all = evaluator.evaluate(MemoryPlan())
    bound = LowerBound(evaluator)
    assert bound.step_ns(keep_all.peak_bytes) == keep_all.step_ns
    times = [bound.step_ns(round(share * keep_all.peak_bytes)) for share in (0.9, 0.7, 0.5, 0.3)]
    assert all(time is not None for time in times)
    assert times == sorted(times)  # type: ignore[type-var]
    assert times[-1] > keep_all.step_ns  # type: ignore[operator]
    assert bound.step_ns(keep_all.use.initial_bytes) is None


def test_what_an_op_writes_together_is_charged_by_its_bytes() -> None:
    """All prices times bytes never add up to more than the ops that wrote them take."""
    graph = OpGraph.build(load_trace("resnet50-train-b8"), default_hardware(""))
    storages = Storages.of(graph.trace)
    charged = prices(storages, graph.solo_ns)
    writers = {op for s in charged for op in storages.writers[s] if op < storages.first_backward}
    total = sum(price * storages.bytes[s] for s, price in charged.items() if price < math.inf)
    assert 0 < total <= sum(graph.solo_ns[op] for op in writers) * (1 + 1e-9)


def test_front_of_the_comparison_says_the_bound() -> None:
    comparison = compare_policies(OpGraph.build(load_trace("googlenet-train-b8"), default_hardware("")))
    bounds = [comparison.bound_ns(row.outcome) for row in comparison.front if row.outcome is not None]
    assert len(bounds) == len(comparison.front) > 3
    for row, bound in zip(comparison.front, bounds, strict=True):
        assert row.outcome is not None
        assert bound is None or bound <= row.outcome.step_ns + ROUNDING_NS
    assert any(bound is not None and bound > comparison.keep_all.step_ns for bound in bounds)
