"""Events and releases of a schedule, against an independent model of streams: happens-before by brute force."""

from __future__ import annotations

from collections.abc import Sequence

from hypothesis import given

from gpusim.formats.trace import Trace
from gpusim.plan.sync import SyncPlan, kept_storages, plan_sync
from gpusim.trace.dependencies import dependencies
from tests.support.helpers import Step, ancestors, in_place, kernel, make_trace, op, traces_with_schedules, view, works

Scheduled = tuple[Trace, list[int], list[int]]


def sync_of(trace: Trace, streams: Sequence[int], order: Sequence[int] | None = None) -> SyncPlan:
    """The sync plan of a schedule, recorded order by default."""
    return plan_sync(trace, dependencies(trace), list(order or range(len(trace.ops))), streams)


def happens_before(
    trace: Trace, order: Sequence[int], streams: Sequence[int], waits: Sequence[Sequence[int]]
) -> dict[int, set[int]]:
    """Return, for each GPU op, the ops that must have ended before it: by stream order and waits, transitively."""
    place = {op: position for position, op in enumerate(order)}
    last: dict[int, int] = {}
    direct: list[list[int]] = []
    for position, op_index in enumerate(order):
        before = [place[event] for event in waits[position]]
        if works(trace.ops[op_index]):
            stream = streams[op_index]
            before += [last[stream]] if stream in last else []
            last[stream] = position
        direct.append(before)
    closure = ancestors(direct)
    return {op_index: {order[p] for p in closure[place[op_index]]} for op_index in order if works(trace.ops[op_index])}


def needed(trace: Trace) -> dict[int, set[int]]:
    """Return, for each GPU op, all GPU ops that it depends on, directly or not."""
    closure = ancestors(dependencies(trace))
    working = {index for index, found in enumerate(trace.ops) if works(found)}
    return {index: closure[index] & working for index in working}


def broken(trace: Trace, order: Sequence[int], streams: Sequence[int], waits: Sequence[Sequence[int]]) -> bool:
    """Whether some dependency is not implied by stream order and waits."""
    known = happens_before(trace, order, streams, waits)
    return any(not before <= known[op_index] for op_index, before in needed(trace).items())


# --- Cases by hand ---


def test_one_stream_needs_no_events() -> None:
    trace = make_trace([op("a", "x"), op("b", "a"), op("c", "b")])
    sync = sync_of(trace, [0, 0, 0])
    assert sync.events == 0
    assert sync.waits == ((), (), ())
    assert sync.ends == ()
    assert sync.roots == frozenset()


def test_fork_and_join_take_one_event_each() -> None:
    # a -> (b on 0, c on 1) -> d on 0: c waits for a, d waits for c. b and d follow by stream order.
    trace = make_trace([op("a", "x"), op("b", "a"), op("c", "a"), op("d", "b c")])
    sync = sync_of(trace, [0, 0, 1, 0])
    assert sync.waits == ((), (), (0,), (2,))
    assert sync.records == {0, 2}
    assert sync.ends == ()
    assert sync.roots == frozenset()


def test_wait_that_an_earlier_wait_implies_is_not_repeated() -> None:
    # b on stream 1 waits for a; c behind it on stream 1 needs a too, and needs no further wait.
    trace = make_trace([op("a", "x"), op("b", "a"), op("c", "a b")])
    assert sync_of(trace, [0, 1, 1]).waits == ((), (0,), ())


def test_wait_brings_what_the_waited_for_op_knew() -> None:
    # b (stream 1) waits for a (stream 0); c (stream 2) needs both, and b's event implies a.
    trace = make_trace([op("a", "x"), op("b", "a"), op("c", "a b")])
    assert sync_of(trace, [0, 1, 2]).waits == ((), (0,), (1,))


def test_of_two_needed_ops_on_one_stream_only_the_later_is_waited_for() -> None:
    trace = make_trace([op("a", "x"), op("b", "x"), op("c", "a b")])
    assert sync_of(trace, [0, 0, 1]).waits == ((), (), (1,))


