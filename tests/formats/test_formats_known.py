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
from gpusim.trace.store import load_trace, trace_sha256, write_trace
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


def zip_bytes(member: str) -> bytes:
    data = io.BytesIO()
    with zipfile.ZipFile(data, "w") as archive:
        archive.writestr(member, b"x")
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
    "memory snapshot": (
        pickle.dumps({"segments": [], "device_traces": []}), "a memory snapshot of torch", "TRACE --measured FILE"
    ),
    "memory snapshot of torch 1": (
        pickle.dumps([{"address": 1, "segment_type": "small"}], protocol=2), "a memory snapshot of torch", "--measured"
    ),
    "torch.save": (zip_bytes("archive/data.pkl"), "a file of torch.save (a zip archive)", "gpusim capture"),
    "zip": (zip_bytes("readme.txt"), "a zip archive without a trace or a profile", "unpack it"),
    "web page": (b"\n<!DOCTYPE html>\n<html><body>Sign in", "a web page (HTML)", "download the file"),
    "web page with a comment": (b"<!-- saved from\n x -->\n<HTML lang='en'>", "a web page (HTML)", "download the file"),
    "xml": (b'<?xml version="1.0"?><a/>', "an XML document", "the file that it was made from"),
    "png": (b"\x89PNG\r\n\x1a\n\0\0\0\rIHDR", "a picture (PNG)", "the file that it was made from"),
    "jpeg": (b"\xff\xd8\xff\xe0\0\x10JFIF", "a picture (JPEG)", "the file that it was made from"),
    "pdf": (b"%PDF-1.7\n", "a PDF document", "the file that it was made from"),
    "zstd": (b"\x28\xb5\x2f\xfd\x04", "a file packed with zstd", "zstd -d"),
    "git lfs": (b"version https://git-lfs.github.com/spec/v1\noid", "a pointer of Git LFS", "git lfs pull"),
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
        ("a.nsys-rep", "nsys export --type sqlite"), ("a.ncu-rep", "ncu --import FILE --csv --page raw"),
        ("a.perfetto-trace", "traceconv json"),
        ("a.py", "gpusim capture FILE:FUNCTION"), ("a.toml", "gpusim validate"),
    ],
)  # fmt: skip
def test_file_without_a_known_beginning_is_named_by_its_ending(name: str, words: str, tmp_path: Path) -> None:
    (path := tmp_path / name).write_bytes(b"\n\x02 whatever")
    with pytest.raises(TraceError, match=words):
        load_trace(str(path))


def test_each_reader_says_which_option_takes_the_document_it_was_given(tmp_path: Path) -> None:
    trace, schedule = tmp_path / "t.json", tmp_path / "s.json"
    trace.write_text('{"schema": "gpusim-trace/1"}')
    schedule.write_text('{"schema": "gpusim-schedule/1"}')
    cases: list[tuple[type[FileError], object, str]] = [
        (HardwareError, lambda: load_hardware(str(trace)), "a hardware model (gpusim-hardware/1) is read here"),
        (ScheduleError, lambda: read_schedule_document(trace), "a schedule (gpusim-schedule/1) is read here"),
        (MeasurementError, lambda: read_measured(schedule, wide_trace()), "`gpusim simulate TRACE --schedule FILE`"),
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


@pytest.mark.parametrize("encoding", ["utf-8-sig", "utf-16", "utf-16-le with a mark", "utf-16-be with a mark"])
@pytest.mark.parametrize("packed", [False, True], ids=["plain", "gzip"])
def test_document_in_another_encoding_of_unicode_is_read(encoding: str, packed: bool, tmp_path: Path) -> None:
    """Editors add a mark, Windows' shell writes UTF-16: the document is the same, and so is its hash."""
    trace = wide_trace()
    plain, other = tmp_path / "plain.json", tmp_path / "other.json"
    write_trace(trace, plain)
    name, marked, _ = encoding.partition(" with")
    data = (("\ufeff" if marked else "") + plain.read_text("utf-8")).encode(name)
    other.write_bytes(gzip.compress(data) if packed else data)
    assert load_trace(str(other)) == trace
    assert trace_sha256(other) == trace_sha256(plain)


@pytest.mark.parametrize(
    ("data", "words"),
    [
        (b"", "is empty: copy or write it again"),
        (b" \n\n", "is empty but for white space: copy or write it again"),
        (gzip.compress(b""), "is empty but for white space: copy or write it again"),
        (gzip.compress(b'{"schema": "gpusim-trace/2"}')[:-9], "is truncated gzip.*; copy or write it again"),
        (b'{"schema": "gpusim-trace/2", "ops": [', "is not valid JSON: .*truncated; copy or write it again"),
        (b"\xff\xfe{\0\0\xd8", "starts as UTF-16 but is not: .*; copy or write it again"),
        (b"a,b\n1,2\n", r"is not valid JSON: .*; a trace \(gpusim-trace/2\) is read here; `gpusim import` makes"),
        (b"[1, 2]", r"no text field 'schema' at its top level; a trace .* is read here; `gpusim import`"),
    ],
)
def test_empty_cut_or_unknown_file_says_what_to_do(data: bytes, words: str, tmp_path: Path) -> None:
    (path := tmp_path / "mine.json").write_bytes(data)
    with pytest.raises(TraceError, match=words):
        load_trace(str(path))


def test_file_named_gzip_that_is_none_is_named_by_what_it_is(tmp_path: Path) -> None:
    (path := tmp_path / "step.json.gz").write_bytes(b"<html><body>404")
    with pytest.raises(TraceError, match=r"is named \.gz but is a web page \(HTML\): download"):
        load_trace(str(path))


@pytest.mark.parametrize("schema", ["gpusim-trace/2", "gpusim-schedule/1"])
def test_json_named_gz_is_told_to_change_its_name(schema: str, tmp_path: Path) -> None:
    """Not to be given to the command that it was given to."""
    (path := tmp_path / "step.json.gz").write_bytes(b'{"schema": "%s"}' % schema.encode())
    with pytest.raises(TraceError, match=r"is named \.gz but is not gzip: give it a name without \.gz"):
        load_trace(str(path))
