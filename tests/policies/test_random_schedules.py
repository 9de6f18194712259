"""Random schedules: always legal, the same for the same seed, and of every kind."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpusim.formats.trace import Trace
from gpusim.plan.graph import is_legal_order
from gpusim.policies.random_schedules import STICKINESS, STREAMS, random_schedule
from gpusim.policies.registry import POLICIES
from gpusim.trace.store import load_trace
from tests.support.helpers import build_graph, chain_trace, make_trace, op, traces

NUMBERS = range(len(STREAMS) * len(STICKINESS))


@given(traces(), st.integers(0, 40), st.integers(0, 1000))
def test_every_schedule_is_legal_and_on_as_many_streams_as_its_number_says(
    trace: Trace, number: int, seed: int
) -> None:
    graph = build_graph(trace)
    found = random_schedule(graph, number, seed)
    assert is_legal_order(found.order, graph.preds)
    assert len(found.streams) == len(graph)
    assert 0 <= min(found.streams) <= max(found.streams) < STREAMS[number % len(STREAMS)] <= 8


@given(traces(), st.integers(0, 40), st.integers(0, 1000))
def test_same_seed_and_number_give_the_same_schedule(trace: Trace, number: int, seed: int) -> None:
    graph = build_graph(trace)
    assert random_schedule(graph, number, seed) == random_schedule(graph, number, seed)


def test_schedule_of_a_seed_does_not_change_from_version_to_version() -> None:
    """Results name schedules by seed and number, so these must not change meaning."""
    graph = build_graph(make_trace([op(f"a{i}", "x") for i in range(5)]))
    assert random_schedule(graph, 3, 7).order == (2, 0, 1, 3, 4)
    assert random_schedule(graph, 3, 7).streams == (5, 5, 1, 0, 5)


def test_other_numbers_and_other_seeds_give_other_schedules() -> None:
    graph = build_graph(load_trace("googlenet-infer-b1"))
    found = {random_schedule(graph, number, seed) for number in NUMBERS for seed in range(3)}
    assert len(found) == 3 * len(NUMBERS)


def test_all_streams_are_used_and_orders_are_not_the_recorded_one() -> None:
    graph = build_graph(load_trace("googlenet-infer-b1"))
    for number in NUMBERS:
        found = random_schedule(graph, number, 0)
        assert len(set(found.streams)) == STREAMS[number % len(STREAMS)]
        assert found.order != tuple(range(len(graph)))


def test_every_stream_count_comes_with_every_stickiness() -> None:
    assert len({(number % len(STREAMS), number % len(STICKINESS)) for number in NUMBERS}) == len(NUMBERS)


@pytest.mark.parametrize(("number", "stickiness"), [(0, 0.0), (1, 0.6), (2, 0.9)])
def test_ops_stay_on_their_predecessors_stream_as_often_as_said(number: int, stickiness: float) -> None:
    """In a chain of 400, on n streams: sticky, or on the same one by chance."""
    graph = build_graph(chain_trace(400))
    streams = STREAMS[number % len(STREAMS)]
    found = random_schedule(graph, number, 0).streams
    stayed = sum(found[i] == found[i - 1] for i in range(1, 400)) / 399
    assert stayed == pytest.approx(stickiness + (1 - stickiness) / streams, abs=0.06)


def test_random_is_no_policy_that_a_user_could_choose() -> None:
    assert "random" not in POLICIES
