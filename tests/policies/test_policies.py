"""Policies: every schedule is legal, and each system's own rule shows in a small case."""

from __future__ import annotations

import dataclasses

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gpusim.engine.base import engine_by_name
from gpusim.formats.hardware import HardwareModel, load_hardware
from gpusim.formats.trace import Trace
from gpusim.plan.graph import OpGraph, is_legal_order
from gpusim.plan.lower import lower
from gpusim.plan.schedule import Schedule
from gpusim.plan.sync import plan_sync
from gpusim.policies.registry import POLICIES
from gpusim.policies.wavefront import wavefront
from gpusim.trace.store import load_trace
from tests.support.helpers import (
    WHOLE,
    Step,
    build_graph,
    chain_trace,
    hardware_models,
    kernel,
    make_hardware,
    make_trace,
    op,
    traces,
    view,
    wide_trace,
)
from tests.support.list_scheduling import list_schedule

#: The list scheduler simulates with the engine's rules for SMs, but simplified ones for the front end.
LIST_SCHEDULE_TOLERANCE = 0.05


def makespan_ns(graph: OpGraph, schedule: Schedule) -> int:
    plan = lower(graph, schedule)
    return engine_by_name("reference").run(plan, graph.hardware).makespan_ns


def streams_by_name(graph: OpGraph, schedule: Schedule) -> dict[str, int]:
    return {found.name: stream for found, stream in zip(graph.trace.ops, schedule.streams, strict=True)}


def order_by_name(graph: OpGraph, schedule: Schedule) -> list[str]:
    return [graph.trace.ops[index].name for index in schedule.order]


@pytest.mark.parametrize("name", POLICIES)
@settings(max_examples=20)
@given(trace=traces(), streams=st.integers(1, 8), hardware=hardware_models())
def test_every_op_is_placed_once_after_what_it_needs_on_a_stream_in_range(
    name: str, trace: Trace, streams: int, hardware: HardwareModel
) -> None:
    graph = OpGraph.build(trace, hardware)
    made = POLICIES[name](graph, streams)
    assert sorted(made.order) == list(range(len(graph)))
    assert is_legal_order(made.order, graph.preds)
    assert len(made.streams) == len(graph)
    assert all(0 <= stream < streams for stream in made.streams)
    assert made.policy == name
    assert made.check(graph) == Schedule.from_document(made.to_document(trace), graph) == made


@pytest.mark.parametrize("name", POLICIES)
@settings(max_examples=12)
@given(trace=traces(), chain_ns=st.sampled_from((0.0, 405.3)))
def test_on_one_stream_every_policy_takes_the_sequential_time(name: str, trace: Trace, chain_ns: float) -> None:
    graph = OpGraph.build(trace, make_hardware(chain_ns=chain_ns, slowdown=0.8))
    sequential = makespan_ns(graph, POLICIES["sequential"](graph, 1))
    assert makespan_ns(graph, POLICIES[name](graph, 1)) == pytest.approx(sequential, abs=1)


@pytest.mark.parametrize("name", POLICIES)
def test_policy_gives_the_same_assignment_twice(name: str) -> None:
    trace = wide_trace(7, 3000, 3)
    assert POLICIES[name](build_graph(trace), 3) == POLICIES[name](build_graph(trace), 3)


@pytest.mark.parametrize("name", POLICIES)
def test_chain_stays_a_chain_whatever_the_policy(name: str) -> None:
    graph = build_graph(chain_trace(6), make_hardware(chain_ns=100))
    assert makespan_ns(graph, POLICIES[name](graph, 4)) == 6 * 1000 + 5 * 100


@pytest.mark.parametrize("name", [name for name, policy in POLICIES.items() if (policy.max_streams or 4) >= 4])
def test_independent_small_kernels_run_side_by_side(name: str) -> None:
    graph = build_graph(make_trace([op(f"a{i}", "x") for i in range(4)]))
    assert makespan_ns(graph, POLICIES[name](graph, 4)) == 1000


@pytest.mark.parametrize("name", POLICIES)
def test_views_go_to_the_stream_of_what_they_look_at(name: str) -> None:
    steps = [
        op("a", "x"),
        op("b", "x"),
        view("va", "a"),
        view("vva", "va"),
        view("vb", "b"),
        op("c", "vva"),
        op("d", "vb"),
    ]
    graph = build_graph(make_trace(steps))
    found = streams_by_name(graph, POLICIES[name](graph, 2))
    assert found["va"] == found["vva"] == found["a"]
    assert found["vb"] == found["b"]


def test_sequential_keeps_the_recorded_order_on_one_stream() -> None:
    graph = build_graph(wide_trace(3))
    assert POLICIES["sequential"](graph, 8) == Schedule(tuple(range(len(graph))), (0,) * len(graph))


# --- Levels ---


def test_level_is_the_number_of_ops_with_work_on_the_longest_chain_before() -> None:
    steps = [op("a", "x"), view("v", "a"), op("b", "v"), op("c", "x"), op("d", "b c")]
    # the view adds no level: b comes right after a
    assert build_graph(make_trace(steps)).level == (0, 1, 1, 0, 2)


