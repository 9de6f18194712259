"""Lower bounds: small cases by hand, their names, and no schedule of any step below them."""

from __future__ import annotations

from itertools import product

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gpusim.bounds import energetic as energy
from gpusim.bounds.bounds import AREA, BANDWIDTH, CONTENTION, CRITICAL_PATH, FRONT_END, Bounds, bounds, front_end_ns
from gpusim.bounds.energetic import Kernels, contention_ns, least_ns
from gpusim.engine.fast import FastEngine
from gpusim.formats.hardware import HardwareModel
from gpusim.formats.schedule import Partition
from gpusim.formats.trace import Trace
from gpusim.plan.graph import OpGraph
from tests.support.helpers import (
    HALF,
    WAVES,
    WHOLE,
    build_graph,
    hardware_models,
    lowered,
    make_hardware,
    make_trace,
    op,
    traces,
    traces_with_schedules,
)

CONTENDED = make_hardware(slowdown=0.8)
ONE_BY_ONE = make_hardware(sharing=0.5)


def one_by_one(hardware: HardwareModel, sharing: float) -> HardwareModel:
    """Return the same GPU with block-level placement, where `sharing` is not 0."""
    contention = msgspec.structs.replace(hardware.contention, sharing_exponent=sharing)
    return msgspec.structs.replace(hardware, contention=contention)


def test_largest_bound_is_the_one_that_binds_and_is_named() -> None:
    names = {
        "critical_path_ns": CRITICAL_PATH,
        "area_ns": AREA,
        "contention_ns": CONTENTION,
        "bandwidth_ns": BANDWIDTH,
        "front_end_ns": FRONT_END,
    }
    for field, name in names.items():
        assert Bounds(**{other: 9 if other == field else 1 for other in names}).largest == (9, name)
    assert Bounds(5, 5, 0, 0, 5).largest == (5, CRITICAL_PATH), "the simplest of those that are equal"


def test_area_and_front_end_bounds_by_hand() -> None:
    # four kernels of 1000 that each take half the GPU: 2000 of its time; five starts, four intervals of 250
    steps = [op(f"a{i}", "x", dur_ns=1000, blocks=HALF) for i in range(4)] + [op("b", "x", dur_ns=0)]
    found = bounds(build_graph(make_trace(steps), make_hardware(front_end_ns=250)))
    assert (found.area_ns, found.front_end_ns, found.critical_path_ns) == (2000, 1000, 1000)


def test_nothing_waits_for_block_turnover_in_partitions() -> None:
    # four kernels of ten waves: the next start waits 1 ns for each of their blocks, or else 100 ns for the front end
    steps = [op(f"a{i}", "x", dur_ns=5000, blocks=WAVES) for i in range(4)]
    graph = build_graph(make_trace(steps), make_hardware(front_end_ns=100, turnover_ns=1.0))
    assert [bounds(graph, partitioned).front_end_ns for partitioned in (False, True)] == [3 * WAVES, 300]


def test_front_end_bound_counts_idle_blocks_except_where_their_kernel_may_be_the_last() -> None:
    graph = build_graph(make_trace([op(f"a{i}", "x", dur_ns=1000) for i in range(4)]), make_hardware(front_end_ns=250))
    for idle_ns, bound_ns in (((0, 0, 0, 0), 750), ((100, 0, 0, 0), 750), ((900, 400, 0, 0), 900)):
        tasks = tuple(
            (msgspec.structs.replace(of_op[0], idle_ns=float(ns)),)
            for of_op, ns in zip(graph.tasks, idle_ns, strict=True)
        )
        assert int(front_end_ns(tasks, graph.hardware)) == bound_ns


def test_two_halves_side_by_side_take_as_long_as_elder_first_has_them() -> None:
    """Both fit, but only one runs at full speed: while it does, the other gets 1 / 1.8 of the way, then is the oldest.

    The bound leaves open who is the oldest when, so they take turns: of the area of 1800 that they would take if
    neither ever were, each ns as the oldest saves 0.8 x 0.5, and there are T of them. 1800 - 0.4 T = T.
    """
    graph = build_graph(make_trace([op("a", "x", blocks=HALF), op("b", "x", blocks=HALF)]), CONTENDED)
    found = bounds(graph)
    assert (found.area_ns, found.critical_path_ns) == (1000, 1000)
    assert found.contention_ns == int(1800 / 1.4) == 1285


def test_blocks_on_one_sm_slow_each_other_down_by_their_load() -> None:
    """Two kernels of a block of 1024 threads an SM: either alone loads the SMs by half, both together once.

    At load 1 a block takes 1000 x 2^0.5 = 1414, on half of an SM's threads: 707 of the GPU, 1414 together. Side by side
    they take as long: it is met.
    """
    steps = [op(f"a{i}", "x", dur_ns=1000, blocks=HALF) for i in range(2)]
    graph = build_graph(make_trace(steps), ONE_BY_ONE)
    found = bounds(graph)
    assert (found.area_ns, found.critical_path_ns, found.contention_ns) == (1414, 1000, 1414)
    assert FastEngine().run(lowered(graph, [0, 1], [0, 1]), graph.hardware).makespan_ns == 1414


def test_last_wave_that_is_not_full_takes_less_area_than_time() -> None:
    """Blocks fill the GPU 2.5 times; the last wave takes 0.5^0.5 of a full one's 3000 / 2.71."""
    steps = [op("a", "x", dur_ns=3000, blocks=5 * HALF)]
    found = bounds(build_graph(make_trace(steps), ONE_BY_ONE))
    assert (found.area_ns, found.critical_path_ns) == (2770, 3000)


