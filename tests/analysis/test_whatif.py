"""What-if questions and other library functions of the dashboard: breakdown, memory, waits, background exploration."""

from __future__ import annotations

import csv
import io
import json
import os
import signal
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import pytest

import gpusim
from gpusim.analysis.critical_path import waits
from gpusim.analysis.simulation import Simulated
from gpusim.analysis.simulation import simulate as simulate_schedule
from gpusim.analysis.whatif import (
    Change,
    changed_graph,
    changed_hardware,
    longest,
    policy_schedule,
    retimed,
    sensitivities,
)
from gpusim.cli import main
from gpusim.defaults import SEARCH
from gpusim.engine.base import engine_by_name
from gpusim.errors import OptionError, TraceError, WorkerError
from gpusim.formats.hardware import load_hardware
from gpusim.formats.trace import Trace
from gpusim.importers.upload import parse_upload
from gpusim.io.file_limits import MAX_UPLOAD_BYTES
from gpusim.plan.graph import OpGraph
from gpusim.plan.lower import lower
from gpusim.plan.schedule import Schedule
from gpusim.plan.tasks import LaunchMode, start_interval_ns
from gpusim.policies.registry import POLICIES
from gpusim.report.breakdown import Part, breakdown, family, largest
from gpusim.report.explored_table import CSV_FIELDS, rows_csv
from gpusim.report.figures.breakdown import breakdown_figure, front, front_figure
from gpusim.report.live import by_role, live_at, peak
from gpusim.report.perfetto import run_from_timeline
from gpusim.report.waiting import waiting_chain, waiting_text
from gpusim.rules.start_interference import lost_ns
from gpusim.search.background import Exploration
from gpusim.search.explore import explore
from gpusim.search.explored import Explored
from gpusim.trace.store import load_trace, other_batches, write_trace
from tests.support.helpers import build_graph, chain_trace, make_hardware, make_trace, op, wide_trace

SMS = 132


def whole_gpu(waves: int = 1, dur_ns: int = 1000) -> Trace:
    """One kernel with `waves` full waves of blocks of 1024 threads, two to an SM."""
    return make_trace([op("a", "x", dur_ns=dur_ns, blocks=2 * SMS * waves)])


@pytest.mark.parametrize(
    ("change", "interval_ns"),
    [
        (Change(launch_cost=2.0), 1000),  # 2 ns a block are more than the kernel takes
        (Change(launch_cost=0.5), 0.5 * 1056),
        (Change(sms=4 * SMS), 0),  # one wave
        (Change(op_speed={0: 4.0}), 250),
    ],
)
def test_blocks_of_a_changed_step_hold_up_the_next_start_by_the_changed_rule(
    change: Change, interval_ns: float
) -> None:
    """1,056 blocks on 132 SMs, two on each at a time: four waves in 1000 ns, and 1 ns a block."""
    changed = changed_graph(build_graph(whole_gpu(waves=4), make_hardware(turnover_ns=1.0)), change)
    assert start_interval_ns(changed.tasks[0][0], changed.hardware, in_graph=True) == pytest.approx(interval_ns)


def explored(trace: Trace | None = None) -> Explored:
    return explore(build_graph(trace or wide_trace(), make_hardware()), streams=3, budget_s=60.0, evaluations=8)


# --- What if ---


def test_no_change_at_all_is_the_baseline_itself() -> None:
    graph = build_graph(wide_trace())
    assert changed_graph(graph, Change()) is graph
    assert changed_graph(graph, Change(sms=SMS, queues=8, op_speed={1: 1.0})) is graph
    assert changed_hardware(graph.hardware, Change()).calibrated


def simulate(graph: OpGraph, policy: str, streams: int, mode: LaunchMode = "graph") -> Simulated:
    return simulate_schedule(graph, policy_schedule(graph, policy, streams), mode)


def test_simulate_gives_what_the_command_gives(capsys: pytest.CaptureFixture[str]) -> None:
    main_with(["simulate", "googlenet-infer-b1", "--policy", "wavefront", "--streams", "3", "--json"])
    printed = json.loads(capsys.readouterr().out)
    graph = OpGraph.build(load_trace("googlenet-infer-b1"), load_hardware("h200"))
    found = simulate(graph, "wavefront", 3)
    assert (found.makespan_ns, found.sequential_ns) == (printed["makespan_ns"], printed["sequential_ns"])
    assert found.bounds.critical_path_ns == printed["bounds"]["critical_path_ns"]
    assert found.streams == printed["streams"]


