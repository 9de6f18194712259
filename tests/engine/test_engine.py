"""The engines' rules in graph mode: small plans worked out by hand, and properties of any plan."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpusim.bounds.bounds import bounds
from gpusim.engine.base import Timeline, busy_ns, concurrency
from gpusim.formats.hardware import Copies, HardwareModel
from gpusim.formats.trace import HostLink, Trace
from gpusim.plan.anchor import anchor
from gpusim.plan.graph import OpGraph
from gpusim.plan.tasks import Buffer, LaunchMode, Plan, Task
from gpusim.rules.anchor import MAX_GAP_NS, MAX_SCALE, MIN_GAP_NS, MIN_SCALE
from gpusim.rules.copies import MANY_PENDING
from tests.support.helpers import (
    HALF,
    WAVES,
    WHOLE,
    build_graph,
    chain_trace,
    copy,
    hardware_models,
    lowered,
    make_hardware,
    make_trace,
    memset,
    op,
    plan,
    plans,
    share,
    task,
    traces_with_schedules,
    view,
)
from tests.support.timelines import ROUNDING_NS, assert_legal, longest_chain_ns, run, spans


def sequential(trace: Trace, hardware: HardwareModel) -> Timeline:
    """Run everything on one stream in recorded order."""
    graph = OpGraph.build(trace, hardware)
    return run(lowered(graph, range(len(graph)), [0] * len(graph)), graph.hardware)


# --- Graph mode: gaps and the front end ---


def test_chain_has_a_gap_between_kernels_and_none_before_the_first() -> None:
    timeline = run(plan(task(1000), task(500), task(200)), make_hardware(chain_ns=100))
    # 0..1000, +100, 1100..1600, +100, 1700..1900
    assert spans(timeline) == [(0, 1000), (1100, 1600), (1700, 1900)]
    assert timeline.makespan_ns == 1900


def test_dependency_between_streams_costs_the_same_gap_as_a_chain() -> None:
    timeline = run(plan(task(1000, queue=0), task(500, queue=1, deps=[0])), make_hardware(chain_ns=100))
    assert spans(timeline) == [(0, 1000), (1100, 1600)]


def test_join_costs_its_delay_for_each_predecessor_beyond_the_first() -> None:
    tested = plan(task(1000, queue=0), task(900, queue=1), task(800, queue=2), task(10, queue=3, deps=[0, 1, 2]))
    timeline = run(tested, make_hardware(chain_ns=100, join_ns=30))
    # all start at 0; the last of them ends at 1000; 100 + 2 x 30 later the join starts
    assert spans(timeline)[3] == (1160, 1170)


def test_predecessor_in_its_own_queue_counts_in_a_join() -> None:
    tested = plan(task(1000, queue=0), task(900, queue=1), task(10, queue=0, deps=[1]))
    assert run(tested, make_hardware(chain_ns=100, join_ns=30)).start_ns[2] == 1130


def test_successors_of_a_fork_become_ready_one_after_the_other_but_for_the_last_two() -> None:
    """In launch order, as measured on an H200; one whose other predecessor ends later does not wait for its turn."""
    hardware = make_hardware(chain_ns=100, fork_ns=30)
    forked = plan(task(1000, queue=0), *(task(10, queue=queue, deps=[0] if queue else []) for queue in range(4)))
    assert run(forked, hardware).start_ns == (0, 1100, 1130, 1160, 1160)
    assert run(plan(task(1000), task(10), task(10, queue=1, deps=[0])), hardware).start_ns == (0, 1100, 1100)
    late = plan(
        task(1000, queue=0),
        task(2000, queue=1),
        *(task(10, queue=queue, deps=[0]) for queue in (2, 3)),
        task(10, queue=4, deps=[0, 1]),
        task(10, queue=5, deps=[0]),
    )
    assert run(late, hardware).start_ns == (0, 0, 1100, 1130, 2100, 1160)


def test_what_waits_for_a_kernel_beside_which_others_started_starts_later() -> None:
    """Of 60 ns, one concurrent start costs 60 x 1 / (1 + 2) = 20, two 30; starts before its own cost nothing, nor do
    ends.

    A (0 to 1000) sees B start, and B (0 to 3000) C. C (1120 to 3620) sees D and F start, those two nobody. The copy is
    on no SM and does not count.
    """
    hardware = make_hardware(chain_ns=100, busy_ns=60, busy_starts=2)
    tested = plan(
        task(1000, part=0.1, queue=0),
        task(3000, part=0.1, queue=1),
        task(2500, part=0.1, queue=0),
        task(10, part=0.1, queue=1),
        task(10, part=0.1, queue=0),
        task(10, part=0.1, queue=1),
        copy("h2d", 100_000, queue=2),
    )
    assert spans(run(tested, hardware))[2:6] == [(1120, 3620), (3120, 3130), (3750, 3760), (3230, 3240)]
    at_the_first = make_hardware(chain_ns=100, busy_ns=60)
    assert spans(run(tested, at_the_first))[2:5] == [(1160, 3660), (3160, 3170), (3820, 3830)]


def test_gaps_of_a_graph_that_is_no_straight_line_are_longer() -> None:
    """One task on another queue is enough, anywhere; with one queue, the gap is `chain_ns`."""
    hardware = make_hardware(chain_ns=100, branch_ns=30)
    line = (task(1000), task(500), task(200))
    assert run(plan(*line), hardware).start_ns == (0, 1100, 1700)
    assert run(plan(*line, task(10, part=0.0, queue=1)), hardware).start_ns[:3] == (0, 1130, 1760)
    assert run(plan(*line, task(10, queue=1, deps=[2])), hardware).start_ns == (0, 1130, 1760, 2090)


def test_front_end_starts_kernels_at_a_finite_rate() -> None:
    tested = plan(*(task(1000, part=0.1, queue=queue) for queue in range(4)))
    timeline = run(tested, make_hardware(front_end_ns=250))
    assert timeline.start_ns == (0, 250, 500, 750)
    assert timeline.makespan_ns == 1750


def test_front_end_starts_no_kernel_before_the_idle_blocks_of_the_last_have_ended() -> None:
    hardware = make_hardware(front_end_ns=250)
    few, many = task(1000, part=0.1, queue=0, idle_ns=100), task(1000, part=0.1, queue=1, idle_ns=600)
    assert run(plan(few, many, task(1000, part=0.1, queue=2)), hardware).start_ns == (0, 250, 850)
    assert run(plan(many, few), hardware).start_ns == (0, 600)
    after = task(10, part=0.1, queue=1)
    assert spans(run(plan(many, after), hardware)) == [(0, 1000), (1000, 1010)], "as alone, in a chain"


@pytest.mark.parametrize(("front_end_ns", "dur_ns"), [(233.61615821644043, 84.2817051774099), (250.0, 84.3)])
def test_rounding_of_times_does_not_lose_a_kernel_that_waits_for_the_front_end(
    front_end_ns: float, dur_ns: float
) -> None:
    # ready at dur_ns, while the front end is busy; dur_ns + (front_end_ns - dur_ns) rounds to less than front_end_ns
    timeline = run(plan(task(dur_ns), task(10)), make_hardware(front_end_ns=front_end_ns))
    assert timeline.start_ns == (0, round(front_end_ns))


def test_front_end_does_not_delay_a_chain_of_kernels_longer_than_its_interval() -> None:
    timeline = run(plan(task(300), task(300)), make_hardware(front_end_ns=250))
    assert spans(timeline) == [(0, 300), (300, 600)]


def test_memory_operation_has_its_extra_delay_and_needs_no_sm() -> None:
    fill = Task(name="fill", kind="memset", dur_ns=400, extra_ns=70, queue=1, deps=(0,))
    tested = plan(task(100, queue=1), task(1000, part=1.0, queue=0), fill)
    # the fill starts at 100 + 10 + 70 though the GPU is full, and takes its own time
    timeline = run(tested, make_hardware(chain_ns=10))
    assert spans(timeline)[2] == (180, 580)


def test_empty_plan_takes_no_time() -> None:
    assert run(Plan(())).makespan_ns == 0


# --- Graph mode: sharing the SMs ---


def test_two_kernels_that_fit_run_at_full_speed_side_by_side() -> None:
    timeline = run(plan(task(1000, part=0.5, queue=0), task(800, part=0.5, queue=1)))
    assert spans(timeline) == [(0, 1000), (0, 800)]


def test_younger_kernel_gets_what_the_older_one_leaves() -> None:
    # A takes 3/4 for 1000. B needs 1/2, gets 1/4 = half of it: 500 of its 1000 are done at 1000. Then it gets all: 500
    # more.
    timeline = run(plan(task(1000, part=0.75, queue=0), task(1000, part=0.5, queue=1)))
    assert spans(timeline) == [(0, 1000), (0, 1500)]


def test_kernel_behind_one_that_fills_the_gpu_waits_for_it() -> None:
    timeline = run(plan(task(1000, part=1.0, queue=0), task(500, part=0.1, queue=1)))
    assert timeline.makespan_ns == 1500


def test_scarcest_resource_sets_the_share() -> None:
    # registers: A leaves 0.2 of which B needs 0.4, half of it; threads would give B all it needs.
    first = replace(share(0.1), regs=0.8)
    second = replace(share(0.1), regs=0.4)
    timeline = run(plan(task(1000, queue=0, demand=first), task(1000, queue=1, demand=second)))
    assert spans(timeline)[1] == (0, 1500)


def test_head_of_line_nobody_passes_a_kernel_that_waits_for_room() -> None:
    # A 0.75, B 0.5 (gets 0.25), C 0.1: B is not fully placed, so C gets nothing though ... nothing is left anyway;
    # with registers as B's scarce resource threads are left, and C still waits.
    a = replace(share(0.1), regs=0.9)
    b = replace(share(0.1), regs=0.4)
    c = share(0.1)
    timeline = run(plan(task(1000, queue=0, demand=a), task(1000, queue=1, demand=b), task(100, queue=2, demand=c)))
    # B holds 0.1 / 0.4 = 1/4 until 1000: 250 done, 750 to go. C runs from 1000 on only.
    assert spans(timeline) == [(0, 1000), (0, 1750), (0, 1100)]


def test_elder_is_undisturbed_and_the_younger_runs_slower() -> None:
    # slowdown 1: B runs at 1/2 next to A. At 1000 B has done 500; now it is the oldest: 500 more.
    timeline = run(plan(task(1000, queue=0), task(1000, queue=1)), make_hardware(slowdown=1.0))
    assert spans(timeline) == [(0, 1000), (0, 1500)]


def test_memory_operation_is_no_elder_and_disturbs_no_kernel() -> None:
    fill = Task(name="fill", kind="memset", dur_ns=5000, queue=0)
    assert run(plan(fill, task(1000, queue=1)), make_hardware(slowdown=1.0)).end_ns == (5000, 1000)


def test_kernel_of_a_few_warps_loses_less() -> None:
    # slowdown 1, cover 0.25: B runs at 1 / 1.25 next to A. At 1000 it has done 800: 200 more.
    small = share(0.1, cover=0.25)
    timeline = run(plan(task(1000, queue=0), task(1000, queue=1, demand=small)), make_hardware(slowdown=1.0))
    assert spans(timeline) == [(0, 1000), (0, 1200)]


def test_dram_slows_those_that_use_it_alike_once_it_is_full() -> None:
    # 1000 B/ns. A and B each move 800 B/ns: 1600 together, so each runs at 1000/1600. C moves nothing.
    # A and B end at 1600, C at 1000.
    heavy = {"part": 0.2, "dram_bytes": 800_000.0}
    timeline = run(
        plan(task(1000, queue=0, **heavy), task(1000, queue=1, **heavy), task(1000, 0.2, queue=2)),  # type: ignore[arg-type]
        make_hardware(dram_bytes_per_ns=1000),
    )
    assert spans(timeline) == [(0, 1600), (0, 1600), (0, 1000)]


def test_kernel_alone_takes_exactly_its_time_even_where_its_traffic_is_over_the_bandwidth() -> None:
    greedy = task(1000, dram_bytes=9e9)
    hardware = make_hardware(slowdown=3.0, dram_bytes_per_ns=1000)
    assert run(plan(greedy), hardware).makespan_ns == 1000


def test_more_kernels_than_resident_grids_run_in_rounds() -> None:
    # 128 grids at once on an H200; 300 kernels of one SM each take three rounds.
    tested = plan(*(task(1000, part=0.001, queue=queue) for queue in range(300)))
    timeline = run(tested)
    assert timeline.makespan_ns == 3000
    assert sum(start == 0 for start in timeline.start_ns) == 128


def test_equal_times_start_in_launch_order() -> None:
    timeline = run(plan(*(task(100, part=1.0, queue=queue) for queue in (3, 1, 2))))
    assert timeline.end_ns == (100, 200, 300)


def test_kernels_of_a_trace_share_the_gpu_by_their_blocks() -> None:
    # 1024 threads per block, two blocks per SM: 132 blocks take half the GPU, 264 all of it.
    trace = make_trace([op("a", "x", blocks=HALF), op("b", "y", blocks=HALF), op("c", "z", blocks=WHOLE)])
    graph = build_graph(trace)
    assert [tasks[0].demand.threads for tasks in graph.tasks] == [0.5, 0.5, 1.0]
    timeline = run(lowered(graph, range(3), range(3)))
    assert spans(timeline) == [(0, 1000), (0, 1000), (0, 2000)]


def test_kernel_of_many_waves_asks_for_the_whole_gpu_once() -> None:
    graph = build_graph(make_trace([op("a", "x", blocks=WAVES)]))
    assert graph.tasks[0][0].demand.threads == 1.0


# --- Anchoring ---


def test_trace_with_its_own_graph_time_sets_the_gap() -> None:
    # five kernels of 1000: 6600 measured leaves 1600 for four gaps
    trace = chain_trace(5, 1000, graph_ns=6600)
    assert anchor(trace, make_hardware(chain_ns=50)).chain_ns == 400
    assert sequential(trace, make_hardware(chain_ns=50)).makespan_ns == 6600


@pytest.mark.parametrize(("measured_ns", "gap_ns"), [(5000, MIN_GAP_NS), (4500, MIN_GAP_NS), (8500, MAX_GAP_NS)])
def test_gap_that_is_not_believed_is_cut_and_the_durations_scaled(measured_ns: int, gap_ns: float) -> None:
    trace = chain_trace(5, 1000, graph_ns=measured_ns)
    found = anchor(trace, make_hardware())
    assert found.chain_ns == gap_ns
    assert found.scale == (measured_ns - 4 * gap_ns) / 5000
    assert sequential(trace, make_hardware()).makespan_ns == pytest.approx(measured_ns, abs=ROUNDING_NS)


@pytest.mark.parametrize(("measured_ns", "scale"), [(1000, MIN_SCALE), (90_000, MAX_SCALE)])
def test_sequential_run_far_from_its_kernels_scales_them_no_further_than_the_limit(
    measured_ns: int, scale: float
) -> None:
    assert anchor(chain_trace(5, 1000, graph_ns=measured_ns), make_hardware()).scale == scale


def test_memory_operations_are_not_counted_as_gaps_when_anchoring() -> None:
    fill = replace(op("b", "a"), kernels=(memset(1000),))
    trace = make_trace([op("a", "x"), fill, op("c", "b")], graph_ns=4200)
    hardware = make_hardware(memory_node_ns=500)
    # 4200 - 3000 - 500 leaves 700 for two gaps
    assert anchor(trace, hardware).chain_ns == 350
    assert sequential(trace, hardware).makespan_ns == 4200


def test_trace_of_another_gpu_or_without_a_measured_time_is_not_anchored() -> None:
    hardware = make_hardware(chain_ns=50)
    elsewhere = make_hardware(chain_ns=50, gpu="another GPU")
    assert anchor(chain_trace(5), hardware).chain_ns == 50
    assert anchor(chain_trace(5, graph_ns=9000), elsewhere).chain_ns == 50


def test_measured_link_stands_for_that_of_the_model_on_its_own_gpu() -> None:
    """Both directions at half the model's rate: so is their sum, and latency stays."""
    hardware = make_hardware()
    hardware = msgspec.structs.replace(
        hardware,
        copies=Copies(h2d_bytes_per_ns=20.0, d2h_bytes_per_ns=40.0, both_bytes_per_ns=30.0, latency_ns=1.0),
    )
    trace = chain_trace(5, graph_ns=9000)
    assert trace.ground_truth is not None
    link = HostLink(h2d_bytes_per_ns=10.0, d2h_bytes_per_ns=20.0)
    trace = msgspec.structs.replace(trace, ground_truth=msgspec.structs.replace(trace.ground_truth, link=link))
    assert OpGraph.build(trace, hardware).hardware.copies == Copies(
        h2d_bytes_per_ns=10.0, d2h_bytes_per_ns=20.0, both_bytes_per_ns=15.0, latency_ns=1.0
    )
    elsewhere = msgspec.structs.replace(hardware, gpu="another GPU")
    assert OpGraph.build(trace, elsewhere).hardware.copies == hardware.copies


