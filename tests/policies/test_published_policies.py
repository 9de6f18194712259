"""Published systems: the rule of each in a case worked out by hand, and common properties of all."""

from __future__ import annotations

from dataclasses import replace
from itertools import combinations

import msgspec
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from gpusim.engine.base import engine_by_name
from gpusim.formats.hardware import load_hardware
from gpusim.formats.trace import Phase, Trace
from gpusim.io.file_limits import MAX_STREAMS
from gpusim.plan.graph import OpGraph, is_legal_order
from gpusim.plan.lower import lower
from gpusim.plan.schedule import Schedule
from gpusim.plan.sync import plan_sync
from gpusim.policies import ios as ios_module
from gpusim.policies import registry
from gpusim.policies.nimble import chains_of, nimble, pack
from gpusim.policies.ooo_backprop import ooo_backprop, weight_gradients
from gpusim.policies.opara import handed_on, opara
from gpusim.policies.registry import POLICIES, RegisteredPolicy
from gpusim.policies.sequential import sequential
from gpusim.policies.shared.dag import work_dag
from gpusim.policies.shared.op_kinds import is_compute_intensive, is_depthwise
from gpusim.policies.torchsched import torchsched
from gpusim.policies.trtllm import trtllm
from gpusim.policies.turbodl import paths, turbodl
from gpusim.search.explore import explore
from gpusim.trace.store import bundled_traces, load_trace
from tests.support.helpers import (
    HALF,
    WHOLE,
    Step,
    ancestors,
    build_graph,
    chain_trace,
    kernel,
    make_hardware,
    make_trace,
    op,
    traces,
    view,
    wide_trace,
)

PHASES: tuple[Phase, ...] = ("forward", "backward", "optimizer")


def streams_by_name(graph: OpGraph, schedule: Schedule) -> dict[str, int]:
    return {found.name: stream for found, stream in zip(graph.trace.ops, schedule.streams, strict=True)}


def order_by_name(graph: OpGraph, schedule: Schedule) -> list[str]:
    return [graph.trace.ops[index].name for index in schedule.order]


def makespan_ns(graph: OpGraph, schedule: Schedule) -> int:
    plan = lower(graph, schedule)
    return engine_by_name("reference").run(plan, graph.hardware).makespan_ns


def in_phase(phase: Phase, *steps: Step) -> list[Step]:
    return [replace(step, phase=phase) for step in steps]


def conv(name: str, reads: str, blocks: int = 1, groups: int = 1) -> Step:
    """A convolution."""
    rest = (None, [1], [0], [1], False, [0], groups)
    return Step(
        name,
        f"{reads} w{name}",
        name,
        kernels=(kernel(1000, blocks),),
        target="aten.convolution.default",
        args=rest,
    )


@st.composite
def training_traces(draw: st.DrawFn) -> Trace:
    """Draw a random trace whose ops have phases: mostly in order, as in a step, or any."""
    trace = draw(traces())
    phases = draw(st.lists(st.sampled_from(PHASES), min_size=len(trace.ops), max_size=len(trace.ops)))
    if draw(st.integers(0, 3)):
        phases.sort(key=PHASES.index)
    ops = [msgspec.structs.replace(found, phase=phase) for found, phase in zip(trace.ops, phases, strict=True)]
    return msgspec.structs.replace(trace, ops=tuple(ops))


# --- What holds for all ---


@pytest.mark.parametrize("name", POLICIES)
@settings(max_examples=12)
@given(trace=training_traces(), streams=st.integers(1, 9))
def test_every_op_of_a_training_step_is_placed_once_after_what_it_needs(name: str, trace: Trace, streams: int) -> None:
    graph = build_graph(trace, make_hardware(chain_ns=300, join_ns=40, front_end_ns=200, slowdown=0.6))
    made = POLICIES[name](graph, streams)
    assert is_legal_order(made.order, graph.preds)
    assert len(made.streams) == len(graph)
    assert all(0 <= stream < streams for stream in made.streams)
    assert made == POLICIES[name](graph, streams)