@pytest.mark.parametrize("blocks", [4096 * HALF * 2, 4096 * HALF * 2 + 1, 10**9, 2**31 - 1])
def test_a_grid_whose_blocks_stand_for_several_takes_no_more_area_than_time(blocks: int) -> None:
    """Alone a kernel takes its time for any grid: 49 us of the whole GPU, except a partial last wave."""
    graph = build_graph(make_trace([op("a", "x", dur_ns=49_000, blocks=blocks)]), ONE_BY_ONE)
    found = bounds(graph)
    assert FastEngine().run(lowered(graph, [0], [0]), graph.hardware).makespan_ns == 49_000
    assert 0.99 * 49_000 < found.area_ns <= found.largest[0] <= 49_000


def test_without_contention_or_chains_it_is_the_area() -> None:
    steps = [op(f"a{i}", "x", dur_ns=1000, blocks=HALF) for i in range(4)]
    found = bounds(build_graph(make_trace(steps), make_hardware(slowdown=0.0)))
    assert found.contention_ns == found.area_ns == 2000


def test_chains_before_and_behind_add_to_what_runs_between_them() -> None:
    """Six kernels of the whole GPU between two of a single SM: neither the path nor the area alone covers both."""
    middle = [op(f"m{i}", "first", dur_ns=1000, blocks=WHOLE) for i in range(6)]
    last = op("last", " ".join(f"m{i}" for i in range(6)), dur_ns=3000, blocks=1)
    graph = build_graph(
        make_trace([op("first", "x", dur_ns=2000, blocks=1), *middle, last]), make_hardware(chain_ns=100)
    )
    found = bounds(graph)
    assert found.critical_path_ns == 2000 + 100 + 1000 + 100 + 3000
    assert found.contention_ns == 2000 + 100 + 6000 + 100 + 3000
    assert found.area_ns < 6100


def test_step_without_kernels_has_no_bound() -> None:
    assert bounds(build_graph(make_trace([op("v", "x", dur_ns=0)]))).largest[0] == 0
    assert contention_ns(Kernels.of(OpGraph(build_graph(make_trace([])).trace, CONTENDED, (), ()))) == 0.0


@given(
    st.lists(st.tuples(st.floats(1, 100), st.floats(0, 1), st.floats(0, 0.8), st.booleans()), min_size=1, max_size=4)
)
def test_least_time_is_that_of_the_best_choice_of_oldest_kernels(rows: list[tuple[float, float, float, bool]]) -> None:
    """Compared with a grid over each kernel's share as the oldest: no choice is better, and one comes close."""
    rows.sort(key=lambda row: -row[1] * row[2])
    dur, demand, slowdown, inside = (np.array(column) for column in zip(*rows, strict=True))
    dur = np.where(inside, dur, 0.0)
    costs = demand * slowdown
    area = float((dur * demand * (1 + slowdown)).sum())
    found = float(least_ns(dur[None, :], costs, np.array([area]))[0])
    steps = 8
    tried = [
        max(float(share @ dur), area - float(share @ (dur * costs)))
        for share in map(np.array, product(np.linspace(0, 1, steps + 1), repeat=len(rows)))
    ]
    assert found <= min(tried) * (1 + 1e-9)
    assert found >= min(tried) - dur.max() / steps


@settings(max_examples=50)
@given(traces(), hardware_models(), st.sampled_from((0.3, 0.55)))
def test_stretches_count_the_kernels_between_their_ends(trace: Trace, hardware: HardwareModel, sharing: float) -> None:
    """Compared with checking each kernel in each interval, with areas as they are."""
    kernels = Kernels.of(OpGraph.build(trace, one_by_one(hardware, sharing)))
    heads, tails = np.unique(kernels.head_ns)[::2], np.unique(kernels.tail_ns)[::2]
    stretches = [(h, q, (kernels.head_ns >= h) & (kernels.tail_ns >= q)) for h, q in product(heads, tails)]
    for resource in range(4):
        areas = kernels.area_ns[:, resource]
        kinds = [(inside & ~kernels.matrix, inside & kernels.matrix) for _, _, inside in stretches]
        counted = [energy._counted_ns(kernels, areas[a].sum(), areas[b].sum()) for a, b in kinds]
        spans = [h + q + need for (h, q, inside), need in zip(stretches, counted, strict=True) if inside.any()]
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(energy, "_CROWDS", (1.0,))
            found = energy._largest_by_block_ns(kernels, resource, heads, tails)
        assert found == pytest.approx(max(spans), rel=1e-12)


@settings(max_examples=80)
@given(
    traces_with_schedules(),
    hardware_models(),
    st.sampled_from((2, energy._MOST_CUTS)),
    st.sampled_from((0.0, 0.55)),
    st.booleans(),
)
def test_no_schedule_is_faster_than_any_bound(
    drawn: tuple[Trace, list[int], list[int]], hardware: HardwareModel, cuts: int, sharing: float, partitioned: bool
) -> None:
    trace, order, streams = drawn
    hardware = one_by_one(hardware, sharing)
    graph = OpGraph.build(trace, hardware)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(energy, "_MOST_CUTS", cuts)
        patch.setattr(energy, "_FEWEST_CUTS", min(cuts, energy._FEWEST_CUTS))
        bound = bounds(graph, partitioned)
    # One stream has half of the SMs for itself, the others the rest.
    partitions = [Partition(sms=64, streams=(0,))] if partitioned and {0} < set(streams) else []
    makespan_ns = FastEngine().run(lowered(graph, order, streams, partitions=partitions), graph.hardware).makespan_ns
    assert bound.largest[0] <= makespan_ns + 1, bound.largest[1]
