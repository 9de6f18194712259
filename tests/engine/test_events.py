"""Events of a batch: those that the replay would record, for any order, streams, kernels and SM partitions."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from gpusim.engine.batch import BatchEngine
from gpusim.formats.schedule import Partition
from gpusim.formats.trace import Trace, Variant, VariantSettings
from gpusim.plan.graph import OpGraph
from gpusim.plan.partitions import lay_out
from gpusim.plan.sync import plan_sync, works
from gpusim.trace.check import check_trace
from gpusim.trace.fusion import covered_by, place_fused
from tests.support.helpers import Step, build_graph, kernel, make_trace, op, schedules, traces_with_schedules


def replayed(graph: OpGraph, order: Sequence[int], streams: Sequence[int], variants: Sequence[int] = ()) -> int:
    """Return the events of the replay, with streams numbered by first use."""
    covered = covered_by(graph.trace, variants)
    order, streams = place_fused(order, streams, covered)
    numbers: dict[int, int] = {}
    for each in order:
        if graph.tasks[each]:
            numbers.setdefault(streams[each], len(numbers))
    placed = [numbers.get(stream, 0) for stream in streams]
    return plan_sync(graph.trace, graph.preds, order, placed, covered).events


@pytest.mark.parametrize(
    ("streams", "events"),
    [
        ((0, 0, 0, 0), 0),
        ((0, 0, 1, 0), 2),  # c waits for a, d for c
        ((0, 1, 2, 0), 3),  # b and c wait for a, which records once; d for b and c
        ((1, 1, 0, 0), 3),  # c waits for a, d for b; at the end the first stream waits for d
    ],
)
def test_events_of_a_diamond_counted_by_hand(streams: tuple[int, ...], events: int) -> None:
    graph = build_graph(make_trace([op("a", "x"), op("b", "a"), op("c", "a"), op("d", "b c")]))
    assert BatchEngine(graph).events([range(4)], [streams]).tolist() == [events]


@settings(max_examples=50)
@given(traces_with_schedules(), st.data())
def test_events_are_those_of_the_replay(case: tuple[Trace, list[int], list[int]], data: st.DataObject) -> None:
    trace, *first = case
    assume(all(works(each) == bool(each.kernels) for each in trace.ops))
    graph = build_graph(trace)
    made = [first, data.draw(schedules(trace)), first]
    found = BatchEngine(graph).events(*zip(*made, strict=True), threads=2)
    assert found.tolist() == [replayed(graph, *each) for each in made]


def test_op_that_writes_without_a_kernel_counts_as_a_view() -> None:
    """b on another stream waits for a through it: one event, and one at the end."""
    trace = make_trace([op("a", "x"), Step("silent", "a", changes="a"), op("b", "a")])
    assert BatchEngine(build_graph(trace)).events([range(3)], [(0, 2, 1)]).tolist() == [2]


@settings(max_examples=60)
@given(st.data())
def test_events_of_fused_ops_are_those_of_the_replay(data: st.DataObject) -> None:
    """a may do the work of b and c, d that of e; f waits for all of them, g for e alone."""
    steps = [op("a", "x"), op("b", "a"), op("c", "b"), op("d", "x"), op("e", "d"), op("f", "c e"), op("g", "e")]
    trace = make_trace(steps, outputs="f g")
    ops = list(trace.ops)
    for index, covers in ((0, (1, 2)), (3, (4,))):
        way = Variant(name="fused", settings=VariantSettings(), kernels=(kernel(500),), covers=covers)
        ops[index] = msgspec.structs.replace(ops[index], variants=(way,))
    trace = msgspec.structs.replace(trace, ops=tuple(ops))
    check_trace(trace, "t")
    graph = build_graph(trace)
    order, streams = data.draw(schedules(trace))
    variants = [data.draw(st.integers(0, len(each.variants))) for each in trace.ops]
    assert BatchEngine(graph).events([order], [streams], [variants]) == [replayed(graph, order, streams, variants)]


def test_first_stream_of_a_partition_waits_at_the_end_used_or_not() -> None:
    graph = build_graph(make_trace([op("a", "x"), op("b", "y")]))
    partitions = (Partition(sms=64, streams=(0, 1)), Partition(sms=68, streams=(2,)))
    engine = BatchEngine(graph, lay_out(partitions, 3, 132))
    assert engine.events([range(2)] * 2, [(1, 2), (0, 2)]).tolist() == [2, 1]
    assert BatchEngine(graph).events([range(2)], [(1, 2)]).tolist() == [1]
