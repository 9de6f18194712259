"""The engines' rules in graph mode: small plans worked out by hand."""

from __future__ import annotations

from dataclasses import replace

import msgspec
import pytest

from gpusim.engine.base import Timeline, busy_ns, concurrency
from gpusim.formats.hardware import Copies, HardwareModel
from gpusim.formats.trace import HostLink, Trace
from gpusim.plan.anchor import anchor
from gpusim.plan.graph import OpGraph
from gpusim.plan.tasks import Buffer, Plan, Task
from gpusim.rules.anchor import MAX_GAP_NS, MAX_SCALE, MIN_GAP_NS, MIN_SCALE
from tests.support.helpers import (
    HALF,
    SMS,
    WAVES,
    WHOLE,
    build_graph,
    chain_trace,
    copy,
    lowered,
    make_hardware,
    make_trace,
    memset,
    op,
    plan,
    share,
    task,
    view,
)
from tests.support.timelines import ROUNDING_NS, run, spans


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


def test_join_costs_its_delay_once_however_many_predecessors_it_has() -> None:
    tested = plan(task(1000, queue=0), task(900, queue=1), task(800, queue=2), task(10, queue=3, deps=[0, 1, 2]))
    timeline = run(tested, make_hardware(chain_ns=100, join_ns=30))
    # all start at 0; the last of them ends at 1000; 100 + 30 later the join starts
    assert spans(timeline)[3] == (1130, 1140)


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


def test_what_waits_for_a_product_starts_later_by_a_share_of_its_time_beside_others() -> None:
    """A product of 1000 ns has others beside it for 400 and 10 ns: at 0.5, what waits for it starts 205 ns later.

    Those beside it are no products, and a second product runs alone: both delay nothing. Nor does a copy count.
    """
    hardware = make_hardware(chain_ns=100, product_frac=0.5)
    product = msgspec.structs.replace(task(1000, part=0.1, queue=0), product=True)
    tested = plan(
        product,
        task(400, part=0.1, queue=1),
        product,
        task(10, part=0.1, queue=0),
        task(10, part=0.1, queue=1),
        copy("h2d", 100_000, queue=2),
    )
    assert spans(run(tested, hardware))[2:5] == [(1305, 2305), (2405, 2415), (500, 510)]


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
    faster = task(400, part=0.1, queue=0, idle_ns=600)
    assert run(plan(faster, few), hardware).start_ns == (0, 400), "no longer than the kernel takes"


@pytest.mark.parametrize(
    ("blocks", "changes", "second_ns"),
    [
        (SMS * 16, {}, 250),  # one wave
        (SMS * 16 + 1, {}, 2113),  # a ns each
        (SMS * 16 + 1, {"dur_ns": 700.0}, 700),  # the kernel ends before
        (SMS * 16 + 1, {"idle_ns": 2200.0}, 2200),
        (SMS * 16 + 1, {"partition_sms": 64}, 250),
    ],
)
def test_blocks_of_a_kernel_of_more_than_one_wave_hold_up_the_next_start(
    blocks: int, changes: dict[str, float], second_ns: int
) -> None:
    hardware = make_hardware(front_end_ns=250, turnover_ns=1.0)
    large = msgspec.structs.replace(task(5000, part=0.1, queue=0), blocks=blocks, blocks_per_sm=16, **changes)
    assert run(plan(large, task(1000, part=0.1, queue=1)), hardware).start_ns == (0, second_ns)


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
