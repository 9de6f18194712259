"""L2 cache misses of schedules, against hand-worked examples, and their time in all engines."""

from __future__ import annotations

import msgspec
import pytest

from gpusim.analysis.explain import MISSES, explain
from gpusim.bounds.bounds import bounds
from gpusim.defaults import PARTITIONS
from gpusim.engine.evaluate import Evaluator
from gpusim.engine.fast import FastEngine
from gpusim.engine.reference import ReferenceEngine
from gpusim.formats.hardware import HardwareModel, load_hardware
from gpusim.plan.anchor import anchored
from gpusim.plan.cache_misses import CHUNK_BYTES, STREAM_BITS, Miss, _Step, lost_times_ns, misses, touched
from gpusim.plan.graph import OpGraph
from gpusim.plan.lower import lower
from gpusim.plan.schedule import Schedule
from gpusim.policies.registry import POLICIES
from gpusim.rules.l2_cache import MISSING_GAP_NS, launch_lost_ns, lost_ns
from gpusim.search.explore import explore
from gpusim.search.neighbourhood import Refined
from gpusim.search.variants import tried_variants, usual_splits
from gpusim.trace.store import load_trace
from gpusim.units import MIB

H200 = load_hardware("h200")


def with_memory(**fields: float) -> HardwareModel:
    return msgspec.structs.replace(H200, memory=msgspec.structs.replace(H200.memory, **fields))


@pytest.fixture(scope="module")
def graph() -> OpGraph:
    """A step that fits the cache on one stream only."""
    return OpGraph.build(load_trace("googlenet-infer-b1"), H200)


def test_least_recently_used_chunk_goes_and_counts_as_written_where_it_was_changed() -> None:
    """Two chunks fit. Op 0 reads 0 and 1, op 1 writes 2, which pushes out 0; in the second step 0 pushes out 1, and 1
    pushes out 2, which was changed; writing 2 again reads nothing."""
    touches = {0: [(range(2), True)], 1: [(range(2, 3), False)]}
    assert misses(touches, (0, 1), 2) == {0: Miss(2 * CHUNK_BYTES, CHUNK_BYTES), 1: Miss(0, 0)}


def test_what_fits_is_read_from_the_cache_in_the_second_step() -> None:
    touches = {0: [(range(2), True)], 1: [(range(2, 3), False)]}
    assert set(misses(touches, (0, 1), 3).values()) == {Miss(0, 0)}


def test_every_tensor_has_memory_of_its_own_stream_also_the_first(graph: OpGraph) -> None:
    """The first block of a stream is at address 0 of its pool; no stream's range meets that of lasting storages."""
    step = _Step.of(graph)
    streams = tuple(2000 if op % 2 else 0 for op in range(len(graph)))
    alone = Schedule.in_recorded_order(len(graph))
    for schedule in (alone, Schedule(order=alone.order, streams=streams)):
        for op, touches in touched(graph, step, schedule).items():
            sized = [storage for storage, size_bytes, _ in step.accesses[op] if size_bytes]
            assert len(sized) <= len(touches) <= len(sized) + 1, "each storage, and perhaps a workspace"
            ranges = {chunks.start * CHUNK_BYTES >> STREAM_BITS for chunks, _ in touches}
            assert ranges <= {0, 1, 2001}
            assert (0 in ranges) == any(s in step.lasting for s in sized)


@pytest.mark.parametrize(
    ("read", "written", "warps", "wanted"),
    [
        (800, 0, 10, 10 + 5),  # 800 / 40 - 800 / 80, and the delay
        (800, 0, 10_000, 0.1 + 5),  # both bandwidths reached: 800 / 4000 - 800 / 8000
        (0, 4000, 10, 1),
        (800, 4000, 10, 10 + 5 + 1),
        (0, 0, 10, 0),
    ],
)
def test_lost_time_is_that_of_the_hand_worked_cases(read: int, written: int, warps: float, wanted: float) -> None:
    memory = with_memory(
        dram_bytes_per_ns=4000.0,
        l2_bytes_per_ns=8000.0,
        warp_dram_bytes_per_ns=4.0,
        warp_l2_bytes_per_ns=8.0,
        miss_ns=5.0,
    ).memory
    assert lost_ns(memory, read, written, warps) == pytest.approx(wanted)


@pytest.mark.parametrize(("touched_mib", "wanted"), [(61, 7.0), (59, 0.0)])
def test_launches_lose_time_where_a_replay_does_not_fit(touched_mib: int, wanted: float) -> None:
    """0.6 of 100 MiB are usable."""
    memory = with_memory(l2_bytes=100 * MIB, launch_miss_ns=7.0).memory
    assert launch_lost_ns(memory, touched_mib * MIB) == wanted
    unmeasured = msgspec.structs.replace(memory, l2_bytes_per_ns=0.0)
    assert launch_lost_ns(unmeasured, touched_mib * MIB) == 0.0