def test_stream_that_begins_without_waiting_is_a_root() -> None:
    trace = make_trace([op("a", "x"), op("b", "y"), op("c", "a"), op("d", "c b")])
    sync = sync_of(trace, [0, 1, 2, 0])
    assert sync.roots == {1}


def test_stream_0_waits_at_the_end_for_streams_that_nobody_joined() -> None:
    trace = make_trace([op("a", "x"), op("b", "y"), op("c", "z")])
    sync = sync_of(trace, [0, 1, 2])
    assert set(sync.ends) == {1, 2}
    assert {1, 2} <= sync.records


def test_stream_joined_through_another_is_not_waited_for_at_the_end() -> None:
    # stream 1 ends in a, which stream 2 waited for: waiting for stream 2 is enough.
    trace = make_trace([op("a", "x"), op("b", "a")])
    assert sync_of(trace, [1, 2]).ends == (1,)


def test_dependency_through_a_view_is_waited_for_at_the_op_that_made_the_memory() -> None:
    trace = make_trace([op("a", "x"), view("v", "a"), op("b", "v")])
    # the view's own stream does not matter: it does nothing on the GPU
    assert sync_of(trace, [0, 2, 1]).waits == ((), (), (0,))


def test_storage_is_released_on_its_own_stream_once_its_users_are_known_to_have_ended() -> None:
    # a is made on 0 and read by b on 1; stream 0 learns of b's end at d only.
    trace = make_trace([op("a", "x"), op("b", "a"), op("c", "y"), op("d", "b c")], outputs="d")
    storage = {tensor.name: tensor.storage for tensor in trace.tensors}
    sync = sync_of(trace, [0, 1, 0, 0])
    assert sync.releases[2] == ()
    assert sync.releases[3] == (storage["a"],)


def test_inputs_and_outputs_are_never_released() -> None:
    trace = make_trace([op("a", "x"), op("b", "a"), op("c", "b"), op("d", "c")], outputs="a")
    released = {storage for place in sync_of(trace, [0] * 4).releases for storage in place}
    storage = {tensor.name: tensor.storage for tensor in trace.tensors}
    assert released == {storage["b"]}  # c is still in use when d starts


def test_storage_seen_through_a_later_view_is_not_released_before_it() -> None:
    trace = make_trace([op("a", "x"), op("b", "a"), op("c", "b"), view("v", "a"), op("d", "v c"), op("e", "d")])
    storage = {tensor.name: tensor.storage for tensor in trace.tensors}
    places = [place for place, found in enumerate(sync_of(trace, [0] * 6).releases) if storage["a"] in found]
    assert places == [5]


def test_write_without_kernels_is_synchronised_like_work() -> None:
    silent = Step("w", reads="a", changes="a")
    trace = make_trace([op("a", "x"), silent, op("b", "a")])
    assert sync_of(trace, [0, 1, 0]).waits == ((), (0,), (1,))


def test_launch_order_other_than_the_recorded_one() -> None:
    trace = make_trace([op("a", "x"), op("b", "y"), in_place("c", "x"), op("d", "b", dur_ns=5)])
    sync = sync_of(trace, [0, 1, 0, 0], order=[1, 3, 0, 2])
    assert sync.waits == ((), (1,), (), ())


def test_ops_of_several_kernels_count_once() -> None:
    double = Step("a", "x", "a", kernels=(kernel(5), kernel(6)))
    assert sync_of(make_trace([double, op("b", "a")]), [0, 1]).waits == ((), (0,))


# --- Properties on random traces and schedules ---


@given(traces_with_schedules())
def test_every_dependency_is_implied_by_stream_order_and_waits(case: Scheduled) -> None:
    trace, order, streams = case
    assert not broken(trace, order, streams, sync_of(trace, streams, order).waits)


