"""SM partitions: possible sizes, each like a small GPU, equal on both engines, whole groups from the driver."""

from __future__ import annotations

import ctypes
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from click.testing import CliRunner
from hypothesis import given, settings
from hypothesis import strategies as st

from gpusim.cli import cli
from gpusim.defaults import PARTITIONS, SEARCH
from gpusim.engine.batch import BatchEngine
from gpusim.engine.fast import FastEngine
from gpusim.engine.reference import ReferenceEngine
from gpusim.errors import GpuError, OptionError, PlanError, ScheduleError
from gpusim.formats.hardware import HardwareModel
from gpusim.formats.schedule import Partition
from gpusim.formats.trace import Trace
from gpusim.gpu.replay import green_contexts as runtime
from gpusim.plan.graph import OpGraph
from gpusim.plan.lower import lower
from gpusim.plan.partitions import Layout, in_partition, lay_out
from gpusim.plan.schedule import Schedule, read_schedule, write_schedule
from gpusim.plan.tasks import MAX_PARTITIONS, LaunchMode
from gpusim.rules.partitions import PACKING
from gpusim.search.explore import explore
from gpusim.search.variants import parse_splits, usual_splits
from gpusim.trace.store import write_trace
from tests.support.helpers import (
    HALF,
    ONE_SM,
    SMS,
    WHOLE,
    build_graph,
    hardware_models,
    lowered,
    make_hardware,
    make_trace,
    op,
    plan,
    schedule_of,
    schedules,
    task,
    traces,
    wide_trace,
)

MODES: tuple[LaunchMode, ...] = ("graph", "stream")
#: Pooled and block-level SMs.
EXPONENTS = (0.0, 0.55)


def parted(*parts: tuple[int, tuple[int, ...]]) -> tuple[Partition, ...]:
    """Partitions from pairs of SMs and streams."""
    return tuple(Partition(sms=sms, streams=streams) for sms, streams in parts)


# --- Layouts ---


@pytest.mark.parametrize(
    ("partitions", "streams", "layout"),
    [
        ((), 3, Layout((132,), (0, 0, 0))),
        (parted((64, (0,)), (68, (1,))), 2, Layout((64, 68), (0, 1))),
        (parted((64, (1,))), 3, Layout((64, 68), (1, 0, 1))),
        (parted((96, (0, 2)), (32, (1,))), 3, Layout((96, 32), (0, 1, 0))),
        (parted((8, (0,)), (16, (1,))), 3, Layout((8, 16, 108), (0, 1, 2))),
        (parted((132, (0, 1))), 2, Layout((132,), (0, 0))),
    ],
)
def test_streams_that_no_partition_names_share_what_is_left(
    partitions: tuple[Partition, ...], streams: int, layout: Layout
) -> None:
    assert lay_out(partitions, streams, SMS) == layout


@pytest.mark.parametrize(
    ("partitions", "streams", "problem"),
    [
        (parted((64, (0,)), (72, (1,))), 2, "the partitions have 136 SMs in all, the GPU has 132"),
        (parted((64, (0,)), (68, (1,))), 3, "stream 2 is in no partition, and of 132 SMs none are left for it"),
        (parted((64, (0,)), (64, (0, 1))), 2, "stream 0 is in partitions 0 and 1"),
        (parted((64, (0, 0))), 2, "stream 0 is in partitions 0 and 0"),
        (parted((64, (2,))), 2, "partition 0 has stream 2, of 2 streams"),
        (parted((64, ())), 1, "partition 0 has no stream"),
        (parted((60, (0,))), 2, "partition 0 has 60 SMs, not a multiple of 8"),
        (parted((4, (0,)), (64, (1,))), 2, "partition 0 has 4 SMs, not a multiple of 8"),
        (parted((64, (0,)), (66, (1,))), 2, "partition 1 has 66 SMs, neither a multiple of 8 nor one and the 4 that"),
    ],
)
def test_layout_that_cannot_be_is_refused_in_words(
    partitions: tuple[Partition, ...], streams: int, problem: str
) -> None:
    with pytest.raises(PlanError, match=problem):
        lay_out(partitions, streams, SMS)


