"""Shortcuts of the planner: each against the plain method, on random steps."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from hypothesis import given, settings
from hypothesis import strategies as st

from gpusim.formats.trace import Trace
from gpusim.memplan.memory import memory_of, peak_bytes_of, pool_before
from gpusim.memplan.plan import MemoryPlan
from gpusim.memplan.policies.base import Setting
from gpusim.memplan.policies.capuchin import by_msps
from gpusim.memplan.policies.least_time import LeastTime
from gpusim.memplan.policies.runs import Runs
from gpusim.memplan.program import program_of
from gpusim.memplan.rebuild import GroupedRedos, SeparateRedos, Uses, chain
from gpusim.memplan.storages import Storages
from gpusim.memplan.times import CopiesOut, Link, OpTimes
from tests.support.helpers import Step, kernel, make_trace
from tests.support.memory_steps import graph_of


@st.composite
def steps(draw: st.DrawFn) -> Trace:
    """Draw a training step whose ops read several earlier results, also late in the backward pass."""
    count = draw(st.integers(2, 9))
    ops: list[Step] = []
    for i in range(count):
        others = draw(st.sets(st.integers(0, i - 1), min_size=1, max_size=3)) if i else set()
        reads = " ".join(f"a{j}" for j in sorted(others)) or "x"
        dur_ns = draw(st.integers(1, 50)) * 1000
        ops.append(Step(f"f{i}", reads, f"a{i}", kernels=(kernel(dur_ns),), target="aten.relu.default"))
    gradient = "x"
    for number, i in enumerate(draw(st.permutations(range(count)))):
        ops.append(Step(f"b{i}", f"{gradient} a{i}", f"g{number}", kernels=(kernel(2000),), phase="backward"))
        gradient = f"g{number}"
    return make_trace(ops, outputs=gradient, elements=1 << 20)


@settings(max_examples=150, deadline=None)
@given(trace=steps(), choices=st.lists(st.sets(st.integers(0, 8)), min_size=1, max_size=6))
def test_recomputation_by_itself_is_the_chain_from_what_is_there(trace: Trace, choices: list[set[int]]) -> None:
    storages = Storages.of(trace)
    uses = Uses.of(storages, range(len(trace.ops)))
    again = SeparateRedos(storages, uses)  # one for all choices: its cache must not show
    for choice in choices:
        gone = [s for n, s in enumerate(storages.saved) if n in choice]
        expected = []
        for storage in sorted(gone, key=lambda s: (uses.first[s], s)):
            before = uses.first[storage]
            there = {s for s in storages.saved if s not in gone and uses.last[s] >= before}
            found = chain(storages, (storage,), there.__contains__)
            if found is not None:
                expected.append(found.redo(before))
        assert again.of(gone, gone) == tuple(expected)


@settings(max_examples=150, deadline=None)
@given(
    trace=steps(),
    kept=st.sets(st.integers(0, 8), max_size=2),
    choices=st.lists(st.sets(st.integers(0, 8)), min_size=1, max_size=6),
)
def test_recomputation_in_groups_reuses_what_an_earlier_one_brought_back(
    trace: Trace, kept: set[int], choices: list[set[int]]
) -> None:
    storages = Storages.of(trace)
    uses = Uses.of(storages, range(len(trace.ops)))
    stay = frozenset(s for n, s in enumerate(storages.saved) if n in kept)
    again = GroupedRedos(storages, range(len(trace.ops)), uses, stay)  # one for all choices: its cache must not show
    for choice in choices:
        gone = {s for n, s in enumerate(storages.saved) if n in choice} - stay
        expected = []
        for storage in sorted(gone, key=lambda s: (uses.first[s], s)):
            if storage in gone:
                before = uses.first[storage]
                there = {s for s in storages.saved if s not in gone and uses.last[s] >= before} | stay
                found = chain(storages, (storage,), there.__contains__)
                assert found is not None
                gone -= found.storages
                expected.append(found.redo(before))
        gone = {s for n, s in enumerate(storages.saved) if n in choice} - stay
        assert again.of(gone) == tuple(expected)


def _brought(storage: int, sources: Mapping[int, Sequence[int]], taken: set[int]) -> set[int]:
    reached, todo = {storage}, [storage]
    while todo:
        new = {s for s in sources[todo.pop()] if s in taken} - reached
        reached |= new
        todo += new
    return reached


@settings(max_examples=200, deadline=None)
@given(data=st.data(), count=st.integers(1, 12), limit=st.integers(1, 60))
def test_runs_keep_their_limit_and_refuse_nothing_that_does(data: st.DataObject, count: int, limit: int) -> None:
    sources = {
        s: tuple(sorted(data.draw(st.sets(st.integers(0, s - 1), max_size=3)))) if s else () for s in range(count)
    }
    sizes = data.draw(st.lists(st.integers(1, 20), min_size=count, max_size=count))
    runs, taken = Runs(sources, sizes, limit), set[int]()
    for storage in data.draw(st.permutations(range(count))):
        with_it = taken | {storage}
        most = max(sum(sizes[s] for s in _brought(each, sources, with_it)) for each in with_it)
        assert runs.add(storage) == (most <= limit)
        if most <= limit:
            taken = with_it


@settings(max_examples=150, deadline=None)
@given(
    copies=st.lists(st.tuples(st.integers(0, 9), st.integers(0, 1 << 24)), min_size=1, max_size=12),
    limit_ns=st.integers(1_000, 2_000_000),
)
def test_copies_are_taken_as_long_as_all_of_them_end_in_time(copies: list[tuple[int, int]], limit_ns: int) -> None:
    graph = graph_of(make_trace([Step(f"f{i}", "x", f"a{i}", kernels=(kernel(20_000),)) for i in range(10)]))
    times, link = OpTimes.of(graph), Link.of(graph)
    taken: list[tuple[int, int, int]] = []
    out = CopiesOut(times, link)
    for storage, (place, size) in enumerate(copies):
        now = 0.0
        for where, _, each in sorted([*taken, (place, storage, size)]):
            now = max(now, times.end_ns[where]) + link.out_ns(each)
        assert out.add((place, storage), size, limit_ns) == (now <= limit_ns)
        if now <= limit_ns:
            taken.append((place, storage, size))


@settings(max_examples=100, deadline=None)
@given(trace=steps(), swapped=st.sets(st.integers(0, 8)))
def test_capuchin_takes_the_most_bytes_for_their_time_each_time(trace: Trace, swapped: set[int]) -> None:
    setting = Setting.of(graph_of(trace))
    storages = setting.storages
    gone = [s for n, s in enumerate(storages.saved) if n in swapped]
    own = {s: setting.recompute_ns(s) for s in setting.chains if s not in gone}
    sources = {s: set().union(*(storages.touched[op] for op in setting.chains[s].ops)) - {s} for s in own}
    left, taken = dict(own), list[int]()
    while left:
        best = max(left, key=lambda s: (storages.bytes[s] / max(left[s], 1.0), -s))
        cost = left.pop(best)
        taken.append(best)
        for other in left:
            if best in sources[other]:
                left[other] += cost
            if other in sources[best]:
                left[other] = max(left[other], own[other] * sum(1 for t in taken if other in sources[t]))
    assert by_msps(setting, gone) == taken


@settings(max_examples=50, deadline=None)
@given(trace=steps())
def test_quick_peak_is_that_of_the_whole_account(trace: Trace) -> None:
    storages = Storages.of(trace)
    program = program_of(storages, MemoryPlan())
    initial_bytes = pool_before(storages).allocated_bytes
    assert peak_bytes_of(storages, program, initial_bytes) == memory_of(storages, program).peak.allocated_bytes


@settings(max_examples=12, deadline=None)
@given(trace=steps(), shares=st.lists(st.floats(0.0, 1.0), min_size=2, max_size=4))
def test_planner_that_has_planned_for_other_budgets_gives_the_same_plan(trace: Trace, shares: list[float]) -> None:
    setting = Setting.of(graph_of(trace))
    planner = LeastTime(setting)
    least, most = planner.least_peak.peak_bytes, setting.keep_all_bytes
    for share in shares:
        budget = round(least + share * (most - least))
        assert planner.plan_for(budget) == LeastTime(Setting.of(graph_of(trace))).plan_for(budget)