def main_with(words: list[str]) -> None:
    from unittest.mock import patch

    with patch("sys.argv", ["gpusim", *words]):
        main()


@pytest.mark.parametrize(("sms", "expected"), [(66, 2000), (132, 1000), (264, 500)])
def test_a_kernel_of_many_waves_takes_time_with_the_number_of_waves(sms: int, expected: int) -> None:
    graph = changed_graph(build_graph(whole_gpu(waves=4)), Change(sms=sms))
    assert simulate(graph, "sequential", 1).makespan_ns == expected


def test_a_kernel_of_one_block_takes_as_long_on_fewer_sms_and_more_of_them() -> None:
    base = build_graph(make_trace([op("a", "x", blocks=1)]))
    graph = changed_graph(base, Change(sms=66))
    assert graph.tasks[0][0].dur_ns == base.tasks[0][0].dur_ns
    assert graph.tasks[0][0].demand.slots == pytest.approx(2 * base.tasks[0][0].demand.slots)


def test_bandwidth_scales_the_share_of_time_that_traffic_explains() -> None:
    elements = 64 * 2**20  # far over the L2 cache
    hardware = make_hardware(dram_bytes_per_ns=1000.0)
    base = build_graph(make_trace([op("a", "x", dur_ns=1_000_000)], elements=elements), hardware)
    memory_ns = base.tasks[0][0].dram_bytes / 1000.0
    assert 0 < memory_ns < 1_000_000
    graph = changed_graph(base, Change(bandwidth=2.0))
    assert graph.tasks[0][0].dur_ns == pytest.approx(1_000_000 - memory_ns / 2)


def test_launch_cost_scales_the_gaps() -> None:
    trace = chain_trace(4)
    graph = build_graph(trace, make_hardware(chain_ns=100.0))
    assert simulate(graph, "sequential", 1).makespan_ns == 4300
    assert simulate(changed_graph(graph, Change(launch_cost=2.0)), "sequential", 1).makespan_ns == 4600
    assert simulate(changed_graph(graph, Change(launch_cost=0.0)), "sequential", 1).makespan_ns == 4000


@pytest.mark.parametrize("factor", [0.0, 0.5, 2.0])
def test_launch_cost_scales_what_starts_cost_and_not_their_number(factor: float) -> None:
    graph = load_hardware("h200").graph
    assert graph.busy_starts > 0
    changed = changed_hardware(load_hardware("h200"), Change(launch_cost=factor))
    assert changed.graph.busy_starts == graph.busy_starts
    assert changed.stream.queues == load_hardware("h200").stream.queues
    for starts in (0, 1, 9):
        assert lost_ns(changed.graph, starts) == pytest.approx(factor * lost_ns(graph, starts))


def test_an_op_twice_as_fast_takes_half_its_time_and_the_model_stays_calibrated() -> None:
    graph = build_graph(chain_trace(4))
    changed = changed_graph(graph, Change(op_speed={2: 2.0}))
    assert simulate(changed, "sequential", 1).makespan_ns == 3500
    assert changed.hardware.calibrated


def test_contention_scales_how_much_kernels_slow_each_other() -> None:
    graph = build_graph(wide_trace(), make_hardware(slowdown=0.5))
    slower = simulate(changed_graph(graph, Change(contention=2.0)), "critical_path", 6).makespan_ns
    assert slower > simulate(graph, "critical_path", 6).makespan_ns


@pytest.mark.parametrize("change", [Change(sms=66), Change(bandwidth=2.0), Change(launch_cost=0.5)])
def test_changed_hardware_is_marked_as_uncalibrated(change: Change) -> None:
    hardware = changed_hardware(make_hardware(), change)
    assert not hardware.calibrated
    assert "(uncalibrated)" in hardware.label


