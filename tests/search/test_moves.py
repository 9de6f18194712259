"""Moves of the search: which changes are equivalent, and which can be combined."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gpusim.formats.schedule import Partition
from gpusim.formats.trace import Trace
from gpusim.plan.graph import OpGraph
from gpusim.plan.partitions import lay_out
from gpusim.plan.schedule import Schedule
from gpusim.policies.registry import POLICIES
from gpusim.search import moves as moves_module
from gpusim.search import neighbourhood as module
from gpusim.search.moves import Candidates, Current, Fingerprints, Moves, joined
from gpusim.search.neighbourhood import BATCH, DRAWN
from tests.support.helpers import build_graph, make_trace, op, schedules, traces, wide_trace

SIX = 6


def generator(seed: int = 0) -> np.random.Generator:
    return np.random.Generator(np.random.PCG64(seed))


def one(order: Sequence[int], streams: Sequence[int], variants: Sequence[int] | None = None) -> Candidates:
    """Make a candidate launched in this order."""
    keys = np.zeros((1, len(order)))
    keys[0, list(order)] = np.arange(len(order))
    return Candidates(keys, np.array([streams], np.int32), np.array([variants or [0] * len(order)], np.int32))


def fingerprint(made: Fingerprints, order: Sequence[int], streams: Sequence[int], variants: Sequence[int] = ()) -> int:
    return made.of(np.array([order], np.int32), one(order, streams, list(variants) or None))[0]


# --- Which changes count as the same ---


def two_chains() -> OpGraph:
    """Make a0 a1 and b0 b1, independent of each other, then the end."""
    return build_graph(make_trace([op("a0", "x"), op("a1", "a0"), op("b0", "x"), op("b1", "b0"), op("end", "a1 b1")]))


def test_what_changes_no_wait_counts_as_the_same() -> None:
    """Renamed streams, another launch order across streams, a chain split over streams of its own."""
    prints = Fingerprints(two_chains(), generator(), None)
    wanted = fingerprint(prints, [0, 1, 2, 3, 4], [0, 0, 1, 1, 0])
    assert fingerprint(prints, [0, 1, 2, 3, 4], [5, 5, 2, 2, 5]) == wanted
    assert fingerprint(prints, [2, 0, 1, 3, 4], [0, 0, 1, 1, 0]) == wanted
    assert fingerprint(prints, [0, 1, 2, 3, 4], [0, 2, 1, 3, 0]) == wanted


def test_large_steps_need_no_table_of_who_depends_on_whom(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without it, a chain split over streams counts as another schedule; renamed streams still do not."""
    monkeypatch.setattr(moves_module, "MOST_RELATED", 4)
    prints = Fingerprints(two_chains(), generator(), None)
    wanted = fingerprint(prints, [0, 1, 2, 3, 4], [0, 0, 1, 1, 0])
    assert fingerprint(prints, [0, 1, 2, 3, 4], [5, 5, 2, 2, 5]) == wanted
    assert fingerprint(prints, [0, 1, 2, 3, 4], [0, 2, 1, 3, 0]) != wanted


def test_what_changes_a_wait_or_a_kernel_counts_as_another() -> None:
    prints = Fingerprints(two_chains(), generator(), None)
    found = [
        fingerprint(prints, [0, 1, 2, 3, 4], [0, 0, 1, 1, 0]),
        fingerprint(prints, [0, 1, 2, 3, 4], [0, 0, 0, 0, 0]),
        fingerprint(prints, [2, 3, 0, 1, 4], [0, 0, 0, 0, 0]),
        fingerprint(prints, [0, 2, 1, 3, 4], [0, 0, 0, 0, 0]),
        fingerprint(prints, [0, 1, 2, 3, 4], [0, 0, 1, 1, 0], [0, 1, 0, 0, 0]),
        fingerprint(prints, [0, 1, 2, 3, 4], [0, 0, 1, 1, 0], [0, 2, 0, 0, 0]),
    ]
    assert len(set(found)) == len(found)


def test_other_partition_counts_as_another_schedule() -> None:
    """Two streams of one partition are alike; a stream of the other runs on other SMs."""
    layout = lay_out((Partition(sms=64, streams=(0, 1)), Partition(sms=68, streams=(2,))), 3, 132)
    prints = Fingerprints(two_chains(), generator(), layout)
    wanted = fingerprint(prints, [0, 1, 2, 3, 4], [0, 0, 0, 0, 0])
    assert fingerprint(prints, [0, 1, 2, 3, 4], [1, 1, 1, 1, 1]) == wanted
    assert fingerprint(prints, [0, 1, 2, 3, 4], [2, 2, 2, 2, 2]) != wanted