@pytest.mark.parametrize("trace", bundled_traces())
def test_policies_are_legal_on_bundled_traces(trace: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ios_module, "BLOCK_EFFORT", 2000)
    graph = OpGraph.build(load_trace(trace), load_hardware("h200"))
    for policy in POLICIES.values():
        for streams in policy.stream_counts((2, 5)):
            made = policy(graph, streams)
            assert is_legal_order(made.order, graph.preds), policy.name
            assert len(made.streams) == len(graph)
            assert all(0 <= stream < streams for stream in made.streams), policy.name


# --- The registry ---


def test_registry_knows_each_policy_by_its_own_name() -> None:
    assert all(name == policy.name and policy.source for name, policy in POLICIES.items())


def test_policy_without_use_for_more_streams_is_tried_once_with_those_it_uses() -> None:
    assert POLICIES["sequential"].stream_counts((2, 4, 8)) == (1,)
    assert POLICIES["ooo_backprop"].stream_counts((2, 4, 8)) == (2,)
    assert POLICIES["ooo_backprop"].stream_counts((1,)) == (1,)
    assert POLICIES["wavefront"].stream_counts((2, 4, 8)) == (2, 4, 8)
    assert POLICIES["ios"].stream_counts((2, 4, 16, 128)) == (2, 4, 8)


LIMITED = {name: policy.max_streams for name, policy in POLICIES.items() if policy.max_streams is not None}


@pytest.mark.parametrize("name", LIMITED)
@settings(max_examples=25)
@given(trace=training_traces())
@example(trace=wide_trace(12, depth=1))
def test_schedule_on_more_streams_than_a_policy_uses_is_that_on_those_it_uses(name: str, trace: Trace) -> None:
    """A stage of IOS has at most eight groups; the branches of the wide step would fill twelve streams."""
    graph = build_graph(trace)
    made = [POLICIES[name](graph, count) for count in (LIMITED[name], LIMITED[name] + 1, MAX_STREAMS)]
    assert made[0] == made[1] == made[2]
    assert made[2].stream_count <= LIMITED[name]


def test_explore_runs_a_slow_policy_only_where_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(registry.POLICIES, "patient", RegisteredPolicy("patient", sequential, "here", slow=True))
    trace = chain_trace(2)
    for also in ((), ("patient",)):
        found = explore(build_graph(trace, make_hardware()), streams=2, budget_s=0.0, also=also)
        assert ("patient" in {row.policy for row in found.rows}) == bool(also)


# --- Nimble ---


def test_nimble_needs_two_waits_for_a_diamond() -> None:
    # a -> d is implied; of the other 4 edges a matching takes 2, and 4 - 2 are left to wait for
    graph = build_graph(make_trace([op("a", "x"), op("b", "a"), op("c", "a"), op("d", "a b c")], outputs="d"))
    made = nimble(graph, 4)
    assert streams_by_name(graph, made) == {"a": 0, "b": 0, "c": 1, "d": 0}
    assert plan_sync(graph.trace, graph.preds, made.order, made.streams).events == 2


def test_nimble_puts_chains_that_the_data_orders_on_one_stream() -> None:
    # two diamonds in a row: the side of the second begins only after that of the first has been joined
    steps = [op("a", "x"), op("b", "a"), op("c", "a"), op("d", "b c"), op("e", "d"), op("f", "d"), op("g", "e f")]
    graph = build_graph(make_trace(steps))
    _, dag = work_dag(graph)
    assert chains_of(dag) == [[0, 1, 3, 4, 6], [2], [5]]
    assert pack(dag, chains_of(dag)) == [[0, 1, 3, 4, 6], [2, 5]]
    assert max(nimble(graph, 8).streams) == 1


