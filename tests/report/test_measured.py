"""Measured runs for display: supported files, a check that they belong to the step, and errors for broken ones."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest

from gpusim.errors import MeasurementError
from gpusim.formats.measurement import SCHEMA, Measurement, OutputCheck
from gpusim.formats.trace import Timing, Trace
from gpusim.io.files import compress
from gpusim.report import measured
from gpusim.report.measured import (
    Measured,
    bundled_measured,
    load_measured,
    not_comparable,
    parse_measured,
    parse_measured_upload,
    read_measured,
)
from gpusim.report.perfetto import Run, Slice, chrome_trace
from gpusim.trace.store import bundled_traces, load_trace, structure_hash
from tests.support.helpers import chain_trace, make_hardware, wide_trace

SLICES = tuple(Slice(f"k{i}", i % 2, 1000 * i, 800, {"stream": i % 2, "device": 0}) for i in range(6))


def measurement_of(trace: Trace, median_ns: int = 6_000) -> Measurement:
    """Make a replay of the trace on two streams."""
    time = Timing(median_ns=median_ns, lo_ns=median_ns, hi_ns=median_ns, rounds=25)
    outputs = OutputCheck(
        equal=True, bit_equal=True, sequential_repeats=True, worst_error=0.0, sequential_error=0.0, tolerance=1e-3,
        compared=1,
    )  # fmt: skip
    return Measurement(
        schema=SCHEMA, trace=trace.name, trace_hash=structure_hash(trace), policy="wavefront", streams=2,
        schedule=time, sequential=Timing(median_ns=9_000, lo_ns=9_000, hi_ns=9_000, rounds=25), predicted_ns=5_900,
        predicted_sequential_ns=9_000, hardware="h200", outputs=outputs, peak_bytes=1, sequential_peak_bytes=1,
        events=1, gpu=trace.provenance.gpu, date="2026-11-20", command="gpusim replay",
    )  # fmt: skip


def timeline_of(trace: Trace, measurement: Measurement | None = None, name: str | None = None) -> bytes:
    """Return a file as written by `gpusim replay --perfetto`."""
    runs = [
        Run("simulated: wavefront, 2 streams", SLICES[:2], trace=name or trace.name),
        Run("measured (profiled replay): wavefront, 2 streams", SLICES),
    ]
    return msgspec.json.encode(chrome_trace(runs, measurement))


def kernels(*events: dict[str, Any]) -> bytes:
    """Return a profiler's file."""
    plain = {"ph": "X", "cat": "kernel", "name": "k", "ts": 5.0, "dur": 1.0}
    return json.dumps({"traceEvents": [plain | event for event in events]}).encode()


def test_a_replays_timeline_gives_its_measured_run_and_its_measurement() -> None:
    trace = wide_trace()
    found = parse_measured(timeline_of(trace, measurement_of(trace)), "t.json", trace)
    assert found.run is not None
    assert [(piece.name, piece.stream, piece.start_ns, piece.dur_ns) for piece in found.run.slices] == [
        (piece.name, piece.stream, piece.start_ns, piece.dur_ns) for piece in SLICES
    ]
    assert found.title == "measured (profiled replay): wavefront, 2 streams"
    assert found.measurement == measurement_of(trace)
    assert (found.timed_ns, found.makespan_ns) == (6_000, 6_000)


def test_without_its_measurement_the_time_is_that_of_the_profiled_kernels() -> None:
    trace = wide_trace()
    found = parse_measured(timeline_of(trace), "t.json", trace)
    assert (found.timed_ns, found.makespan_ns) == (None, 5_800)


def test_a_measurement_alone_has_a_time_and_no_kernels() -> None:
    trace = wide_trace()
    found = parse_measured(msgspec.json.encode(measurement_of(trace)), "m.json", trace)
    assert (found.run, found.makespan_ns) == (None, 6_000)
    assert found.title == "measured: wavefront, 2 streams"


