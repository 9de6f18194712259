"""Rules for the ops that a variant may cover, one by one, and schedules of a step with such variants."""

from __future__ import annotations

import json
from pathlib import Path

import msgspec
import pytest
from click.testing import CliRunner

from gpusim.cli import cli
from gpusim.engine.batch import BatchEngine
from gpusim.engine.reference import ReferenceEngine
from gpusim.errors import ScheduleError, TraceError
from gpusim.formats.hardware import load_hardware
from gpusim.formats.trace import Trace, Variant, VariantSettings
from gpusim.plan.graph import OpGraph
from gpusim.plan.lower import lower
from gpusim.plan.ranking import is_slower, ranked_variants
from gpusim.plan.schedule import write_schedule
from gpusim.policies.registry import POLICIES
from gpusim.search.neighbourhood import refine
from gpusim.trace import check, fusion
from gpusim.trace.check import check_trace
from gpusim.trace.dependencies import dependencies
from gpusim.trace.fusion import CoverRules, canonical_variants, covered_by, place_fused
from gpusim.trace.store import write_trace
from tests.support.helpers import Step, build_graph, in_place, kernel, lowered, make_trace, op, schedule_of, view


def problem(steps: list[Step], op: int, *covers: int, outputs: str = "") -> str | None:
    trace = make_trace(steps, outputs=outputs)
    return CoverRules(trace, dependencies(trace)).problem(op, covers)


def covering(trace: Trace, ways: dict[int, list[tuple[int, tuple[int, ...]]]]) -> Trace:
    """Return the trace with variants of some ops: time of the one kernel, and covered ops."""
    ops = list(trace.ops)
    for index, mine in ways.items():
        variants = tuple(
            Variant(name=f"way {number}", settings=VariantSettings(), kernels=(kernel(dur_ns),), covers=covers)
            for number, (dur_ns, covers) in enumerate(mine)
        )
        ops[index] = msgspec.structs.replace(ops[index], variants=variants)
    return msgspec.structs.replace(trace, ops=tuple(ops))


def test_chain_whose_inner_results_nobody_sees_may_be_covered() -> None:
    """New results and results changed in place, one op or two; the last one's is a normal result."""
    assert problem([op("a", "x"), op("b", "a"), op("c", "b")], 0, 1) is None
    assert problem([op("a", "x"), op("b", "a"), op("c", "b")], 0, 1, 2, outputs="c") is None
    assert problem([op("a", "x"), in_place("relu", "a"), op("c", "a")], 0, 1) is None


@pytest.mark.parametrize(
    ("steps", "covers", "outputs", "why"),
    [
        ([op("a", "x"), op("b", "a")], (2,), "", "no ops of this step"),
        ([op("a", "x"), op("b", "a"), op("c", "b")], (2, 1), "", "not in order"),
        ([op("a", "x"), op("b", "x")], (1,), "", "does not depend on it"),
        ([op("a", "x"), view("v", "a")], (1,), "", "has no kernels"),
        ([op("a", "x"), op("late", "x"), op("b", "a late")], (2,), "", "needs op 'late', which may end later"),
        ([op("a", "x"), op("b", "a"), op("other", "a")], (1,), "", "op 'other' uses tensor"),
        ([op("a", "x"), op("look", "a"), in_place("relu", "a")], (2,), "", "'look', which may end later"),
        ([op("a", "x"), op("b", "a")], (1,), "a", "is a state or a result"),
        ([view("v", "x"), in_place("add", "x"), in_place("relu", "x")], (1,), "", "does not depend"),
    ],
)
def test_what_cannot_be_covered(steps: list[Step], covers: tuple[int, ...], outputs: str, why: str) -> None:
    found = problem(steps, 0, *covers, outputs=outputs)
    assert found is not None
    assert why in found