# --- Views, buffers ---


def test_view_takes_no_time_and_hands_its_dependency_on() -> None:
    trace = make_trace([op("a", "x"), view("v", "a"), op("b", "v")])
    graph = build_graph(trace, make_hardware(chain_ns=100))
    timeline = run(lowered(graph, range(3), [0, 2, 1]), make_hardware(chain_ns=100))
    assert spans(timeline) == [(0, 1000), (1100, 2100)]


def test_memory_is_held_from_the_first_users_start_to_the_last_users_end() -> None:
    tested = plan(
        task(100),
        task(100),
        task(100),
        buffers=(Buffer(bytes=8, tasks=(0, 1)), Buffer(bytes=4, tasks=(1, 2))),
        kept_bytes=1,
    )
    timeline = run(tested, make_hardware(chain_ns=10))
    assert timeline.memory == ((0, 9), (110, 13), (210, 5), (320, 1))
    assert timeline.peak_bytes == 13


def test_busy_time_and_concurrency() -> None:
    timeline = run(plan(task(1000, queue=0), task(500, queue=1)))
    assert busy_ns(timeline.start_ns, timeline.end_ns) == 1000
    assert concurrency(timeline) == 1.5


# --- Copies ---


@pytest.mark.parametrize(("kind", "expected_ns"), [("h2d", 100 + 1000), ("d2h", 100 + 2000)])
def test_copy_takes_its_latency_and_its_bytes_over_the_bandwidth(kind: str, expected_ns: int) -> None:
    hardware = make_hardware(h2d=50, d2h=25, both=75, copy_latency_ns=100)
    assert run(plan(copy(kind, 50_000)), hardware).makespan_ns == expected_ns


