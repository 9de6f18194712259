"""Explanation of a schedule: every ns of the gap has one cause, and windows and pairs report their share."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import msgspec
import pytest
from click.testing import CliRunner, Result
from hypothesis import given, settings
from hypothesis import strategies as st

from gpusim.analysis.explain import (
    CAUSES,
    DEPENDENCY,
    FRONT_END,
    GRAPH_GAPS,
    LAUNCH,
    PRODUCTS,
    QUEUE,
    START_INTERFERENCE,
    Explained,
    explain,
    totals_ns,
)
from gpusim.analysis.explain_pair import explain_pair, find_op
from gpusim.bounds.bounds import critical_path_ns
from gpusim.cli import cli
from gpusim.engine.base import Timeline
from gpusim.engine.causes import BLOCKS, CARVEOUT, COPY, DRAM, ISSUE, REGISTERS, SMEM, THREADS, Loss, alone_ns
from gpusim.engine.fast import FastEngine
from gpusim.errors import OptionError, UnknownNameError
from gpusim.formats.hardware import HardwareModel
from gpusim.formats.trace import Kernel, Trace
from gpusim.plan.graph import OpGraph
from gpusim.plan.tasks import LaunchMode, Task
from gpusim.rules.occupancy import Demand
from gpusim.trace.store import write_trace
from tests.support.helpers import (
    HALF,
    ONE_SM,
    Step,
    build_graph,
    copy,
    hardware_models,
    kernel,
    lowered,
    make_hardware,
    make_trace,
    op,
    plan,
    share,
    task,
    traces_with_schedules,
    wide_trace,
)
from tests.support.timelines import run


def sharing(hardware: HardwareModel, exponent: float) -> HardwareModel:
    """Return hardware with pooled SMs (exponent 0), or with block-level placement."""
    contention = msgspec.structs.replace(hardware.contention, sharing_exponent=exponent)
    return msgspec.structs.replace(hardware, contention=contention)


def pool(**costs: float) -> HardwareModel:
    return sharing(make_hardware(**costs), 0.0)


def by_block(**costs: float) -> HardwareModel:
    """Two blocks on an SM each take twice as long as one alone."""
    return sharing(make_hardware(**costs), 1.0)


def explained(
    trace: Trace, streams: Sequence[int], hardware: HardwareModel | None = None, mode: LaunchMode = "graph"
) -> Explained:
    """Explain a trace's ops in recorded order on these streams."""
    graph = build_graph(trace, hardware or pool())
    timeline = FastEngine().run(lowered(graph, range(len(graph)), streams, mode), graph.hardware)
    return explain(graph, timeline, graph.hardware)


def losses(timeline: Timeline) -> tuple[tuple[Loss, ...], ...]:
    """Return the losses of each task while it ran."""
    assert timeline.causes is not None
    return timeline.causes.losses


def causes(found: Explained) -> dict[str, int]:
    """Return the totals of the step in whole ns."""
    return {cause: round(lost_ns) for cause, lost_ns in totals_ns(found.step().delays).items()}


FORK = [op("a", "x", dur_ns=1000), op("b", "a", dur_ns=1000), op("c", "a", dur_ns=1000), op("d", "b c", dur_ns=1000)]


# --- One cause at a time ---


def test_schedule_as_fast_as_the_critical_path_has_no_gap() -> None:
    found = explained(make_trace(FORK), [0, 0, 1, 0], make_hardware(chain_ns=100))
    # a, then b and c concurrently, then d: 3000 and two gaps
    assert found.step().makespan_ns == found.step().critical_path_ns == 3200
    assert causes(found) == {}


def test_one_stream_is_a_queue() -> None:
    """c waits for b's 1000 and the gap after it, although its data were ready."""
    found = explained(make_trace(FORK), [0, 0, 0, 0], make_hardware(chain_ns=100))
    assert causes(found) == {QUEUE: 1100}
    (delay,) = found.step().delays
    assert (delay.task, delay.by) == (2, 1)


def test_join_and_front_end_costs() -> None:
    """b and c are ready at 1100; c starts 70 later; d has two predecessors."""
    found = explained(make_trace(FORK), [0, 0, 1, 0], make_hardware(chain_ns=100, join_ns=30, front_end_ns=70))
    assert causes(found) == {GRAPH_GAPS: 30, FRONT_END: 70}