def test_nimble_folds_longest_first_onto_the_least_loaded_stream() -> None:
    graph = build_graph(make_trace([op("a", "x", dur_ns=100), op("b", "x", dur_ns=300), op("c", "x", dur_ns=250)]))
    assert streams_by_name(graph, nimble(graph, 2)) == {"b": 0, "c": 1, "a": 1}
    assert streams_by_name(graph, nimble(graph, 3)) == {"b": 0, "c": 1, "a": 2}


@given(traces())
def test_nimble_keeps_all_concurrency_and_waits_as_rarely_as_a_matching_allows(trace: Trace) -> None:
    graph = build_graph(trace)
    ops, dag = work_dag(graph)
    before = ancestors(dag.preds)
    chain_of = {node: number for number, chain in enumerate(chains_of(dag)) for node in chain}
    lane_of = {node: number for number, lane in enumerate(pack(dag, chains_of(dag))) for node in lane}
    assert sorted(lane_of) == sorted(chain_of) == list(range(len(ops)))
    for one, other in combinations(range(len(ops)), 2):
        if one not in before[other]:
            assert chain_of[one] != chain_of[other]
            assert lane_of[one] != lane_of[other]
    edges = [(p, node) for node, found in enumerate(dag.reduced.preds) for p in found]
    matched = len(ops) - len(set(chain_of.values()))
    assert sum(chain_of[p] != chain_of[node] for p, node in edges) == len(edges) - matched
    assert len(set(lane_of.values())) <= len(set(chain_of.values()))


# --- Opara ---


def test_opara_hands_each_stream_on_once_and_opens_one_where_none_is_left() -> None:
    steps = [op("a", "x"), op("b", "a"), op("c", "a"), op("d", "b c"), op("e", "c"), op("f", "a d")]
    graph = build_graph(make_trace(steps))
    # b claims a's stream, so c opens one; d claims b's (a's), e claims c's; for f, a is claimed and d is not
    assert handed_on(work_dag(graph)[1]) == [0, 0, 1, 0, 1, 0]
    assert streams_by_name(graph, opara(graph, 8)) == {"a": 0, "b": 0, "c": 1, "d": 0, "e": 1, "f": 0}


def test_opara_folds_streams_modulo_the_limit() -> None:
    graph = build_graph(make_trace([op(f"a{i}", "x") for i in range(5)]))
    assert streams_by_name(graph, opara(graph, 2)) == {"a0": 0, "a1": 1, "a2": 0, "a3": 1, "a4": 0}


def test_opara_alternates_between_classes_and_takes_the_smallest_demand_of_each() -> None:
    steps = [
        op("m0", "x", blocks=100),
        op("m1", "x", blocks=10),
        op("m2", "x", blocks=50),
        conv("c0", "x", blocks=30),
        conv("c1", "x", blocks=20),
    ]
    graph = build_graph(make_trace(steps))
    # memory-intensive ones by demand: m1, m2, m0; compute-intensive: c1, c0; in turns, then what is left
    assert order_by_name(graph, opara(graph, 2)) == ["m1", "c1", "m2", "c0", "m0"]


def test_opara_puts_successors_into_the_list_of_their_class() -> None:
    graph = build_graph(make_trace([conv("c", "x"), op("m", "c"), conv("d", "x", blocks=5)]))
    # no memory-intensive op is ready at first; c makes m ready, and it is m's turn before d
    assert order_by_name(graph, opara(graph, 2)) == ["c", "m", "d"]
    graph = build_graph(make_trace([op("m", "x"), op("n", "x", blocks=5), conv("c", "m", blocks=9)]))
    # m makes c ready, whose turn it is before n, which needs less
    assert order_by_name(graph, opara(graph, 2)) == ["m", "c", "n"]