def test_a_profilers_trace_is_taken_from_its_first_kernel_on() -> None:
    trace = chain_trace(2)
    one, two = (each.kernels[0].name for each in trace.ops)
    data = kernels(
        {"ts": 70.5, "name": one}, {"ts": 71.5, "cat": "gpu_memcpy", "name": two}, {"cat": "cpu_op"}, {"ph": "i"}
    )
    found = parse_measured(data, "folder/p.json", trace)
    assert found.run is not None
    assert [(piece.start_ns, piece.dur_ns) for piece in found.run.slices] == [(0, 1000), (1000, 1000)]
    assert found.title == "measured: p.json"


def other(trace: Trace) -> Trace:
    return wide_trace(len(trace.ops))


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda t: b"", "is empty"),
        (lambda t: b"{", "is not valid JSON"),
        (lambda t: b"[1]", "is neither a measurement"),
        (lambda t: b'{"schema": "gpusim-trace/1"}', "is a trace, and a measurement"),
        (lambda t: b'{"schema": "gpusim-measurement/9"}', "unknown schema version 'gpusim-measurement/9'"),
        (lambda t: b'{"schema": "gpusim-measurement/1"}', "missing required field"),
        (lambda t: b'{"traceEvents": 3}', "is neither a measurement"),
        (lambda t: b'{"traceEvents": []}', "has no GPU kernel"),
        (lambda t: kernels({"ts": "soon"}), "kernel 'k' has ts 'soon', which is no time in us"),
        (lambda t: kernels({"dur": -1}), "kernel 'k' has dur '-1', which is no time in us"),
        (lambda t: kernels({"ts": 1e300}), "which is no time in us"),
        (lambda t: kernels({"args": {"stream": "seven"}}), "has stream 'seven', which is no number"),
        (lambda t: kernels(*[{"name": "other"}] * 20), "0 of that step's 14 kernels are among the file's 20"),
        (lambda t: timeline_of(t, name="resnet"), "is a timeline of 'resnet', not of"),
        (lambda t: timeline_of(t, measurement_of(other(t))), "measures another step"),
        (lambda t: msgspec.json.encode(measurement_of(other(t))), "measures another step"),
        (lambda t: msgspec.json.encode(chrome_trace([Run("simulated", SLICES, trace=t.name)])), "only simulated runs"),
    ],
    ids=[
        "empty", "half", "list", "trace", "newer", "incomplete", "events are a number", "no events", "time is a word",
        "backwards", "far future", "stream is a word", "profile of another step", "other trace", "other step inside",
        "other step", "simulated",
    ],
)  # fmt: skip
def test_a_broken_file_is_one_line_with_its_name(make: Callable[[Trace], bytes], words: str) -> None:
    trace = wide_trace()
    with pytest.raises(MeasurementError) as caught:
        parse_measured(make(trace), "mine.json", trace)
    assert str(caught.value).startswith("mine.json: ")
    assert words in str(caught.value)
    assert "\n" not in str(caught.value)