def test_more_partitions_than_any_gpu_has_are_refused() -> None:
    many = parted(*((8, (number,)) for number in range(MAX_PARTITIONS + 1)))
    with pytest.raises(PlanError, match=f"{MAX_PARTITIONS + 1} partitions; the limit is {MAX_PARTITIONS}"):
        lay_out(many, MAX_PARTITIONS + 1, 1000)


# --- A kernel alone on fewer SMs ---


def alone(blocks: int, sms: int, dram_bytes: float = 0.0) -> tuple[float, float]:
    """Return time and thread demand of a kernel of 1024-thread blocks, two per SM, that takes 10,000 ns on the GPU."""
    trace = make_trace([op("a", "x", dur_ns=10_000, blocks=blocks)])
    (made,) = build_graph(trace).tasks[0]
    made = msgspec.structs.replace(made, dram_bytes=dram_bytes)
    small = in_partition(made, 1, sms, make_hardware(dram_bytes_per_ns=1000.0))
    assert small.partition == 1
    return small.dur_ns, small.demand.threads


def test_kernel_takes_waves_and_packed_blocks_on_fewer_sms() -> None:
    """By hand, for two blocks an SM: waves and blocks an SM works through, each over its value on 132 SMs."""

    def expected(waves: float, packed: float) -> float:
        return 10_000 * (PACKING * waves + (1 - PACKING) * packed)

    assert alone(ONE_SM, 64) == (10_000, pytest.approx(0.5 / 64))
    assert alone(HALF, 64) == (pytest.approx(expected(2, 3)), 1.0)  # 132 blocks on 64 SMs: 2 waves of 128, 3 an SM
    assert alone(HALF, 96) == (pytest.approx(expected(1, 2)), pytest.approx(132 / 192))
    assert alone(WHOLE, 64) == (pytest.approx(expected(3, 5 / 2)), 1.0)
    assert alone(WHOLE, SMS) == (10_000, 1.0)


def test_time_of_dram_traffic_does_not_grow() -> None:
    """4,000 of the 10,000 ns are traffic at full bandwidth."""
    grown, _ = alone(HALF, 64)
    assert alone(HALF, 64, dram_bytes=4e6)[0] == pytest.approx(4000 + 0.6 * grown)
    assert alone(HALF, 64, dram_bytes=1e9)[0] == 10_000


@given(st.integers(1, 3000), st.integers(1, 16), st.integers(1, 16))
def test_more_sms_never_take_longer_and_all_take_what_was_measured(blocks: int, one: int, other: int) -> None:
    few, many = sorted((8 * one, 8 * other))
    assert alone(blocks, few)[0] >= alone(blocks, many)[0] >= alone(blocks, SMS)[0] == 10_000
    assert all(0 < alone(blocks, sms)[1] <= 1 for sms in (few, many))


# --- Simulation ---


def test_kernels_in_two_partitions_neither_share_nor_wait() -> None:
    """By hand: in one partition the younger is slowed and the third waits; in two, neither happens."""
    hardware = make_hardware(slowdown=0.8)
    together = plan(task(1000, 1.0, queue=0), task(1000, 1.0, queue=1))
    apart = plan(task(1000, 1.0, queue=0), task(1000, 1.0, queue=1, partition=1))
    assert FastEngine().run(together, hardware).end_ns == (1000, 2000)
    assert FastEngine().run(apart, hardware).end_ns == (1000, 1000)
    three = plan(
        task(1000, 0.5, queue=0), task(900, 0.5, queue=1), task(900, 0.5, queue=2, partition=1)
    )  # the third is the oldest of its own partition
    assert FastEngine().run(three, hardware).end_ns == ReferenceEngine().run(three, hardware).end_ns
    assert FastEngine().run(three, hardware).end_ns[2] == 900


