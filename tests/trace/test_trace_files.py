"""Trace files: unchanged by a round trip; each broken or hostile file gives one line with file, place and value."""

from __future__ import annotations

import contextlib
import gzip
import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import HealthCheck, given, settings

from gpusim.cli import cli
from gpusim.engine.base import engine_by_name
from gpusim.errors import GpusimError, OutputError, TraceError, UnknownNameError
from gpusim.formats.trace import SCHEMA, Trace
from gpusim.trace.check import check_trace
from gpusim.trace.store import load_trace, other_batches, parse_trace, read_trace, write_trace
from tests.support.helpers import (
    Step,
    build_graph,
    chain_trace,
    in_place,
    kernel,
    lowered,
    make_trace,
    memset,
    op,
    traces,
    view,
)

ROOT = Path(__file__).parents[2]

#: Below and above Python's and msgspec's own limits on nesting.
NESTING = (100, 400, 700, 900, 1500, 100_000)


def small_trace() -> Trace:
    """Make one of everything: a view, a change in place, a memset, a random op, a measured time."""
    fill = Step("m", makes="m", kernels=(memset(500),))
    drop = Step("r", "a", "r", kernels=(kernel(300, 7, 128, 32, 2048), kernel(200)), random=True, host_ns=12)
    steps = [op("a", "x"), view("v", "a"), fill, drop, in_place("w", "v", "r m"), op("b", "a")]
    return make_trace(steps, outputs="b", graph_ns=6000, eager_ns=50_000)


@pytest.fixture(scope="module")
def good() -> bytes:
    return msgspec.json.encode(small_trace())


def simulate(trace: Trace) -> int:
    """Return the makespan of the ops in recorded order, launched from the host."""
    graph = build_graph(trace)
    steps = lowered(graph, range(len(graph)), [0] * len(graph), "stream")
    return engine_by_name("reference").run(steps, graph.hardware).makespan_ns


def one_line(error: Exception, path: Path) -> str:
    """Return the message, checked to be one line that begins with the file."""
    text = str(error)
    assert text.startswith(f"{path}: "), text
    assert "\n" not in text
    assert len(text) < 1000
    return text


def refusal(path: Path) -> TraceError:
    """Return the error of reading `path`."""
    with pytest.raises(TraceError) as caught:
        read_trace(path)
    one_line(caught.value, path)
    assert caught.value.file == str(path)
    return caught.value


# --- Round trips ---


@pytest.mark.parametrize("name", ["t.json", "t.json.gz"])
def test_trace_survives_its_file_and_the_same_one_gives_the_same_bytes(name: str, tmp_path: Path) -> None:
    trace = small_trace()
    first, second = tmp_path / name, tmp_path / f"again-{name}"
    write_trace(trace, first)
    assert read_trace(first) == trace
    write_trace(read_trace(first), second)
    assert first.read_bytes() == second.read_bytes()
    assert (first.read_bytes()[:2] == b"\x1f\x8b") == name.endswith(".gz")


def test_gzip_holds_the_very_document_of_the_plain_file(tmp_path: Path) -> None:
    write_trace(small_trace(), tmp_path / "t.json")
    write_trace(small_trace(), tmp_path / "t.json.gz")
    assert gzip.decompress((tmp_path / "t.json.gz").read_bytes()) == (tmp_path / "t.json").read_bytes().rstrip(b"\n")


def test_gzip_is_known_by_its_content_and_not_by_its_name(tmp_path: Path, good: bytes) -> None:
    (tmp_path / "t.json").write_bytes(gzip.compress(good))
    assert read_trace(tmp_path / "t.json") == small_trace()


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=50)
@given(traces())
def test_any_legal_trace_survives_its_file(tmp_path: Path, trace: Trace) -> None:
    check_trace(trace, "random")
    path = tmp_path / "t.json.gz"
    write_trace(trace, path)
    assert read_trace(path) == trace
    assert parse_trace(path.read_bytes(), "upload.gz") == trace


