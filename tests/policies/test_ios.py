"""IOS: units and blocks, the cost of a stage, the dynamic program against enumeration."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from typing import Any

import msgspec
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from gpusim.engine.base import engine_by_name
from gpusim.formats.hardware import HardwareModel, load_hardware
from gpusim.formats.trace import Trace
from gpusim.plan.graph import OpGraph
from gpusim.plan.tasks import Plan, Task
from gpusim.policies import ios as ios_module
from gpusim.policies.ios import Stage, ios, ios_stages, place_stage, stage_ns
from gpusim.policies.shared.dag import Dag, mask_of, maximum_matching
from gpusim.policies.shared.ios_blocks import Units, articulations, blocks_of, narrowest, units_of
from gpusim.trace.store import load_trace
from tests.support.helpers import (
    HALF,
    WHOLE,
    Step,
    build_graph,
    hardware_models,
    kernel,
    lowered,
    make_hardware,
    make_trace,
    op,
    task,
    traces,
)

INCEPTION = "inception_v3-infer-b1"


def conv(name: str, reads: str, groups: int = 1, dur_ns: int = 1000) -> Step:
    """A convolution."""
    rest = (None, [1], [0], [1], False, [0], groups)
    kernels = (kernel(dur_ns),)
    return Step(name, f"{reads} w{name}", name, kernels=kernels, target="aten.convolution.default", args=rest)


def named(graph: OpGraph, units: Units) -> list[str]:
    """Return the names of each unit's ops."""
    return [" ".join(graph.trace.ops[index].name for index in unit) for unit in units.ops]


def stages_by_name(graph: OpGraph) -> list[list[str]]:
    """Stages, each a list of groups, each the names of its ops."""
    units = units_of(graph)
    names = named(graph, units)
    return [[" ".join(names[u] for u in group) for group in stage] for stage in ios_stages(graph, units, 8)]


# --- Units ---


def test_unit_is_a_convolution_with_what_follows_without_a_branch() -> None:
    steps = [conv("c", "x"), op("bn", "c"), op("relu", "bn"), conv("d", "relu"), op("e", "relu")]
    graph = build_graph(make_trace(steps))
    units = units_of(graph)
    assert named(graph, units) == ["c bn relu", "d", "e"]
    assert units.dag.preds == ((), (0,), (0,))


def test_second_convolution_begins_a_unit_of_its_own() -> None:
    graph = build_graph(make_trace([op("relu", "x"), conv("c", "relu"), op("bn", "c"), conv("d", "bn"), op("e", "d")]))
    assert named(graph, units_of(graph)) == ["relu c bn", "d e"]


def test_depthwise_convolution_belongs_to_the_pointwise_one_behind_it() -> None:
    steps = [op("relu", "x"), conv("dw", "relu", groups=8), conv("pw", "dw"), op("bn", "pw")]
    steps += [conv("dw2", "bn", groups=8), conv("pw2", "dw2")]
    graph = build_graph(make_trace(steps))
    assert named(graph, units_of(graph)) == ["relu dw pw bn", "dw2 pw2"]


def test_dependency_that_a_longer_path_implies_makes_no_branch() -> None:
    # training keeps c for its backward: c -> back is implied by c -> relu -> back
    graph = build_graph(make_trace([conv("c", "x"), op("relu", "c"), op("back", "relu c")]))
    assert named(graph, units_of(graph)) == ["c relu back"]


# --- Blocks ---


def test_articulation_is_what_every_other_node_comes_before_or_after() -> None:
    # 0 -> (1, 2) -> 3 -> 4, and 5 beside 4
    assert articulations(Dag(((), (0,), (0,), (1, 2), (3,), (3,)))) == [0, 3]


def test_block_ends_with_its_articulation() -> None:
    dag = Dag(((), (0,), (0,), (1, 2), (3,), (3,)))
    assert blocks_of(dag, 10) == [range(1), range(1, 4), range(4, 6)]