def test_ops_before_may_be_covered_where_nobody_else_waits_for_them() -> None:
    """A sum of several tensors, added one after the other, by the last: its other inputs may come late."""
    steps = [op("a", "x"), op("late", "x"), op("b", "a late"), op("c", "b")]
    assert problem(steps, 2, 0) is None
    assert problem(steps, 3, 0, 2) is None
    assert problem(steps, 3, 0, 2, outputs="c") is None
    assert "some come before it and some behind it" in str(problem(steps, 2, 0, 3))
    assert "it does not depend on op 'a'" in str(problem([op("a", "x"), op("b", "x")], 1, 0))
    assert "op 'c' depends on op 'a', too" in str(problem([op("a", "x"), op("b", "a"), op("c", "a")], 1, 0))
    assert "is a result of the step" in str(problem(steps, 2, 0, outputs="a"))
    assert problem([in_place("scale", "m"), in_place("add", "m", "g"), in_place("step", "p", "m")], 2, 0, 1) is None


def test_of_choices_that_exclude_each_other_the_first_counts() -> None:
    """No op does the work of an op that does another's, nor work that is done already."""
    trace = covering(
        make_trace([op("a", "x"), op("b", "a"), op("c", "b"), op("d", "c")], outputs="d"),
        {0: [(100, (1,))], 2: [(100, (0, 1)), (200, ())], 3: [(100, (2,))]},
    )
    check_trace(trace, "t")
    assert covered_by(trace, (1, 0, 1, 0)) == {1: 0}
    assert canonical_variants(trace, (1, 0, 1, 0)) == (1, 0, 0, 0)
    assert canonical_variants(trace, (1, 0, 2, 0)) == (1, 0, 2, 0)
    assert covered_by(trace, (0, 0, 1, 1)) == {0: 2, 1: 2}
    assert canonical_variants(trace, (0, 0, 1, 1)) == (0, 0, 1, 0)
    graph = build_graph(trace)
    for chosen, total_ns in (((1, 0, 1, 0), 2100), ((0, 0, 1, 1), 1100), ((0, 0, 2, 1), 2100)):
        plan = lowered(graph, range(4), [0, 1, 0, 1], variants=chosen)
        assert sum(task.dur_ns for task in plan.tasks) == total_ns
        found = BatchEngine(graph).evaluate([range(4)], [[0, 1, 0, 1]], [chosen])
        assert found.makespan_ns[0] == ReferenceEngine().run(plan, graph.hardware).makespan_ns


def test_op_that_does_the_work_of_those_before_waits_for_all_they_need() -> None:
    """c does b's work: it starts when b's inputs are ready, also where they come late."""
    steps = [op("a", "x", dur_ns=1000), op("late", "x", dur_ns=9000), op("b", "a late"), op("c", "b", dur_ns=500)]
    graph = build_graph(covering(make_trace(steps, outputs="c"), {3: [(700, (2,))]}))
    plan = lowered(graph, range(4), [0, 1, 2, 3], variants=(0, 0, 0, 1))
    assert [(task.op, task.deps) for task in plan.tasks] == [(0, ()), (1, ()), (3, (0, 1))]
    order, streams = place_fused([0, 2, 1, 3], [0, 1, 2, 3], {2: 3})
    assert (order, streams) == ([0, 1, 2, 3], [0, 1, 3, 3])


def test_memory_that_was_there_before_is_not_replaced_where_others_know_it() -> None:
    """A fused sum in place and ReLU write new memory: a view made before would show the old."""
    steps = [op("a", "x"), view("old", "a"), in_place("add", "a", "x"), in_place("relu", "a")]
    assert problem([*steps, op("c", "a")], 2, 3) is None
    assert "shares memory" in str(problem([*steps, op("c", "old")], 2, 3))
    assert "is a state" in str(problem([in_place("add", "x"), in_place("relu", "x")], 0, 1))


def test_file_with_a_variant_that_cannot_cover_is_refused_with_the_place() -> None:
    trace = make_trace([op("a", "x"), op("b", "x")], outputs="a b")
    check_trace(covering(trace, {0: [(100, ())]}), "t.json")
    with pytest.raises(TraceError, match=r"\$\.ops\[0\]\.variants\[0\]\.covers.*op 'b' does not depend on it"):
        check_trace(covering(trace, {0: [(100, (1,))]}), "t.json")