def test_partitions_share_the_bandwidth() -> None:
    """Two kernels that each use all of it take twice their time, in any partition."""
    busy = {"dram_bytes": 1e6}
    apart = plan(task(1000, 1.0, queue=0, **busy), task(1000, 1.0, queue=1, partition=1, **busy))
    for engine in (FastEngine(), ReferenceEngine()):
        assert engine.run(apart, make_hardware(dram_bytes_per_ns=1000.0)).end_ns == (2000, 2000)


@pytest.mark.parametrize("sharing", EXPONENTS)
def test_two_halves_of_the_gpu_by_hand(sharing: float) -> None:
    """Stem on stream 0, then two kernels of the whole GPU's blocks, each on its half: 64 and 68 SMs."""
    steps = [op("stem", "x", dur_ns=1000), *(op(name, "stem", dur_ns=10_000, blocks=WHOLE) for name in "ab")]
    graph = build_graph(make_trace(steps), make_hardware(sharing=sharing))
    timeline = FastEngine().run(
        lowered(graph, range(3), [0, 0, 1], partitions=parted((64, (0,)), (68, (1,)))), graph.hardware
    )
    slow = [10_000 * (PACKING * waves + (1 - PACKING) * packed) for waves, packed in ((3, 5 / 2), (2, 4 / 2))]
    assert timeline.end_ns == (1000, 1000 + round(slow[0]), 1000 + round(slow[1]))


@pytest.mark.parametrize("sharing", EXPONENTS)
def test_residency_over_time_is_a_share_of_the_whole_gpu(sharing: float) -> None:
    graph = build_graph(make_trace([op("a", "x", dur_ns=1000, blocks=WHOLE)]), make_hardware(sharing=sharing))
    timeline = ReferenceEngine().run(lowered(graph, [0], [0], partitions=parted((64, (0,)))), graph.hardware)
    assert timeline.occupied[0][1] == pytest.approx(64 / 132)


@st.composite
def cases(draw: st.DrawFn) -> tuple[Trace, list[list[int]], list[list[int]], tuple[Partition, ...]]:
    """Draw a trace, schedules on four streams, and partitions that name some or all of these."""
    made = draw(traces(10))
    several = [draw(schedules(made, max_streams=4)) for _ in range(2)]
    partitions = draw(
        st.sampled_from(
            (
                parted((64, (0,))),
                parted((64, (0, 1)), (68, (2, 3))),
                parted((8, (3,)), (96, (1,))),
                parted((32, (0,)), (32, (1,)), (32, (2,)), (36, (3,))),
                parted((132, (0, 1, 2, 3))),
            )
        )
    )
    return made, [order for order, _ in several], [streams for _, streams in several], partitions


@settings(max_examples=120)
@given(cases(), hardware_models(), st.sampled_from(EXPONENTS), st.sampled_from(MODES))
def test_batch_on_partitions_gives_what_lowering_and_the_reference_engine_give(
    case: tuple[Trace, list[list[int]], list[list[int]], tuple[Partition, ...]],
    hardware: HardwareModel,
    exponent: float,
    mode: LaunchMode,
) -> None:
    made, orders, streams, partitions = case
    contention = msgspec.structs.replace(hardware.contention, sharing_exponent=exponent)
    graph = OpGraph.build(made, msgspec.structs.replace(hardware, contention=contention))
    engine = BatchEngine(graph, lay_out(partitions, 4, SMS))
    found = engine.evaluate(orders, streams, mode=mode, peak=True)
    assert found.peak_bytes is not None
    for number, (order, placed) in enumerate(zip(orders, streams, strict=True)):
        plan = lowered(graph, order, placed, mode, partitions=partitions)
        expected = ReferenceEngine().run(plan, graph.hardware)
        assert FastEngine().run(plan, graph.hardware).end_ns == expected.end_ns
        assert (found.makespan_ns[number], found.peak_bytes[number]) == (expected.makespan_ns, expected.peak_bytes)