@pytest.mark.parametrize(
    ("target", "compute"),
    [
        ("aten.convolution.default", True),
        ("aten.convolution_backward.default", True),
        ("aten.addmm.default", True),
        ("aten.mm.default", True),
        ("aten.baddbmm.default", True),
        ("aten._scaled_dot_product_flash_attention.default", True),
        ("extern_kernels.mm", True),
        ("aten.relu_.default", False),
        ("aten.add.Tensor", False),
        ("aten.native_batch_norm.default", False),
        ("prims.convert_element_type.default", False),
        ("triton_poi_fused_convolution_relu_0", False),
    ],
)
def test_convolutions_products_and_attention_are_compute_intensive(target: str, compute: bool) -> None:
    graph = build_graph(make_trace([replace(op("a", "x"), target=target)]))
    assert is_compute_intensive(graph, 0) == compute


def test_only_a_convolution_in_groups_is_depthwise() -> None:
    graph = build_graph(make_trace([conv("a", "x", groups=32), conv("b", "x"), op("c", "x")]))
    assert [is_depthwise(graph, index) for index in range(3)] == [True, False, False]


# --- torchsched and TurboDL: two ideas of a critical path ---


def paths_trace() -> Trace:
    """Make three short ops in a row next to two long ones."""
    steps = [op("s0", "x", dur_ns=10), op("l0", "x", dur_ns=900), op("s1", "s0", dur_ns=10)]
    return make_trace([*steps, op("l1", "l0", dur_ns=900), op("s2", "s1", dur_ns=10), op("t", "x", dur_ns=10)])


def test_torchsched_counts_ops_and_deals_the_rest_to_side_streams_in_turn() -> None:
    graph = build_graph(paths_trace())
    found = streams_by_name(graph, torchsched(graph, 3))
    assert found == {"s0": 0, "s1": 0, "s2": 0, "l0": 1, "l1": 2, "t": 1}
    assert torchsched(graph, 3).order == tuple(range(6))


def test_torchsched_of_equal_paths_takes_the_first() -> None:
    graph = build_graph(make_trace([op("a", "x"), op("b", "x"), op("c", "a"), op("d", "b"), op("e", "a")]))
    assert streams_by_name(graph, torchsched(graph, 2)) == {"a": 0, "b": 1, "c": 0, "d": 1, "e": 1}


def test_torchsched_keeps_views_with_their_base() -> None:
    graph = build_graph(make_trace([op("a", "x"), op("b", "a"), op("c", "x"), view("v", "c")]))
    assert streams_by_name(graph, torchsched(graph, 3)) == {"a": 0, "b": 0, "c": 1, "v": 1}


def guessed_trace() -> Trace:
    """Make two products of which one waits, and short ops; real times are the other way round."""
    return make_trace([product("a", "x"), op("b", "x", dur_ns=900), op("c", "b"), product("d", "b"), op("e", "a d")])


def product(name: str, reads: str, target: str = "aten.mm.default") -> Step:
    return Step(name, reads, name, kernels=(kernel(10),), target=target)


def test_trtllm_takes_the_longest_guessed_distance_and_the_first_free_stream() -> None:
    """Distances: e 1, d 11, c 1, b 12, a 11. `c` finds no stream free at 1 and takes the one free at 10."""
    graph = build_graph(guessed_trace())
    found = trtllm(graph, 2)
    assert order_by_name(graph, found) == ["b", "a", "d", "c", "e"]
    assert streams_by_name(graph, found) == {"a": 1, "b": 0, "c": 1, "d": 0, "e": 0}


def test_trtllm_leaves_streams_alone_that_it_does_not_need() -> None:
    graph = build_graph(make_trace([op("a", "x"), op("b", "a"), op("c", "b"), view("v", "c")]))
    assert set(streams_by_name(graph, trtllm(graph, 8)).values()) == {0}


def test_attention_is_no_product_to_trtllm() -> None:
    attention = "aten._scaled_dot_product_flash_attention.default"
    graph = build_graph(make_trace([product("a", "x", attention), product("b", "x")]))
    assert order_by_name(graph, trtllm(graph, 1)) == ["b", "a"]