def test_limits_on_size_hold(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(measured, "MAX_UPLOAD_BYTES", 10)
    with pytest.raises(MeasurementError, match="the limit is 10 B"):
        parse_measured(b"x" * 11, "m.json", wide_trace())
    monkeypatch.undo()
    monkeypatch.setattr(measured, "MAX_SLICES", 1)
    with pytest.raises(MeasurementError, match="has 2 kernels; the limit is 1"):
        parse_measured(kernels({}, {}), "m.json", wide_trace())


def profiled(trace: Trace, times: int = 1, share: float = 1.0) -> bytes:
    """Return a profiler's file of `times` runs of the first kernels of a step, that share of them."""
    names = [kernel.name for op in trace.ops for kernel in op.kernels]
    return kernels(*({"name": name} for name in names[: round(share * len(names))] * times))


def test_profile_with_most_kernels_of_the_step_is_taken_and_one_with_half_is_not() -> None:
    trace = wide_trace()  # 14 kernels
    assert parse_measured(profiled(trace), "p.json", trace).run is not None
    assert parse_measured(profiled(trace, share=8 / 14), "p.json", trace).run is not None
    with pytest.raises(MeasurementError, match="7 of that step's 14 kernels are among the file's 7"):
        parse_measured(profiled(trace, share=0.5), "p.json", trace)


def test_profile_of_several_steps_in_a_row_is_refused() -> None:
    """Its length is not that of the step."""
    trace = wide_trace()
    with pytest.raises(MeasurementError, match="14 of that step's 14 kernels are among the file's 140"):
        parse_measured(profiled(trace, times=10), "p.json", trace)


def test_limit_on_streams_holds() -> None:
    trace = chain_trace(300)
    names = [each.kernels[0].name for each in trace.ops]
    data = kernels(*({"name": name, "args": {"stream": n}} for n, name in enumerate(names)))
    with pytest.raises(MeasurementError, match="has 300 streams; the limit is 256"):
        parse_measured(data, "p.json", trace)


def test_percentage_only_where_gpu_launch_and_schedule_agree() -> None:
    trace = wide_trace()
    hardware = make_hardware()
    measurement = msgspec.structs.replace(
        measurement_of(trace), gpu=msgspec.structs.replace(trace.provenance.gpu, name=hardware.gpu)
    )
    found = Measured("m", measurement, None)
    assert not_comparable(found, hardware, "graph", "wavefront", 2) == ""
    elsewhere = msgspec.structs.replace(hardware, gpu="Tesla V100")
    assert "predicted for Tesla V100" in not_comparable(found, elsewhere, "graph", "wavefront", 2)
    assert "launched from the host" in not_comparable(found, hardware, "stream", "wavefront", 2)
    words = not_comparable(found, hardware, "graph", "nimble", 2)
    assert words == "measured wavefront on 2 streams, predicted nimble on 2 streams"
    assert "predicted wavefront on 1 stream" in not_comparable(found, hardware, "graph", "wavefront", 1)
    profile = parse_measured(profiled(trace), "p.json", trace)
    assert "does not say which schedule ran" in not_comparable(profile, hardware, "graph", "wavefront", 2)


def test_a_missing_file_is_one_line(tmp_path: Path) -> None:
    with pytest.raises(MeasurementError, match="cannot be read"):
        read_measured(tmp_path / "none.json", wide_trace())


def test_a_measured_run_is_named_or_a_file() -> None:
    """Bundled runs go by name; anything else that is not a file gives one line with the known names."""
    trace = load_trace("googlenet-train-b8")
    for name, path in bundled_measured(trace).items():
        assert load_measured(name, trace) == read_measured(path, trace) == load_measured(str(path), trace)
    names = ", ".join(bundled_measured(trace))
    with pytest.raises(MeasurementError, match=f"critical-path: is no file and no measured run .*googlenet.*: {names}"):
        load_measured("critical-path", trace)
    with pytest.raises(MeasurementError, match=r"none of .* ships with gpusim"):
        load_measured("critical_path-8", wide_trace())
    with pytest.raises(MeasurementError, match="cannot be read"):
        load_measured("none.json", trace)


def test_bundled_timelines_belong_to_bundled_traces(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Bundled timelines are read with their trace; a step without one has none."""
    for name in bundled_traces():
        trace = load_trace(name)
        for path in bundled_measured(trace).values():
            assert read_measured(path, trace).timed_ns
    assert bundled_measured(wide_trace()) == {}
    monkeypatch.setattr(measured, "resource_dir", lambda name: tmp_path)
    (tmp_path / f"{wide_trace().name}.wavefront-2.perfetto.json.gz").touch()
    assert list(bundled_measured(wide_trace())) == ["wavefront-2"]


@pytest.mark.parametrize("name", ["t.json", "t.json.gz"])
def test_upload_read_apart_is_what_a_file_is_read_as(name: str) -> None:
    trace = wide_trace()
    for data in (timeline_of(trace, measurement_of(trace)), msgspec.json.encode(measurement_of(trace))):
        packed = compress(data) if name.endswith(".gz") else data
        assert parse_measured_upload(packed, name, trace) == parse_measured(packed, name, trace)


@pytest.mark.parametrize("data", [b"", b"x", b"{}", b'{"traceEvents": []}', b'{"schema": "gpusim-measurement/1"}'])
def test_broken_upload_gives_the_line_of_a_broken_file(data: bytes) -> None:
    with pytest.raises(MeasurementError) as here:
        parse_measured(data, "m.json", wide_trace())
    with pytest.raises(MeasurementError) as apart:
        parse_measured_upload(data, "m.json", wide_trace())
    assert str(apart.value) == str(here.value)