@settings(max_examples=40)
@given(cases(), hardware_models())
def test_one_partition_of_all_sms_changes_nothing(case: Any, hardware: HardwareModel) -> None:
    made, (order, _), (streams, _), _ = case
    graph = OpGraph.build(made, hardware)
    whole = lowered(graph, order, streams, partitions=parted((132, (0, 1, 2, 3))))
    expected = FastEngine().run(lowered(graph, order, streams), graph.hardware)
    assert FastEngine().run(whole, graph.hardware).end_ns == expected.end_ns


def test_batch_knows_only_the_streams_of_its_layout() -> None:
    engine = BatchEngine(build_graph(wide_trace(2, depth=1)), lay_out(parted((64, (0,))), 2, SMS))
    with pytest.raises(PlanError, match="stream 2, of 2 streams in partitions"):
        engine.evaluate([range(4)], [[0, 1, 2, 0]])


def test_task_in_a_partition_out_of_range_is_refused_by_both_engines() -> None:
    for number in (-1, MAX_PARTITIONS):
        for engine in (FastEngine(), ReferenceEngine()):
            with pytest.raises(PlanError, match=f"is in partition {number} of {MAX_PARTITIONS}"):
                engine.run(plan(task(10, partition=number)), make_hardware())


# --- Schedules and commands ---


def test_schedule_keeps_its_partitions_and_refuses_those_the_gpu_cannot_have(tmp_path: Path) -> None:
    trace = wide_trace(2, depth=1)
    graph = build_graph(trace)
    good = schedule_of(range(4), [0, 0, 1, 0], partitions=parted((64, (0,)), (68, (1,))))
    path = tmp_path / "s.json"
    write_schedule(good, trace, path)
    assert read_schedule(path, graph) == good
    assert {task.partition for task in lower(graph, good).tasks} == {0, 1}
    bad = msgspec.structs.replace(good.to_document(trace), partitions=parted((64, (0,)), (72, (1,))))
    with pytest.raises(ScheduleError) as caught:
        Schedule.from_document(bad, graph, "s.json")
    expected = "s.json: $.partitions: the partitions have 136 SMs in all, the GPU has 132 ('h200')"
    assert str(caught.value) == expected


def test_partition_of_an_unused_stream_is_one_rule_for_files_and_values(tmp_path: Path) -> None:
    trace = wide_trace(2, depth=1)
    graph = build_graph(trace)
    document = schedule_of(range(4), [0, 0, 1, 0], partitions=parted((64, (0, 1)), (32, (7,)))).to_document(trace)
    assert document.streams == 8
    loaded = Schedule.from_document(document, graph)
    assert loaded.check(graph).stream_count == 2
    write_schedule(loaded, trace, tmp_path / "s.json")
    assert read_schedule(tmp_path / "s.json", graph) == loaded
    with pytest.raises(ScheduleError, match="partition 1 has stream 7, of 2 streams"):
        Schedule.from_document(msgspec.structs.replace(document, streams=2), graph)
    far = schedule_of(range(4), [0, 0, 1, 0], partitions=parted((64, (0, 1)), (68, (2**50,))))
    with pytest.raises(ScheduleError, match="the limit is 128"):
        far.check(graph)


@pytest.mark.parametrize(
    ("text", "streams", "expected"),
    [
        ("64+68", 2, [((64, (0,)), (68, (1,)))]),
        ("96+36", 4, [((96, (0, 1, 2)), (36, (3,)))]),
        ("64+68,32+32+68", 3, [((64, (0,)), (68, (1, 2))), ((32, (0,)), (32, (1,)), (68, (2,)))]),
    ],
)
def test_splits_are_read_and_streams_dealt_in_proportion(text: str, streams: int, expected: Any) -> None:
    assert parse_splits(text, streams, SMS) == [parted(*parts) for parts in expected]


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("64-68", "'64-68' is not a split such as 64\\+68"),
        ("", "'' is not a split"),
        ("64+", "'64\\+' is not a split"),
        ("64+68,half", "'half' is not a split"),
        ("60+72", "'60\\+72': partition 0 has 60 SMs"),
        ("64+72", "136 SMs in all"),
        ("32+32+32+36", "has 4 partitions for 2 streams"),
        ("0+132", "partition 0 has 0 SMs"),
    ],
)
def test_split_that_makes_no_sense_is_one_line(text: str, problem: str) -> None:
    with pytest.raises(OptionError, match=problem):
        parse_splits(text, 2, SMS)