def test_turbodl_measures_paths_by_time_and_keeps_each_on_one_stream() -> None:
    graph = build_graph(paths_trace())
    assert [[graph.trace.ops[index].name for index in path] for path in paths(graph)] == [
        ["l0", "l1"],
        ["s0", "s1", "s2"],
        ["t"],
    ]
    made = turbodl(graph, 3)
    assert streams_by_name(graph, made) == {"l0": 0, "l1": 0, "s0": 1, "s1": 1, "s2": 1, "t": 2}
    # by descending bottom level as streams come free: at 0 l0, s0 and t, then the others
    assert order_by_name(graph, made) == ["l0", "s0", "t", "s1", "s2", "l1"]


def test_turbodl_uses_no_more_streams_than_there_are_hardware_queues() -> None:
    trace = make_trace([op(f"a{i}", "x") for i in range(12)])
    for queues in (2, 8):
        made = turbodl(build_graph(trace, make_hardware(queues=queues)), 12)
        assert len(set(made.streams)) == queues


def test_turbodl_gives_a_path_the_free_side_stream_with_the_least_work() -> None:
    steps = [op("c0", "x", dur_ns=1000), op("a", "x", dur_ns=500), op("b", "x", dur_ns=100)]
    graph = build_graph(make_trace([*steps, op("c1", "c0", dur_ns=1000), op("d", "c0", dur_ns=10)]))
    # when c0 ends and d may start, both side streams are free: 1 has had 500, 2 only 100
    assert streams_by_name(graph, turbodl(graph, 3)) == {"c0": 0, "c1": 0, "a": 1, "b": 2, "d": 2}


def test_turbodl_lets_small_kernels_pass_one_that_finds_no_room_beside_the_critical_path() -> None:
    critical = [op("c0", "x", dur_ns=5000), op("c1", "c0 big", dur_ns=4000)]
    side = [op("big", "x", dur_ns=2000, blocks=WHOLE), op("s0", "x", dur_ns=300), op("s1", "x", dur_ns=200)]
    graph = build_graph(make_trace([*side, *critical]))
    # big is the more urgent (c1 hangs on it), but takes the whole GPU, part of which c0 has
    assert order_by_name(graph, turbodl(graph, 4)) == ["c0", "s0", "s1", "big", "c1"]


def test_turbodl_starts_the_critical_path_even_where_it_finds_no_room() -> None:
    chain = [op("c0", "x", dur_ns=1000), op("c1", "c0", dur_ns=500, blocks=WHOLE), op("c2", "c1", dur_ns=500)]
    side = [op("s", "x", dur_ns=2000, blocks=HALF), op("p", "x", dur_ns=2200), op("v", "p", dur_ns=100)]
    graph = build_graph(make_trace([*chain, op("c3", "c2", dur_ns=1000), *side]))
    # c1 begins at 1000 though s has half the GPU until 2000, so c3 begins at 2000, and v at 2200
    assert order_by_name(graph, turbodl(graph, 3)) == ["c0", "p", "s", "c1", "c2", "c3", "v"]


def test_turbodl_lets_nobody_pass_what_the_critical_path_waits_for() -> None:
    steps = [
        op("c0", "x", dur_ns=5000),
        op("a", "x", dur_ns=5500),
        op("p", "x", dur_ns=5200),
        op("big", "x", dur_ns=2000, blocks=WHOLE),
        op("s", "p", dur_ns=200),
        op("join", "c0 big", dur_ns=1000),
    ]
    graph = build_graph(make_trace(steps))
    # s is ready at 5200, when join waits for big and big for a, which runs until 5500
    assert order_by_name(graph, turbodl(graph, 4)) == ["c0", "a", "p", "big", "join", "s"]


# --- Out-of-order backprop ---