@given(traces_with_schedules())
def test_waits_are_for_events_recorded_before(case: Scheduled) -> None:
    trace, order, streams = case
    sync = sync_of(trace, streams, order)
    place = {op_index: position for position, op_index in enumerate(order)}
    for position, events in enumerate(sync.waits):
        for event in events:
            assert place[event] < position
            assert streams[event] != streams[order[position]]
    waited = {event for events in sync.waits for event in events} | set(sync.ends)
    assert sync.records == waited


@given(traces_with_schedules())
def test_events_are_the_fewest_no_wait_can_be_left_out(case: Scheduled) -> None:
    trace, order, streams = case
    waits = sync_of(trace, streams, order).waits
    for position, events in enumerate(waits):
        for event in events:
            fewer = list(waits)
            fewer[position] = tuple(e for e in events if e != event)
            assert broken(trace, order, streams, fewer)


@given(traces_with_schedules())
def test_everything_has_ended_before_the_end_of_stream_0_and_no_end_is_superfluous(case: Scheduled) -> None:
    trace, order, streams = case
    sync = sync_of(trace, streams, order)
    known = happens_before(trace, order, streams, sync.waits)

    def ended(ends: Sequence[int]) -> set[int]:
        last = [op_index for op_index in order if op_index in known and streams[op_index] == 0][-1:]
        return {op_index for end in [*last, *ends] for op_index in {end} | known[end]}

    assert ended(sync.ends) == set(known)
    for end in sync.ends:
        assert ended([other for other in sync.ends if other != end]) != set(known)


@given(traces_with_schedules())
def test_each_stream_starts_after_the_step_does(case: Scheduled) -> None:
    """A capture includes only streams that wait for one already in it: by a root's wait or a wait of their first op."""
    trace, order, streams = case
    sync = sync_of(trace, streams, order)
    begun = {0}
    for position, op_index in enumerate(order):
        if works(trace.ops[op_index]) and streams[op_index] not in begun:
            assert (streams[op_index] in sync.roots) != bool(sync.waits[position])
            begun.add(streams[op_index])
    assert sync.roots <= begun - {0}


@given(traces_with_schedules())
def test_memory_is_released_once_on_its_own_stream_and_after_all_who_use_it(case: Scheduled) -> None:
    trace, order, streams = case
    sync = sync_of(trace, streams, order)
    known = happens_before(trace, order, streams, sync.waits)
    users: dict[int, list[int]] = {}
    for op_index in order:
        found = trace.ops[op_index]
        tensors = {*found.reads, *found.writes, *(arg["tensor"] for arg in found.args), *found.outputs}
        for storage in {trace.tensors[t].storage for t in tensors if t is not None}:
            users.setdefault(storage, []).append(op_index)
    released: set[int] = set()
    for position, storages in enumerate(sync.releases):
        next_op = order[position]
        for storage in storages:
            assert storage not in kept_storages(trace)
            assert storage not in released
            released.add(storage)
            working = [user for user in users[storage] if works(trace.ops[user])]
            # The owner is the stream that allocated it: only the owner reuses it, after `next_op`.
            assert streams[working[0]] == streams[next_op]
            assert works(trace.ops[next_op])
            assert set(working) <= known[next_op]
            assert not set(users[storage]) & set(order[position:])


@given(traces_with_schedules())
def test_on_one_stream_every_storage_is_released_before_the_op_after_its_last_user(case: Scheduled) -> None:
    """Nothing is held longer than needed: the releases are those of a run that frees as early as possible."""
    trace, order, _ = case
    sync = sync_of(trace, [0] * len(order), order)
    kept = kept_storages(trace)
    last: dict[int, int] = {}
    for position, op_index in enumerate(order):
        found = trace.ops[op_index]
        for tensor in (*found.reads, *found.writes, *found.outputs):
            if tensor is not None and trace.tensors[tensor].storage not in kept:
                last[trace.tensors[tensor].storage] = position
    for storage, position in last.items():
        after = [p for p in range(position + 1, len(order)) if works(trace.ops[order[p]])]
        expected = after[0] if after else None
        assert next((p for p, found in enumerate(sync.releases) if storage in found), None) == expected