def test_large_block_is_cut_where_the_fewest_results_cross() -> None:
    # cells of three branches and their join; the third cell reads the first one, too
    dag = Dag(((), (), (), (0, 1, 2), (3,), (3,), (3,), (4, 5, 6), (7,), (7,), (3,), (8, 9, 10)))
    # between cells 1 and 2 results cross, within a cell up to 4
    assert narrowest(dag, range(12), 5) == [range(4), range(4, 8), range(8, 12)]
    assert narrowest(dag, range(12), 12) == [range(12)]
    assert narrowest(dag, range(12), 1) == [range(node, node + 1) for node in range(12)]


@given(traces(), st.integers(1, 6))
def test_blocks_cover_all_units_in_order_within_the_limit(trace: Trace, limit: int) -> None:
    graph = build_graph(trace)
    units = units_of(graph)
    assert sorted(o for unit in units.ops for o in unit) == list(graph.work_preds)
    blocks = blocks_of(units.dag, limit)
    assert [node for block in blocks for node in block] == list(range(len(units)))
    assert all(0 < len(block) <= limit for block in blocks)


def test_last_block_of_inception_v3_has_the_size_and_width_that_ios_counts() -> None:
    units = units_of(OpGraph.build(load_trace(INCEPTION), load_hardware("h200")))
    blocks = blocks_of(units.dag, 25)
    assert max(map(len, blocks)) == len(blocks[-1]) == 11 + 1  # and the concatenation, its articulation
    inner = blocks[-1][:-1]
    behind = [[late for late in inner if units.dag.ancestors[late] >> node & 1] for node in inner]
    pairs = maximum_matching([mask_of(late - inner.start for late in found) for found in behind], len(inner))
    assert sum(pair < 0 for pair in pairs) == 6  # the fewest chains that cover it (Dilworth)


# --- The cost of a stage ---


def test_single_group_costs_what_it_takes_in_sequence() -> None:
    hardware = make_hardware(chain_ns=100, join_ns=50, front_end_ns=200, slowdown=0.8)
    assert stage_ns([[task(1000), task(300, part=1.0)]], hardware) == 1000 + 300 + 2 * 100


def test_barrier_costs_a_fork_before_and_a_join_behind() -> None:
    """The last of three groups starts one turn of the fork later; a stage pays for it, whichever group is longest."""
    hardware = make_hardware(chain_ns=100, fork_ns=30, join_ns=50)
    assert stage_ns([[task(1000)], [task(400), task(500)], [task(10)]], hardware) == 100 + 30 + 400 + 100 + 500 + 50


def test_groups_that_do_not_fit_side_by_side_wait_for_room() -> None:
    assert stage_ns([[task(1000, part=1.0)], [task(1000, part=1.0)]], make_hardware()) == 2000


def test_groups_start_no_faster_than_the_front_end() -> None:
    assert stage_ns([[task(1000, part=0.1)] for _ in range(4)], make_hardware(front_end_ns=200)) == 1000 + 3 * 200


@given(
    groups=st.lists(
        st.lists(
            st.builds(
                lambda dur_ns, part, dram_bytes: task(dur_ns, part, dram_bytes=dram_bytes),
                st.integers(1, 5000),
                st.sampled_from((0.05, 0.3, 0.7, 1.0)),
                st.sampled_from((0.0, 1e6)),
            ),
            min_size=1,
            max_size=3,
        ),
        min_size=1,
        max_size=4,
    ),
    front_end_ns=st.sampled_from((0.0, 130.5)),
    slowdown=st.sampled_from((0.0, 0.6)),
)
def test_stage_takes_what_the_engine_makes_of_its_groups(
    groups: list[list[Task]], front_end_ns: float, slowdown: float
) -> None:
    hardware = make_hardware(chain_ns=77.7, front_end_ns=front_end_ns, slowdown=slowdown)
    tasks = [msgspec.structs.replace(each, queue=queue) for queue, group in enumerate(groups) for each in group]
    engine_ns = engine_by_name("reference").run(Plan(tuple(tasks)), hardware).makespan_ns
    # in the engine the first kernels of all are ready at once; in a stage, after the barrier's gap
    assert stage_ns(groups, hardware) == pytest.approx(engine_ns + 77.7, abs=1)