def training_step(sizes: dict[str, int] | None = None) -> Trace:
    """Three layers: forward, loss, data gradients d3, d2, weight gradients w3, w2, w1, one update of all."""
    blocks = {"d3": 1, "d2": 1, "w3": 1, "w2": 1, "w1": 1} | (sizes or {})

    def made(name: str, reads: str) -> Step:
        return op(name, reads, blocks=blocks[name])

    forward = in_phase("forward", op("f1", "x"), op("f2", "f1"), op("f3", "f2"), op("loss", "f3"))
    backward = in_phase(
        "backward",
        made("d3", "loss"),
        made("w3", "loss f2"),
        made("d2", "d3"),
        made("w2", "d3 f1"),
        op("n1", "d2"),
        made("w1", "n1 x"),
    )
    return make_trace([*forward, *backward, *in_phase("optimizer", op("update", "w1 w2 w3"))])


def test_weight_gradients_are_what_nobody_needs_before_the_optimizer() -> None:
    graph = build_graph(training_step())
    # n1, the first layer's normalisation, has only w1 behind it, but w1 is no optimizer
    assert {graph.trace.ops[index].name for index in weight_gradients(graph)} == {"w1", "w2", "w3"}


def test_ooo_backprop_runs_weight_gradients_beside_the_chain_of_data_gradients() -> None:
    graph = build_graph(training_step())
    made = ooo_backprop(graph, 4)
    found = streams_by_name(graph, made)
    assert {name for name, stream in found.items() if stream == 1} == {"w1", "w2", "w3"}
    assert max(made.streams) == 1
    names = ["f1", "f2", "f3", "loss", "d3", "w3", "d2", "w2", "n1", "w1", "update"]
    assert order_by_name(graph, made) == names
    # w3 and w2 take no time of their own: 11 ops, 9 of them one after another
    assert makespan_ns(graph, made) == 9 * 1000


@pytest.mark.parametrize(("blocks", "order"), [(WHOLE, ["small", "e", "old"]), (HALF, ["old", "e", "small"])])
def test_ooo_backprop_takes_the_weight_gradient_that_finds_the_most_room_and_of_equals_the_oldest(
    blocks: int, order: list[str]
) -> None:
    gradients = [op("old", "loss", blocks=blocks), op("small", "loss"), op("d", "loss", blocks=HALF)]
    graph = build_graph(make_trace([op("loss", "x"), *in_phase("backward", *gradients, op("e", "d"), op("u", "e"))]))
    # u has nobody behind it, so it is one of them; d is not, since e needs it
    assert order_by_name(graph, ooo_backprop(graph, 2)) == ["loss", "d", *order, "u"]


def test_ooo_backprop_plans_with_the_time_a_weight_gradient_takes_in_the_room_it_finds() -> None:
    graph = build_graph(training_step({"d3": HALF, "w3": WHOLE}))
    # w3 finds half its room beside d3 and so takes until d2 ends: w2 is ready beside d2, but comes beside n1
    assert order_by_name(graph, ooo_backprop(graph, 2))[4:] == ["d3", "w3", "d2", "n1", "w2", "w1", "update"]
    graph = build_graph(training_step({"d3": WHOLE, "w3": WHOLE}))
    # beside d3 there is none: w3 runs after it, beside d2, which comes to the same
    assert order_by_name(graph, ooo_backprop(graph, 2))[4:] == ["d3", "w3", "d2", "n1", "w2", "w1", "update"]


def test_ooo_backprop_plans_that_the_optimizer_waits_for_its_gradients() -> None:
    gradients = in_phase("backward", op("wa", "loss"), op("wb", "loss"))
    updates = in_phase("optimizer", op("ua", "wa"), op("more", "ua"), op("ub", "wb"))
    graph = build_graph(make_trace([op("loss", "x"), *gradients, *updates]))
    # ua begins when wa ends; beside it there is time for wb
    assert order_by_name(graph, ooo_backprop(graph, 2)) == ["loss", "wa", "ua", "wb", "more", "ub"]


def test_ooo_backprop_without_weight_gradients_or_without_a_second_stream_is_sequential() -> None:
    for graph, streams in ((build_graph(wide_trace(3)), 4), (build_graph(training_step()), 1)):
        assert ooo_backprop(graph, streams) == Schedule(tuple(range(len(graph))), (0,) * len(graph))