def test_start_beside_a_kernel_delays_what_waits_for_it() -> None:
    """b starts 70 after a; one start costs a 60 x 1 / (1 + 2), and c is ready 20 later. b sees no start."""
    steps = [op("a", "x", dur_ns=2000), op("b", "x", dur_ns=1000), op("c", "a", dur_ns=1000)]
    hardware = make_hardware(chain_ns=100, front_end_ns=70, busy_ns=60, busy_starts=2)
    found = explained(make_trace(steps), [0, 1, 0], hardware)
    assert found.timeline.start_ns == (0, 70, 2120)
    assert causes(found) == {START_INTERFERENCE: 20}


def test_product_beside_a_kernel_delays_what_waits_for_it() -> None:
    """b runs beside the product a for all of its 2000 ns: at 0.1, c is ready 200 later."""
    gemm = Step("a", "x", "a", kernels=(msgspec.structs.replace(kernel(2000), name="gemm"),))
    steps = [gemm, op("b", "x", dur_ns=3000), op("c", "a", dur_ns=2000)]
    found = explained(make_trace(steps), [0, 1, 0], make_hardware(chain_ns=100, product_frac=0.1))
    assert found.timeline.start_ns == (0, 0, 2300)
    assert causes(found) == {PRODUCTS: 200}


def test_younger_kernel_loses_issue_slots() -> None:
    """Half of the GPU each; at a = 1 the younger runs at half speed next to the older: 1000 ns late."""
    steps = [op("a", "x", dur_ns=2000, blocks=HALF), op("b", "x", dur_ns=2000, blocks=HALF)]
    found = explained(make_trace(steps), [0, 1], pool(slowdown=1.0))
    # b gets 1000 done in 2000 next to a; then the other 1000 alone
    assert found.timeline.makespan_ns == 3000
    assert causes(found) == {ISSUE: 1000}
    (delay,) = found.step().delays
    assert (delay.task, delay.by, delay.from_ns, delay.until_ns) == (1, 0, 0, 2000)


@pytest.mark.parametrize(
    ("demand", "cause"),
    [
        (Demand(threads=0.75, regs=0.1, smem=0.1, slots=0.1, residency=0.75, cover=1.0), THREADS),
        (Demand(threads=0.1, regs=0.75, smem=0.1, slots=0.1, residency=0.75, cover=1.0), REGISTERS),
        (Demand(threads=0.1, regs=0.1, smem=0.75, slots=0.1, residency=0.75, cover=1.0), SMEM),
        (Demand(threads=0.1, regs=0.1, smem=0.1, slots=0.75, residency=0.75, cover=1.0), BLOCKS),
    ],
)
def test_the_scarce_resource_is_named(demand: Demand, cause: str) -> None:
    """Two kernels that need 0.75 of one resource: the second runs at a third of its rate beside the first."""
    hardware = pool()
    timeline = run(plan(task(1000, demand=demand), task(1000, demand=demand, queue=1)), hardware)
    first, second = losses(timeline)
    assert first == ()
    assert {row.cause for row in second} == {cause}
    assert sum(row.lost_ns for row in second) == pytest.approx(timeline.end_ns[1] - 1000, abs=1)


def test_behind_a_kernel_that_is_not_placed_it_is_blocks() -> None:
    """Head of line: the third would fit, but waits behind the second."""
    hardware = pool()
    timeline = run(plan(task(1000, 1.0), task(1000, 0.5, queue=1), task(100, 0.1, queue=2)), hardware)
    rows = losses(timeline)[2]
    assert {row.cause for row in rows} == {BLOCKS}
    assert (rows[0].from_ns, rows[0].until_ns, rows[0].lost_ns) == (0, 1000, 1000)


def test_bandwidth_that_two_kernels_share_is_dram() -> None:
    """Each needs the full bandwidth: both run at half speed, from the first to the last ns."""
    hardware = pool(dram_bytes_per_ns=10)
    timeline = run(plan(*(task(1000, queue=q, dram_bytes=10_000) for q in range(2))), hardware)
    for rows in losses(timeline):
        assert {row.cause for row in rows} == {DRAM}
        assert sum(row.lost_ns for row in rows) == pytest.approx(1000, abs=2)