@settings(max_examples=60)
@given(traces(max_ops=8), hardware_models(), st.integers(1, 3), st.integers(1, 4))
def test_compiled_search_finds_and_times_the_stages_that_the_plain_cost_gives(
    trace: Trace, hardware: HardwareModel, max_group: int, grids: int
) -> None:
    """The cost of a stage is implemented twice: equal stages at equal times, to the last bit."""
    limits = msgspec.structs.replace(hardware.limits, resident_grids=grids)
    graph = OpGraph.build(trace, msgspec.structs.replace(hardware, limits=limits))
    units = units_of(graph)
    compiled: list[Any] = []
    plain: list[Any] = []
    times = ios_module._Block._times_ns

    def both(block: ios_module._Block, stages: Any) -> Any:
        (plain if block.cost else compiled).append(found := times(block, stages))
        return found

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ios_module, "MAX_GROUP", max_group)
        patch.setattr(ios_module._Block, "_times_ns", both)
        assert ios_stages(graph, units, 8) == ios_stages(graph, units, 8, stage_ns)
    assert [found.tolist() for found in compiled] == [found.tolist() for found in plain]


def test_more_room_is_made_for_sets_where_it_is_needed(monkeypatch: pytest.MonkeyPatch) -> None:
    graph = build_graph(make_trace([conv(f"a{n}", "x") for n in range(6)] + [conv("j", "a0 a1 a2 a3 a4 a5")]))
    wanted = stages_by_name(graph)
    monkeypatch.setattr(ios_module, "FEWEST_SETS", 1)
    assert stages_by_name(graph) == wanted


# --- The search ---


def made_up_cost(seed: int) -> Callable[[Sequence[Sequence[Task]], HardwareModel], float]:
    """A cost unrelated to time, which depends only on the ops in the stage."""

    def cost(groups: Sequence[Sequence[Task]], hardware: HardwareModel) -> float:
        ops = sorted(each.op for group in groups for each in group)
        return random.Random(f"{seed} {ops}").uniform(1, 2) * (1 + 0.3 * len(ops))

    return cost


def least_cost(
    dag: Dag, state: frozenset[int], cost: Callable[[frozenset[int]], float], max_group: int, max_groups: int
) -> float:
    """Return the least cost of any sequence of stages, by trying every subset as the last one."""
    if not state:
        return 0.0
    nodes = sorted(state)
    best = float("inf")
    for mask in range(1, 1 << len(nodes)):
        last = frozenset(node for bit, node in enumerate(nodes) if mask >> bit & 1)
        if any(s in state and s not in last for node in last for s in dag.succs[node]):
            continue
        groups = connected(dag, last)
        if len(groups) <= max_groups and all(len(group) <= max_group for group in groups):
            best = min(best, cost(last) + least_cost(dag, state - last, cost, max_group, max_groups))
    return best


def connected(dag: Dag, nodes: frozenset[int]) -> list[set[int]]:
    """Return the connected components of `nodes`."""
    parts: list[set[int]] = []
    for node in sorted(nodes):
        near = {p for p in dag.preds[node] if p in nodes}
        joined = {node}.union(*(part for part in parts if part & near))
        parts = [part for part in parts if not part & near] + [joined]
    return parts


@settings(max_examples=40, deadline=None)
@given(data=st.data(), seed=st.integers(0, 100), max_group=st.integers(1, 3))
def test_search_finds_the_least_cost_of_all_sequences_of_stages(data: st.DataObject, seed: int, max_group: int) -> None:
    count = data.draw(st.integers(1, 6))
    preds = [data.draw(st.sets(st.integers(0, n - 1), max_size=2)) if n else set() for n in range(count)]
    # convolutions, so that each is a unit
    graph = build_graph(make_trace([conv(f"a{n}", " ".join(f"a{p}" for p in ps) or "x") for n, ps in enumerate(preds)]))
    units = units_of(graph)
    assume(len(units) == count)  # a chain without branches may become one unit
    cost = made_up_cost(seed)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ios_module, "MAX_GROUP", max_group)
        patch.setattr(ios_module, "blocks_of", lambda dag, limit: [range(len(dag))])
        stages = ios_stages(graph, units, 8, cost)

    def stage_cost(nodes: frozenset[int]) -> float:
        return cost([graph.tasks[o] for node in nodes for o in units.ops[node]], graph.hardware)

    found = sum(stage_cost(frozenset(node for group in stage for node in group)) for stage in stages)
    assert found == pytest.approx(least_cost(units.dag, frozenset(range(count)), stage_cost, max_group, 8))
    for stage in stages:
        assert sorted(map(sorted, stage)) == sorted(
            map(sorted, connected(units.dag, frozenset(node for group in stage for node in group)))
        )


