"""Kineto: all forms of its files, each read alike."""

from __future__ import annotations

import gzip
import io
import json
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import gpusim
from gpusim.errors import GpusimError, OptionError, TraceError
from gpusim.importers import examine, import_files
from tests.support.importer_files import call, kernel, operator, write_kineto, write_tar
from tests.support.profile_counts import counts

Document = dict[str, Any]


def plain() -> Document:
    """Two operators, each with a launch and a kernel, on two streams of an A100."""
    events = [operator("aten::a", 0, 9, 1), call("cudaLaunchKernel", 2, 3, 11), kernel("ka", 10.5, 20.25, 7, 11)]
    events += [operator("aten::b", 12, 9, 2), call("cudaLaunchKernel", 14, 3, 12), kernel("kb", 40, 5.125, 20, 12)]
    return {
        "schemaVersion": 1,
        "deviceProperties": [{"id": 0, "name": "NVIDIA A100-SXM4-40GB", "numSms": 108}],
        "traceEvents": events,
    }


def on_events(change: Callable[[Document], object]) -> Callable[[Document], object]:
    def changed(document: Document) -> object:
        for event in document["traceEvents"]:
            change(event)
        return document

    return changed


def text_arguments(event: Document) -> None:
    event["args"] = {key: str(value) for key, value in event["args"].items()}


def without_correlation(event: Document) -> None:
    number = event["args"].pop("correlation", None)
    if number is not None:
        event["args"]["External id"] = number


def oldest(event: Document) -> None:
    event["cat"] = {"cpu_op": "Operator", "cuda_runtime": "Runtime", "kernel": "Kernel"}[event["cat"]]


def with_other_events(document: Document) -> Document:
    """Add metadata, flows, instants and counters, as in current files; some without `args`, `ts` or `cat`."""
    others: list[Document] = [
        {"ph": "M", "name": "process_name", "pid": 0, "args": {"name": "python"}},
        {"ph": "s", "id": 11, "pid": 9, "tid": 9, "ts": 2, "cat": "ac2g", "name": "ac2g"},
        {"ph": "f", "id": 11, "pid": 0, "tid": 7, "ts": 10.5, "cat": "ac2g", "name": "ac2g", "bp": "e"},
        {"ph": "i", "cat": "cpu_instant_event", "s": "t", "name": "[memory]", "pid": 9, "tid": 9, "ts": 3, "args": {}},
        {"ph": "C", "name": "power", "pid": 0, "ts": 1, "args": {"watts": 300}},
        {"ph": "X", "cat": "Trace", "ts": 0, "dur": 100, "pid": "Spans", "tid": "PyTorch Profiler", "name": "span"},
        {"ph": "X", "cat": "gpu_user_annotation", "name": "k", "pid": 0, "tid": 7, "ts": 10, "dur": 40, "args": None},
        {"ph": "X", "cat": "overhead", "name": "flush", "pid": -1, "tid": 0, "ts": 1, "dur": 2.5, "args": "text"},
        {"name": "Iteration Start: PyTorch Profiler", "ph": "i", "s": "g", "pid": "Traces", "tid": "Trace", "ts": 0},
    ]
    return {**document, "traceEvents": others[:4] + document["traceEvents"] + others[4:]}


FORMS: dict[str, Callable[[Document], object]] = {
    "plain": lambda d: d,
    "arguments as texts": on_events(text_arguments),
    "launches tied by external ids": on_events(without_correlation),
    "oldest categories": on_events(oldest),
    "times as texts": on_events(lambda e: e.update(ts=str(e["ts"]), dur=str(e["dur"]))),
    "times since 1970 in the base": lambda d: {**d, "baseTimeNanoseconds": 1_727_740_800_000_000_000, "displayTimeUnit": "ns"},  # noqa: E501
    "other events": with_other_events,
    "a list of events": lambda d: d["traceEvents"],
    "events after everything else": lambda d: {key: d[key] for key in sorted(d, key=lambda key: key == "traceEvents")},
    "one of several ranks": lambda d: {**d, "distributedInfo": {"backend": "nccl", "rank": "3", "world_size": "8"}},
    "a rank that is null": lambda d: {**d, "distributedInfo": None},
    "without properties": lambda d: {"traceEvents": d["traceEvents"]},
    "properties that are none": lambda d: {**d, "deviceProperties": {"name": 4}},
}  # fmt: skip