def test_copies_of_one_direction_take_turns() -> None:
    timeline = run(plan(copy("h2d", 5000, queue=0), copy("h2d", 5000, queue=1)), make_hardware(h2d=50))
    assert spans(timeline) == [(0, 100), (100, 200)]


def test_both_directions_at_once_are_independent_where_the_link_carries_both() -> None:
    timeline = run(plan(copy("h2d", 5000, queue=0), copy("d2h", 5000, queue=1)), make_hardware(both=100))
    assert spans(timeline) == [(0, 100), (0, 100)]


def test_both_directions_at_once_share_a_link_that_cannot() -> None:
    # 50 + 50 needed, 80 available: each at 40 B/ns. h2d ends at 125; d2h has 5000 of 10000 left and takes 100 more.
    timeline = run(plan(copy("h2d", 5000, queue=0), copy("d2h", 10_000, queue=1)), make_hardware(both=80))
    assert spans(timeline) == [(0, 125), (0, 225)]


def test_copies_overlap_with_kernels_and_need_no_sm() -> None:
    timeline = run(plan(task(1000, part=1.0, queue=0), copy("h2d", 5000, queue=1), copy("d2h", 5000, queue=2)))
    assert spans(timeline) == [(0, 1000), (0, 100), (0, 100)]


def test_kernel_waits_for_the_copy_it_needs() -> None:
    timeline = run(plan(copy("h2d", 5000, queue=1), task(1000, deps=[0])), make_hardware(chain_ns=10))
    assert spans(timeline)[1] == (110, 1110)