def test_wavefront_goes_level_by_level_longest_first_to_the_least_loaded_stream() -> None:
    steps = [op("a", "x", dur_ns=100), op("b", "x", dur_ns=300), op("c", "x", dur_ns=200), op("d", "a", dur_ns=50)]
    graph = build_graph(make_trace(steps))
    made = wavefront(graph, 2)
    # level 0: b (300) to 0, c (200) to 1, a (100) to 1; level 1 starts anew: d to 0
    assert order_by_name(graph, made) == ["b", "c", "a", "d"]
    assert streams_by_name(graph, made) == {"b": 0, "c": 1, "a": 1, "d": 0}


def test_round_robin_deals_each_level_to_the_streams_in_turn() -> None:
    steps = [op(f"a{i}", "x", dur_ns=100 * (i + 1)) for i in range(4)] + [op("b0", "a0"), op("b1", "a3")]
    graph = build_graph(make_trace(steps))
    made = POLICIES["round_robin"](graph, 3)
    assert streams_by_name(graph, made) == {"a0": 0, "a1": 1, "a2": 2, "a3": 0, "b0": 0, "b1": 1}
    assert order_by_name(graph, made) == ["a0", "a1", "a2", "a3", "b0", "b1"]


# --- Critical path ---


def test_critical_path_picks_the_branch_with_the_longest_chain_behind_it_first() -> None:
    # recorded last, and its own first op the shortest of all: what counts is what hangs on it
    short = [op(f"s{i}", "x", dur_ns=900, blocks=WHOLE) for i in range(3)]
    long = [op("l0", "x", dur_ns=100), op("l1", "l0", dur_ns=5000), op("l2", "l1", dur_ns=5000)]
    graph = build_graph(make_trace([*short, *long]))
    made = POLICIES["critical_path"](graph, 2)
    assert order_by_name(graph, made)[0] == "l0"
    assert makespan_ns(graph, made) < makespan_ns(graph, POLICIES["round_robin"](graph, 2))


def test_bottom_level_is_the_longest_chain_of_solo_times_to_the_end() -> None:
    steps = [op("a", "x", dur_ns=1000), op("b", "a", dur_ns=300), op("c", "a", dur_ns=700), op("d", "b c", dur_ns=10)]
    graph = build_graph(make_trace(steps), make_hardware(chain_ns=100))
    assert graph.bottom_ns == (1100 + 800 + 110, 400 + 110, 800 + 110, 110)


def test_successor_stays_on_its_predecessors_stream_where_that_saves_an_event() -> None:
    graph = build_graph(wide_trace(4, 5000, 5))
    made = POLICIES["critical_path"](graph, 4)
    sync = plan_sync(graph.trace, graph.preds, made.order, made.streams)
    # the stem's event for three streams, three events for the join, and one for the end of the step
    assert sync.events <= 1 + 3 + 1


def test_ops_of_several_kernels_run_in_one_piece() -> None:
    double = Step("a", "x", "a", kernels=(kernel(100), kernel(200)))
    graph = build_graph(make_trace([double, op("b", "a")]), make_hardware(chain_ns=10))
    assert (
        list_schedule(graph, 2, graph.bottom_ns).makespan_ns
        == makespan_ns(graph, POLICIES["sequential"](graph, 1))
        == 1320
    )


@settings(max_examples=60)
@given(traces(), hardware_models(), st.integers(1, 6))
def test_list_schedulers_own_makespan_is_near_the_engines(trace: Trace, hardware: HardwareModel, streams: int) -> None:
    """With several streams its gaps are those of a graph with branches, even where the schedule is a single chain.

    It leaves out the turns of a fork's successors (`fork_ns`) and what products lose beside others (`product_frac`):
    with short kernels more than the tolerance.
    """
    costs = msgspec.structs.replace(hardware.graph, fork_ns=0.0, product_frac=0.0)
    graph = OpGraph.build(trace, msgspec.structs.replace(hardware, graph=costs))
    made = list_schedule(graph, streams, graph.bottom_ns, 0.0)
    if streams > 1:
        costs = graph.hardware.graph
        costs = msgspec.structs.replace(costs, chain_ns=costs.chain_ns + costs.branch_ns, branch_ns=0.0)
        graph = dataclasses.replace(graph, hardware=msgspec.structs.replace(graph.hardware, graph=costs))
    expected = makespan_ns(graph, made.schedule)
    assert made.makespan_ns == pytest.approx(expected, rel=LIST_SCHEDULE_TOLERANCE, abs=1)


@settings(max_examples=60)
@given(traces(), st.integers(1, 6), st.sampled_from((0.0, 100.0)), st.sampled_from((0.0, 250.0)))
def test_list_schedulers_own_makespan_is_the_engines_where_no_op_is_held_back_and_joins_cost_nothing(
    trace: Trace, streams: int, chain_ns: float, front_end_ns: float
) -> None:
    graph = OpGraph.build(trace, make_hardware(chain_ns=chain_ns, front_end_ns=front_end_ns, slowdown=0.8))
    made = list_schedule(graph, streams, graph.bottom_ns, 0.0)
    assert made.makespan_ns == pytest.approx(makespan_ns(graph, made.schedule), abs=1)


def test_list_schedulers_own_makespan_is_an_estimate_where_sms_are_shared_one_by_one() -> None:
    """The bundled models have block-level SMs; the list scheduler sees one pool."""
    graph = OpGraph.build(load_trace("googlenet-train-b8"), load_hardware("h200"))
    made = list_schedule(graph, 4, graph.bottom_ns, 0.0)
    expected = makespan_ns(graph, made.schedule)
    assert made.makespan_ns != pytest.approx(expected, rel=1e-3)
    assert made.makespan_ns == pytest.approx(expected, rel=0.1)