@pytest.mark.parametrize("form", FORMS)
def test_kernels_streams_operators_and_launches_are_the_same_in_each_form(form: str, tmp_path: Path) -> None:
    path = tmp_path / "k.json"
    path.write_text(json.dumps(FORMS[form](plain())))
    report, counted = examine([str(path)]), counts(path)
    assert (report.kernels, report.streams, report.busy_ns) == (2, 2, 25_375)
    assert (counted.kernels, counted.streams, counted.busy_ns) == (2, 2, 25_375)
    ops = import_files([str(path)]).trace.ops
    assert [op.target for op in ops] == ["aten.a", "aten.b"]
    assert [op.observed and (op.observed.stream, op.observed.start_ns, op.observed.launch_ns) for op in ops] == [
        (7, 0, -8_500),
        (20, 29_500, 3_500),
    ]
    assert [(k.grid, k.regs_per_thread) for op in ops for k in op.kernels] == [((8, 1, 1), 32)] * 2
    assert ("no-gpu-properties" in [f.code for f in report.findings]) == (
        form in ("without properties", "properties that are none", "a list of events")
    )


def in_args(more: bytes) -> Callable[[bytes], bytes]:
    """Insert text into the arguments of each kernel."""
    return lambda text: text.replace(b'"shared memory": 0', b'"shared memory": 0, ' + more)


STRICT: dict[str, Callable[[bytes], bytes]] = {
    "byte order mark": lambda text: b"\xef\xbb\xbf" + text,
    "UTF-16, little end first": lambda text: text.decode().encode("utf-16-le").join((b"\xff\xfe", b"")),
    "UTF-16, big end first": lambda text: text.decode().encode("utf-16-be").join((b"\xfe\xff", b"")),
    "an object within the arguments": in_args(b'"Call stack": [{"a": 1}, {"b": "},{"}]'),
    "a list that is not closed": lambda text: json.dumps(json.loads(text)["traceEvents"]).encode()[:-1] + b",\n",
    "a list with arguments first": lambda text: json.dumps(
        [{"args": event.pop("args"), **event} for event in json.loads(text)["traceEvents"]]
    ).encode(),
}  # fmt: skip
LENIENT: dict[str, Callable[[bytes], bytes]] = {
    "numbers that JSON does not have": in_args(b'"blocks per SM": inf, "warps per SM": -nan, "more": [NaN, Infinity]'),
    "a device without a name": in_args(b'"name": N/A'),
    "a path of Windows": in_args(rb'"file": "C:\Users\sam\new\q.py", "quoted": "\"\\", "good": "\u00e9"'),
    "control characters": in_args(b'"file": "a\x01b\tc"'),
    "bytes that are no UTF-8": lambda text: text.replace(b'"ka"', b'"k\xe9a"'),
}


@pytest.mark.parametrize("form", [*STRICT, *LENIENT])
def test_text_is_read_as_lenient_readers_take_it_and_that_is_said(form: str, tmp_path: Path) -> None:
    path = tmp_path / "k.json"
    path.write_bytes((STRICT | LENIENT)[form](json.dumps(plain()).encode()))
    report = examine([str(path)])
    assert (report.kernels, report.streams, report.busy_ns) == (2, 2, 25_375)
    assert ("not-strict-json" in [finding.code for finding in report.findings]) == (form in LENIENT)
    assert [op.target for op in gpusim.load(path).trace.ops] == ["aten.a", "aten.b"]


@pytest.mark.parametrize("share", [0.3, 0.6, 0.95])
def test_file_that_was_cut_off_is_refused(share: float, tmp_path: Path) -> None:
    text = json.dumps(plain())
    (tmp_path / "k.json").write_text(text[: int(len(text) * share)])
    with pytest.raises(TraceError, match="as if cut off"):
        examine([str(tmp_path / "k.json")])


@pytest.mark.parametrize("thread", ["7", "stream 7", "stream 7 "])
def test_stream_is_taken_from_the_thread_where_no_argument_has_it(thread: str, tmp_path: Path) -> None:
    event = kernel("a", 1.5, 2)
    del event["args"]["stream"], event["args"]["device"]
    report = import_files([str(write_kineto(tmp_path / "k.json", [event | {"tid": thread, "pid": 3}]))])
    assert [op.observed and op.observed.stream for op in report.trace.ops] == [7]
    assert report.source.device == 3