def test_kernels_take_longer_beside_copies() -> None:
    # Copies of 100 ns; a kernel runs at 0.8 of its rate during one direction, at 2 / 3 during both.
    one = run(plan(task(1000, part=1.0), copy("h2d", 5000, queue=1)), make_hardware(kernel_slowdown=0.25))
    assert spans(one) == [(0, 1020), (0, 100)]
    both = plan(task(1000, part=1.0), copy("h2d", 5000, queue=1), copy("d2h", 5000, queue=2))
    assert spans(run(both, make_hardware(kernel_slowdown=0.25)))[0] == (0, 1033)


def test_going_from_a_kernel_to_a_copy_and_on_to_a_kernel_takes_longer_each_way() -> None:
    tested = plan(task(1000), copy("d2h", 5000, queue=1, deps=[0]), task(500, deps=[1]))
    assert spans(run(tested, make_hardware(chain_ns=10, switch_ns=70))) == [(0, 1000), (1080, 1180), (1260, 1760)]
    chain = plan(copy("d2h", 5000, queue=1), copy("d2h", 5000, queue=1))  # no kernel, no switch
    assert spans(run(chain, make_hardware(chain_ns=10, switch_ns=70))) == [(0, 100), (110, 210)]


def test_kernel_waits_longer_for_a_copy_that_ended_long_before() -> None:
    # The copy ends at 100; the last kernel waits for it and for the kernel that ends at 1000.
    tested = plan(task(1000), copy("d2h", 5000, queue=1), task(500, deps=[1]))
    assert spans(run(tested, make_hardware(chain_ns=10, switch_ns=70)))[2] == (1080, 1580)


