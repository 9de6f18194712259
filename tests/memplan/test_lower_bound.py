"""No plan of any policy is faster than the bound for its peak; and the bound by hand."""

from __future__ import annotations

import math

import pytest

from gpusim.errors import PlanError
from gpusim.formats.hardware import Copies, default_hardware
from gpusim.formats.trace import Trace
from gpusim.memplan.compare import MemoryComparison, compare_policies
from gpusim.memplan.evaluate import MemoryEvaluator
from gpusim.memplan.lower_bound import LowerBound, cheapest_ns, prices
from gpusim.memplan.plan import MemoryPlan
from gpusim.memplan.policies.base import Setting
from gpusim.memplan.policies.registry import MEMORY_POLICIES
from gpusim.memplan.storages import Storages
from gpusim.plan.graph import OpGraph
from gpusim.report.figures.memory_front import memory_front_figure
from gpusim.report.memory_table import memory_document
from gpusim.trace.store import load_trace
from gpusim.units import MIB, NS_PER_MS
from tests.support.helpers import Step, kernel, make_trace
from tests.support.memory_steps import SIZE, WITHOUT_VARIANTS, chain_step, graph_of, storage_of, storages_of, with_bytes

#: Simulated times are whole ns for each task.
ROUNDING_NS = 2_000


def link(kernel_slowdown: float = 0.0, copy_slowdown: float = 0.0) -> Copies:
    """10 bytes a ns each way."""
    return Copies(
        h2d_bytes_per_ns=10.0,
        d2h_bytes_per_ns=10.0,
        both_bytes_per_ns=20.0,
        latency_ns=0.0,
        kernel_slowdown=kernel_slowdown,
        copy_slowdown=copy_slowdown,
    )


def test_copies_cost_nothing_as_long_as_they_fit_beside_ops() -> None:
    """100 bytes over at 10 bytes a ns: 10 ns of copies, 4 of them free; recomputing 40 at 0.05 ns each is cheaper."""
    assert cheapest_ns([], 100, link(), 10.0) == 0.0
    assert cheapest_ns([], 100, link(), 4.0) == pytest.approx(6.0)
    assert cheapest_ns([(40, 0.05)], 100, link(), 4.0) == pytest.approx(40 * 0.05 + 2.0)
    assert cheapest_ns([(40, 0.05), (40, 0.2)], 100, link(), 4.0) == pytest.approx(40 * 0.05 + 2.0)
    assert cheapest_ns([(40, 0.05), (40, math.inf)], 30, link(), 4.0) == pytest.approx(0.0)


def test_kernels_beside_copies_are_slower() -> None:
    """A slowdown of 1/8 costs at least 1/10 of the copies beside kernels, so 1/50 ns a byte for both ways.

    Within 9 ns without delay, 100 bytes leave in the 10 ns that these 9 then take: the delay is no more than the
    slower kernels. Recomputation at less than 1/50 ns a byte comes before any copy.
    """
    assert cheapest_ns([], 100, link(0.125), 9.0) == pytest.approx(2.0)
    assert cheapest_ns([(40, 0.01)], 100, link(0.125), 9.0) == pytest.approx(40 * 0.01 + 60 * 0.02)
    assert cheapest_ns([(40, 0.03)], 100, link(0.125), 9.0) == pytest.approx(2.0)
    assert cheapest_ns([], 110, link(0.125), 9.0) == pytest.approx(2.0 + 10 * (0.1 + 0.01))


def test_copies_out_are_slower_in_a_step() -> None:
    """At half the bandwidth, 20 bytes leave in 4 ns, and the other 80 in 16."""
    assert cheapest_ns([], 100, link(copy_slowdown=1.0), 4.0) == pytest.approx(16.0)


def test_kernels_that_stand_still_beside_copies_have_a_bound() -> None:
    """Kernels that lose all of their time beside a copy: no copy delays them further."""
    assert cheapest_ns([], 100, link(1.0, 2.0), 9.0) == pytest.approx(20.0)