@pytest.mark.parametrize(("names", "problem"), [(("",), "0.*without a name"), (("a", "a"), "1.*'a' is taken by")])
def test_file_with_variants_that_a_schedule_cannot_name_is_refused_with_the_place(
    names: tuple[str, ...], problem: str
) -> None:
    """In a schedule and a memory plan no name stands for the captured kernels."""
    trace = covering(make_trace([op("a", "x")], outputs="a"), {0: [(100, ()), (200, ())]})
    variants = tuple(msgspec.structs.replace(trace.ops[0].variants[0], name=name) for name in names)
    trace = msgspec.structs.replace(trace, ops=(msgspec.structs.replace(trace.ops[0], variants=variants),))
    with pytest.raises(TraceError, match=rf"\$\.ops\[0\]\.variants\[{problem}"):
        check_trace(trace, "t.json")


MERGED = VariantSettings(composition="merged")


def merging(trace: Trace, op: int, covers: tuple[int, ...], dur_ns: int = 100) -> Trace:
    """Return the trace with one more variant of an op, which merges it with others."""
    ops = list(trace.ops)
    merge = Variant(name="merged", settings=MERGED, kernels=(kernel(dur_ns),), covers=covers)
    ops[op] = msgspec.structs.replace(ops[op], variants=(*ops[op].variants, merge))
    return msgspec.structs.replace(trace, ops=tuple(ops))


@pytest.mark.parametrize(
    ("steps", "op", "why"),
    [
        ([op("a", "x"), op("b", "x")], 0, None),
        ([op("first", "x"), op("a", "first"), op("other", "a"), op("b", "first")], 1, None),
        ([op("a", "x"), op("b", "a")], 0, "op 'b' needs op 'a', which may end later"),
        ([op("a", "x"), op("late", "x"), op("b", "late")], 0, "op 'b' needs op 'late', which may end later"),
        ([op("a", "x"), op("use", "y"), in_place("b", "y")], 0, "needs op 'use'"),
        ([op("a", "x"), in_place("b", "y", "x")], 0, "op 'b' writes memory that is in use before"),
    ],
)
def test_what_may_be_merged(steps: list[Step], op: int, why: str | None) -> None:
    """All inputs of the covered op exist before the first one, and its results have memory of their own."""
    trace = make_trace(steps)
    found = CoverRules(trace, dependencies(trace)).problem(op, (len(steps) - 1,), merge=True)
    assert found is None if why is None else why in str(found)


def test_merges_come_last_and_cover_later_ops() -> None:
    made = make_trace([op("a", "x"), op("b", "x"), op("c", "a"), op("d", "b")], outputs="c d")
    check_trace(merging(covering(made, {0: [(100, ())]}), 0, (1,)), "t.json")
    with pytest.raises(TraceError, match=r"\$\.ops\[1\].*a merge covers later ops"):
        check_trace(merging(made, 1, (0,)), "t.json")
    wrong = merging(made, 0, (1,))
    plain = Variant(name="plain", settings=VariantSettings(), kernels=(kernel(100),))
    first = msgspec.structs.replace(wrong.ops[0], variants=(*wrong.ops[0].variants, plain))
    with pytest.raises(TraceError, match=r"\$\.ops\[0\]\.variants\[0\]: merges come behind other variants"):
        check_trace(msgspec.structs.replace(wrong, ops=(first, *wrong.ops[1:])), "t.json")


def test_what_follows_a_merged_op_waits_for_the_merge_alone() -> None:
    """a and b as one take 1500 ns in place of 1000 each; their followers start then, on streams of their own."""
    steps = [op("a", "x"), op("b", "x"), op("c", "a"), op("d", "b")]
    made = merging(make_trace(steps, outputs="c d"), 0, (1,), 1500)
    graph = build_graph(made)
    streams, chosen = [0, 1, 0, 1], (1, 0, 0, 0)
    plan = lowered(graph, range(4), streams, variants=chosen)
    assert [(task.op, task.queue, task.deps) for task in plan.tasks] == [(0, 0, ()), (2, 0, ()), (3, 1, (0,))]
    assert plan.tasks[0].dur_ns == 1500
    found = BatchEngine(graph).evaluate([range(4)], [streams], [chosen], peak=True)
    expected = ReferenceEngine().run(plan, graph.hardware)
    assert found.peak_bytes is not None
    assert (found.makespan_ns[0], found.peak_bytes[0]) == (expected.makespan_ns, expected.peak_bytes)