def test_copies_take_longer_beside_kernels() -> None:
    # 100 bytes per ns alone, 80 beside the kernel: 8,000 bytes in its 100 ns, the other 12,000 in 120 ns.
    tested = plan(task(100), copy("h2d", 20_000, queue=1))
    assert spans(run(tested, make_hardware(h2d=100, copy_slowdown=0.25)))[1] == (0, 220)


def test_copies_to_the_host_take_longer_with_or_without_kernels() -> None:
    # 100 bytes per ns alone, 80 in a step.
    tested = plan(task(100), copy("d2h", 20_000, queue=1))
    assert spans(run(tested, make_hardware(d2h=100, copy_slowdown=0.25)))[1] == (0, 250)


def memset_beside(*kinds: str, small: bool = True) -> tuple[int, int]:
    """Return start and end of a memset of 100 ns beside copies of 2,000 ns."""
    memset = task(100, kind="memset", part=0.0, on_copy_engine=small)
    copies = [copy(kind, 100_000, queue=1 + number) for number, kind in enumerate(kinds)]
    return spans(run(plan(*copies, memset), make_hardware(memset_d2h_ns=30, memset_h2d_ns=80)))[-1]


def test_small_memsets_wait_for_copies() -> None:
    assert memset_beside() == (0, 100)
    assert memset_beside("d2h") == (0, 130)
    assert memset_beside("h2d") == memset_beside("h2d", "d2h") == (0, 180)
    assert memset_beside("h2d", small=False) == (0, 100)