def test_queues_are_a_setting_and_bind_in_stream_mode_only() -> None:
    # Launched in the order a, b (needs a, on another stream), c: in one queue c waits behind b.
    graph = build_graph(make_trace([op("a", "x", blocks=1), op("b", "a", blocks=1), op("c", "x", blocks=1)]))
    apart = Schedule(order=(0, 1, 2), streams=(0, 1, 2))
    one = changed_graph(graph, Change(queues=1))
    assert one.hardware.calibrated

    def ends(graph: OpGraph, mode: LaunchMode) -> int:
        return simulate_schedule(graph, apart, mode).timeline.end_ns[2]

    assert ends(one, "graph") == ends(graph, "graph") == 1000
    assert ends(graph, "stream") == 1000
    assert ends(one, "stream") == 2000


@pytest.mark.parametrize(
    "wrong",
    [
        {"sms": 0},
        {"bandwidth": 0.0},
        {"bandwidth": float("nan")},
        {"bandwidth": float("inf")},
        {"launch_cost": -1.0},
        {"queues": 0},
        {"op_speed": {0: 0.0}},
    ],
)
def test_changes_out_of_range_are_one_line(wrong: dict[str, Any]) -> None:
    with pytest.raises(OptionError, match="what-if"):
        Change(**wrong)


@pytest.mark.parametrize("factor", [1e-300, 1e7, 1e308])
def test_bandwidth_that_no_hardware_model_can_have_is_refused(factor: float) -> None:
    with pytest.raises(OptionError, match=r"what-if: .*x bandwidth is .* bytes/ns; simulated are from 1e-06 to 1e\+09"):
        changed_graph(build_graph(chain_trace(2)), Change(bandwidth=factor))


def test_queues_without_a_launch_that_has_them_are_refused() -> None:
    step = gpusim.Step(chain_trace(2), make_hardware())
    with pytest.raises(OptionError, match="queues=1: hardware queues count only where the host launches"):
        gpusim.whatif(step, queues=1)
    assert gpusim.whatif(step, queues=1, launch="stream").changed.graph.hardware.stream.queues == 1


def test_more_queues_than_the_gpu_has_and_unknown_ops_are_refused() -> None:
    graph = build_graph(chain_trace(2))
    with pytest.raises(OptionError, match="at most 32"):
        changed_graph(graph, Change(queues=33))
    with pytest.raises(OptionError, match="no op 9 among 2 ops"):
        changed_graph(graph, Change(op_speed={9: 2.0}))


@pytest.mark.parametrize("mode", ["graph", "stream"])
def test_a_retimed_plan_is_the_changed_step_lowered_again(mode: LaunchMode) -> None:
    graph = OpGraph.build(load_trace("googlenet-infer-b1"), load_hardware("h200"))
    base = simulate(graph, "critical_path", 4, mode)
    for change in (Change(sms=66), Change(bandwidth=0.5), Change(launch_cost=2.0), Change(op_speed={3: 2.0})):
        changed = changed_graph(graph, change)
        again = lower(changed, base.schedule, mode)
        assert retimed(base.timeline.plan, changed, base.schedule) == again


def test_contention_scales_both_rules_of_it() -> None:
    hardware = make_hardware(slowdown=0.5)
    pooled = changed_hardware(hardware, Change(contention=2.0)).contention
    assert (pooled.younger_slowdown, pooled.sharing_exponent) == (1.0, 0.0)
    contention = msgspec.structs.replace(hardware.contention, sharing_exponent=0.5)
    by_block = msgspec.structs.replace(hardware, contention=contention)
    assert changed_hardware(by_block, Change(contention=2.0)).contention.sharing_exponent == 1.0
    assert 0.0 < changed_hardware(by_block, Change(contention=0.0)).contention.sharing_exponent < 1e-3


def test_sensitivities_hold_the_schedule_and_name_ranges() -> None:
    graph = build_graph(chain_trace(4), make_hardware(chain_ns=100.0))
    rows = {name: (low, high, now) for name, low, high, now in sensitivities(simulate(graph, "sequential", 1), 1)}
    assert rows["launch cost, 0.5x to 2x"] == (4150, 4600, 4300)
    assert rows["SMs, 66 to 264"] == (4300, 4300, 4300)
    [op_row] = [row for name, row in rows.items() if name.startswith("speed of")]
    assert op_row == (5300, 3800, 4300)
    assert not any("queues" in name for name in rows)
    streams = sensitivities(simulate(graph, "sequential", 1, "stream"), 0)
    assert any("hardware queues, 1 to 32" in name for name, *_ in streams)