def test_times_in_microseconds_since_1970_keep_all_digits(tmp_path: Path) -> None:
    path = write_kineto(tmp_path / "k.json", [kernel("a", 111111.25, 2.75), kernel("b", 222222.5, 1.25)])
    text = path.read_text().replace("111111.25", "1680548000000000.123").replace("222222.5", "1680548000000002.9009")
    path.write_text(text)
    starts = [op.observed.start_ns for op in import_files([str(path)]).trace.ops if op.observed]
    assert starts == [0, 2_778]
    assert examine([str(path)]).busy_ns == counts(path).busy_ns == 4_000


def test_file_of_metadata_alone_has_no_kernels_and_says_so(tmp_path: Path) -> None:
    path = write_kineto(tmp_path / "k.json", [{"ph": "M", "name": "process_name", "pid": 0, "args": {"name": "x"}}])
    assert [finding.code for finding in examine([str(path)]).findings] == ["no-kernels"]
    with pytest.raises(TraceError, match="without a GPU kernel"):
        import_files([str(path)])


def test_kernels_of_one_graph_launch_on_two_streams_are_ordered_by_what_is_observed(tmp_path: Path) -> None:
    kernels = [kernel("k", 20.5 + 6 * n, 5, 7 + n % 2, 5) for n in range(6)]
    path = write_kineto(tmp_path / "k.json", [call("cudaGraphLaunch", 1, 2, 5), *kernels])
    imported = import_files([str(path)])
    assert (imported.source.dependency_quality, imported.source.streams) == ("assumed", 2)
    assert [op.after[-1].op for op in imported.trace.ops[1:]] == [0, 1, 2, 3, 4]
    launches = [op.observed.launch_ns for op in imported.trace.ops if op.observed]
    assert launches == [-19_500] * 6


def test_two_gpus_that_count_launches_alike_ran_no_graph(tmp_path: Path) -> None:
    kernels = [kernel("k", 20.5, 5, 7, 5, device=device) for device in range(2)]
    report = examine([str(write_kineto(tmp_path / "k.json", [call("cudaLaunchKernel", 1, 2, 5), *kernels]))])
    assert report.streams == 2
    assert "shared-correlation" not in [finding.code for finding in report.findings]


# --- Packed, and in folders ---


def zipped(members: dict[str, bytes], method: int = zipfile.ZIP_DEFLATED) -> bytes:
    packed = io.BytesIO()
    with zipfile.ZipFile(packed, "w", method) as archive:
        for name, data in members.items():
            archive.writestr(name, data)
    return packed.getvalue()


def packed(form: str, folder: Path) -> Path:
    data = json.dumps(plain()).encode()
    half = len(data) // 2
    forms = {
        "k.json.gz": gzip.compress(data),
        "members.json.gz": gzip.compress(data[:half]) + gzip.compress(data[half:]) + b"\0" * 512,
        "gzip without its suffix.json": gzip.compress(data),
        "k.zip": zipped({"rank0.json": data, "notes.txt": b"x"}),
        "stored.zip": zipped({"run/": b"", "run/rank0.json": data}, zipfile.ZIP_STORED),
        "packed twice.zip": zipped({"rank0.pt.trace.json.gz": gzip.compress(data)}),
    }
    path = folder / form
    if form.startswith("k.t"):
        return write_tar(path, {"a/._k.json": b"junk", "a/k.json": data, "a/k.txt": b"hello"})
    if form == "packed twice.tar.gz":
        return write_tar(path, {"k.json.gz": gzip.compress(data)})
    path.write_bytes(forms[form])
    return path


PACKED = ["k.json.gz", "members.json.gz", "gzip without its suffix.json", "k.zip", "stored.zip", "packed twice.zip"]
PACKED += ["k.tar.gz", "k.tgz", "packed twice.tar.gz"]


@pytest.mark.parametrize("form", PACKED)
def test_packed_profile_is_read_as_the_plain_one(form: str, tmp_path: Path) -> None:
    path = packed(form, tmp_path)
    assert examine([str(path)]).busy_ns == 25_375
    assert [op.target for op in gpusim.load(path).trace.ops] == ["aten.a", "aten.b"]
    assert [found.name for found in tmp_path.iterdir()] == [form]