def test_a_memset_that_starts_after_the_copies_does_not_wait() -> None:
    memset = task(100, kind="memset", part=0.0, on_copy_engine=True, deps=[0])
    tested = plan(copy("h2d", 5000, queue=1), memset)
    assert spans(run(tested, make_hardware(memset_h2d_ns=80)))[1] == (100, 200)


def memset_with_copies_pending(count: int, mode: LaunchMode = "graph") -> tuple[int, int]:
    """Return start and end of a memset of 100 ns, of a plan with copies that wait for a kernel of 500 ns."""
    memset = task(100, kind="memset", part=0.0, on_copy_engine=True, queue=1)
    copies = [copy("h2d" if number % 2 else "d2h", 100, queue=2, deps=[1]) for number in range(count)]
    tested = plan(memset, task(500), *copies, mode=mode)
    return spans(run(tested, make_hardware(memset_d2h_ns=30, memset_h2d_ns=80)))[0]


def test_small_memsets_are_slow_while_many_copies_of_their_graph_are_pending() -> None:
    assert memset_with_copies_pending(MANY_PENDING - 1) == (0, 100)
    assert memset_with_copies_pending(MANY_PENDING) == (0, 130)


def test_a_host_launches_copies_too_late_to_slow_memsets() -> None:
    start, end = memset_with_copies_pending(MANY_PENDING, mode="stream")
    assert end - start == 100