def test_two_kernels_of_the_whole_gpu_are_two_stages_since_a_join_costs() -> None:
    steps = [conv("a", "x"), op("b", "a", blocks=WHOLE), op("c", "a", blocks=WHOLE), op("d", "b c")]
    hardware = make_hardware(join_ns=10)
    assert len(stages_by_name(build_graph(make_trace(steps), hardware))) == 4
    halves = [conv("a", "x"), op("b", "a", blocks=HALF), op("c", "a", blocks=HALF), op("d", "b c")]
    assert stages_by_name(build_graph(make_trace(halves), hardware)) == [["a"], ["b", "c"], ["d"]]


def test_groups_of_unequal_length_are_balanced() -> None:
    # one branch of 3000, and 1000 + 1000 + 1000: one stage, the chain a group of r = 3 units
    chain = [conv("b0", "s"), conv("b1", "b0"), conv("b2", "b1")]
    graph = build_graph(make_trace([conv("s", "x"), conv("a", "s", dur_ns=3000), *chain, conv("j", "a b2")]))
    assert stages_by_name(graph) == [["s"], ["a", "b0 b1 b2"], ["j"]]


def test_stage_has_no_more_groups_than_there_are_streams() -> None:
    graph = build_graph(make_trace([conv(f"a{n}", "x") for n in range(5)]))
    for streams in (2, 3):
        stages = ios_stages(graph, units_of(graph), streams)
        assert max(len(stage) for stage in stages) == streams
        assert max(ios(graph, streams).streams) == streams - 1
    assert max(len(stage) for stage in ios_stages(graph, units_of(graph), 8)) == 5


def test_block_that_is_too_large_is_searched_with_smaller_groups_and_then_in_pieces(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    chains = [conv(f"{b}{n}", f"{b}{n - 1}" if n else "x") for b in "abc" for n in range(4)]
    graph = build_graph(make_trace(chains))
    units = units_of(graph)

    def sizes() -> tuple[int, int]:
        """Return the units of the largest group and of the largest stage; every unit is in one stage."""
        stages = ios_stages(graph, units, 8)
        assert sorted(node for stage in stages for group in stage for node in group) == list(range(12))
        return (
            max(len(group) for stage in stages for group in stage),
            max(sum(map(len, stage)) for stage in stages),
        )

    assert sizes() == (3, 9)
    monkeypatch.setattr(ios_module, "BLOCK_EFFORT", 20_000)
    assert sizes() == (1, 3)  # the same depth in each branch, side by side
    monkeypatch.setattr(ios_module, "BLOCK_EFFORT", 500)
    assert sizes()[1] < 3  # in pieces, which hold parts of two branches at most


@settings(max_examples=60)
@given(trace=traces(max_ops=12), max_groups=st.integers(1, 8), effort=st.integers(1, 3000))
def test_groups_of_a_block_are_the_largest_that_its_effort_allows(trace: Trace, max_groups: int, effort: int) -> None:
    """Found from the smallest on: an r that takes too much rules out those above."""
    graph = OpGraph.build(trace, make_hardware())
    units = units_of(graph)
    block = ios_module._Block(graph, units, range(len(units)), None)
    tried = [block._find(max_group, max_groups, effort) for max_group in (3, 2, 1)]
    largest = next((found.max_group for found in tried if found is not None), None)
    found = block.within(max_groups, effort)
    assert (found.max_group if found is not None else None) == largest


@settings(max_examples=60, deadline=None)
@given(data=st.data(), max_group=st.integers(1, 3), max_groups=st.integers(1, 8), stage_effort=st.sampled_from((0, 50)))
def test_search_takes_just_the_effort_of_its_endings_and_stages(
    data: st.DataObject, max_group: int, max_groups: int, stage_effort: int
) -> None:
    """Those of single nodes are counted at once before they are visited; one less effort is too little all the same."""
    preds = [data.draw(st.sets(st.integers(0, n - 1), max_size=2)) if n else set() for n in range(7)]
    graph = build_graph(make_trace([conv(f"a{n}", " ".join(f"a{p}" for p in ps) or "x") for n, ps in enumerate(preds)]))
    units = units_of(graph)
    block = ios_module._Block(graph, units, range(len(units)), None)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ios_module, "STAGE_EFFORT", stage_effort)
        found = block._find(max_group, max_groups, 10**9)
        assert found is not None
        states, stages = (sets.values[: sets.used[0]].tolist() for sets in (found.states, found.stages))
        endings = sum(is_last(block, stage, state) for state in states for stage in stages)
        effort = endings + stage_effort * len(stages)
        assert block._find(max_group, max_groups, effort) is not None
        assert block._find(max_group, max_groups, effort - 1) is None


