"""Schedules: files round trip, illegal ones are refused with the place, unknown names list the known ones."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import given

from gpusim.engine.base import engine_by_name
from gpusim.errors import OptionError, ScheduleError, UnknownNameError
from gpusim.formats.schedule import Partition, Placement, ScheduleDocument, read_schedule_document
from gpusim.formats.trace import Trace
from gpusim.io.file_limits import MAX_STREAMS
from gpusim.plan.schedule import Schedule, check_streams, read_schedule, write_schedule
from gpusim.policies.registry import policy_by_name
from gpusim.trace.store import structure_hash
from tests.support.helpers import build_graph, chain_trace, in_place, make_trace, op, schedule_of, traces_with_schedules


@pytest.fixture
def trace() -> Trace:
    return make_trace([op("a", "x"), op("b", "a"), op("c", "a"), op("d", "b c")], outputs="d")


@pytest.fixture
def schedule(trace: Trace) -> ScheduleDocument:
    return schedule_of([0, 2, 1, 3], [0, 0, 1, 0]).made("critical_path", "a test", 3000).to_document(trace)


def check(schedule: ScheduleDocument, trace: Trace) -> Schedule:
    return Schedule.from_document(schedule, build_graph(trace), "s.json")


def change(schedule: ScheduleDocument, **fields: Any) -> ScheduleDocument:
    return msgspec.structs.replace(schedule, **fields)


def refusal(schedule: ScheduleDocument, trace: Trace) -> ScheduleError:
    with pytest.raises(ScheduleError) as caught:
        check(schedule, trace)
    assert str(caught.value).startswith("s.json: $")
    assert "\n" not in str(caught.value)
    return caught.value


def test_legal_schedule_gives_its_order_and_streams(schedule: ScheduleDocument, trace: Trace) -> None:
    value = check(schedule, trace)
    assert (value.order, value.streams) == ((0, 2, 1, 3), (0, 0, 1, 0))
    assert (value.policy, value.made_by, value.predicted_ns) == ("critical_path", "a test", 3000)
    assert value.stream_count == schedule.streams == 2


@pytest.mark.parametrize("name", ["s.json", "s.json.gz"])
def test_schedule_survives_its_file_and_the_same_one_gives_the_same_bytes(
    name: str, tmp_path: Path, schedule: ScheduleDocument, trace: Trace
) -> None:
    value = check(schedule, trace)
    write_schedule(value, trace, tmp_path / name)
    assert read_schedule_document(tmp_path / name) == schedule
    again = read_schedule(tmp_path / name, build_graph(trace))
    assert dataclasses.asdict(again) == dataclasses.asdict(value)
    first = (tmp_path / name).read_bytes()
    write_schedule(again, trace, tmp_path / name)
    assert (tmp_path / name).read_bytes() == first


@given(traces_with_schedules())
def test_any_legal_schedule_is_accepted_as_it_was_made(case: tuple[Trace, list[int], list[int]]) -> None:
    trace, order, streams = case
    made = schedule_of(order, streams)
    assert check(made.to_document(trace), trace) == made.check(build_graph(trace)) == made


def test_schedule_of_another_trace_is_refused(schedule: ScheduleDocument) -> None:
    error = refusal(schedule, chain_trace(4))
    assert error.place == "$.trace_hash"
    assert "another trace" in error.problem


def test_schedule_stays_valid_when_only_the_timings_differ(schedule: ScheduleDocument, trace: Trace) -> None:
    slower = make_trace([op("a", "x", dur_ns=9), op("b", "a"), op("c", "a", blocks=7), op("d", "b c")], outputs="d")
    assert structure_hash(slower) == structure_hash(trace)
    assert check(schedule, slower) == check(schedule, trace)


@pytest.mark.parametrize(
    "other",
    [
        [op("a", "x"), op("b", "a"), op("c", "a"), op("e", "b c", makes="d")],
        [op("a", "x"), op("b", "a"), op("c", "b"), op("d", "b c")],
        [op("a", "x"), op("b", "a"), op("c", "a"), op("d", "b c"), op("e", "d")],
    ],
    ids=["renamed op", "other dependency", "one op more"],
)
def test_hash_tells_structures_apart(trace: Trace, other: list[Any]) -> None:
    assert structure_hash(make_trace(other)) != structure_hash(trace)


def test_missing_op_is_named(schedule: ScheduleDocument, trace: Trace) -> None:
    error = refusal(change(schedule, placements=schedule.placements[:-1]), trace)
    assert error.place == "$.placements"
    assert "'d'" in error.problem


def test_unknown_op_is_named(schedule: ScheduleDocument, trace: Trace) -> None:
    error = refusal(change(schedule, placements=(*schedule.placements, Placement(op="zzz", stream=0))), trace)
    assert error.place == "$.placements[4].op"
    assert "'zzz'" in error.problem


def test_op_placed_twice_is_named(schedule: ScheduleDocument, trace: Trace) -> None:
    error = refusal(change(schedule, placements=(*schedule.placements, schedule.placements[0])), trace)
    assert error.place == "$.placements[4].op"
    assert "twice" in error.problem


def test_stream_out_of_range_is_refused(schedule: ScheduleDocument, trace: Trace) -> None:
    placements = (Placement(op="a", stream=2), *schedule.placements[1:])
    error = refusal(change(schedule, placements=placements), trace)
    assert error.place == "$.placements[0].stream"
    assert "stream 2, of 2 streams" in error.problem


@pytest.mark.parametrize("streams", [MAX_STREAMS + 1, 10**9])
def test_more_streams_than_a_gpu_has_are_refused(streams: int, schedule: ScheduleDocument, trace: Trace) -> None:
    error = refusal(change(schedule, streams=streams), trace)
    assert error.place == "$.streams"
    assert str(streams) in error.problem


def test_order_against_the_dependencies_is_refused_with_both_ops(schedule: ScheduleDocument, trace: Trace) -> None:
    a, c, b, d = schedule.placements
    error = refusal(change(schedule, placements=(a, d, c, b)), trace)
    assert error.place == "$.placements[1]"
    assert "'d'" in error.problem
    assert "'b'" in error.problem


def test_order_against_a_change_in_place_is_refused() -> None:
    trace = make_trace([op("r", "x"), in_place("w", "x")])
    swapped = schedule_of([1, 0], [0, 0]).to_document(trace)
    assert "'w'" in refusal(swapped, trace).problem


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"order": (0, 2, 1)}, "each of the 4 ops once"),
        ({"order": (0, 2, 1, 1)}, "each of the 4 ops once"),
        ({"order": (0, 2, 1, 4)}, "each of the 4 ops once"),
        ({"order": (0, 3, 1, 2)}, "op 'd' comes before 'b', whose result it needs"),
        ({"streams": (0, 0, 1)}, "for each of the 4 ops"),
        ({"streams": (0, 0, -1, 0)}, "op 'c' is on stream -1"),
        ({"streams": (0, 0, MAX_STREAMS, 0)}, f"op 'c' is on stream {MAX_STREAMS}"),
        ({"variants": (0, 0, 1)}, "for each of the 4 ops"),
        ({"variants": (0, 0, 1, 0)}, "op 'c' has no variant 1, of 0"),
        (
            {"partitions": (Partition(sms=64, streams=(MAX_STREAMS,)),)},
            f"a partition has stream {MAX_STREAMS}; the limit",
        ),
    ],
)
def test_schedule_made_in_python_is_refused_in_one_line_where_it_is_illegal(
    fields: dict[str, Any], words: str, trace: Trace
) -> None:
    wrong = dataclasses.replace(schedule_of([0, 2, 1, 3], [0, 0, 1, 0]), **fields)
    with pytest.raises(ScheduleError, match=words) as caught:
        wrong.check(build_graph(trace))
    assert "\n" not in str(caught.value)


def test_schedules_are_equal_where_they_run_the_same_whoever_made_them() -> None:
    one = schedule_of([0, 1], [0, 1])
    assert one == one.made("search", "a test", 7)
    assert hash(one) == hash(one.made("search", "a test", 7))
    assert one != schedule_of([1, 0], [0, 1])
    assert one != schedule_of([0, 1], [0, 1], variants=(0, 1))


def test_repr_of_a_schedule_is_short() -> None:
    assert (
        repr(schedule_of(range(2000), [0] * 2000).made("wavefront", ""))
        == "<Schedule wavefront: 2,000 ops on 1 stream>"
    )


@pytest.mark.parametrize(
    ("field", "value", "place"),
    [
        ("streams", 0, "$.streams"),
        ("streams", -1, "$.streams"),
        ("streams", "two", "$.streams"),
        ("predicted_ns", -5, "$.predicted_ns"),
        ("schema", "gpusim-schedule/9", "$.schema"),
        ("placements", [{"op": "a", "stream": -1}], "$.placements[0].stream"),
        ("placements", [{"op": "a"}], "$.placements[0]"),
        ("surprise", 1, "$"),
    ],
)
def test_file_with_a_bad_field_is_refused_with_file_and_place(
    field: str, value: Any, place: str, tmp_path: Path, schedule: ScheduleDocument
) -> None:
    path = tmp_path / "bad.json"
    path.write_bytes(msgspec.json.encode(msgspec.to_builtins(schedule) | {field: value}))
    with pytest.raises(ScheduleError) as caught:
        read_schedule_document(path)
    assert (caught.value.file, caught.value.place) == (str(path), place)


def test_trace_given_as_a_schedule_is_refused(tmp_path: Path, trace: Trace) -> None:
    path = tmp_path / "trace.json"
    path.write_bytes(msgspec.json.encode(trace))
    with pytest.raises(ScheduleError, match=r"is a trace, and a schedule \(gpusim-schedule/1\) is read here"):
        read_schedule_document(path)


@pytest.mark.parametrize("streams", [0, -1, MAX_STREAMS + 1])
def test_stream_count_out_of_range_is_an_option_error_with_the_value(streams: int) -> None:
    with pytest.raises(OptionError, match=f"streams={streams}: .*between 1 and {MAX_STREAMS}"):
        check_streams(streams)


@pytest.mark.parametrize("streams", [1, MAX_STREAMS])
def test_stream_counts_at_the_limits_are_fine(streams: int) -> None:
    assert check_streams(streams) == streams


@pytest.mark.parametrize(
    ("name", "nearest"),
    [("wavefrnt", "wavefront"), ("roundrobin", "round_robin"), ("Critical-Path", "critical_path"), ("seq", None)],
)
def test_unknown_policy_suggests_the_nearest_and_lists_all(name: str, nearest: str | None) -> None:
    with pytest.raises(UnknownNameError) as caught:
        policy_by_name(name)
    text = str(caught.value)
    assert f"unknown policy '{name}'" in text
    assert "sequential" in text
    assert nearest is None or f"did you mean '{nearest}'?" in text


def test_unknown_engine_suggests_the_nearest_and_lists_all() -> None:
    with pytest.raises(UnknownNameError, match=r"unknown engine 'refrence'; did you mean 'reference'\?.*there are: "):
        engine_by_name("refrence")