def test_copies_that_have_started_are_not_pending() -> None:
    """The first of three copies has ended, the others wait for a kernel of 500 ns."""
    memset = task(100, kind="memset", part=0.0, on_copy_engine=True, queue=1, deps=[0])
    later = [copy("h2d", 100, queue=2, deps=[1]) for _ in range(MANY_PENDING - 1)]
    tested = plan(copy("d2h", 5000, queue=3), task(500), *later, memset)
    assert spans(run(tested, make_hardware(memset_d2h_ns=30)))[-1] == (100, 200)


# --- Properties ---


def upper_bound_ns(tested: Plan, hardware: HardwareModel) -> float:
    """Return all work and all costs in sequence, as if nothing ever overlapped.

    At any time the oldest kernel runs at full speed, DRAM is saturated, a copy runs, or a fixed delay passes.
    """
    costs, copies = hardware.graph, hardware.copies
    total = 0.0
    for found in tested.tasks:
        total += found.dur_ns * (1 + 2 * copies.kernel_slowdown) + found.extra_ns + costs.chain_ns + costs.front_end_ns
        total += copies.switch_ns + max(copies.memset_d2h_ns, copies.memset_h2d_ns)
        total += costs.fork_ns * len(tested)
        total += costs.join_ns * (len(found.deps) + 1) + costs.busy_ns + costs.branch_ns
        total += found.dram_bytes / hardware.memory.dram_bytes_per_ns
        if found.kind in ("h2d", "d2h"):
            slowest = min(copies.h2d_bytes_per_ns, copies.d2h_bytes_per_ns)
            shared = copies.both_bytes_per_ns / (copies.h2d_bytes_per_ns + copies.d2h_bytes_per_ns)
            alone_ns = (found.copy_bytes + copies.latency_ns * slowest) / (slowest * min(1.0, shared))
            total += alone_ns * (1 + copies.copy_slowdown)
    return total


@given(plans(), hardware_models())
def test_any_graph_plan_is_run_legally_between_its_longest_chain_and_everything_in_a_row(
    tested: Plan, hardware: HardwareModel
) -> None:
    timeline = run(tested, hardware)
    assert_legal(timeline)
    assert timeline.makespan_ns >= longest_chain_ns(tested) - ROUNDING_NS
    assert timeline.makespan_ns <= upper_bound_ns(tested, hardware) + ROUNDING_NS


@given(plans(), hardware_models())
def test_front_end_never_starts_two_kernels_too_close(tested: Plan, hardware: HardwareModel) -> None:
    timeline = run(tested, hardware)
    kernels = [i for i, found in enumerate(tested.tasks) if found.kind not in ("h2d", "d2h")]
    starts = sorted(timeline.start_ns[i] for i in kernels)
    pairs = pairwise(starts)
    assert all(later - earlier >= hardware.graph.front_end_ns - ROUNDING_NS for earlier, later in pairs)