def test_all_fields_survive(tmp_path: Path, good: bytes) -> None:
    document = json.loads(good)
    document["ops"][0]["kwargs"] = {
        "a": None,
        "b": [1, 2.5, "mean", True],
        "c": {"float": "inf"},
        "d": {"dtype": "float32"},
    }
    document["ops"][0]["kernels"][0] |= {
        "cluster": [2, 1, 1],
        "counters": {"dram_bytes": 1, "l2_bytes": 2, "instructions": 3, "tensor_instructions": 4},
        "smem_static_bytes": 0,
        "smem_dynamic_bytes": 5,
    }
    document["ops"][0]["outputs"].append(None)
    document["tensors"][0]["init"] = {"kind": "values", "values": [0.5]}
    (tmp_path / "t.json").write_text(json.dumps(document))
    trace = read_trace(tmp_path / "t.json")
    assert trace.ops[0].kernels[0].counters is not None
    assert trace.ops[0].outputs[-1] is None
    write_trace(trace, tmp_path / "u.json")
    assert read_trace(tmp_path / "u.json") == trace


def test_failed_write_leaves_the_old_file_and_no_other(tmp_path: Path) -> None:
    with pytest.raises(OutputError) as caught:
        write_trace(small_trace(), tmp_path / "missing" / "t.json")
    one_line(caught.value, tmp_path / "missing" / "t.json")
    (tmp_path / "folder.json").mkdir()
    with pytest.raises(OutputError):
        write_trace(small_trace(), tmp_path / "folder.json")
    assert [path.name for path in tmp_path.iterdir()] == ["folder.json"]


# --- Files that are no JSON document ---

