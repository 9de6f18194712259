"""A file of another tool, or another document of gpusim, is named in the error, with advice."""

from __future__ import annotations

import gzip
import io
import json
import pickle
import sqlite3
import zipfile
from pathlib import Path

import pytest

from gpusim.errors import FileError, HardwareError, MeasurementError, ScheduleError, TraceError
from gpusim.formats.hardware import load_hardware
from gpusim.formats.schedule import read_schedule_document
from gpusim.io.known_formats import LOOKED_AT_BYTES, known_format
from gpusim.report.measured import read_measured
from gpusim.trace.store import load_trace
from tests.support.helpers import wide_trace

KINETO = {
    "schemaVersion": 1,
    "deviceProperties": [{"id": 0, "name": "NVIDIA H200", "schema": "1.0"}],
    "traceEvents": [{"ph": "X", "cat": "cpu_op", "name": "aten::add", "ts": 1, "dur": 2}],
}


def sqlite_bytes(folder: Path) -> bytes:
    path = folder / "made.sqlite"
    with sqlite3.connect(path) as base:
        base.execute("create table CUPTI_ACTIVITY_KIND_KERNEL (start integer)")
    base.close()
    return path.read_bytes()


def zip_bytes() -> bytes:
    data = io.BytesIO()
    with zipfile.ZipFile(data, "w") as archive:
        archive.writestr("archive/data.pkl", b"x")
    return data.getvalue()


FOREIGN = {
    "kineto": (json.dumps(KINETO).encode(), "a trace of torch.profiler (Kineto)", "gpusim capture"),
    "kineto in gzip": (gzip.compress(json.dumps(KINETO).encode()), "a trace of torch.profiler", "gpusim capture"),
    "bare events": (b'[\n {"name": "k", "ph": "X", "ts": 1}]', "a trace of torch.profiler (Kineto)", "gpusim capture"),
    "own timeline": (b'{"otherData":{"producer":"gpusim"},"traceEvents":[]}', "a timeline of gpusim's", "--measured"),
    "execution trace": (
        b'{"schema": "1.1.1-chakra.0.0.4", "pid": 1, "nodes": []}', "an execution trace of PyTorch", "gpusim capture"
    ),
    "chakra": (b"\x07\x0a\x050.0.4\x10\x02", "a Chakra execution trace", "gpusim capture"),
    "pickle": (pickle.dumps({"a": 1}), "a Python pickle, which gpusim never loads", "gpusim capture"),
    "torch.save": (zip_bytes(), "a zip archive, such as torch.save writes", "gpusim capture"),
    "safetensors": (b"\x16" + bytes(7) + b'{"a":{"dtype":"F32"}}  ', "a safetensors file", "gpusim capture"),
    "onnx": (b"\x08\x08\x12\x07pytorch\x1a\x052.1.0", "an ONNX model", "gpusim capture"),
    "ncu": (b'"ID","Process ID","Process Name"\n', "an output of Nsight Compute", "--counters"),
    "schedule": (b'{"schema": "gpusim-schedule/1"}', "a schedule", "--schedule FILE"),
    "measurement": (b'{"schema": "gpusim-measurement/1"}', "a measurement", "--measured FILE"),
    "hardware": (b'{"name": "x", "schema": "gpusim-hardware/1"}', "a hardware model", "--hw FILE"),
    "results": (b'{"schema": "gpusim-results/1"}', "a file of results", "gpusim figure fidelity FILE"),
}  # fmt: skip


@pytest.mark.parametrize("kind", FOREIGN)
def test_file_given_as_a_trace_says_what_it_is_what_is_read_and_what_to_do(kind: str, tmp_path: Path) -> None:
    data, what, advice = FOREIGN[kind]
    path = tmp_path / "mine.json"
    path.write_bytes(data)
    with pytest.raises(TraceError) as caught:
        load_trace(str(path))
    text = str(caught.value)
    assert text.startswith(f"{path}: ")
    assert what in text
    assert "a trace (gpusim-trace/2) is read here" in text
    assert advice in text
    assert "\n" not in text


def test_sqlite_of_nsight_is_named_by_its_content_whatever_its_ending(tmp_path: Path) -> None:
    data = sqlite_bytes(tmp_path)
    for name in ("report.sqlite", "report.json", "report"):
        (path := tmp_path / name).write_bytes(data)
        with pytest.raises(TraceError, match="is an SQLite file, such as Nsight Systems exports"):
            load_trace(str(path))


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("a.nsys-rep", "a report of Nsight Systems"), ("a.ncu-rep", "a report of Nsight Compute"),
        ("a.py", "gpusim capture FILE:FUNCTION"), ("a.toml", "gpusim validate"),
    ],
)  # fmt: skip
def test_file_without_a_known_beginning_is_named_by_its_ending(name: str, words: str, tmp_path: Path) -> None:
    (path := tmp_path / name).write_bytes(b"\x01\x02 whatever")
    with pytest.raises(TraceError, match=words):
        load_trace(str(path))


def test_each_reader_says_which_option_takes_the_document_it_was_given(tmp_path: Path) -> None:
    trace, schedule = tmp_path / "t.json", tmp_path / "s.json"
    trace.write_text('{"schema": "gpusim-trace/1"}')
    schedule.write_text('{"schema": "gpusim-schedule/1"}')
    cases: list[tuple[type[FileError], object, str]] = [
        (HardwareError, lambda: load_hardware(str(trace)), "a hardware model (gpusim-hardware/1) is read here"),
        (ScheduleError, lambda: read_schedule_document(trace), "a schedule (gpusim-schedule/1) is read here"),
        (MeasurementError, lambda: read_measured(schedule, wide_trace()), "give it with `--schedule FILE`"),
    ]
    for error, read, words in cases:
        with pytest.raises(error) as caught:
            read()  # type: ignore[operator]
        assert words in str(caught.value)


@pytest.mark.parametrize(
    "data",
    [b"", b"{", b"{}", b"hello", b"[1, 2]", b'{"a": {"traceEvents": []}}', b'{"x": "traceEvents"}', b"\x00" * 99],
)
def test_unknown_files_keep_the_message_they_had(data: bytes) -> None:
    assert known_format(data, "x.json", "gpusim-trace/1") == ""


def test_newer_or_damaged_document_of_the_wanted_kind_is_left_to_its_reader(tmp_path: Path) -> None:
    (path := tmp_path / "t.json").write_text('{"schema": "gpusim-trace/9"}')
    with pytest.raises(TraceError, match="unknown schema version 'gpusim-trace/9'"):
        load_trace(str(path))


def test_only_the_beginning_is_looked_at() -> None:
    late = b'{"pad": "' + b"x" * LOOKED_AT_BYTES + b'", "traceEvents": []}'
    assert known_format(late, "x.json", "gpusim-trace/1") == ""