@given(plans(), hardware_models())
def test_memory_is_never_negative_and_ends_with_what_is_kept(tested: Plan, hardware: HardwareModel) -> None:
    memory = run(tested, hardware).memory
    assert memory[-1][1] == tested.kept_bytes
    assert min(level for _, level in memory) >= 0
    assert [time for time, _ in memory] == sorted({time for time, _ in memory})


@given(plans(max_queues=1), hardware_models())
def test_doubling_all_durations_never_shortens_a_plan_of_one_queue(tested: Plan, hardware: HardwareModel) -> None:
    doubled = replace(
        tested, tasks=tuple(msgspec.structs.replace(found, dur_ns=2 * found.dur_ns) for found in tested.tasks)
    )
    assert run(doubled, hardware).makespan_ns >= run(tested, hardware).makespan_ns


@given(plans(max_queues=1), st.sampled_from((0.0, 100.0, 405.3)))
def test_plan_of_one_queue_takes_the_sum_of_its_times_and_gaps(tested: Plan, chain_ns: float) -> None:
    kernels = tuple(msgspec.structs.replace(found, deps=()) for found in tested.tasks if found.kind == "kernel")
    expected = sum(found.dur_ns for found in kernels) + chain_ns * max(0, len(kernels) - 1)
    timeline = run(replace(tested, tasks=kernels, buffers=()), make_hardware(chain_ns=chain_ns, slowdown=0.8))
    assert timeline.makespan_ns == pytest.approx(expected, abs=ROUNDING_NS)


@given(plans(), hardware_models())
def test_recorded_residency_and_traffic_stay_within_the_gpu(tested: Plan, hardware: HardwareModel) -> None:
    timeline = run(tested, hardware)
    assert all(0 <= level <= 1 for _, level in timeline.occupied)
    limit = hardware.memory.dram_bytes_per_ns * (1 + 1e-9)
    assert all(0 <= level <= limit for _, level in timeline.bandwidth)
    for series in (timeline.occupied, timeline.bandwidth):
        assert [time for time, _ in series] == sorted({time for time, _ in series})


@given(traces_with_schedules(), hardware_models())
def test_no_schedule_is_faster_than_any_bound(
    case: tuple[Trace, list[int], list[int]], hardware: HardwareModel
) -> None:
    trace, order, streams = case
    graph = OpGraph.build(trace, hardware)
    makespan_ns = run(lowered(graph, order, streams), graph.hardware).makespan_ns
    found = bounds(graph)
    for bound_ns, name in found.named:
        assert makespan_ns >= bound_ns - ROUNDING_NS, name
    assert found.largest[0] == max(bound_ns for bound_ns, _ in found.named)


def test_critical_path_bound_has_no_delay_before_its_first_task() -> None:
    fill = replace(op("m"), kernels=(memset(1000),))
    graph = build_graph(make_trace([fill, op("b", "m", dur_ns=1000)]), make_hardware(memory_node_ns=700, chain_ns=100))
    assert bounds(graph).critical_path_ns == run(lowered(graph, [0, 1], [0, 0]), graph.hardware).makespan_ns == 2100


@given(traces_with_schedules(), hardware_models())
def test_lowered_schedule_keeps_the_dependencies_between_ops(
    case: tuple[Trace, list[int], list[int]], hardware: HardwareModel
) -> None:
    trace, order, streams = case
    graph = OpGraph.build(trace, hardware)
    timeline = run(lowered(graph, order, streams), graph.hardware)
    assert_legal(timeline)
    starts: dict[int, int] = {}
    ends: dict[int, int] = {}
    for found, start, end in zip(timeline.plan.tasks, timeline.start_ns, timeline.end_ns, strict=True):
        starts.setdefault(found.op, start)
        ends[found.op] = end
    reach: list[int] = []  # by op, its end, and for a view, the end of all its sources
    for index, before in enumerate(graph.preds):
        ready = max((reach[p] for p in before), default=0)
        if index in starts:
            assert ready <= starts[index]
            ready = ends[index]
        reach.append(ready)
    assert sorted((found.op, found.kernel) for found in timeline.plan.tasks) == [
        (index, number) for index, tasks in enumerate(graph.tasks) for number in range(len(tasks))
    ]