@given(st.integers(2, 128))
def test_usual_splits_can_be_had_for_any_number_of_streams(streams: int) -> None:
    for partitions in usual_splits(streams, SMS):
        layout = lay_out(partitions, streams, SMS)
        assert sum(layout.sms) == SMS
        assert set(layout.of_stream) == {0, 1}


def test_explore_reports_partitions_and_their_rows_replay_as_predicted() -> None:
    """Each row of a split is simulated with its partitions; without any, partitions are not mentioned."""
    trace = wide_trace(4, 20_000, 2, graph_ns=200_000)
    hardware = make_hardware(chain_ns=400, slowdown=0.8)
    found = explore(
        build_graph(trace, hardware),
        streams=4,
        budget_s=60,
        evaluations=1500,
        splits=usual_splits(4, SMS),
        policies=("wavefront",),
    )
    assert len(found.partitions) == len(usual_splits(4, SMS))
    graph = build_graph(trace, hardware)
    rows = [row for row in found.rows if row.policy == PARTITIONS]
    assert {row.schedule.partitions for row in rows} == set(usual_splits(4, SMS))
    for row in rows:
        assert FastEngine().run(lower(graph, row.schedule), graph.hardware).makespan_ns == row.makespan_ns
    assert min(row.makespan_ns for row in rows) == min(tried.makespan_ns for tried in found.partitions)
    plain = explore(build_graph(trace, hardware), streams=4, budget_s=60, evaluations=300, policies=("wavefront",))
    assert plain.partitions == ()
    assert {row.policy for row in plain.rows} == {"sequential", "wavefront", SEARCH}


def test_command_says_what_partitions_gain_or_that_they_do_not(tmp_path: Path) -> None:
    path = tmp_path / "t.json"
    write_trace(wide_trace(4, 20_000, 2, graph_ns=200_000), path)
    options = ["explore", str(path), "--streams", "2", "--budget", "30", "--evaluations", "600"]
    shown = CliRunner().invoke(cli, [*options, "--partitions", "64+68"])
    assert shown.exit_code == 0, shown.output
    assert "Partitions: " in shown.output
    assert "64+68 SMs, 1+1 streams" in shown.output
    refused = CliRunner().invoke(cli, [*options, "--partitions", "64+72"])
    assert isinstance(refused.exception, OptionError)


# --- On the GPU, up to its edge ---

#: Groups of an H200: its GPCs have 16 or 18 SMs, so groups of 8 leave some over.
GROUPS = runtime.SmGroups(sms=132, group_sms=8, count=15, left_sms=12)


@pytest.mark.parametrize(
    ("sizes", "dealt"),
    [
        ((64, 68), [(0, 8, False), (8, 15, True)]),
        ((64, 56), [(0, 8, False), (8, 15, False)]),
        ((96, 36), [(0, 12, False), (12, 15, True)]),
        ((112, 12), [(0, 14, False), (14, 14, True)]),
        ((132,), [(0, 15, True)]),
        ((8, 16, 8), [(0, 1, False), (1, 3, False), (3, 4, False)]),
    ],
)
def test_partitions_are_made_of_whole_groups_that_nobody_shares(sizes: Any, dealt: Any) -> None:
    assert runtime.deal_groups(sizes, GROUPS) == dealt