@pytest.mark.parametrize(("gap_ns", "wanted"), [(100.0, 7.0), (MISSING_GAP_NS - 5.0, 5.0), (MISSING_GAP_NS + 5.0, 0.0)])
def test_launches_that_miss_on_one_stream_do_not_miss_again(graph: OpGraph, gap_ns: float, wanted: float) -> None:
    hardware = anchored(graph.trace, with_memory(launch_miss_ns=7.0), gap_ns)
    assert hardware.memory.launch_miss_ns == wanted


def test_every_kernel_loses_its_launch_in_a_schedule_that_does_not_fit(graph: OpGraph) -> None:
    lost = lost_times_ns(graph, POLICIES["critical_path"](graph, 4))
    assert set(lost) == {op for op, tasks in enumerate(graph.tasks) if tasks}
    assert min(min(times) for times in lost.values()) == H200.memory.launch_miss_ns


def test_nothing_is_lost_on_one_stream_or_with_a_cache_that_was_not_measured(graph: OpGraph) -> None:
    schedule = POLICIES["critical_path"](graph, 4)
    assert lost_times_ns(graph, schedule)
    assert not lost_times_ns(graph, Schedule.in_recorded_order(len(graph)))
    unmeasured = OpGraph.build(graph.trace, with_memory(l2_bytes_per_ns=0.0))
    assert not lost_times_ns(unmeasured, schedule)


def test_nothing_is_lost_by_a_step_that_fits_on_any_streams_or_on_none() -> None:
    """All 24 MiB of SqueezeNet's fit the usable part; Inception-v3 was timed with its misses."""
    for name in ("squeezenet1_1-infer-b1", "inception_v3-infer-b1"):
        other = OpGraph.build(load_trace(name), H200)
        assert not lost_times_ns(other, POLICIES["critical_path"](other, 4))


def test_lost_time_is_in_every_engine_and_in_the_evaluation_alike(graph: OpGraph) -> None:
    schedule = POLICIES["critical_path"](graph, 4)
    plan = lower(graph, schedule)
    fast, reference = FastEngine().run(plan, graph.hardware), ReferenceEngine().run(plan, graph.hardware)
    assert fast.end_ns == reference.end_ns
    assert Evaluator(graph).makespan_ns(schedule) == fast.makespan_ns
    assert Evaluator(graph).evaluate(schedule).peak_bytes == fast.peak_bytes
    lost = lost_times_ns(graph, schedule)
    for task in plan.tasks:
        assert task.dur_ns == graph.tasks[task.op][task.kernel].dur_ns + lost.get(task.op, (0.0,) * 99)[task.kernel]


def test_tables_of_an_exploration_have_the_times_of_its_rows(graph: OpGraph) -> None:
    """Each table and row evaluates again what was found, with its misses."""
    found = explore(
        graph, streams=4, seed=1, evaluations=200, policies=["critical_path"], splits=usual_splits(4, 132)[:1]
    )
    (tried,) = found.partitions
    assert tried.makespan_ns in {row.makespan_ns for row in found.rows if row.policy == PARTITIONS}
    for row in found.rows:
        assert row.makespan_ns == ReferenceEngine().run(lower(graph, row.schedule), graph.hardware).makespan_ns
    assert any(lost_times_ns(graph, row.schedule) for row in found.rows if row.policy == PARTITIONS)


def test_gain_of_variants_counts_misses(graph: OpGraph) -> None:
    schedule = POLICIES["critical_path"](graph, 4)
    refined = Refined((schedule,), (1,), (1,), (0,), 1, False)  # the search's own time, without misses, is not used
    tried = tried_variants(Evaluator(graph), refined, refined)
    assert tried.without_ns == tried.with_ns == tried.fastest_ns == Evaluator(graph).makespan_ns(schedule)


def test_misses_are_a_cause_of_their_own_above_the_critical_path(graph: OpGraph) -> None:
    """The critical path is the bound, whatever the schedule misses."""
    lowered = lower(graph, POLICIES["critical_path"](graph, 4))
    found = explain(graph, FastEngine().run(lowered, graph.hardware), graph.hardware)
    gap = found.step()
    assert int(gap.critical_path_ns) == bounds(graph).critical_path_ns
    assert sum(delay.lost_ns for delay in gap.delays) == pytest.approx(gap.gap_ns, abs=1e-3)
    for index, task in enumerate(lowered.tasks):
        assert sum(d.lost_ns for d in found.delays[index] if d.cause == MISSES) == task.missed_ns
    assert 0.0 < found.causes_ns()[MISSES] < sum(task.missed_ns for task in lowered.tasks)
