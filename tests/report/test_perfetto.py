"""Perfetto export: complete for Kineto's readers, and without slices that viewers drop."""

from __future__ import annotations

import errno
import gzip
import json
import os
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpusim.engine.base import Timeline
from gpusim.errors import OutputError
from gpusim.formats.hardware import (
    Contention,
    Copies,
    GraphCosts,
    HardwareModel,
    Limits,
    Memory,
    Rates,
    StreamCosts,
    Uncertainty,
)
from gpusim.formats.trace import SCHEMA, Gpu, Kernel, Model, Op, Provenance, Trace
from gpusim.plan.tasks import Buffer, Plan, Task
from gpusim.report.perfetto import (
    Run,
    Slice,
    chrome_trace,
    ns_to_trace_us,
    pack_lanes,
    run_from_kineto,
    run_from_timeline,
    write_perfetto,
)

KINETO_KERNEL_ARGS = {
    "External id",
    "device",
    "context",
    "stream",
    "correlation",
    "registers per thread",
    "shared memory",
    "blocks per SM",
    "warps per SM",
    "grid",
    "block",
    "est. achieved occupancy %",
}
KINETO_MEMORY_ARGS = {"device", "context", "stream", "correlation", "bytes", "memory bandwidth (GB/s)"}
OWN_ARGS = {"op", "layer", "phase", "target", "ready (us)"}


def small_hardware(*, gpu: str = "NVIDIA H200", calibrated: bool = True, regs_per_thread: int = 255) -> HardwareModel:
    """Return limits of compute capability 9.0; the costs do not matter here."""
    return HardwareModel(
        schema="gpusim-hardware/1",
        name="small",
        gpu=gpu,
        calibrated=calibrated,
        limits=Limits(
            compute_capability="9.0",
            sms=132,
            warp_threads=32,
            threads_per_sm=2048,
            blocks_per_sm=32,
            threads_per_block=1024,
            regs_per_sm=65536,
            regs_per_block=65536,
            regs_per_thread=regs_per_thread,
            reg_granularity=256,
            sub_partitions=4,
            smem_per_sm_bytes=233472,
            smem_per_block_bytes=232448,
            smem_granularity_bytes=128,
            smem_reserved_bytes=1024,
            resident_grids=128,
        ),
        memory=Memory(dram_bytes=1 << 37, dram_bytes_per_ns=4800.0, l2_bytes=1 << 26),
        rates=Rates(fp32=67000.0, tf32=495000.0, bf16=989000.0),
        copies=Copies(h2d_bytes_per_ns=50.0, d2h_bytes_per_ns=50.0, both_bytes_per_ns=80.0, latency_ns=0.0),
        graph=GraphCosts(chain_ns=0.0, fork_ns=0.0, join_ns=0.0, front_end_ns=0.0, memory_node_ns=0.0),
        stream=StreamCosts(
            launch_ns=0.0, start_ns=0.0, chain_ns=0.0, event_ns=0.0, event_host_ns=0.0, queues=8, max_queues=32
        ),
        contention=Contention(younger_slowdown=0.0),
        uncertainty=Uncertainty(sequential_frac=0.0, schedule_frac=0.0),
        sources={},
    )


def small_trace() -> Trace:
    """A convolution, a fill, and a sum of both."""
    conv = Kernel(name="conv_k", dur_ns=1000, grid=(132, 2, 1), block=(128, 2, 1), regs_per_thread=128, smem_bytes=4096)
    fill = Kernel(name="Memset (Device)", kind="memset", dur_ns=500, bytes=1024)
    add = Kernel(name="add_k", dur_ns=200, grid=(33, 1, 1), block=(64, 1, 1), regs_per_thread=16)
    return Trace(
        schema=SCHEMA,
        provenance=Provenance(
            gpu=Gpu(name="NVIDIA H200", driver="", cuda="", torch="", cudnn="", sm_clock_mhz=0, mem_clock_mhz=0),
            date="2025-01-01",
            command="",
            gpusim="0",
        ),
        model=Model(
            spec="torchvision:tiny",
            network="tiny",
            mode="train",
            batch=8,
            dtype="tf32",
            memory_format="contiguous",
            frontend="aten",
        ),
        storages=(),
        tensors=(),
        ops=(
            Op(name="convolution", target="aten.convolution.default", layer="branch1.conv", kernels=(conv,)),
            Op(name="zero_", target="aten.zero_.default", layer="branch2", kernels=(fill,)),
            Op(name="add", target="aten.add.Tensor", phase="backward", kernels=(add,)),
        ),
    )