@pytest.mark.parametrize("sizes", [(68, 64), (60, 64), (128, 8), (64, 64), (0, 64), (136,), (4,)])
def test_sizes_that_groups_do_not_make_are_refused(sizes: tuple[int, ...]) -> None:
    with pytest.raises(GpuError, match=r"partition \d of \d+ SMs: this GPU has 15 groups of 8 SMs and 12 left over"):
        runtime.deal_groups(sizes, GROUPS)


class FakeDriver:
    """Stand-in that answers CUDA driver calls as an H200 does; `refuse` names the failing call."""

    def __init__(self, refuse: str = "") -> None:
        self.refuse = refuse
        self.calls: list[str] = []
        self.contexts: list[int] = []

    def __getattr__(self, name: str) -> Any:
        if not name.startswith("cu"):
            raise AttributeError(name)
        return lambda *arguments: self.answer(name, arguments)

    def answer(self, name: str, arguments: tuple[Any, ...]) -> int:
        self.calls.append(name)
        if name == "cuGetErrorName":
            arguments[1]._obj.value = b"CUDA_ERROR_NOT_SUPPORTED"
        elif name == self.refuse:
            return 801
        elif name == "cuDeviceGetDevResource":
            whole = arguments[1]._obj
            whole.sms, whole.smallest, whole.alignment = 132, 8, 8
        elif name == "cuDevSmResourceSplitByCount":
            arguments[1]._obj.value = 15
            if isinstance(arguments[0], ctypes.Array):
                for group in arguments[0]:
                    group.sms = 8
                arguments[3]._obj.sms = 12
        elif name == "cuDevResourceGenerateDesc":
            self.contexts.append(sum(group.sms for group in arguments[1]))
        elif name in ("cuGreenCtxCreate", "cuGreenCtxStreamCreate"):
            arguments[0]._obj.value = 0x1000 + len(self.calls)
        return 0


@pytest.fixture
def driver(monkeypatch: pytest.MonkeyPatch) -> FakeDriver:
    fake = FakeDriver()
    monkeypatch.setattr(runtime, "require_gpu", lambda: torch.device("cuda", 0))
    monkeypatch.setattr(runtime.ctypes, "CDLL", lambda name: fake)
    monkeypatch.setattr(torch.cuda, "init", lambda: None)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: type("S", (), {"synchronize": lambda self: None})())
    monkeypatch.setattr(torch.cuda, "ExternalStream", lambda pointer, device: (pointer, device))
    return fake


def test_partitions_ask_the_driver_for_disjoint_contexts_and_give_them_back(driver: FakeDriver) -> None:
    found = runtime.Partitions([64, 68])
    assert found.sms == driver.contexts == [64, 68]
    one, other = found.stream(0), found.stream(1)
    assert one != other
    found.close()
    assert driver.calls[-4:] == ["cuStreamDestroy_v2"] * 2 + ["cuGreenCtxDestroy"] * 2


@pytest.mark.parametrize("call", ["cuDeviceGetDevResource", "cuDevSmResourceSplitByCount", "cuGreenCtxCreate"])
def test_driver_that_refuses_is_one_line_with_its_own_words(driver: FakeDriver, call: str) -> None:
    driver.refuse = call
    with pytest.raises(GpuError, match=f"no SM partitions: {call} says CUDA_ERROR_NOT_SUPPORTED"):
        runtime.Partitions([64, 68])


def test_driver_without_green_contexts_is_named(driver: FakeDriver, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(runtime.ctypes, "CDLL", lambda name: object())
    with pytest.raises(GpuError, match=r"libcuda\.so\.1 has no green contexts"):
        runtime.sm_groups()


def test_resource_has_the_size_that_the_driver_writes() -> None:
    """`CUdevResource` of cuda.h, CUDA 13.0: 4 bytes of type, 92 of padding, 48 of numbers."""
    assert ctypes.sizeof(runtime._Resource) == 144
    assert (runtime._Resource.sms.offset, runtime._Resource.alignment.offset) == (96, 104)
