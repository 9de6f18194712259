"""Many schedules at once: batches, threads and the compiled list scheduler equal single runs."""

from __future__ import annotations

import random
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gpusim.analysis.relaxed import LIMITS, relaxed
from gpusim.engine.base import ENGINES
from gpusim.engine.batch import BatchEngine
from gpusim.engine.compiled.op_graph import OpArrays
from gpusim.engine.evaluate import Evaluation, Evaluator
from gpusim.engine.reference import ReferenceEngine
from gpusim.engine.threads import in_ranges
from gpusim.errors import PlanError
from gpusim.formats.hardware import HardwareModel, load_hardware
from gpusim.formats.trace import Trace
from gpusim.plan.graph import OpGraph
from gpusim.plan.schedule import Schedule
from gpusim.plan.tasks import LaunchMode
from gpusim.policies.shared.list_scheduling import FastLists
from gpusim.trace.store import load_trace
from tests.support.helpers import (
    build_graph,
    chain_trace,
    hardware_models,
    lowered,
    make_hardware,
    make_trace,
    traces,
    traces_with_schedules,
    view,
    wide_trace,
)
from tests.support.list_scheduling import list_schedule

MODES: tuple[LaunchMode, ...] = ("graph", "stream")


# --- Batches of schedules ---


@settings(max_examples=80)
@given(traces_with_schedules(), hardware_models(), st.sampled_from(MODES))
def test_batch_gives_what_lowering_and_the_reference_engine_give(
    case: tuple[Trace, list[int], list[int]], hardware: HardwareModel, mode: LaunchMode
) -> None:
    trace, order, streams = case
    graph = OpGraph.build(trace, hardware)
    recorded, alone = list(range(len(graph))), [0] * len(graph)
    found = BatchEngine(graph).evaluate([order, recorded, order], [streams, alone, streams], mode=mode, peak=True)
    assert found.peak_bytes is not None
    for number, (launched, placed) in enumerate(((order, streams), (recorded, alone), (order, streams))):
        expected = ReferenceEngine().run(lowered(graph, launched, placed, mode), graph.hardware)
        assert found.makespan_ns[number] == expected.makespan_ns
        assert found.peak_bytes[number] == expected.peak_bytes


@settings(max_examples=30)
@given(traces_with_schedules(), hardware_models(), st.sampled_from(MODES), st.sampled_from(ENGINES))
def test_makespan_alone_is_that_of_the_evaluation(
    case: tuple[Trace, list[int], list[int]], hardware: HardwareModel, mode: LaunchMode, engine: str
) -> None:
    trace, order, streams = case
    graph = OpGraph.build(trace, hardware)
    expected = ReferenceEngine().run(lowered(graph, order, streams, mode), graph.hardware)
    evaluator, schedule = Evaluator(graph, engine), Schedule(tuple(order), tuple(streams))
    assert evaluator.makespan_ns(schedule, mode) == expected.makespan_ns
    assert evaluator.evaluate(schedule, mode) == Evaluation(expected.makespan_ns, expected.peak_bytes)


@given(traces(), st.lists(st.sampled_from(LIMITS), unique=True), st.booleans())
def test_arrays_of_a_graph_that_is_like_another_are_as_if_made_for_it(
    trace: Trace, limits_on: list[str], dependent: bool
) -> None:
    graph = build_graph(trace)
    found = relaxed(graph if dependent else graph.without_dependencies(), limits_on)
    apart = replace(found)  # nothing is known of it
    assert (found.succs, found.bottom_ns, found.work_preds, found.work_succs) == (
        apart.succs,
        apart.bottom_ns,
        apart.work_preds,
        apart.work_succs,
    )
    for name, kept, made in zip(OpArrays._fields, OpArrays.of(found), OpArrays.of(apart), strict=True):
        assert np.array_equal(kept, made), name


def test_other_tasks_are_as_many_for_each_op() -> None:
    graph = build_graph(wide_trace(3))
    with pytest.raises(ValueError, match="number of tasks"):
        graph.with_tasks(graph.hardware, ((),) * len(graph))


def legal_schedules(graph: OpGraph, count: int, seed: int) -> tuple[list[list[int]], list[list[int]]]:
    """Draw random legal launch orders and streams."""
    dice = random.Random(seed)
    orders, streams = [], []
    for _ in range(count):
        waiting = [len(before) for before in graph.preds]
        ready = [number for number, left in enumerate(waiting) if not left]
        order = []
        while ready:
            order.append(ready.pop(dice.randrange(len(ready))))
            for after in graph.succs[order[-1]]:
                waiting[after] -= 1
                if not waiting[after]:
                    ready.append(after)
        orders.append(order)
        streams.append([dice.randrange(5) for _ in order])
    return orders, streams


@pytest.mark.parametrize("mode", MODES)
def test_number_of_threads_and_company_in_a_batch_change_no_result(mode: LaunchMode) -> None:
    graph = OpGraph.build(load_trace("squeezenet1_1-infer-b1"), load_hardware("h200"))
    engine = BatchEngine(graph)
    orders, streams = legal_schedules(graph, 101, seed=1)
    found = [engine.evaluate(orders, streams, mode=mode, peak=True, threads=threads) for threads in (1, 2, 3, 7, None)]
    assert len(set(found[0].makespan_ns.tolist())) > 10  # otherwise equal results would prove little
    for other in found[1:]:
        assert np.array_equal(other.makespan_ns, found[0].makespan_ns)
        assert other.peak_bytes is not None
        assert np.array_equal(other.peak_bytes, found[0].peak_bytes)
    alone = engine.evaluate([orders[77]], [streams[77]], mode=mode)
    assert alone.makespan_ns[0] == found[0].makespan_ns[77]
    assert alone.peak_bytes is None


