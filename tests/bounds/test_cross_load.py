"""Largest throughput of an SM with two kinds of kernels, and the lower bounds based on it."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gpusim.bounds.bounds import Bounds, bounds
from gpusim.bounds.cross_load import IN_FULL, most_done, weights
from gpusim.engine.reference import ReferenceEngine
from gpusim.formats.hardware import HardwareModel
from gpusim.formats.trace import Trace
from gpusim.gpu.calibrate.contention import with_contention
from gpusim.plan.graph import OpGraph
from gpusim.rules.contention import exponents
from tests.support.helpers import (
    HALF,
    Step,
    build_graph,
    hardware_models,
    kernel,
    lowered,
    make_hardware,
    make_trace,
    traces_with_schedules,
)

EXPONENTS = st.floats(0.01, 1.0)


def halves(*names: str, cross: float, sharing: float = 0.5, matrix: float = 0.0) -> OpGraph:
    """Make independent kernels of a block of 1024 threads per SM, of which an SM holds two; `gemm` is a matrix
    kernel.
    """
    steps = [
        Step(f"op{place}", "x", f"y{place}", kernels=(msgspec.structs.replace(kernel(1000, HALF), name=name),))
        for place, name in enumerate(names)
    ]
    return build_graph(make_trace(steps), make_hardware(sharing=sharing, matrix=matrix, cross=cross))


def side_by_side_ns(graph: OpGraph) -> int:
    """Simulate every op on a stream of its own, in ns."""
    return ReferenceEngine().run(lowered(graph, range(len(graph)), range(len(graph))), graph.hardware).makespan_ns


def test_two_kinds_of_kernels_that_share_each_sm_meet_the_bound() -> None:
    """Each has load 1/2 and counts half for the other: 3/4, so both run at (3/4)^-0.5, not at load 1's rate of 1.

    At load 1 a block takes 1000 x 2^0.5 = 1414 ns: here 1414 x 0.75^0.5 = 1225. An SM does (4/3)^0.5 together at most.
    """
    graph = halves("gemm", "add", cross=0.5)
    found = bounds(graph)
    assert side_by_side_ns(graph) == 1225
    assert 1224 <= found.contention_ns <= 1225
    assert 1224 <= found.area_ns <= 1225
    assert bounds(halves("gemm", "add", cross=1.0)).area_ns == 1414


def test_kernels_of_one_kind_have_the_bound_that_they_have_without_cross_load() -> None:
    for names in (("gemm", "gemm", "gemm"), ("add", "add", "add")):
        plain, crossed = (bounds(halves(*names, cross=cross, sharing=0.3, matrix=0.6)) for cross in (1.0, 0.5))
        assert crossed == plain


def test_stretch_with_one_kind_loses_nothing_to_the_other_kind_elsewhere() -> None:
    """Eight kernels of the whole GPU, then one matrix kernel: the bound of the eight does not change."""
    eight = [Step(f"a{i}", "x", f"a{i}", kernels=(kernel(1000, 2 * HALF),)) for i in range(8)]
    gemm = msgspec.structs.replace(kernel(1000, 2 * HALF), name="gemm")
    last = Step("last", " ".join(f"a{i}" for i in range(8)), "last", kernels=(gemm,))
    found = bounds(build_graph(make_trace([*eight, last]), make_hardware(sharing=0.3, matrix=0.6, cross=0.5)))
    assert found.contention_ns == 9000
    assert found.area_ns < 9000


def test_little_of_one_kind_costs_little() -> None:
    """Nine kernels of one kind and one of the other: the one may hide next to the nine, which count in full.

    Together, over what an SM does of both at most, they would come to less than the nine alone.
    """
    graph = halves(*["add"] * 9, "gemm", cross=0.5)
    nine_ns = bounds(halves(*["add"] * 9, cross=0.5)).area_ns
    assert 10 / 9 * nine_ns / most_done((0.5, 0.5), 0.5, (1.0, 1.0)) < nine_ns
    assert nine_ns + 300 < bounds(graph).area_ns <= side_by_side_ns(graph)


def test_everything_counts_in_full_where_the_cross_load_is_1() -> None:
    assert weights((0.3, 0.6), 1.0) == IN_FULL
    assert most_done((0.3, 0.6), 1.0, (1.0, 1.0)) == pytest.approx(1.0, rel=1e-3)


@pytest.mark.parametrize(("exponent", "cross"), [(0.3, 0.8), (0.5, 0.5), (1.0, 0.2)])
def test_kinds_that_share_alike_do_most_where_both_have_half(exponent: float, cross: float) -> None:
    """Each at (1/2 + w/2)^-p."""
    found = most_done((exponent, exponent), cross, (1.0, 1.0))
    assert (2 / (1 + cross)) ** exponent <= found <= (2 / (1 + cross)) ** exponent * 1.001


@pytest.mark.parametrize("cross", [0.9, 0.8, 0.5])
def test_no_more_than_needed_is_allowed_for_kinds_with_exponents_as_measured(cross: float) -> None:
    """Full SMs reach C with the best split, so C is at least that; it is at most 1 % above it."""
    split = np.linspace(0.0, 1.0, 1001)
    reached = split * (split + cross * (1 - split)) ** -0.29 + (1 - split) * (1 - split + cross * split) ** -0.6
    found = most_done((0.29, 0.6), cross, (1.0, 1.0))
    assert reached.max() <= found <= reached.max() * 1.01


@pytest.mark.parametrize("exponents", [(1e-12, 1e-12), (1e-12, 1.0), (1.0, 1e-6)])
@pytest.mark.parametrize("cross", [0.0, 1e-9, 0.8])
def test_weights_stay_finite_at_the_ends_of_the_exponents(exponents: tuple[float, float], cross: float) -> None:
    for pair in weights(exponents, cross):
        assert all(math.isfinite(weight) and 0.0 <= weight <= 1.0 for weight in pair)
    assert most_done(exponents, cross, (1.0, 1.0)) <= 2.0 + 1e-6
    assert most_done((1e-12, 1e-12), 0.8, (1.0, 1.0)) == pytest.approx(1.0, abs=1e-6)


@settings(max_examples=200)
@given(
    st.tuples(EXPONENTS, EXPONENTS),
    st.sampled_from((0.0, 0.2, 0.5, 0.8, 0.95)),
    st.sampled_from((1.0, 1.5, 3.0, 8.0, 32.0)),
    st.integers(0, 2**32 - 1),
)
def test_no_sm_does_more_than_the_weights_allow(
    exponents: tuple[float, float], cross: float, crowd: float, seed: int
) -> None:
    """Compared with arbitrary SM contents: parts of a resource of either kind, and loads from that much to more."""
    random = np.random.default_rng(seed)
    count = 2000
    split, full = random.random(count), 10.0 ** -random.choice([0.0, 0.0, 0.1, 1.0, 3.0], count)
    parts = np.array([split * full, (1 - split) * full])
    counted = parts * crowd ** random.choice([0.0, 0.1, 0.5, 0.9, 1.0], (2, count))
    loads = counted * random.choice([1.0, 1.0, 1.0, 1.5, 10.0], (2, count))
    share = (crowd ** min(exponents) - 1.0) / (crowd - 1.0) if crowd > 1.0 else 0.0
    with np.errstate(divide="ignore", invalid="ignore"):
        done = np.array(
            [
                (share * counted[kind] + (1 - share) * parts[kind])
                * (loads[kind] + cross * loads[1 - kind]) ** -exponents[kind]
                for kind in (0, 1)
            ]
        )
    done = np.nan_to_num(done)  # nothing of a kind does nothing
    for others, matrix in weights(exponents, cross):
        assert np.max(others * done[0] + matrix * done[1]) <= 1.0 + 1e-9


def crossed(hardware: HardwareModel, sharing: float, matrix: float, cross: float) -> HardwareModel:
    """The same GPU with these exponents and this cross load."""
    contention = msgspec.structs.replace(
        hardware.contention, sharing_exponent=sharing, matrix_exponent=matrix, cross_load=cross
    )
    return msgspec.structs.replace(hardware, contention=contention)


@settings(max_examples=80)
@given(
    traces_with_schedules(),
    hardware_models(),
    st.sampled_from(((0.3, 0.6), (0.6, 0.3), (0.5, 0.0), (0.05, 1.0))),
    st.sampled_from((1.0, 0.8, 0.5, 0.0)),
)
def test_no_schedule_is_faster_than_any_bound_where_kinds_count_little_for_each_other(
    found: tuple[Trace, list[int], list[int]], hardware: HardwareModel, exponents: tuple[float, float], cross: float
) -> None:
    trace, order, streams = found
    hardware = crossed(hardware, *exponents, cross)
    graph = OpGraph.build(trace, hardware)
    _holds(graph, bounds(graph), order, streams)


@settings(max_examples=100)
@given(
    st.lists(
        st.tuples(
            st.sampled_from(("gemm", "add")),
            st.sampled_from((132, 264, 528, 1000)),
            st.sampled_from((128, 256, 512, 1024)),
            st.sampled_from((0, 32, 64)),
        ),
        min_size=2,
        max_size=8,
    ),
    st.sampled_from(((0.3, 0.6), (0.6, 0.3), (0.9, 0.9))),
    st.sampled_from((1.0, 0.8, 0.5, 0.0)),
)
def test_kernels_that_crowd_side_by_side_are_no_faster_than_any_bound(
    rows: list[tuple[str, int, int, int]], exponents: tuple[float, float], cross: float
) -> None:
    """All at once, without gaps: steps come no closer to the bounds."""
    steps = [
        Step(
            f"op{i}", "x", f"y{i}", kernels=(msgspec.structs.replace(kernel(10_000, blocks, threads, regs), name=name),)
        )
        for i, (name, blocks, threads, regs) in enumerate(rows)
    ]
    hardware = crossed(make_hardware(dram_bytes_per_ns=1e6), *exponents, cross)
    graph = build_graph(make_trace(steps), hardware)
    for streams in (range(len(graph)), [place % 2 for place in range(len(graph))]):
        _holds(graph, bounds(graph), range(len(graph)), streams)


def _holds(graph: OpGraph, bound: Bounds, order: Sequence[int], streams: Sequence[int]) -> None:
    makespan_ns = ReferenceEngine().run(lowered(graph, order, streams), graph.hardware).makespan_ns
    assert bound.area_ns <= bound.contention_ns + 1
    assert bound.largest[0] <= makespan_ns + 1, bound.largest[1]


def test_other_constants_keep_the_cross_load_of_the_model() -> None:
    """Fitted exponents do not depend on it."""
    for cross, sharing in itertools.product((1.0, 0.8), (0.0, 0.5)):
        changed = with_contention(make_hardware(cross=cross, busy_ns=100), sharing, 0.6, 0.7)
        assert changed.contention.cross_load == cross
        assert (exponents(changed.contention), changed.contention.younger_slowdown) == ((sharing, 0.6), 0.7)