def test_two_directions_of_copies_slow_each_other() -> None:
    hardware = make_hardware(h2d=50, d2h=50, both=60)
    timeline = run(plan(copy("h2d", 6000), copy("d2h", 6000, queue=1)), hardware)
    for rows in losses(timeline):
        assert [row.cause for row in rows] == [COPY]
        assert rows[0].lost_ns == 80  # 6000 bytes at 30 per ns, not 50


def test_slow_host_is_launch() -> None:
    steps = [replace(op("a", "x", dur_ns=100), host_ns=1000), replace(op("b", "x", dur_ns=100), host_ns=1000)]
    found = explained(make_trace(steps), [0, 1], make_hardware(start_ns=10), "stream")
    # b is launched at 2000 and starts at 2010; nothing else would delay it
    assert causes(found) == {LAUNCH: 2010}


def test_slack_forgives_the_earliest_delays() -> None:
    """The long branch decides: the queue wait of the short one cost nothing."""
    steps = [
        op("a", "x", dur_ns=100),
        op("long", "a", dur_ns=5000),
        op("b", "a", dur_ns=1000),
        op("c", "a", dur_ns=1000),
        op("d", "long b c", dur_ns=100),
    ]
    found = explained(make_trace(steps), [0, 0, 1, 1, 0])
    assert found.delays[3][0].cause == QUEUE
    assert causes(found) == {}


# --- One cause at a time, where blocks are placed SM by SM ---


def two(first: Kernel, second: Kernel) -> Explained:
    """Explain two kernels that start together on two streams."""
    steps = [replace(op("a", "x"), kernels=(first,)), replace(op("b", "x"), kernels=(second,))]
    return explained(make_trace(steps), [0, 1], by_block())


def run_causes(found: Explained, task: int) -> dict[str, int]:
    """Return the losses of a kernel while it ran, in whole ns."""
    return {cause: round(lost_ns) for cause, lost_ns in totals_ns(found.delays[task]).items()}


def test_blocks_on_the_same_sms_lose_issue_slots() -> None:
    """One block of each on every SM: both take twice as long."""
    found = two(kernel(1000, 132, threads=512), kernel(1000, 132, threads=512))
    assert found.timeline.makespan_ns == 2000
    assert run_causes(found, 0) == run_causes(found, 1) == {ISSUE: 1000}


def test_blocks_on_sms_of_their_own_lose_nothing() -> None:
    found = two(kernel(1000, 60, threads=512), kernel(1000, 60, threads=512))
    assert run_causes(found, 0) == run_causes(found, 1) == {}


@pytest.mark.parametrize(
    ("first", "second", "cause"),
    [
        (kernel(1000, 264, threads=1024), kernel(100, 132, threads=1024), THREADS),
        (kernel(1000, 132, threads=256, regs=255), kernel(100, 132, threads=256, regs=64), REGISTERS),
        (kernel(1000, 132 * 32, threads=32), kernel(100, 132, threads=32), BLOCKS),
        (kernel(1000, 132, threads=256, smem=200_000), kernel(100, 132, threads=256, smem=200_000), SMEM),
    ],
)
def test_what_blocks_wait_for_is_named(first: Kernel, second: Kernel, cause: str) -> None:
    """The first leaves no room on any SM: the second runs after it, and no slower than alone."""
    found = two(first, second)
    assert run_causes(found, 0) == {}
    assert run_causes(found, 1) == {cause: 1000}


def test_wait_for_another_split_of_shared_memory_is_named_and_so_is_the_crowd_after_it() -> None:
    """SMs that run blocks without shared memory get no carve-out. As they empty, each gets two blocks, not one."""
    found = two(kernel(1000, 132, threads=256), kernel(100, 132, threads=256, smem=100_000))
    assert run_causes(found, 1) == {CARVEOUT: 1000, ISSUE: 100}


def test_kernel_behind_one_that_waits_for_room_waits_for_its_turn() -> None:
    """Head of line: the third would fit next to the first."""
    steps = [
        replace(op("a", "x"), kernels=(kernel(1000, 132, threads=768),)),
        replace(op("b", "x"), kernels=(kernel(500, 264, threads=1024),)),
        replace(op("c", "x"), kernels=(kernel(100, 1, threads=64),)),
    ]
    found = explained(make_trace(steps), [0, 1, 2], by_block())
    assert found.delays[2][0].cause == BLOCKS
    assert found.delays[2][0].from_ns == 0