def small_timeline() -> Timeline:
    """Stream 0 runs the convolution and then the sum, stream 1 the fill that the sum waits for."""
    tasks = (
        Task(name="conv_k", dur_ns=1000, op=0, kernel=0),
        Task(name="Memset (Device)", kind="memset", queue=1, dur_ns=500, copy_bytes=1024, op=1, kernel=0),
        Task(name="add_k", deps=(1,), dur_ns=200, op=2, kernel=0),
    )
    return Timeline(
        plan=Plan(tasks=tasks, buffers=(Buffer(bytes=1 << 20, tasks=(0, 2)),), kept_bytes=1 << 21),
        start_ns=(0, 1, 1001),
        end_ns=(1001, 513, 1201),
        ready_ns=(0, 0, 1001),
        occupied=((0, 1.0), (1201, 0.0)),
        bandwidth=((0, 2400.0), (1201, 0.0)),
    )


def small_run(**hardware: Any) -> Run:
    return run_from_timeline(small_timeline(), small_trace(), "simulated: small", small_hardware(**hardware))


def slices_by_track(document: dict[str, Any]) -> dict[tuple[int, int], list[dict[str, Any]]]:
    tracks: dict[tuple[int, int], list[dict[str, Any]]] = {}
    for event in document["traceEvents"]:
        if event["ph"] == "X":
            tracks.setdefault((event["pid"], event["tid"]), []).append(event)
    return tracks


def track_names(document: dict[str, Any]) -> dict[tuple[int, int], str]:
    return {(e["pid"], e["tid"]): e["args"]["name"] for e in document["traceEvents"] if e["name"] == "thread_name"}


def test_small_run_gives_exactly_these_events() -> None:
    """The file of a known timeline, event by event: metadata first, then by time, arrows after the slices they link."""
    own = {"layer": "", "phase": "forward"}
    common = {"device": 0, "context": 1}
    conv = {
        "External id": 0,
        **common,
        "stream": 0,
        "correlation": 1,
        "registers per thread": 128,
        "shared memory": 4096,
        "blocks per SM": 2.0,
        "warps per SM": 16.0,
        "grid": [132, 2, 1],
        "block": [128, 2, 1],
        "est. achieved occupancy %": 25,
        "limited by": "registers",
        "op": "convolution",
        **own,
        "layer": "branch1.conv",
        "target": "aten.convolution.default",
        "ready (us)": 0.0,
    }
    fill = {
        "External id": 1,
        **common,
        "stream": 1,
        "correlation": 2,
        "bytes": 1024,
        "memory bandwidth (GB/s)": 2.0,
        "op": "zero_",
        **own,
        "layer": "branch2",
        "target": "aten.zero_.default",
        "ready (us)": 0.0,
    }
    add = {
        "External id": 2,
        **common,
        "stream": 0,
        "correlation": 3,
        "registers per thread": 16,
        "shared memory": 0,
        "blocks per SM": 0.25,
        "warps per SM": 0.5,
        "grid": [33, 1, 1],
        "block": [64, 1, 1],
        "est. achieved occupancy %": 1,
        "limited by": "threads",
        "op": "add",
        **own,
        "phase": "backward",
        "target": "aten.add.Tensor",
        "ready (us)": ns_to_trace_us(1001),
    }

    def meta(name: str, tid: int, /, **args: Any) -> dict[str, Any]:
        return {"ph": "M", "name": name, "pid": 1, "tid": tid, "ts": 0, "args": args}

    def piece(name: str, tid: int, ts: float, dur: float, args: dict[str, Any], cat: str = "kernel") -> dict[str, Any]:
        return {"ph": "X", "cat": cat, "name": name, "pid": 1, "tid": tid, "ts": ts, "dur": dur, "args": args}

    def counter(name: str, ts: float, value: float) -> dict[str, Any]:
        return {"ph": "C", "name": name, "pid": 1, "ts": ts, "args": {"value": value}}

    arrow = {"id": 1, "pid": 1, "cat": "dependency", "name": "dependency"}
    end_conv = ns_to_trace_us(1001)
    assert chrome_trace([small_run()]) == {
        "schemaVersion": 1,
        "displayTimeUnit": "ns",
        "otherData": {
            "producer": "gpusim",
            "runs": "simulated: small",
            "trace": "tiny-train-b8",
            "hardware": "small",
        },
        "traceEvents": [
            meta("process_name", 0, name="simulated: small"),
            meta("process_labels", 0, labels="small"),
            meta("process_sort_index", 0, sort_index=1),
            meta("thread_name", 2, name="stream 0"),
            meta("thread_sort_index", 2, sort_index=2),
            meta("thread_name", 3, name="stream 1"),
            meta("thread_sort_index", 3, sort_index=3),
            piece("conv_k", 2, 0.0, end_conv, conv),
            counter("SM residency", 0.0, 1.0),
            counter("DRAM GB/s", 0.0, 2400.0),
            counter("memory MiB", 0.0, 3.0),
            piece("Memset (Device)", 3, 0.001, 0.512, fill, "gpu_memset"),
            {"ph": "s", "tid": 3, "ts": 0.512, **arrow},
            piece("add_k", 2, end_conv, 0.2, add),
            {"ph": "f", "tid": 2, "ts": end_conv, "bp": "e", **arrow},
            counter("SM residency", 1.201, 0.0),
            counter("DRAM GB/s", 1.201, 0.0),
            counter("memory MiB", 1.201, 2.0),
        ],
    }