def test_order_with_a_merged_op_first_is_refused_and_the_search_takes_no_merge() -> None:
    """A merge is a choice of the schedule: a launch order that puts d before a is legal without it alone."""
    steps = [op("a", "x"), op("b", "x"), op("c", "a"), op("d", "b")]
    made = merging(covering(make_trace(steps, outputs="c d"), {0: [(1, ())], 2: [(900, ())]}), 0, (1,))
    graph = build_graph(made)
    schedule_of([1, 3, 0, 2], [0, 1, 0, 1]).check(graph)
    with pytest.raises(ScheduleError, match="op 'b' comes before 'a'"):
        schedule_of([1, 3, 0, 2], [0, 1, 0, 1], variants=(2, 0, 0, 0)).check(graph)
    assert ranked_variants(graph, 0.0) == (1, 0, 1, 0)
    start = POLICIES["critical_path"](graph, 2)
    found = refine(graph, [start], 2, budget_s=60, seed=0, evaluations=500, variants=True)
    assert all(each.variants in ((), (1, 0, 0, 0), (0, 0, 1, 0), (1, 0, 1, 0)) for each in found.schedules)


@pytest.fixture
def trace() -> Trace:
    """Make two chains a0 > b0 > c0 and a1 > b1 > c1; an op a may do all of its chain, an op b what is behind it."""
    steps = [
        op(f"{name}{chain}", f"{before}{chain}", dur_ns=5000) for chain in "01" for before, name in ("xa", "ab", "bc")
    ]
    made = covering(
        make_trace(steps, outputs="c0 c1"),
        {0: [(5300, (1, 2))], 1: [(1000, (2,))], 3: [(16_000, (4, 5))], 4: [(100, (5,))]},
    )
    check_trace(made, "t")
    return made


def test_covered_ops_take_no_time_and_hand_on_what_they_wait_for(trace: Trace) -> None:
    graph = build_graph(trace)
    chosen = (1, 1, 0, 0, 1, 0)
    assert covered_by(trace, chosen) == {1: 0, 2: 0, 5: 4}
    assert canonical_variants(trace, chosen) == (1, 0, 0, 0, 1, 0)
    varied = graph.choosing(chosen)
    assert [sum(task.dur_ns for task in tasks) for tasks in varied.tasks] == [5300, 0, 0, 5000, 100, 0]
    assert varied.preds == ((), (0,), (0, 1), (), (3,), (4,))
    streams = [0, 1, 2, 3, 3, 0]
    plan = lowered(graph, range(6), streams, variants=chosen)
    assert [(task.op, task.queue, task.deps) for task in plan.tasks] == [(0, 0, ()), (3, 3, ()), (4, 3, ())]
    found = BatchEngine(graph).evaluate([range(6)], [streams], [chosen], peak=True)
    expected = ReferenceEngine().run(plan, graph.hardware)
    assert found.peak_bytes is not None
    assert (found.makespan_ns[0], found.peak_bytes[0]) == (expected.makespan_ns, expected.peak_bytes)


def test_covered_ops_are_recorded_behind_the_op_that_does_their_work(trace: Trace) -> None:
    """Successors of a covered op wait for that op, not for other work on the covered op's own stream."""
    order, streams = place_fused([0, 3, 4, 1, 5, 2], [0, 1, 2, 1, 1, 0], covered_by(trace, (1, 0, 0, 0, 0, 0)))
    assert order == [0, 1, 2, 3, 4, 5]
    assert streams == [0, 0, 0, 1, 1, 0]


def test_kernels_are_ranked_with_those_they_make_needless(trace: Trace) -> None:
    """All of the first chain in 5.3 us beats 5 us and 1 us for the rest; of the second, 16 us is more than all."""
    graph = build_graph(trace)
    assert canonical_variants(trace, ranked_variants(graph, 0.0)) == (1, 0, 0, 0, 1, 0)
    assert not is_slower(graph, 0, 1)
    assert is_slower(graph, 3, 1) == (3 * 5000 + 2 * graph.chain_ns < 16_000)


def test_search_finds_the_chains_and_names_no_variant_of_covered_ops(trace: Trace) -> None:
    graph = build_graph(trace)
    start = POLICIES["critical_path"](graph, 4)
    found = refine(graph, [start], 4, budget_s=60, seed=0, evaluations=4000, variants=True)
    best = found.schedules[0]
    assert best.variants == canonical_variants(trace, best.variants) == (1, 0, 0, 0, 1, 0)
    assert max(best.streams) + 1 == 2
    expected = ReferenceEngine().run(lower(graph, best), graph.hardware).makespan_ns
    assert found.makespans_ns[0] == expected