# --- The totals add up ---


@settings(max_examples=60, deadline=None)
@given(
    traces_with_schedules(), hardware_models(), st.sampled_from(("graph", "stream")), st.sampled_from((0.0, 0.55, 1.0))
)
def test_totals_add_up_to_the_gap_between_makespan_and_critical_path(
    drawn: tuple[Trace, list[int], list[int]], hardware: HardwareModel, mode: LaunchMode, exponent: float
) -> None:
    """For any schedule and GPU, no delay is negative and no cause is unknown."""
    trace, order, streams = drawn
    hardware = sharing(hardware, exponent)
    graph = OpGraph.build(trace, hardware)
    timeline = FastEngine().run(lowered(graph, order, streams, mode), graph.hardware)
    found = explain(graph, timeline, graph.hardware)
    gap = found.step()
    rounding_ns = 2 + len(timeline.plan)
    assert sum(totals_ns(gap.delays).values()) == pytest.approx(max(0.0, gap.gap_ns), abs=rounding_ns)
    assert gap.gap_ns >= -rounding_ns
    assert set(totals_ns(gap.delays)) <= set(CAUSES) - {DEPENDENCY}
    assert all(delay.lost_ns >= 0.0 for delay in gap.delays)
    if mode == "graph":
        assert gap.critical_path_ns == pytest.approx(critical_path_ns(graph), abs=1)
    for index, tested in enumerate(timeline.plan.tasks):  # a task's lateness has no part without a cause
        late_ns = timeline.end_ns[index] - found.data_ns[index] - alone_ns(tested, graph.hardware)
        assert sum(delay.lost_ns for delay in found.delays[index]) == pytest.approx(max(0.0, late_ns), abs=6)


@settings(max_examples=50, deadline=None)
@given(traces_with_schedules(), hardware_models(), st.sampled_from((0.0, 0.55)))
def test_delays_of_a_window_are_part_of_those_of_the_step(
    drawn: tuple[Trace, list[int], list[int]], hardware: HardwareModel, exponent: float
) -> None:
    """Two halves of the timeline add up to the whole."""
    trace, order, streams = drawn
    hardware = sharing(hardware, exponent)
    graph = OpGraph.build(trace, hardware)
    timeline = FastEngine().run(lowered(graph, order, streams), graph.hardware)
    found = explain(graph, timeline, graph.hardware)
    end, half = timeline.makespan_ns + 1, timeline.makespan_ns // 2
    whole = totals_ns(found.window(0, end))
    parts = [totals_ns(found.window(0, half)), totals_ns(found.window(half, end))]
    for cause in CAUSES:
        assert sum(part.get(cause, 0.0) for part in parts) == pytest.approx(whole.get(cause, 0.0), rel=1e-6, abs=1e-3)


def test_empty_plan_has_nothing_to_explain() -> None:
    graph = build_graph(make_trace(FORK), make_hardware())
    empty = FastEngine().run(plan(), graph.hardware)
    assert explain(graph, empty, graph.hardware).step().gap_ns == 0


# --- Two ops ---


def test_ops_apart_because_of_data() -> None:
    found = explained(make_trace(FORK), [0, 0, 1, 0], make_hardware(chain_ns=100))
    pair = explain_pair(found, 3, 0)
    assert (pair.first, pair.second, pair.together_ns) == (0, 3, 0)
    assert pair.chain == (0, 1, 3)
    assert [(delay.cause, delay.from_ns, delay.until_ns) for delay in pair.apart] == [(DEPENDENCY, 0, 2200)]


def test_ops_apart_because_of_their_stream() -> None:
    found = explained(make_trace(FORK), [0, 0, 0, 0], make_hardware(chain_ns=100))
    pair = explain_pair(found, 1, 2)
    assert pair.chain == ()
    assert [(delay.cause, delay.by) for delay in pair.apart] == [(QUEUE, 1)]
    assert (pair.together_ns, pair.slowed) == (0, ())