def test_argument_names_are_those_of_kineto() -> None:
    """Tools that read PyTorch's profiles look arguments up by Kineto's names; gpusim's own are additions."""
    kernel, memset, _ = small_run().slices
    assert set(kernel.args) == KINETO_KERNEL_ARGS | OWN_ARGS | {"limited by"}
    assert set(memset.args) == KINETO_MEMORY_ARGS | OWN_ARGS | {"External id"}
    assert (kernel.category, memset.category) == ("kernel", "gpu_memset")


@pytest.mark.parametrize("kind", ["memcpy", "h2d", "d2h"])
def test_copies_of_a_plan_without_an_op_are_memcpy_slices(kind: Any) -> None:
    """Memory plans add copies without an op; they have no op name, and no division by a time of 0."""
    plan = Plan(tasks=(Task(name="offload", kind=kind, queue=2, copy_bytes=64),))
    timeline = Timeline(plan=plan, start_ns=(5,), end_ns=(5,), ready_ns=(0,))
    (copy,) = run_from_timeline(timeline, small_trace(), "", small_hardware()).slices
    assert copy.category == "gpu_memcpy"
    assert set(copy.args) == KINETO_MEMORY_ARGS | {"ready (us)"}
    assert copy.args["memory bandwidth (GB/s)"] == "N/A"


def test_kernel_on_another_gpu_shows_the_launch_that_was_simulated() -> None:
    """What-if questions fit a kernel to the GPU's limits; the file must not show registers that GPU does not have."""
    assert small_run(gpu="Other", regs_per_thread=64).slices[0].args["registers per thread"] == 64


def test_uncalibrated_hardware_is_said_wherever_the_run_is_named() -> None:
    """Every output with a hardware model that was never measured says so."""
    document = chrome_trace([small_run(calibrated=False)])
    names = {event["name"]: event["args"] for event in document["traceEvents"] if event["ph"] == "M"}
    assert document["otherData"]["hardware"] == "small (uncalibrated)"
    assert names["process_name"] == {"name": "simulated: small (uncalibrated)"}
    assert names["process_labels"] == {"labels": "small (uncalibrated)"}


def test_two_runs_side_by_side_share_no_ids() -> None:
    """Runs differ by process id; ids of threads, processes and arrows are never reused."""
    document = chrome_trace([small_run(), small_run()])
    events = document["traceEvents"]
    pids = {event["args"]["name"]: event["pid"] for event in events if event["name"] == "process_name"}
    assert set(pids.values()) == {2}
    assert {event["pid"] for event in events} == {1, 2}
    tracks = list(slices_by_track(document))
    assert len({tid for _, tid in tracks}) == len(tracks)
    assert {tid for _, tid in tracks}.isdisjoint({1, 2})
    assert sorted(event["id"] for event in events if event["ph"] == "s") == [1, 2]


INTERVALS = st.lists(
    st.tuples(st.integers(0, 2), st.one_of(st.integers(0, 30), st.integers(0, 10**13)), st.integers(0, 3000)),
    max_size=60,
)