def write_ranks(folder: Path, ranks: int = 8) -> list[str]:
    paths = []
    for rank in range(ranks):
        kernels = [kernel("ncclDevKernel_AllReduce", 1.5, 10 + rank, 20, 1), kernel("gemm", 30, 5, 7, 2)]
        info = {"rank": rank, "world_size": ranks}
        paths.append(str(write_kineto(folder / f"rank-{rank}.json.gz", kernels, distributedInfo=info)))
    return paths


def test_folder_of_ranks_is_refused_with_what_is_in_it(tmp_path: Path) -> None:
    write_ranks(tmp_path)
    for read in (
        lambda: import_files([str(tmp_path)]),
        lambda: gpusim.load(tmp_path),
        lambda: examine([str(tmp_path)]),
    ):
        with pytest.raises(TraceError, match=r"is a folder \(rank-0.json.gz, .* and 5 more\): give one of its files"):
            read()


def test_several_ranks_are_described_together_and_one_is_imported_by_its_number(tmp_path: Path) -> None:
    paths = write_ranks(tmp_path)
    report = examine(paths)
    assert (report.kernels, report.streams) == (16, 16)
    assert "not-importable" in [finding.code for finding in report.findings]
    with pytest.raises(OptionError, match="8 separate profiles"):
        import_files(paths)
    assert import_files(paths, rank=5).trace.ops[0].kernels[0].dur_ns == 15_000
    archive = write_tar(tmp_path / "ranks.tar.gz", {Path(path).name: Path(path).read_bytes() for path in paths})
    assert examine([str(archive)]).busy_ns == counts(archive).busy_ns
    assert import_files([str(archive)], rank=6).trace.ops[0].kernels[0].dur_ns == 16_000


REFUSED: dict[str, tuple[str, bytes, str]] = {
    "weights": ("w.zip", zipped({"archive/data.pkl": b"\x80\x02."}), "none of them in a known format"),
    "sqlite in an archive": ("s.zip", zipped({"n.sqlite": b"SQLite format 3\0" + bytes(100)}), "unpack it first"),
    "trace in an archive": ("t.zip", zipped({"a.json": b'{"schema": "gpusim-trace/2"}'}), "is a trace of gpusim"),
    "packed sqlite": ("n.sqlite.gz", gzip.compress(b"SQLite format 3\0" + bytes(100)), "unpack it first"),
    "damaged zip": ("d.zip", zipped({"k.json": b"{" * 999})[:-9], "damaged"),
    "memory timeline": ("m.raw.json.gz", gzip.compress(b"[[-1, 0, 2048, 1], [5, 1, 512, 0]]"), "memory timeline"),
    "pickle": ("snapshot.pickle", b"\x80\x04\x95\x10", "never loads"),
    "report of nsys": ("r.nsys-rep", b"\x01\x02\x03", "nsys export --type sqlite"),
    "report of ncu": ("r.ncu-rep", b"NVR\0", "--page raw"),
}  # fmt: skip


@pytest.mark.parametrize("what", REFUSED)
def test_other_file_is_refused_with_the_right_reason(what: str, tmp_path: Path) -> None:
    name, data, problem = REFUSED[what]
    path = tmp_path / name
    path.write_bytes(data)
    with pytest.raises(GpusimError, match=problem) as caught:
        examine([str(path)])
    assert "\n" not in str(caught.value)


def test_encrypted_member_is_refused(tmp_path: Path) -> None:
    data = bytearray(zipped({"k.json": json.dumps(plain()).encode()}))
    data[6] |= 1
    data[data.rfind(b"PK\x01\x02") + 8] |= 1
    path = tmp_path / "e.zip"
    path.write_bytes(data)
    with pytest.raises(TraceError, match="encrypted"):
        examine([str(path)])


def test_zip_archive_that_expands_is_refused_before_it_does(tmp_path: Path) -> None:
    path = tmp_path / "b.zip"
    path.write_bytes(zipped({"k.json": b" " * (48 * 2**20)}))
    with pytest.raises(TraceError, match=r"holds more than"):
        examine([str(path)])


def test_long_list_of_members_is_refused_unread(tmp_path: Path) -> None:
    path = tmp_path / "b.zip"
    data = bytearray(zipped({"k.json": b"{}"}))
    at = data.rfind(b"PK\x05\x06") + 12
    data[at : at + 4] = (2**31).to_bytes(4, "little")
    path.write_bytes(data)
    with pytest.raises(TraceError, match="list of members of more than 4"):
        examine([str(path)])