DAMAGED: dict[str, tuple[str, Callable[[bytes], bytes], str]] = {
    "truncated gzip": ("t.json.gz", lambda good: gzip.compress(good)[:-30], "truncated gzip"),
    "gzip without its trailer": ("t.json.gz", lambda good: gzip.compress(good)[:-1], "truncated gzip"),
    "gzip header alone": ("t.json.gz", lambda good: gzip.compress(good)[:10], "truncated gzip"),
    "damaged gzip": ("t.json.gz", lambda good: gzip.compress(good)[:10] + b"\xff" * 90, "damaged gzip"),
    "gzip with a wrong checksum": ("t.json.gz", lambda good: gzip.compress(good)[:-8] + bytes(8), "damaged gzip"),
    "truncated JSON": ("t.json", lambda good: good[: len(good) // 2], "not valid JSON"),
    "text": ("t.json", lambda good: b"hello there", "not valid JSON"),
    "bytes that are no text": ("t.json", lambda good: bytes(range(128, 256)), "not valid JSON"),
    "text field that is no UTF-8": ("t.json", lambda good: good.replace(b'"tiny"', b'"\xff\xfe"'), "not valid JSON"),
    "plain JSON named .gz": ("t.json.gz", lambda good: good, "is not gzip"),
    "gzip of garbage": ("t.json.gz", lambda good: gzip.compress(b"\x00\x01garbage"), "not valid JSON"),
    "gzip of nothing": ("t.json.gz", lambda good: gzip.compress(b""), "is empty"),
    "empty": ("t.json", lambda good: b"", "is empty"),
    "empty, named .gz": ("t.json.gz", lambda good: b"", "is empty"),
    "JSON list": ("t.json", lambda good: b"[" + good + b"]", "no text field 'schema'"),
    "JSON without a schema": ("t.json", lambda good: b'{"ops": []}', "no text field 'schema'"),
    "schema that is a number": ("t.json", lambda good: b'{"schema": 1}', "no text field 'schema'"),
    "two documents": ("t.json", lambda good: good + good, "not valid JSON"),
    "NaN": ("t.json", lambda good: good.replace(b'"dur_ns":1000', b'"dur_ns":NaN', 1), "not valid JSON"),
    "deep nesting": ("t.json", lambda good: b"[" * 100_000, ""),
}


@pytest.mark.parametrize("case", DAMAGED)
def test_damaged_file_gives_one_line(case: str, tmp_path: Path, good: bytes) -> None:
    name, damage, problem = DAMAGED[case]
    path = tmp_path / name
    path.write_bytes(damage(good))
    assert problem in refusal(path).problem


def test_missing_file_gives_one_line(tmp_path: Path) -> None:
    assert "No such file" in refusal(tmp_path / "missing.json").problem


def test_folder_in_place_of_a_file_gives_one_line(tmp_path: Path) -> None:
    assert "cannot be read" in refusal(tmp_path).problem


def test_gzip_bomb_is_refused_before_it_fills_the_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("gpusim.io.file_limits.MAX_DOCUMENT_BYTES", 10_000)
    path = tmp_path / "t.json.gz"
    path.write_bytes(gzip.compress(b" " * 1_000_000))
    assert "larger than 10000 bytes" in refusal(path).problem


# --- Documents of the wrong shape, and traces that make no sense ---

Change = Callable[[dict[str, Any]], Any]


def put(path: str, value: Any) -> Change:
    """Return a change that sets the value at a path such as `ops.0.reads`."""
    *way, last = [int(part) if part.isdigit() else part for part in path.split(".")]

    def change(document: dict[str, Any]) -> None:
        place: Any = document
        for part in way:
            place = place[part]
        place[last] = value

    return change


def remove(path: str) -> Change:
    *way, last = [int(part) if part.isdigit() else part for part in path.split(".")]

    def change(document: dict[str, Any]) -> None:
        place: Any = document
        for part in way:
            place = place[part]
        del place[last]

    return change


def swap(first: int, second: int) -> Change:
    def change(document: dict[str, Any]) -> None:
        ops = document["ops"]
        ops[first], ops[second] = ops[second], ops[first]

    return change


def both(*changes: Change) -> Change:
    return lambda document: [change(document) for change in changes]


# tensors of small_trace: x 0, a 1, v 2, m 3, r 4, b 5; ops: a 0, v 1, m 2, r 3, w 4, b 5
WRONG: dict[str, tuple[Change, str, str]] = {
    "unknown schema version": (put("schema", "gpusim-trace/99"), "$.schema", "gpusim-trace/99"),
    "schedule in place of a trace": (put("schema", "gpusim-schedule/1"), "$.schema", "--schedule FILE"),
    "missing field at the top": (remove("ops"), "$", "`ops`"),
    "missing field below": (remove("ops.3.target"), "$.ops[3]", "`target`"),
    "wrong type": (put("ops.0.kernels.0.dur_ns", "fast"), "$.ops[0].kernels[0].dur_ns", "'fast'"),
    "fraction for a whole number": (put("ops.0.kernels.0.dur_ns", 1.5), "$.ops[0].kernels[0].dur_ns", "1.5"),
    "null for a number": (put("ops.0.kernels.0.dur_ns", None), "$.ops[0].kernels[0].dur_ns", "null"),
    "unknown field": (put("ops.0.surprise", 1), "$.ops[0]", "`surprise`"),
    "unknown word": (put("model.mode", "dream"), "$.model.mode", "dream"),
    "date in words": (put("provenance.date", "25 November"), "$.provenance.date", "'25 November'"),
    "date of two lines": (put("provenance.date", "2026-11-25\n"), "$.provenance.date", "2026-11-25"),
    "negative duration": (put("ops.3.kernels.1.dur_ns", -7), "$.ops[3].kernels[1].dur_ns", "-7"),
    "duration that is the text NaN": (put("ops.3.kernels.1.dur_ns", "NaN"), "$.ops[3].kernels[1].dur_ns", "'NaN'"),
    "grid of size zero": (put("ops.0.kernels.0.grid", [0, 1, 1]), "$.ops[0].kernels[0].grid[0]", "0"),
    "grid of two dimensions": (put("ops.0.kernels.0.grid", [1, 1]), "$.ops[0].kernels[0].grid", "3"),
    "negative shape": (put("tensors.1.shape", [-256]), "$.tensors[1].shape[0]", "-256"),
    "negative stride": (put("tensors.1.stride", [-1]), "$.tensors[1].stride[0]", "-1"),
    "share over one": (put("ground_truth.attributed_frac", 1.5), "$.ground_truth.attributed_frac", "1.5"),
    "dangling tensor in the arguments": (put("ops.5.args", [[3, {"tensor": 77}]]), "$.ops[5].args", "77"),
    "dangling tensor in reads": (put("ops.0.reads", [6]), "$.ops[0].reads", "tensor 6"),
    "dangling tensor in writes": (put("ops.0.writes", [6]), "$.ops[0].writes", "tensor 6"),
    "dangling tensor in outputs": (put("ops.0.outputs", [1, 99]), "$.ops[0].outputs", "tensor 99"),
    "negative tensor in outputs": (put("ops.0.outputs", [-1]), "$.ops[0].outputs", "-1"),
    "negative tensor in reads": (put("ops.0.reads", [-1]), "$.ops[0].reads[0]", "-1"),
    "negative tensor in the arguments": (put("ops.0.args", [{"tensor": -1}]), "$.ops[0].args[0]", "-1"),
    "storage out of range": (put("tensors.2.storage", 5), "$.tensors[2].storage", "storage 5"),
    "tensor over its storage": (put("tensors.1.shape", [257]), "$.tensors[1]", "1028 bytes of a storage of 1024"),
    "offset over the storage": (put("tensors.2.offset", 1), "$.tensors[2]", "1028 bytes of a storage of 1024"),
    "stride over the storage": (put("tensors.1.stride", [2]), "$.tensors[1]", "2044 bytes of a storage of 1024"),
    "storage emptied": (put("storages.0.bytes", 0), "$.tensors[0]", "storage of 0"),
    "strides for another rank": (put("tensors.1.stride", [1, 1]), "$.tensors[1]", "2 strides for 1 dim"),
    "unknown dtype": (put("tensors.1.dtype", "float1"), "$.tensors[1].dtype", "float1"),
    "op name taken twice": (put("ops.5.name", "a"), "$.ops[5].name", "$.ops[0]"),
    "cycle of two ops": (both(put("ops.0.reads", [5]), put("ops.0.args", [{"tensor": 5}])), "$.ops[0]", "cycle"),
    "op that reads its own result": (both(put("ops.0.reads", [1]), put("ops.0.args", [])), "$.ops[0]", "cycle"),
    "order against the dependencies": (swap(2, 4), "$.ops[2]", "order against the dependencies"),
    "view before what it looks at": (swap(0, 1), "$.ops[0]", "order against the dependencies"),
    "tensor that nobody makes": (remove("tensors.0.init"), "$.ops[0]", "tensor 0"),
    "no ops": (put("ops", []), "$.ops", "no ops"),
    "no kernels": (put("ops", [{"name": "a", "target": "t"}]), "$.ops", "no kernels"),
    "argument of an unknown encoding": (put("ops.0.args", [1, {"pickle": "x"}]), "$.ops[0].args[1]", "pickle"),
    "argument with two keys": (put("ops.0.args", [{"tensor": 0, "dtype": "x"}]), "$.ops[0].args[0]", "dtype"),
    "argument of no keys": (put("ops.0.args", [{}]), "$.ops[0].args[0]", "one key"),
    "tensor that is a text": (put("ops.0.args", [{"tensor": "0"}]), "$.ops[0].args[0]", "'0'"),
    "tensor that is true": (put("ops.0.args", [{"tensor": True}]), "$.ops[0].args[0]", "True"),
    "dtype that is a number": (put("ops.0.kwargs", {"d": {"dtype": 3}}), "$.ops[0].kwargs.d", "3"),
    "bad argument in a list": (put("ops.0.kwargs", {"d": [[{"x": 3}]]}), "$.ops[0].kwargs.d", "x"),
}


def changed(good: bytes, change: Change) -> bytes:
    document = json.loads(good)
    change(document)
    return json.dumps(document).encode()


@pytest.mark.parametrize("case", WRONG)
def test_wrong_trace_gives_one_line_with_place_and_value(case: str, tmp_path: Path, good: bytes) -> None:
    change, place, value = WRONG[case]
    path = tmp_path / "t.json"
    path.write_bytes(changed(good, change))
    error = refusal(path)
    assert error.place == place
    assert value in error.problem


@pytest.mark.parametrize("depth", NESTING)
def test_deeply_nested_argument_never_ends_in_a_traceback(depth: int, tmp_path: Path, good: bytes) -> None:
    path = tmp_path / "t.json"
    path.write_bytes(changed(good, put("ops.0.args", ["NEST"])).replace(b'"NEST"', b"[" * depth + b"]" * depth))
    refusal(path)


def test_list_of_lists_is_a_legal_argument(tmp_path: Path, good: bytes) -> None:
    path = tmp_path / "t.json"
    path.write_bytes(changed(good, put("ops.0.args", [[[{"tensor": 0}, None], [1]]])))
    assert read_trace(path).ops[0].args == ([[{"tensor": 0}, None], [1]],)


@pytest.mark.parametrize("field", ["ops.0.kernels.0.dur_ns", "ops.0.host_ns", "ground_truth.graph.median_ns"])
def test_number_beyond_a_float_is_refused(field: str, tmp_path: Path, good: bytes) -> None:
    path = tmp_path / "t.json"
    path.write_bytes(changed(good, put(field, 10**400)))
    with pytest.raises(TraceError):
        simulate(read_trace(path))


def test_step_that_takes_no_time_never_ends_in_a_traceback(tmp_path: Path) -> None:
    path = tmp_path / "t.json"
    write_trace(make_trace([op("a", "x", dur_ns=0)]), path)
    with contextlib.suppress(GpusimError):
        cli(["simulate", str(path), "--json"], standalone_mode=False)


def test_huge_numbers_in_shapes_are_refused_and_not_computed_with(tmp_path: Path, good: bytes) -> None:
    path = tmp_path / "t.json"
    path.write_bytes(changed(good, put("tensors.1.shape", [2**62])))
    assert refusal(path).place == "$.tensors[1].shape[0]"


def test_keyword_argument_called_tensor_is_no_tensor_reference(tmp_path: Path, good: bytes) -> None:
    path = tmp_path / "t.json"
    path.write_bytes(changed(good, put("ops.0.kwargs", {"tensor": 77})))
    assert read_trace(path).ops[0].kwargs == {"tensor": 77}


def test_uploaded_bytes_are_checked_like_a_file(good: bytes) -> None:
    with pytest.raises(TraceError, match=r"^upload\.json: \$\.ops\[5\]\.name: "):
        parse_trace(changed(good, put("ops.5.name", "a")), "upload.json")


# --- By name ---


@pytest.fixture
def bundle(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return a folder of bundled traces."""
    for name in ("googlenet-train-b8", "resnet50-infer-b1"):
        write_trace(chain_trace(2), tmp_path / f"{name}.json.gz")
    monkeypatch.setattr("gpusim.trace.store.resource_dir", lambda name: tmp_path)
    return tmp_path


def test_bundled_trace_is_found_by_name(bundle: Path) -> None:
    assert load_trace("resnet50-infer-b1") == chain_trace(2)


@pytest.mark.parametrize(
    ("name", "nearest"), [("googlnet-train-b8", "googlenet-train-b8"), ("resnet50-infer-b2", "resnet50-infer-b1")]
)
def test_unknown_bundled_trace_suggests_the_nearest(name: str, nearest: str, bundle: Path) -> None:
    with pytest.raises(UnknownNameError, match=f"unknown trace '{name}'; did you mean '{nearest}'"):
        load_trace(name)


def test_name_that_resembles_nothing_lists_what_there_is(bundle: Path) -> None:
    with pytest.raises(UnknownNameError, match="there are: googlenet-train-b8, resnet50-infer-b1"):
        load_trace("zzz")


@pytest.mark.parametrize("name", ["trace.json", "profile.sqlite", "ranks.tar.gz", "table.csv", "chakra.et"])
def test_name_of_a_file_that_is_missing_is_no_unknown_name(name: str, bundle: Path) -> None:
    with pytest.raises(TraceError, match=f"{name}: cannot be read: No such file or directory"):
        load_trace(name)


@pytest.mark.parametrize("name", ["x" * 300, "x" * 5000, "", "a/b"])
def test_strange_name_is_an_unknown_name(name: str, bundle: Path) -> None:
    with pytest.raises(UnknownNameError):
        load_trace(name)


# --- Through the command line ---


def gpusim(*arguments: str) -> subprocess.CompletedProcess[str]:
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-m", "gpusim", *arguments]
    return subprocess.run(command, env=environment, capture_output=True, text=True, check=False)


@pytest.mark.parametrize("case", ["truncated gzip", "text", "cycle of two ops", "negative duration", "missing"])
def test_command_line_answers_a_bad_file_with_one_line_and_exit_code_2(case: str, tmp_path: Path, good: bytes) -> None:
    path = tmp_path / DAMAGED.get(case, ("t.json",))[0]
    if case in DAMAGED:
        path.write_bytes(DAMAGED[case][1](good))
    elif case in WRONG:
        path.write_bytes(changed(good, WRONG[case][0]))
    done = gpusim("simulate", str(path), "--json")
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.count("\n") == 1
    assert str(path) in done.stderr
    assert "Traceback" not in done.stderr


def test_command_line_simulates_a_good_file(tmp_path: Path, good: bytes) -> None:
    path = tmp_path / "t.json"
    path.write_bytes(good)
    done = gpusim("simulate", str(path), "--hw", "h200", "--policy", "sequential", "--json")
    assert (done.returncode, done.stderr) == (0, "")
    document = json.loads(done.stdout)
    assert document["makespan_ns"] == document["sequential_ns"] == small_trace().ground_truth.graph.median_ns  # type: ignore[union-attr]


def test_schema_version_is_the_one_documented() -> None:
    assert SCHEMA == small_trace().schema == "gpusim-trace/2"


def test_trace_of_version_1_is_read_as_one_of_today(good: bytes) -> None:
    old = good.replace(b'"gpusim-trace/2"', b'"gpusim-trace/1"')
    assert parse_trace(old, "t.json") == parse_trace(good, "t.json")


@pytest.mark.parametrize("version", ["gpusim-trace/0", "gpusim-trace/3", "gpusim-trace/20"])
def test_unknown_version_is_named_with_those_that_are_read(good: bytes, version: str) -> None:
    other = good.replace(b"gpusim-trace/2", version.encode())
    with pytest.raises(TraceError, match=f"unknown schema version '{version}'.*'gpusim-trace/1' and 'gpusim-trace/2'"):
        parse_trace(other, "t.json")


def test_bundled_trace_of_version_1_is_written_anew_as_version_2(tmp_path: Path) -> None:
    path = tmp_path / "t.json"
    write_trace(load_trace("squeezenet1_1-infer-b1"), path)
    assert json.loads(path.read_bytes())["schema"] == SCHEMA
    assert read_trace(path) == load_trace("squeezenet1_1-infer-b1")


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