@given(INTERVALS)
def test_no_slices_overlap_on_a_track_and_none_is_lost(intervals: list[tuple[int, int, int]]) -> None:
    """Perfetto drops a slice that overlaps another one on its track, so none may: rounded, truncated or in doubles."""
    run = Run("x", tuple(Slice(f"k{i}", *interval) for i, interval in enumerate(intervals)))
    document = json.loads(json.dumps(chrome_trace([run])))
    tracks = slices_by_track(document)
    found = {event["name"]: event for events in tracks.values() for event in events}
    assert len(found) == len(intervals) == sum(map(len, tracks.values()))
    for i, (stream, start, dur) in enumerate(intervals):
        event = found[f"k{i}"]
        for as_ns in (int, round):
            assert (as_ns(event["ts"] * 1000.0), as_ns(event["dur"] * 1000.0)) == (start, dur)
        assert track_names(document)[event["pid"], event["tid"]].split(" (")[0] == f"stream {stream}"
    for events in tracks.values():
        for before, after in pairwise(events):
            assert before["ts"] + before["dur"] <= after["ts"]
            for as_ns in (int, round):
                before_end = as_ns(before["ts"] * 1000.0) + max(1, as_ns(before["dur"] * 1000.0))
                assert before_end <= as_ns(after["ts"] * 1000.0)


@given(INTERVALS)
def test_there_are_no_more_lanes_than_slices_at_once(intervals: list[tuple[int, int, int]]) -> None:
    """An extra track would show concurrency that does not exist."""
    spans = [(start, start + dur) for _, start, dur in intervals]
    at_once = [sum(s <= start < max(e, s + 1) for s, e in spans) for start, _ in spans]
    assert len(pack_lanes(spans)) == max(at_once, default=0)


def test_long_chain_without_gaps_stays_on_one_track_and_on_time() -> None:
    """Starts move up by the rounding of sums of doubles; over a long chain that must not add up to a ns."""
    run = Run("x", tuple(Slice("k", 0, 10**9 + 1003 * i, 1003) for i in range(5000)))
    ((_, events),) = slices_by_track(chrome_trace([run])).items()
    assert [int(event["ts"] * 1000.0) for event in events] == [piece.start_ns for piece in run.slices]
    assert all(a["ts"] + a["dur"] <= b["ts"] for a, b in pairwise(events))


@given(st.integers(0, 10**14))
def test_times_survive_microseconds(time_ns: int) -> None:
    """A reader gets the same ns back, whether it rounds or cuts off; written with 3 decimals it is the same time."""
    time_us = ns_to_trace_us(time_ns)
    assert int(time_us * 1000.0) == round(time_us * 1000.0) == time_ns
    assert f"{time_us:.3f}" == f"{time_ns // 1000}.{time_ns % 1000:03}"


def test_overlapping_slices_are_named_lanes_of_their_stream() -> None:
    """A viewer's user must see that two tracks are one stream."""
    run = Run("x", (Slice("a", 3, 0, 10), Slice("b", 3, 5, 10), Slice("c", 3, 10, 5)))
    document = chrome_trace([run])
    names = track_names(document)
    shown = {e["name"]: names[key] for key, events in slices_by_track(document).items() for e in events}
    assert shown == {"a": "stream 3", "b": "stream 3 (lane 2)", "c": "stream 3"}


def test_streams_of_several_gpus_do_not_share_tracks() -> None:
    """Stream numbers repeat from GPU to GPU."""
    document = chrome_trace([Run("x", (Slice("a", 0, 0, 9), Slice("b", 0, 9, 9, device=1)))])
    assert sorted(track_names(document).values()) == ["GPU 0 stream 0", "GPU 1 stream 0"]


def test_arrows_leave_and_reach_the_slices_they_are_meant_for() -> None:
    """An arrow is tied to what is open on its track at its time, in the file's order: at its end a slice is over."""
    run = Run("x", (Slice("a", 0, 0, 10), Slice("b", 0, 10, 10), Slice("c", 1, 10, 1)), dependencies=((0, 2), (2, 1)))
    open_on: dict[int, str] = {}
    ties = []
    for event in chrome_trace([run])["traceEvents"]:
        if event["ph"] == "X":
            open_on[event["tid"]] = event["name"]
        elif event["ph"] in "sf":
            ties.append((event["ph"], event["id"], open_on[event["tid"]]))
    assert sorted(ties, key=lambda tie: (tie[1], tie[0] == "f")) == [
        ("s", 1, "a"),
        ("f", 1, "c"),
        ("s", 2, "c"),
        ("f", 2, "b"),
    ]


def test_order_within_a_stream_is_not_drawn_as_an_arrow() -> None:
    """Only waits between streams get an arrow; the others would bury them."""
    tasks = (Task(name="a"), Task(name="b", deps=(0,)), Task(name="c", queue=1, deps=(1,)))
    timeline = Timeline(plan=Plan(tasks=tasks), start_ns=(0, 1, 2), end_ns=(1, 2, 3), ready_ns=(0, 1, 2))
    assert run_from_timeline(timeline, small_trace(), "", small_hardware()).dependencies == ((1, 2),)