def branches(count: int) -> Trace:
    """Branches that are made first and added one by one, all in the forward pass: no storage of theirs is saved."""
    made = [Step(f"b{n}", "x", f"t{n}", kernels=(kernel(10_000),), target="aten.relu.default") for n in range(count)]
    sums = [f"u{n}" if n else "t0" for n in range(count)]
    added = [
        Step(f"a{n}", f"{sums[n - 1]} t{n}", sums[n], kernels=(kernel(1_000),), target="aten.add.Tensor")
        for n in range(1, count)
    ]
    end = [
        Step("loss", sums[-1], "g", kernels=(kernel(1_000),)),
        Step("back", "g x", "w", kernels=(kernel(1_000),), phase="backward"),
    ]
    return make_trace([*made, *added, *end], outputs="w", elements=SIZE // 4)


@pytest.mark.parametrize("name", ["resnet50-train-b8", "branches"])
def test_no_plan_is_faster_than_its_bound(name: str) -> None:
    graph = graph_of(branches(8)) if name == "branches" else OpGraph.build(load_trace(name), default_hardware(""))
    evaluator = MemoryEvaluator(graph)
    bound = LowerBound(evaluator)
    keep_all = evaluator.evaluate(MemoryPlan())
    setting = Setting(graph, evaluator.storages)
    held = 0
    for policy in map(MEMORY_POLICIES.__getitem__, WITHOUT_VARIANTS):
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
    assert held > len(WITHOUT_VARIANTS)
    assert setting.keep_all_bytes == keep_all.peak_bytes


def test_bound_falls_with_the_budget_and_begins_at_keeping_all() -> None:
    graph = OpGraph.build(load_trace("resnet50-train-b8"), default_hardware(""))
    evaluator = MemoryEvaluator(graph)
    keep_all = evaluator.evaluate(MemoryPlan())
    bound = LowerBound(evaluator)
    assert bound.step_ns(keep_all.peak_bytes) == keep_all.step_ns
    times = [bound.step_ns(round(share * keep_all.peak_bytes)) for share in (0.9, 0.7, 0.5, 0.4)]
    assert all(time is not None for time in times)
    assert times == sorted(times)  # type: ignore[type-var]
    assert times[-1] > keep_all.step_ns  # type: ignore[operator]
    assert bound.step_ns(keep_all.use.initial_bytes) is None


def test_what_an_op_writes_together_is_charged_by_its_bytes() -> None:
    """All prices times bytes never add up to more than the forward pass takes: no op is charged twice."""
    graph = OpGraph.build(load_trace("resnet50-train-b8"), default_hardware(""))
    storages = Storages.of(graph.trace)
    charged = prices(storages, graph.solo_ns)
    total = sum(price * storages.bytes[s] for s, price in charged.items() if price < math.inf)
    assert 0 < total <= sum(graph.solo_ns[: storages.first_backward]) * (1 + 1e-9)


@pytest.mark.parametrize(("kept", "price_ns"), [(SIZE, 300.0), (2 * SIZE, 300.0), (SIZE // 2, 100.0)])
def test_what_is_not_saved_is_computed_again_unless_keeping_it_frees_memory(kept: int, price_ns: float) -> None:
    """The saved s comes from u, which takes 200 us and is not saved. With u half as large as s, u may stay."""
    steps = [
        Step("makes_u", "x", "u", kernels=(kernel(200_000),), target="aten.relu.default"),
        Step("makes_s", "u", "s", kernels=(kernel(100_000),), target="aten.relu.default"),
        Step("loss", "s", "g", kernels=(kernel(1_000),)),
        Step("back", "g s", "w", kernels=(kernel(1_000),), phase="backward"),
    ]
    trace = with_bytes(make_trace(steps, outputs="w", elements=SIZE // 4), {"u": kept})
    price = prices(storages_of(trace), [200.0, 100.0, 1.0, 1.0])[storage_of(trace, "s")]
    assert price * SIZE == pytest.approx(price_ns)


def test_no_plan_keeps_less_than_one_op_takes() -> None:
    """Each backward op reads two tensors of 4 MiB and makes a third; x and the last gradient are 4 MiB each."""
    graph = graph_of(chain_step(4))
    bound = LowerBound(MemoryEvaluator(graph))
    initial = sum(graph.trace.storages[s].bytes for s in storages_of(graph.trace).initial)
    assert bound.least_bytes == initial + 3 * SIZE
    assert bound.step_ns(bound.least_bytes - 1) is None


def test_several_streams_and_other_orders_of_the_forward_pass_are_left_out() -> None:
    graph = graph_of(chain_step(2))
    bound = LowerBound(MemoryEvaluator(graph))
    ops = len(graph)
    assert bound.holds_for(MemoryPlan())
    assert bound.holds_for(MemoryPlan(order=tuple(range(ops)), op_streams=(0,) * ops))
    assert not bound.holds_for(MemoryPlan(op_streams=(0,) * (ops - 1) + (1,)))
    assert not bound.holds_for(MemoryPlan(order=(1, 0, *range(2, ops))))


@pytest.fixture(scope="module")
def comparison() -> MemoryComparison:
    return compare_policies(OpGraph.build(load_trace("googlenet-train-b8"), default_hardware("")))


def test_figure_and_document_have_the_bound(comparison: MemoryComparison) -> None:
    """Below it is no plan that it holds for, of any policy and budget; it ends at the step that keeps all."""
    bounds = [(each["peak_bytes"], each["step_ns"]) for each in memory_document(comparison)["bounds"]]
    assert bounds[-1] == (comparison.keep_all.peak_bytes, comparison.keep_all.step_ns)
    known = [(peak, step) for peak, step in bounds if step is not None]
    assert known[0][1] > known[-1][1]
    held = [r.outcome for r in (*comparison.rows, *comparison.more) if r.outcome and comparison.bound_ns(r.outcome)]
    assert len(held) > len(known) / 2
    for outcome in held:
        least = comparison.bound_ns(outcome)
        assert least is not None
        assert outcome.step_ns >= least - ROUNDING_NS
        above = [step for peak, step in known if peak >= outcome.peak_bytes]
        assert all(outcome.step_ns >= step - ROUNDING_NS for step in above)
    figure = memory_front_figure(comparison)
    assert "140 GiB" in figure.layout.title.text
    assert "dotted: lower bound on one stream" in figure.layout.title.text  # it has no legend
    (line,) = [each for each in figure.data if each.name == "lower bound on one stream"]
    assert list(line.x) == [peak / MIB for peak, _ in known]
    assert list(line.y) == [step / NS_PER_MS for _, step in known]


def test_front_begins_with_our_plan_at_the_least_peak_of_any_policy() -> None:
    """SuperNeurons waits for its copies there; the same peak takes less than half the time."""
    comparison = compare_policies(graph_of(chain_step(12)))
    outcomes = {row.policy: row.outcome for row in comparison.rows if row.outcome is not None}
    least = min(outcomes.values(), key=lambda each: (each.peak_bytes, each.step_ns))
    assert least is outcomes["superneurons"]
    first = comparison.front[0]
    assert first.policy == "least_time"
    assert first.outcome is not None
    assert first.outcome.peak_bytes <= least.peak_bytes
    assert first.outcome.step_ns < least.step_ns / 2


def test_front_of_the_comparison_says_the_bound(comparison: MemoryComparison) -> None:
    bounds = [comparison.bound_ns(row.outcome) for row in comparison.front if row.outcome is not None]
    assert len(bounds) == len(comparison.front) > 3
    for row, bound in zip(comparison.front, bounds, strict=True):
        assert row.outcome is not None
        assert bound is None or bound <= row.outcome.step_ns + ROUNDING_NS
    assert any(bound is not None and bound > comparison.keep_all.step_ns for bound in bounds)