def test_ops_side_by_side_and_what_it_cost() -> None:
    steps = [op("a", "x", dur_ns=2000, blocks=HALF), op("b", "x", dur_ns=2000, blocks=HALF)]
    found = explained(make_trace(steps), [0, 1], pool(slowdown=1.0))
    pair = explain_pair(found, 0, 1)
    assert pair.together_ns == 2000
    assert [(delay.task, delay.cause, delay.lost_ns) for delay in pair.slowed] == [(1, ISSUE, 1000)]
    assert {name: (a, b) for name, a, b in pair.needs}[THREADS] == (0.5, 0.5)


def test_op_of_several_kernels_is_taken_as_a_whole() -> None:
    two = replace(op("b", "x"), kernels=(kernel(500, ONE_SM), kernel(700, ONE_SM)))
    found = explained(make_trace([op("a", "x", dur_ns=1000), two]), [0, 1], make_hardware(chain_ns=100))
    pair = explain_pair(found, 0, 1)
    assert (pair.second_ns, pair.together_ns) == ((0, 1300), 500 + 400)


def test_op_is_found_by_name_or_number() -> None:
    graph = build_graph(make_trace(FORK), make_hardware())
    assert (find_op(graph, "c"), find_op(graph, "2")) == (2, 2)
    with pytest.raises(UnknownNameError, match="op 'cc'"):
        find_op(graph, "cc")
    with pytest.raises(OptionError, match="two different"):
        explain_pair(explained(make_trace(FORK), [0] * 4), 1, 1)


# --- The command ---


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "t.json"
    write_trace(wide_trace(width=4, dur_ns=10_000), path)
    return path


def gpusim(*arguments: object) -> Result:
    return CliRunner().invoke(cli, [str(argument) for argument in arguments])


def test_command_adds_up_in_whole_ns(file: Path) -> None:
    found = json.loads(gpusim("explain", file, "--streams", 2, "--json").stdout)
    assert sum(found["causes"].values()) == found["gap_ns"] == found["makespan_ns"] - found["critical_path_ns"]
    assert found["gap_ns"] > 0
    assert found["delays"][0]["lost_ns"] == max(row["lost_ns"] for row in found["delays"])


@pytest.mark.parametrize("what", [(), ("--window", "0us:30us"), ("--ops", "b0_0,b1_0"), ("--launch", "stream")])
def test_command_prints_tables_for_people(file: Path, what: tuple[str, ...]) -> None:
    done = gpusim("explain", file, "--streams", "2", *what)
    assert done.exit_code == 0, done.output
    assert "us" in done.output
    assert json.loads(gpusim("explain", file, "--streams", "2", *what, "--json").stdout)


def test_schedule_from_a_file_is_explained(file: Path, tmp_path: Path) -> None:
    best = tmp_path / "best.json"
    assert gpusim("explore", file, "--evaluations", 50, "-o", best).exit_code == 0
    found = json.loads(gpusim("explain", file, "--schedule", best, "--json").stdout)
    simulated = json.loads(gpusim("simulate", file, "--schedule", best, "--json").stdout)
    assert found["makespan_ns"] == simulated["makespan_ns"]


@pytest.mark.parametrize(
    ("what", "message"),
    [
        (("--window", "5us"), "give two times with units"),
        (("--window", "5:9"), "give two times with units"),
        (("--window", "9us:5us"), "ends before it begins"),
        (("--window", "5s:9s"), "give two times with units"),
        (("--window", "9ms:10ms"), "the schedule ends at"),
        (("--ops", "a"), "give two ops"),
        (("--ops", "nobody,stem"), "nobody"),
        (("--ops", "stem,stem"), "two different ones"),
        (("--ops", "stem,join", "--window", "0us:1us"), "either --window or --ops"),
        (("--policy", "nothing"), "nothing"),
    ],
)
def test_mistakes_are_one_line(file: Path, what: tuple[str, ...], message: str) -> None:
    done = gpusim("explain", file, *what)
    assert done.exit_code == 1
    assert message in str(done.exception)


def test_tasks_of_no_op_keep_their_dependencies() -> None:
    """Plans may have copies that belong to no op."""
    graph = build_graph(make_trace(FORK), make_hardware())
    tested = plan(copy("h2d", 5000), Task(name="k", dur_ns=100, queue=1, deps=(0,), demand=share(0.1)))
    hardware = make_hardware(chain_ns=20)
    found = explain(graph, run(tested, hardware), hardware)
    assert found.preds == ((), (0,))
    assert found.step().gap_ns == pytest.approx(0, abs=2)
