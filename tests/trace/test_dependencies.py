"""Dependencies come from data alone: reads, writes, changes in place, the random generator; never program order."""

from __future__ import annotations

from hypothesis import given

from gpusim.formats.trace import Trace
from gpusim.trace.check import check_trace
from gpusim.trace.dependencies import dependencies
from tests.support.helpers import Step, ancestors, in_place, kernel, make_trace, op, touched_storages, traces, view

WORK = (kernel(1000),)


def edges(*steps: Step) -> dict[str, set[str]]:
    """Return the names of the ops that each op of a small trace depends on."""
    trace = make_trace(steps)
    names = [found.name for found in trace.ops]
    return {names[i]: {names[j] for j in before} for i, before in enumerate(dependencies(trace))}


def test_op_depends_on_the_maker_of_what_it_reads() -> None:
    assert edges(op("a", "x"), op("b", "a"), op("c", "a b")) == {"a": set(), "b": {"a"}, "c": {"a", "b"}}


def test_program_order_alone_adds_no_edge() -> None:
    assert edges(op("a", "x"), op("b", "x"), op("c", "y")) == {"a": set(), "b": set(), "c": set()}


def test_two_readers_of_one_tensor_are_independent() -> None:
    found = edges(op("a", "x"), op("b", "a"), op("c", "a"))
    assert found["b"] == found["c"] == {"a"}


def test_reading_through_a_view_depends_on_the_view_and_on_who_wrote_the_storage() -> None:
    found = edges(op("a", "x"), view("v", "a"), op("b", "v"))
    assert found == {"a": set(), "v": {"a"}, "b": {"a", "v"}}


def test_view_of_an_input_depends_on_nothing() -> None:
    assert edges(view("v", "x"), op("a", "v"))["v"] == set()


def test_read_after_write_through_another_alias() -> None:
    # Both views refer to a; w changes it through one of them, b reads through the other.
    found = edges(op("a", "x"), view("v1", "a"), view("v2", "a"), in_place("w", "v1"), op("b", "v2"))
    assert found["w"] == {"a", "v1"}
    assert "w" in found["b"]


def test_write_after_read_in_place() -> None:
    found = edges(op("a", "x"), op("r", "a"), in_place("w", "a"))
    assert found["w"] == {"a", "r"}


def test_write_after_read_in_place_on_an_input() -> None:
    assert edges(op("r", "x"), in_place("w", "x"))["w"] == {"r"}


def test_write_after_write_in_place() -> None:
    found = edges(in_place("w1", "x"), in_place("w2", "x"))
    assert found["w2"] == {"w1"}


def test_pure_overwrite_waits_for_the_write_before_it() -> None:
    overwrite = Step("w2", changes="a", kernels=WORK)  # a fill: it reads nothing
    assert edges(op("a", "x"), overwrite)["w2"] == {"a"}


def test_reader_after_a_change_waits_for_the_change_and_not_for_older_readers() -> None:
    found = edges(op("r1", "x"), in_place("w", "x"), op("r2", "x"))
    assert found["r2"] == {"w"}


def test_random_ops_keep_their_order_among_themselves() -> None:
    drop = [Step(f"d{i}", "x", f"d{i}", kernels=WORK, random=True) for i in range(3)]
    found = edges(drop[0], op("a", "x"), drop[1], drop[2])
    assert found == {"d0": set(), "a": set(), "d1": {"d0"}, "d2": {"d1"}}


def test_op_that_reads_and_changes_one_storage_does_not_depend_on_itself() -> None:
    assert edges(in_place("w", "x")) == {"w": set()}


@given(traces())
def test_every_dependency_is_an_earlier_op(trace: Trace) -> None:
    check_trace(trace, "random")
    for index, before in enumerate(dependencies(trace)):
        assert list(before) == sorted(set(before))
        assert all(0 <= other < index for other in before)


@given(traces())
def test_ops_that_dependencies_do_not_order_never_conflict_on_a_storage(trace: Trace) -> None:
    """Brute force: of two unordered ops neither writes what the other reads or writes, and at most one is random."""
    before = ancestors(dependencies(trace))
    for second in range(len(trace.ops)):
        for first in set(range(second)) - before[second]:
            reads_1, writes_1 = touched_storages(trace, trace.ops[first])
            reads_2, writes_2 = touched_storages(trace, trace.ops[second])
            assert not writes_1 & (reads_2 | writes_2)
            assert not reads_1 & writes_2
            assert not (trace.ops[first].random and trace.ops[second].random)


@given(traces())
def test_op_comes_after_the_maker_of_every_tensor_it_mentions(trace: Trace) -> None:
    before = ancestors(dependencies(trace))
    maker: dict[int, int] = {}
    for index, found in enumerate(trace.ops):
        mentioned = {arg["tensor"] for arg in found.args}
        assert {maker[tensor] for tensor in mentioned if tensor in maker} <= before[index] | {index}
        for tensor in found.outputs:
            if tensor is not None:
                maker.setdefault(tensor, index)