def test_encoded_plans_can_be_simulated_again() -> None:
    graph = build_graph(wide_trace(5, 7000, 2), make_hardware(chain_ns=100, slowdown=0.8))
    encoded = BatchEngine(graph).encode(*legal_schedules(graph, 5, seed=2))
    first = encoded.simulate().tolist()
    assert encoded.simulate().tolist() == first


def test_streams_of_a_batch_may_have_any_numbers() -> None:
    graph = build_graph(wide_trace(4), make_hardware(chain_ns=100, slowdown=0.8))
    orders, streams = legal_schedules(graph, 20, seed=3)
    renamed = [[1_000_000 * stream + 7 for stream in each] for each in streams]
    engine = BatchEngine(graph)
    assert np.array_equal(engine.evaluate(orders, streams).makespan_ns, engine.evaluate(orders, renamed).makespan_ns)


@pytest.mark.parametrize(
    ("order", "streams"),
    [([1, 0, 2], [0, 0, 0]), ([0, 0, 2], [0, 0, 0]), ([0, 1, 3], [0, 0, 0]), ([0, 1, -1], [0, 0, 0]),
     ([0, 1, 2], [0, -1, 0])],
)  # fmt: skip
def test_schedule_that_is_not_legal_is_refused_with_its_number(order: list[int], streams: list[int]) -> None:
    engine = BatchEngine(build_graph(chain_trace(3)))
    with pytest.raises(PlanError, match="schedule 2"):
        engine.evaluate([[0, 1, 2], [0, 1, 2], order], [[0, 0, 0], [0, 1, 2], streams], threads=2)


def test_batch_of_another_shape_is_refused() -> None:
    engine = BatchEngine(build_graph(chain_trace(3)))
    for orders, streams in (([[0, 1]], [[0, 0]]), ([[0, 1, 2]], [[0, 0, 0], [0, 0, 0]]), ([0, 1, 2], [0, 0, 0])):
        with pytest.raises(PlanError, match="of 3 ops"):
            engine.evaluate(orders, streams)
    assert len(engine.evaluate(np.zeros((0, 3)), np.zeros((0, 3))).makespan_ns) == 0


def test_views_alone_take_no_time_in_a_batch() -> None:
    engine = BatchEngine(build_graph(make_trace([view("v", "x"), view("w", "v")])))
    for mode in MODES:
        assert engine.evaluate([[0, 1]], [[0, 1]], mode=mode, peak=True).makespan_ns.tolist() == [0]


@given(st.integers(0, 50), st.integers(1, 9))
def test_ranges_of_threads_cover_everything_once(count: int, threads: int) -> None:
    seen: list[int] = []
    in_ranges(count, threads, lambda first, last: seen.extend(range(first, last)))
    assert sorted(seen) == list(range(count))


# --- The list scheduler ---


@settings(max_examples=100)
@given(traces(), hardware_models(), st.integers(1, 5), st.sampled_from((0.0, 0.05, 0.5, 1.0)), st.data())
def test_compiled_list_scheduler_makes_the_same_schedule(
    trace: Trace, hardware: HardwareModel, streams: int, min_share: float, data: st.DataObject
) -> None:
    graph = OpGraph.build(trace, hardware)
    numbers = st.sampled_from((0.0, 1.0, 2.5)) | st.floats(-1e6, 1e6)
    priority = data.draw(st.lists(numbers, min_size=len(graph), max_size=len(graph)))
    lists = FastLists(graph)
    expected = list_schedule(graph, streams, priority, min_share)
    assert lists.schedule(streams, priority, min_share) == expected
    assert lists.makespans([priority] * 3, streams, min_share, threads=2).tolist() == [expected.makespan_ns] * 3


@pytest.mark.parametrize("name", ["googlenet-train-b8", "squeezenet1_1-infer-b1"])
def test_list_schedules_of_a_bundled_trace_are_the_same_one_by_one_and_in_batches(name: str) -> None:
    graph = OpGraph.build(load_trace(name), load_hardware("h200"))
    lists = FastLists(graph)
    dice = np.random.default_rng(1)
    longest = max(graph.bottom_ns)
    priorities = np.array(graph.bottom_ns) + dice.normal(0, 0.1 * longest, (6, len(graph)))
    streams, shares = [1, 2, 3, 4, 6, 8], [0.0, 0.05, 0.25, 0.5, 0.05, 0.0]
    expected = [
        list_schedule(graph, count, list(priority), share)
        for priority, count, share in zip(priorities, streams, shares, strict=True)
    ]
    for threads in (1, 2, 4):
        found = lists.makespans(priorities, streams, shares, threads=threads)
        assert found.tolist() == [made.makespan_ns for made in expected]
    for number in (0, 5):
        assert lists.schedule(streams[number], priorities[number], shares[number]) == expected[number]


def test_list_scheduler_without_streams_or_with_too_few_priorities_is_refused() -> None:
    lists = FastLists(build_graph(chain_trace(3)))
    with pytest.raises(PlanError, match="0 streams"):
        lists.makespans([[1.0, 2.0, 3.0]], 0)
    with pytest.raises(PlanError, match="2 priorities for 3 ops"):
        lists.schedule(1, [1.0, 2.0])