def test_longest_ops_come_longest_first() -> None:
    graph = build_graph(make_trace([op("a", "x", dur_ns=1), op("b", "a", dur_ns=3), op("c", "b", dur_ns=2)]))
    assert longest(graph, 2) == (1, 2)


def test_command_gives_what_the_library_gives(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    trace = wide_trace()
    write_trace(trace, tmp_path / "t.json")
    words = ["--policy", "wavefront", "--streams", "3", "--sms", "66", "--op", "stem", "2", "--json"]
    main_with(["whatif", str(tmp_path / "t.json"), *words])
    printed = json.loads(capsys.readouterr().out)
    graph = OpGraph.build(trace, load_hardware("h200"))
    found = simulate(changed_graph(graph, Change(sms=66, op_speed={0: 2.0})), "wavefront", 3)
    assert printed["whatif"]["makespan_ns"] == found.makespan_ns
    assert printed["whatif"]["calibrated"] is False
    assert printed["baseline"]["makespan_ns"] == simulate(graph, "wavefront", 3).makespan_ns


@pytest.mark.parametrize("kind", ["breakdown", "bounds", "gain", "front", "memory"])
def test_command_writes_every_figure(kind: str, tmp_path: Path) -> None:
    write_trace(wide_trace(), tmp_path / "t.json")
    main_with(["figure", kind, str(tmp_path / "t.json"), "--streams", "2", "--html", str(tmp_path / "f.html")])
    assert (tmp_path / "f.html").stat().st_size > 100_000


# --- Where the time goes ---


def test_breakdown_adds_up_three_times() -> None:
    trace = wide_trace()
    found = breakdown(build_graph(trace))
    for parts in (found.phases, found.layers, found.families):
        assert sum(part.time_ns for part in parts) == found.total_ns
        assert sum(part.kernels for part in parts) == found.kernels
        assert [part.time_ns for part in parts] == sorted((part.time_ns for part in parts), reverse=True)


@pytest.mark.parametrize(
    ("target", "expected"),
    [
        ("aten.convolution.default", "convolution"),
        ("aten.add_.Tensor", "add_"),
        ("triton_poi_fused_relu_3", "fused pointwise"),
        ("triton_red_fused_sum_1", "fused reduction"),
    ],
)
def test_family_is_the_operator_or_what_a_fused_kernel_does(target: str, expected: str) -> None:
    trace = chain_trace(1)
    assert family(msgspec.structs.replace(trace.ops[0], target=target)) == expected


def test_small_parts_become_one_that_says_how_many() -> None:
    parts = tuple(Part(f"p{n}", 10 - n, 1) for n in range(5))
    assert largest(parts, 5) == parts
    assert largest(parts, 3) == (*parts[:2], Part("3 others", 8 + 7 + 6, 3))


def test_breakdown_figure_has_units_and_every_part() -> None:
    figure = breakdown_figure(breakdown(build_graph(wide_trace())), "tiny <b>")
    assert all(axis.title.text.endswith(", us") for axis in figure.select_xaxes())
    assert "&lt;b&gt;" in figure.layout.title.text
    assert [len(bar.x) for bar in figure.data] == [1, 1, 1]


# --- Memory ---


def test_what_is_live_at_the_peak_adds_up_to_the_peak() -> None:
    trace = wide_trace()
    graph = build_graph(trace)
    for policy in ("sequential", "wavefront"):
        made = POLICIES[policy](graph, 3)
        timeline = engine_by_name("reference").run(lower(graph, made), graph.hardware)
        found = peak(timeline, trace)
        assert found.bytes == timeline.peak_bytes == sum(live.bytes for live in found.live)
        assert sum(by_role(found.live).values()) == found.bytes


def test_a_chain_has_what_is_read_and_written_in_memory() -> None:
    trace = chain_trace(3)
    graph = build_graph(trace)
    made = POLICIES["sequential"](graph, 1)
    timeline = engine_by_name("reference").run(lower(graph, made), graph.hardware)
    # In the middle of the second op: the input x, which is kept, a0, which it reads, and a1, which it writes.
    assert sorted(live.name for live in live_at(timeline, trace, 1500)) == ["a0", "a1", "x"]


def test_front_has_only_what_nothing_beats_in_both() -> None:
    row = explored().rows[0]
    times = ((10, 5), (20, 5), (12, 4), (12, 3), (30, 1))
    rows = [replace(row, makespan_ns=time, peak_bytes=size) for time, size in times]
    assert [(r.makespan_ns, r.peak_bytes) for r in front(rows)] == [(10, 5), (12, 3), (30, 1)]
    figure = front_figure(rows, "tiny")
    assert len(figure.data[0].x) == 3
    assert sum(len(trace.x) for trace in figure.data[1:]) == len(rows)


# --- Why a kernel did not start sooner ---


def test_wait_names_the_predecessor_and_the_chain_goes_back_to_the_start() -> None:
    trace = chain_trace(3)
    graph = build_graph(trace, make_hardware(chain_ns=100.0))
    made = POLICIES["sequential"](graph, 1)
    timeline = engine_by_name("reference").run(lower(graph, made), graph.hardware)
    wait = waits(timeline, graph.hardware)[2]
    assert (wait.cause, wait.blocker, wait.wait_ns) == ("stream", 1, 100)
    assert [each.task for each in waiting_chain(timeline, graph.hardware, 2)] == [2, 1, 0]
    run = run_from_timeline(timeline, trace, "t", graph.hardware)
    text = waiting_text(timeline, trace, graph.hardware, run, 2)
    assert "`a1`" in text
    assert "100 ns before" in text


def test_names_from_a_trace_cannot_become_markup() -> None:
    trace = make_trace([op("a`<b>", "x"), op("c", "a`<b>")])
    graph = build_graph(trace)
    made = POLICIES["sequential"](graph, 1)
    timeline = engine_by_name("reference").run(lower(graph, made), graph.hardware)
    run = run_from_timeline(timeline, trace, "t", graph.hardware)
    assert "`a'<b>`" in waiting_text(timeline, trace, graph.hardware, run, 1)


# --- Exploring in the background ---


def test_background_exploration_finds_what_explore_finds() -> None:
    job = Exploration(build_graph(wide_trace(), make_hardware()), streams=3, budget_s=60.0, evaluations=8).start()
    job.wait(60)
    assert not job.running
    assert job.bug is None
    assert job.result is not None
    assert job.result.rows == job.rows == explored().rows


def searching(job: Exploration) -> Exploration:
    """Start it, and wait until it is past the policies."""
    job.start()
    deadline = time.monotonic() + 120
    while job.what != SEARCH:
        assert job.running
        assert time.monotonic() < deadline
        time.sleep(0.01)
    return job


def test_a_stopped_search_keeps_the_best_found() -> None:
    job = searching(Exploration(build_graph(wide_trace(width=12), make_hardware()), streams=3, budget_s=600.0))
    job.stop()
    job.wait(60)
    assert (job.error, job.bug) == (None, None)
    assert job.result is not None
    assert job.result.interrupted
    assert any(row.policy == SEARCH for row in job.result.rows)


def test_stopped_before_the_search_there_is_no_result_and_no_bug() -> None:
    job = Exploration(build_graph(wide_trace(), make_hardware()), streams=3, budget_s=60.0)
    job.stop()
    job.start().wait(60)
    assert (job.result, job.error, job.bug) == (None, None, None)
    assert job.stopped


def test_an_interrupted_exploration_ends_without_a_bug() -> None:
    """Its process is gone, wherever it was."""
    job = searching(Exploration(build_graph(wide_trace(), make_hardware()), streams=3, budget_s=600.0))
    job.interrupt()
    job.wait(60)
    assert not job.running
    assert (job.result, job.error, job.bug) == (None, None, None)
    assert job.process is not None
    assert not Path(f"/proc/{job.process}").exists()


def test_what_goes_wrong_in_the_background_is_kept() -> None:
    job = Exploration(build_graph(wide_trace(), make_hardware()), streams=999, budget_s=60.0).start()
    job.wait(60)
    assert isinstance(job.error, OptionError)
    job = Exploration(build_graph(wide_trace(), make_hardware()), streams=3, budget_s=60.0, seed="x")  # type: ignore[arg-type]
    job.start().wait(60)
    assert isinstance(job.bug, RuntimeError)
    assert "TypeError" in str(job.bug)


def test_a_search_whose_process_is_killed_says_so() -> None:
    """For example by the system when memory runs out."""
    job = searching(Exploration(build_graph(wide_trace(), make_hardware()), streams=3, budget_s=600.0))
    assert job.process is not None
    os.kill(job.process, signal.SIGKILL)
    job.wait(60)
    assert isinstance(job.error, WorkerError)
    assert str(job.error) == "the process of the search was ended by SIGKILL"


def test_a_search_that_cannot_start_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(*_: Any, **__: Any) -> None:
        raise BlockingIOError(11, "Resource temporarily unavailable")

    monkeypatch.setattr("subprocess.Popen", refused)
    with pytest.raises(WorkerError, match=r"no process can be started for the search: .*unavailable"):
        Exploration(build_graph(wide_trace(), make_hardware()), streams=3, budget_s=60.0).start()


def test_only_the_policies_named_run_besides_the_sequential_one() -> None:
    seen: list[str] = []
    found = explore(
        build_graph(wide_trace(), make_hardware()),
        streams=2,
        budget_s=60.0,
        evaluations=1,
        policies=("wavefront",),
        on_row=lambda row: seen.append(row.policy),
    )
    assert set(seen) == {"sequential", "wavefront", SEARCH}
    assert seen == [row.policy for row in found.rows]


# --- To take away ---


def test_every_row_has_its_schedule_with_its_origin() -> None:
    found = explored()
    for row in found.rows:
        origin = (row.schedule.policy, row.schedule.made_by, row.schedule.predicted_ns)
        assert origin == (row.policy, found.schedule.made_by, row.makespan_ns)
    assert found.schedule is found.best.schedule


def test_csv_has_a_row_for_each_schedule_and_says_what_is_uncalibrated() -> None:
    found = explored()
    rows = list(csv.DictReader(io.StringIO(rows_csv(found.rows, "t", "h (uncalibrated)", calibrated=False))))
    assert tuple(rows[0]) == CSV_FIELDS
    assert [int(row["makespan_ns"]) for row in rows] == [row.makespan_ns for row in found.rows]
    assert {row["calibrated"] for row in rows} == {"false"}


# --- Uploads and batches ---


@pytest.mark.parametrize(
    ("data", "words"),
    [
        (b"", "is empty"),
        (b"{", "not valid JSON"),
        (b"\x1f\x8b\x08\x00", "truncated gzip"),
        (b"\x80\x04\x95", "a Python pickle, which gpusim never loads"),  # a pickle
        (b'{"schema": "other/1"}', "unknown schema"),
    ],
)
def test_a_broken_upload_is_one_line_that_names_the_file(data: bytes, words: str) -> None:
    with pytest.raises(TraceError, match=words) as caught:
        parse_upload(data, "up.json")
    assert str(caught.value).startswith("up.json")
    assert "\n" not in str(caught.value)


def test_an_upload_over_the_limits_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(TraceError, match="64 MiB"):
        parse_upload(bytes(MAX_UPLOAD_BYTES + 1), "up.json")
    import zlib

    packer = zlib.compressobj(wbits=31)
    bomb = packer.compress(bytes(2**20)) + packer.flush()
    monkeypatch.setattr("gpusim.importers.upload.MAX_UPLOAD_DOCUMENT_BYTES", 2**16)
    with pytest.raises(TraceError, match="larger than 65536 bytes when decompressed"):
        parse_upload(bomb, "up.json.gz")


def test_an_empty_trace_is_refused() -> None:
    data = msgspec.json.encode(msgspec.structs.replace(make_trace([]), ops=()))
    with pytest.raises(TraceError, match="has no ops"):
        parse_upload(data, "up.json")


def test_other_batches_differ_in_nothing_but_the_batch() -> None:
    trace = chain_trace(2)

    def variant(**fields: Any) -> Trace:
        return msgspec.structs.replace(trace, model=msgspec.structs.replace(trace.model, **fields))

    others = {
        "same": trace,
        "b8": variant(batch=8),
        "train-b8": variant(batch=16, mode="train"),
        "bf16": variant(batch=32, dtype="bf16"),
        "elsewhere": chain_trace(2, gpu="NVIDIA Other"),
    }
    assert other_batches(trace, others) == {8: "b8"}
