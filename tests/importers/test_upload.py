"""Uploads of other tools' files: read as by `gpusim.load`, in a process of their own, and within limits."""

from __future__ import annotations

import gzip
import io
import json
import zipfile
import zlib
from pathlib import Path

import msgspec
import pytest

import gpusim
from gpusim.errors import TraceError
from gpusim.importers.upload import parse_upload
from gpusim.io.file_limits import MAX_UPLOAD_BYTES
from gpusim.trace.store import load_trace, write_trace
from tests.support.helpers import make_trace
from tests.support.importer_files import SAMPLES, kernel, node, write_execution_trace, write_kineto
from tests.support.nsys_files import SCHEMAS, write_schema

FOREIGN = [
    "hta__triton_example__triton_example.json.gz",
    "tl__traces__inference__vllm_decode_full__graph_execution.json.gz",
    "nsysai__healthy_1pct.sqlite",
    "ncu_raw.csv",
]


@pytest.mark.parametrize("name", FOREIGN)
def test_uploaded_file_of_another_tool_is_the_trace_that_load_makes_of_it(name: str) -> None:
    uploaded = parse_upload((SAMPLES / name).read_bytes(), name)
    loaded = gpusim.load(SAMPLES / name).trace
    assert uploaded == loaded
    assert uploaded.provenance.imported_from is not None


@pytest.mark.parametrize(("name", "quality"), [("2026", "event"), ("trimmed", "assumed")])
def test_upload_says_what_its_dependencies_rest_on(name: str, quality: str, tmp_path: Path) -> None:
    data = write_schema(tmp_path / "n.sqlite", SCHEMAS[name]).read_bytes()
    source = parse_upload(data, "n.sqlite").provenance.imported_from
    assert source is not None
    assert (source.dependency_quality, source.files) == (quality, ("n.sqlite",))


def test_name_of_an_upload_does_not_matter(tmp_path: Path) -> None:
    path = write_kineto(tmp_path / "k.json", [kernel("a", 10, 10.5), kernel("b", 30, 5)])
    assert len(parse_upload(gzip.compress(path.read_bytes()), "x").ops) == 2


def test_trace_of_gpusim_is_uploaded_as_before(tmp_path: Path) -> None:
    trace = load_trace("squeezenet1_1-infer-b1")
    write_trace(trace, tmp_path / "t.json.gz")
    assert parse_upload((tmp_path / "t.json.gz").read_bytes(), "t.json.gz") == trace


def test_upload_that_holds_no_step_is_refused_with_what_to_give(tmp_path: Path) -> None:
    path = write_execution_trace(tmp_path / "e.json", [node(1, "aten::mm", [0], [1])])
    with pytest.raises(TraceError, match=r"e.json: is an execution trace of PyTorch.*PROFILE"):
        parse_upload(path.read_bytes(), "e.json")


def test_too_large_and_expanding_uploads_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(TraceError, match="the limit is 64"):
        parse_upload(b'{"traceEvents": []}' + bytes(MAX_UPLOAD_BYTES), "k.json")
    monkeypatch.setattr("gpusim.importers.upload.MAX_UPLOAD_DOCUMENT_BYTES", 2**20)
    event = json.dumps(kernel("k", 1, 2)).encode() + b","
    text = b'{"traceEvents": [' + event * (2**21 // len(event))
    with pytest.raises(TraceError, match="is larger than 1"):
        parse_upload(gzip.compress(text), "k.json.gz")
    packed = io.BytesIO()
    with zipfile.ZipFile(packed, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("k.json", text)
    with pytest.raises(TraceError, match="holds more than 1"):
        parse_upload(packed.getvalue(), "k.zip")


def test_damaged_database_is_refused_and_one_with_a_log_is_read(tmp_path: Path) -> None:
    data = bytearray(write_schema(tmp_path / "n.sqlite", SCHEMAS["2024"]).read_bytes())
    with pytest.raises(TraceError, match=r"damaged SQLite|no kernel"):
        parse_upload(bytes(data[:4096] + bytes(len(data) - 4096)), "n.sqlite")
    data[18:20] = b"\2\2"  # write-ahead log
    assert len(parse_upload(bytes(data), "n.sqlite").ops) == 4


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
    packer = zlib.compressobj(wbits=31)
    bomb = packer.compress(bytes(2**20)) + packer.flush()
    monkeypatch.setattr("gpusim.importers.upload.MAX_UPLOAD_DOCUMENT_BYTES", 2**16)
    with pytest.raises(TraceError, match="larger than 65536 bytes when decompressed"):
        parse_upload(bomb, "up.json.gz")


def test_an_empty_trace_is_refused() -> None:
    data = msgspec.json.encode(msgspec.structs.replace(make_trace([]), ops=()))
    with pytest.raises(TraceError, match="has no ops"):
        parse_upload(data, "up.json")