def is_last(block: ios_module._Block, ending: int, state: int) -> bool:
    """Whether `ending` is a subset of `state` without edges to the rest of it."""
    rest = state & ~ending
    nodes = [node for node in range(len(block.tasks)) if ending >> node & 1]
    return ending & ~state == 0 and not any(int(block.succs[node]) & rest for node in nodes)


def test_effort_of_all_blocks_together_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[int] = []

    def cost(groups: Sequence[Sequence[Task]], hardware: HardwareModel) -> float:
        calls.append(1)
        return 1.0

    graph = build_graph(make_trace([conv(f"{b}{n}", f"{b}{n - 1}" if n else "x") for n in range(20) for b in "abcd"]))
    units = units_of(graph)
    ios_stages(graph, units, 8, cost)
    unbounded = len(calls)
    for effort in (100_000, 10_000, 0):
        monkeypatch.setattr(ios_module, "EFFORT", effort)
        calls.clear()
        ios_stages(graph, units, 8, cost)
        # one stage for each unit is the least there can be
        assert len(calls) <= max(effort / ios_module.STAGE_EFFORT, len(units)) < unbounded


# --- Streams ---


def test_group_follows_its_inputs_where_the_stream_is_free() -> None:
    units = Units(((0,), (1,), (2,), (3,), (4,)), Dag(((), (), (0,), (1,), (1,))))
    order: list[int] = []
    streams: dict[int, int] = {}
    stages: list[Stage] = [((0,), (1,)), ((3,), (2,), (4,))]
    for stage in stages:
        place_stage(units, stage, 3, order, streams)
    assert order == [0, 1, 3, 2, 4]
    # 3 and 2 follow 1 and 0; 4 finds 1's stream taken
    assert streams == {0: 0, 1: 1, 3: 1, 2: 0, 4: 2}


def test_barriers_are_not_enforced_when_the_schedule_runs() -> None:
    # stages [s], [a b], [c d], [j] by cost; but c needs a alone, and starts before b ends
    steps = [conv("s", "x"), conv("a", "s"), conv("b", "s", dur_ns=3000), conv("c", "a", dur_ns=3000), conv("d", "b")]
    graph = build_graph(make_trace([*steps, conv("j", "c d")]))
    units = units_of(graph)
    stages = [((0,),), ((1,), (2,)), ((3,), (4,)), ((5,),)]
    order: list[int] = []
    streams: dict[int, int] = {}
    for stage in stages:
        place_stage(units, stage, 2, order, streams)
    plan = lowered(graph, order, [streams[node] for node in range(6)])
    with_barriers = 1000 + 3000 + 3000 + 1000
    assert engine_by_name("reference").run(plan, graph.hardware).makespan_ns == with_barriers - 2000