def test_commands_show_the_kernels_that_run(trace: Trace, tmp_path: Path) -> None:
    """Timeline and causes of a schedule with variants show its own kernels, not the captured ones."""
    write_trace(trace, tmp_path / "t.json.gz")
    schedule = schedule_of(range(6), [0, 0, 0, 1, 1, 1], policy="test", variants=(1, 0, 0, 0, 1, 0))
    write_schedule(schedule, trace, tmp_path / "s.json")
    given = [str(tmp_path / "t.json.gz"), "--schedule", str(tmp_path / "s.json")]
    run = CliRunner().invoke(cli, ["simulate", *given, "--perfetto", str(tmp_path / "p.json")])
    assert run.exit_code == 0, run.output
    events = json.loads((tmp_path / "p.json").read_text())["traceEvents"]
    slices = {event["args"]["op"] for event in events if event.get("ph") == "X" and "op" in event.get("args", {})}
    assert slices == {"a0", "a1", "b1"}
    run = CliRunner().invoke(cli, ["explain", *given, "--json"])
    assert run.exit_code == 0, run.output
    graph = OpGraph.build(trace, load_hardware("h200"))
    plan = lowered(graph, range(6), [0, 0, 0, 1, 1, 1], variants=(1, 0, 0, 0, 1, 0))
    assert json.loads(run.output)["makespan_ns"] == ReferenceEngine().run(plan, graph.hardware).makespan_ns


# --- What a file may ask to be checked ---


def test_variant_that_covers_more_than_a_thousand_ops_is_refused() -> None:
    steps = [op("a", "x"), *(op(f"b{n}", f"b{n - 1}" if n else "a") for n in range(1001))]
    assert problem(steps, 0, *range(1, 1001)) is None
    assert problem(steps, 0, *range(1, 1002)) == "it covers 1001 ops; the limit is 1000"


def test_covers_are_refused_in_a_step_of_too_many_ops(monkeypatch: pytest.MonkeyPatch) -> None:
    made = covering(make_trace([op("a", "x"), op("b", "a"), op("c", "b")]), {0: [(1, (1,))]})
    check_trace(made, "t.json")
    monkeypatch.setattr(check, "MAX_OPS", 2)
    with pytest.raises(
        TraceError, match=r"t\.json: \$\.ops\[0\]\.variants\[0\]\.covers: is allowed in .* at most 2 ops"
    ):
        check_trace(made, "t.json")


def shared_by_all(count: int) -> list[Step]:
    """Make a chain of ops that all change one tensor and read another."""
    return [op("a", "x"), *(in_place(f"b{n}", "a", "x") for n in range(count))]


#: Each op needs all before it: 7,140 dependencies.
DENSE = [op(f"d{n}", " ".join(f"d{before}" for before in range(n)) or "x") for n in range(120)]


@pytest.mark.parametrize(
    ("steps", "ways"),
    [
        (shared_by_all(100), {0: [(1, (1,))] * 50}),
        (shared_by_all(100), {0: [(1, tuple(range(1, 100)))]}),
        (shared_by_all(100), {100: [(1, tuple(range(100)))] * 60}),
        (DENSE, {0: [(1, (1,))]}),
    ],
    ids=["one storage", "a long chain", "ops before", "dependencies"],
)
def test_covers_that_share_much_are_given_up_before_they_take_long(
    steps: list[Step], ways: dict[int, list[tuple[int, tuple[int, ...]]]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """They count as too many, whatever else is wrong with them; those of a small step are checked in full."""
    monkeypatch.setattr(fusion, "MAX_LOOKED_AT", 5000)
    monkeypatch.setattr(check, "MAX_LOOKED_AT", 5000)
    made = covering(make_trace(steps), {index: [(1, covers) for _, covers in found] for index, found in ways.items()})
    with pytest.raises(TraceError, match=r"t\.json: \$\.ops\[\d+\]\.variants\[\d+\]\.covers: .*than can be checked"):
        check_trace(made, "t.json")