def test_kineto_events_become_slices_from_zero() -> None:
    """Measured and simulated runs are compared: GPU work only, times from its first start, args kept."""
    events = [
        {"ph": "X", "cat": "cpu_op", "name": "aten::add", "pid": 7, "tid": 7, "ts": 1.0, "dur": 99.0},
        {
            "ph": "X",
            "cat": "kernel",
            "name": "k",
            "ts": 20.5,
            "dur": 3.001,
            "args": {"device": 0, "stream": 7, "grid": [1]},
        },
        {"ph": "X", "cat": "gpu_memset", "name": "m", "ts": 10.25, "dur": 0.5, "args": {"device": 0, "stream": 9}},
        {"ph": "X", "cat": "gpu_memcpy", "name": "bad", "ts": 11, "dur": -1, "tid": 4},
        {"ph": "f", "cat": "ac2g", "name": "ac2g", "id": 1, "pid": 0, "tid": 7, "ts": 20.5},
        {"ph": "M", "name": "process_name", "pid": 0, "args": {"name": "python"}},
    ]
    run = run_from_kineto(events, "measured")
    assert [(s.name, s.stream, s.start_ns, s.dur_ns, s.category) for s in run.slices] == [
        ("k", 7, 10250, 3001, "kernel"),
        ("m", 9, 0, 500, "gpu_memset"),
        ("bad", 4, 750, 0, "gpu_memcpy"),
    ]
    assert run.slices[0].args == {"device": 0, "stream": 7, "grid": [1]}
    assert run_from_kineto([], "nothing").slices == ()


def test_simulated_run_reads_back_as_a_kineto_trace(tmp_path: Path) -> None:
    """The file is a valid Kineto trace: our own reader of measured traces finds the same slices."""
    path = tmp_path / "run.json"
    run = small_run()
    write_perfetto(path, [run])
    again = run_from_kineto(json.loads(path.read_bytes())["traceEvents"], run.title)
    assert again.slices == run.slices


def test_integers_beyond_a_double_are_text() -> None:
    """JavaScript would round them: two ids could become one."""
    run = Run("x", (Slice("k", 0, 0, 1, {"graph node id": 2**53 + 1, "stream": 2**53 - 1}),))
    ((event,),) = slices_by_track(chrome_trace([run])).values()
    assert event["args"] == {"graph node id": "9007199254740993", "stream": 2**53 - 1}


@pytest.mark.parametrize("name", ["run.json", "run.json.gz"])
def test_file_is_valid_json_and_the_same_each_time(tmp_path: Path, name: str) -> None:
    """Strict JSON, whole, gzipped by its name; the same run gives the same bytes."""
    path = tmp_path / name
    runs = [small_run(), Run('quotes " \\ and\nlines \u00b5', (Slice('k<a, "b">\t', 0, 0, 1),))]
    write_perfetto(path, runs)
    data = path.read_bytes()
    text = gzip.decompress(data) if name.endswith(".gz") else data

    def refuse(constant: str) -> None:
        raise AssertionError(constant)

    assert json.loads(text, parse_constant=refuse) == chrome_trace(runs)
    write_perfetto(path, runs)
    assert path.read_bytes() == data


def test_no_runs_and_empty_runs_are_valid_files(tmp_path: Path) -> None:
    """A plan of views has no GPU work; its file is valid."""
    for runs in ([], [Run("empty", ())]):
        write_perfetto(tmp_path / "run.json", runs)
        assert slices_by_track(json.loads((tmp_path / "run.json").read_bytes())) == {}


def test_no_such_folder_is_an_output_error(tmp_path: Path) -> None:
    """A mistyped folder gives one line that names the file, and creates nothing."""
    path = tmp_path / "missing" / "run.json"
    with pytest.raises(OutputError, match=r"missing/run\.json: cannot be written: No such file or directory"):
        write_perfetto(path, [small_run()])
    assert list(tmp_path.iterdir()) == []


def test_full_disk_keeps_the_old_file_and_leaves_nothing_else(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """All or nothing: a write that fails halfway must not replace a good file or leave a part of one."""
    path = tmp_path / "run.json"
    path.write_text("old")

    def full(handle: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OutputError, match="No space left on device"):
        write_perfetto(path, [small_run()])
    assert [file.name for file in tmp_path.iterdir()] == ["run.json"]
    assert path.read_text() == "old"
