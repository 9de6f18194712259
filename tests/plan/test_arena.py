"""The arena's rule: bytes are shared only where every use of the first ends before any use of the second starts."""

from __future__ import annotations

from collections.abc import Sequence
from random import Random

from hypothesis import given
from hypothesis import strategies as st

from gpusim.formats.trace import Trace
from gpusim.plan.arena import ALIGNMENT_BYTES, Arena, overlaps, pack
from gpusim.plan.happens_before import HappensBefore, data_races
from gpusim.plan.sync import kept_storages, plan_sync
from gpusim.trace.dependencies import dependencies
from tests.support.helpers import make_trace, op, traces_with_schedules, view, works

Scheduled = tuple[Trace, list[int], list[int]]


def order_of(trace: Trace, order: Sequence[int], streams: Sequence[int]) -> HappensBefore:
    return HappensBefore.of_plan(trace, order, streams, plan_sync(trace, dependencies(trace), order, streams))


def packed(trace: Trace, streams: Sequence[int]) -> Arena:
    return pack(trace, order_of(trace, range(len(trace.ops)), streams))


def storage(trace: Trace, op_index: int) -> int:
    index = trace.ops[op_index].outputs[0]
    assert index is not None
    return trace.tensors[index].storage


# --- Cases by hand ---


def test_a_chain_takes_the_room_of_two() -> None:
    trace = make_trace([op("a", "x"), op("b", "a"), op("c", "b"), op("d", "c"), op("e", "d")])
    arena = packed(trace, [0] * 5)
    size = ALIGNMENT_BYTES * -(-trace.storages[storage(trace, 0)].bytes // ALIGNMENT_BYTES)
    assert arena.bytes <= 2 * size + (0 if storage(trace, 4) in kept_storages(trace) else size)
    assert arena.offsets[storage(trace, 0)] == arena.offsets[storage(trace, 2)]
    assert arena.offsets[storage(trace, 0)] != arena.offsets[storage(trace, 1)]


def test_two_streams_share_nothing_without_an_event() -> None:
    """`a` ends long before `d` in launch order, but the other stream does not wait for that."""
    trace = make_trace([op("a", "x"), op("b", "a"), op("c", "y"), op("d", "c"), op("e", "b d")])
    one_stream, two_streams = packed(trace, [0, 0, 0, 0, 0]), packed(trace, [0, 0, 1, 1, 0])
    assert one_stream.bytes < two_streams.bytes
    offsets = [two_streams.offsets[storage(trace, index)] for index in range(4)]
    assert len(set(offsets)) == 4


def test_an_event_that_is_there_anyway_lets_streams_share() -> None:
    """`c` waits for `b`, and so for all readers of `a`: its stream may reuse `a`'s bytes."""
    trace = make_trace([op("a", "x"), op("b", "a"), op("c", "b"), op("d", "c")])
    arena = packed(trace, [0, 0, 1, 1])
    assert arena.offsets[storage(trace, 0)] == arena.offsets[storage(trace, 2)]


def test_a_view_keeps_its_storage() -> None:
    trace = make_trace([op("a", "x"), view("v", "a"), op("b", "x"), op("c", "b"), op("d", "v c")])
    arena = packed(trace, [0] * 5)
    assert arena.offsets[storage(trace, 0)] not in {arena.offsets[storage(trace, index)] for index in (2, 3)}


def test_results_are_kept_to_the_end_where_the_arena_holds_them() -> None:
    trace = make_trace([op("a", "x"), op("b", "x"), op("c", "b"), op("d", "c")], outputs="a d")
    order = order_of(trace, range(4), [0] * 4)
    arena = pack(trace, order, kept=True)
    assert list(overlaps(trace, arena, order)) == []
    later = {arena.offsets[storage(trace, index)] for index in (1, 2, 3)}
    assert arena.offsets[storage(trace, 0)] not in later
    assert storage(trace, 0) not in pack(trace, order).offsets


def test_overlaps_names_a_pair_placed_by_hand() -> None:
    trace = make_trace([op("a", "x"), op("b", "a"), op("c", "b")])
    order = order_of(trace, range(3), [0] * 3)
    a, b = storage(trace, 0), storage(trace, 1)
    assert list(overlaps(trace, Arena({a: 0, b: 0}, 512, {}), order)) == [(a, b)]
    assert list(overlaps(trace, Arena({a: 0, b: 1 << 30}, 1 << 31, {}), order)) == []


def test_a_missing_event_is_a_data_race() -> None:
    trace = make_trace([op("a", "x"), op("b", "a"), op("c", "a")])
    sync = plan_sync(trace, dependencies(trace), range(3), [0, 0, 1])
    assert list(data_races(trace, HappensBefore.of(trace, range(3), [0, 0, 1], sync.waits))) == []
    (race,) = data_races(trace, HappensBefore.of(trace, range(3), [0, 0, 1], [(), (), ()]))
    assert {race.op, race.other} == {0, 2}
    assert race.storage == storage(trace, 0)


# --- Properties ---


@given(traces_with_schedules(), st.booleans())
def test_no_schedule_shares_bytes_that_may_be_in_use(case: Scheduled, kept: bool) -> None:
    trace, order, streams = case
    before = order_of(trace, order, streams)
    arena = pack(trace, before, kept=kept)
    assert list(overlaps(trace, arena, before)) == []
    for storage, offset in arena.offsets.items():
        assert offset % ALIGNMENT_BYTES == 0
        assert offset + trace.storages[storage].bytes <= arena.bytes


@given(traces_with_schedules())
def test_planned_events_leave_no_race(case: Scheduled) -> None:
    trace, order, streams = case
    assert list(data_races(trace, order_of(trace, order, streams))) == []


@given(traces_with_schedules(), st.integers(0, 99))
def test_any_order_keeps_to_streams_and_events(case: Scheduled, seed: int) -> None:
    trace, order, streams = case
    before = order_of(trace, order, streams)
    found = before.any_order(Random(seed))
    place = {index: position for position, index in enumerate(found)}
    assert sorted(found) == [index for index in range(len(trace.ops)) if works(trace.ops[index])]
    for index in found:
        assert all(place[other] < place[index] for other in found if before.ends_before(other, index))