@settings(max_examples=50)
@given(st.data(), traces())
def test_fingerprint_is_that_of_what_ops_wait_for(data: st.DataObject, trace: Trace) -> None:
    """Two schedules share it exactly where each op has the same op before it that it does not depend on."""
    graph = build_graph(trace)
    prints = Fingerprints(graph, generator(), None)
    works = [op for op in range(len(graph)) if graph.tasks[op]]
    views = [op for op in range(len(graph)) if not graph.tasks[op]]
    reach: list[set[int]] = []
    for preds in graph.preds:
        reach.append(set(preds).union(*(reach[before] for before in preds)))
    found = []
    for _ in range(2):
        order, streams = data.draw(schedules(trace))
        order = [op for op in order if graph.tasks[op]]
        waits, last = set(), dict[int, int]()
        for each in order:
            before = last.get(streams[each])
            if before is not None and before not in reach[each]:
                waits.add((before, each))
            last[streams[each]] = each
        found.append((fingerprint(prints, [*order, *views], streams), waits))
    assert len(works) + len(views) == len(graph)
    (one_print, one_waits), (other_print, other_waits) = found
    assert (one_print == other_print) == (one_waits == other_waits)


# --- What a batch has ---


def search_of(graph: OpGraph, streams: int, seeds: Sequence[Schedule]) -> module._Search:
    made = module._Search(graph, streams, 0, None, 1)
    made.start(seeds)
    return made


def test_no_neighbour_is_tried_twice_while_there_are_others() -> None:
    graph = build_graph(wide_trace(12, 9000, 6))
    search = search_of(graph, 8, [POLICIES["wavefront"](graph, 8)])
    tried: list[tuple[int, int]] = []
    for _ in range(4):
        near, orders, events = search._untried(search.current[0])
        tried += zip(search.fingerprints.of(orders, near), events.tolist(), strict=True)
    assert len(tried) == 4 * BATCH
    for number, (fingerprint, fewer) in enumerate(tried):
        assert all(fewer < events for known, events in tried[:number] if known == fingerprint)


def test_batch_is_full_where_nothing_is_left_to_try() -> None:
    """Otherwise a search of a tiny graph would never spend its number of evaluations."""
    graph = build_graph(make_trace([op("a", "x"), op("b", "a")]))
    search = search_of(graph, 2, [POLICIES["sequential"](graph, 1)])
    for _ in range(3):
        near, orders, events = search._untried(search.current[0])
        assert len(near.keys) == len(orders) == len(events) == BATCH


def test_every_kind_of_move_changes_something() -> None:
    """Each kind alone: some of its copies wait for other ops than the schedule they are copies of."""
    graph = build_graph(wide_trace(6, 9000, 3))
    search = search_of(graph, 4, [POLICIES["round_robin"](graph, 3)])
    for kind in range(4):
        moves = Moves(graph, 4, generator(kind), variants=False)
        moves.shares = tuple(float(kind == other) for other in range(5))
        drawn = moves.draw(search.current[0], DRAWN * BATCH)
        assert len(set(search.fingerprints.of(search.judge.orders(drawn.keys), drawn))) > BATCH // 2, kind


# --- Several changes together ---


def neighbours() -> tuple[Current, Candidates]:
    """Make six ops on stream 0; neighbour i puts op i on stream i + 1, but neighbour 2 changes op 0, too."""
    current = Current(np.arange(float(SIX)), np.zeros(SIX, np.int32), np.zeros(SIX, np.int32), 100)
    near = Candidates.copies(current, SIX)
    near.streams[np.arange(SIX), np.arange(SIX)] = np.arange(SIX) + 1
    near.keys[2, 0] = 3.5
    return current, near


def test_changes_of_several_neighbours_are_joined_best_first() -> None:
    current, near = neighbours()
    made = joined(current, near, [3, 0, 5], 4)
    assert made.streams.tolist() == [[1, 0, 0, 4, 0, 0], [1, 0, 0, 4, 0, 6]]
    assert (made.keys == current.keys).all()


def test_neighbour_that_changes_the_same_op_is_left_out() -> None:
    current, near = neighbours()
    assert joined(current, near, [0, 2, 1], 4).streams.tolist() == [[1, 2, 0, 0, 0, 0]]
    other_way = joined(current, near, [2, 0, 1], 4)
    assert other_way.streams.tolist() == [[0, 2, 3, 0, 0, 0]]
    assert other_way.keys.tolist() == [[3.5, 1.0, 2.0, 3.0, 4.0, 5.0]]


def test_no_more_are_joined_than_asked_for_and_none_of_one() -> None:
    current, near = neighbours()
    assert len(joined(current, near, range(3, SIX), 1).keys) == 1
    assert len(joined(current, near, [4], 3).keys) == 0
    assert len(joined(current, near, [], 3).keys) == 0


# --- With how many schedules the search goes on ---


def test_search_narrows_to_the_best_as_the_budget_is_spent() -> None:
    graph = build_graph(wide_trace(12, 9000, 6))
    search = search_of(graph, 8, [POLICIES["sequential"](graph, 1), POLICIES["wavefront"](graph, 8)])
    assert len(search.current) == 2
    search.step(0.0)
    assert len(search.current) == 2
    best_ns = min(each.compared_ns for each in search.current)
    search.step(1.0)
    assert len(search.current) == 1
    assert search.current[0].compared_ns <= best_ns
