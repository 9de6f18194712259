"""Attacks on file readers: each ends in one line that names the file, and leaves nothing behind."""

from __future__ import annotations

import gzip
import json
import os
import re
import sqlite3
import subprocess
import sys
from pathlib import Path
from typing import Any

import msgspec
import pytest
from click.testing import CliRunner

from gpusim.cli import cli
from gpusim.errors import GpusimError, RecipeError, ReplayError, TraceError, TrustError
from gpusim.formats.trace import Storage, Tensor, TensorInit, Trace
from gpusim.gpu.capture.models import load_step
from gpusim.gpu.replay.execute import make_initial
from gpusim.plan.schedule import Schedule
from gpusim.text import message
from gpusim.trace.store import parse_trace, read_trace, write_trace
from gpusim.trace.trust import names_code
from gpusim.validation.recipe import check_recipe, read_recipe
from tests.security.test_security import ONES, op, run, t, tensor, trace_of
from tests.support.helpers import chain_trace
from tests.support.networks import CPU

ROOT = Path(__file__).parents[2]
CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069]")


def document(**changes: Any) -> dict[str, Any]:
    """Return a legal trace as JSON, with some of its fields replaced."""
    found: dict[str, Any] = msgspec.to_builtins(chain_trace(2))
    return found | changes


def at(path: str, value: Any) -> dict[str, Any]:
    """Return the trace with one value replaced, named like `ops.0.name`."""
    found: Any = document()
    place = found
    *way, last = [int(part) if part.isdigit() else part for part in path.split(".")]
    for part in way:
        place = place[part]
    place[last] = value
    return found  # type: ignore[no-any-return]


def gpusim(*words: str, **environment: str) -> subprocess.CompletedProcess[bytes]:
    """The command in a process of its own."""
    return subprocess.run(
        [sys.executable, "-m", "gpusim", *words],
        cwd=ROOT,
        env={**os.environ, **environment},
        capture_output=True,
        check=False,
        timeout=120,
    )


def one_line(done: subprocess.CompletedProcess[bytes], code: int = 2) -> str:
    text = done.stderr.decode("utf-8", "replace")
    assert done.returncode == code, text
    assert "Traceback" not in text
    assert not CONTROL.search(text)
    assert len(text) < 2000
    return text


# --- Values of a trace ---


@pytest.mark.parametrize(
    ("path", "value"),
    [
        ("tensors.0.shape", [2**40, 2**40]),
        ("tensors.0.shape", [-1]),
        ("tensors.0.shape", [2**63]),
        ("tensors.0.shape", [2**64 + 1]),
        ("tensors.0.shape", [1.5]),
        ("tensors.0.shape", [1] * 65),
        ("tensors.0.stride", [-1]),
        ("tensors.0.stride", [2**62]),
        ("tensors.0.offset", -1),
        ("tensors.0.offset", 2**40),
        ("tensors.0.storage", 2**31),
        ("tensors.0.storage", -1),
        ("tensors.0.dtype", "float32\x1b[2J"),
        ("tensors.0.dtype", "__class__"),
        ("storages.0.bytes", 2**63 - 1),
        ("ops.0.outputs", [2**53]),
        ("ops.0.reads", [-1]),
        ("ops.0.args", [{"tensor": -1}]),
        ("ops.0.args", [{"tensor": True}]),
        ("ops.0.args", [{"tensor": 0, "dtype": "float32"}]),
        ("ops.0.args", [{"__reduce__": ["os.system", "id"]}]),
        ("ops.0.host_ns", 2**63),
        ("ops.0.kernels.0.dur_ns", 10**30),
        ("ops.0.kernels.0.grid", [0, 1, 1]),
        ("model.batch", 0),
        ("model.frontend", "python"),
        ("provenance.gpu.sm_clock_mhz", -5),
    ],
)
def test_value_that_no_trace_has_is_refused_with_its_place(path: str, value: Any) -> None:
    with pytest.raises(TraceError, match=r"^t\.json: \$"):
        parse_trace(json.dumps(at(path, value)).encode(), "t.json")


@pytest.mark.parametrize(
    "text",
    [
        b"[" * 100_000,
        b'{"schema": "gpusim-trace/1", "ops": ' + b"[" * 5000 + b"]" * 5000 + b"}",
        b'{"schema": NaN}',
        b'{"schema": "gpusim-trace/1", "model": Infinity}',
        b"\xff\xfe" + '{"schema": "gpusim-trace/1"}'.encode("utf-16-le"),
        b"\xef\xbb\xbf{}",
        b'{"schema": "gpusim-trace/1", "schema": 3}',
        b'{"schema": "\\ud800"}',
        b"\x80\x04\x95cposix\nsystem\n.",
        gzip.compress(b"{}")[:-4],
        gzip.compress(b"{}") + b"\x00" * 100,
        b"\x1f\x8b\x08\x00" + b"\x00" * 20,
        b"",
        b"\x00" * 64,
    ],
)
def test_bytes_that_are_no_document_are_one_line(text: bytes) -> None:
    with pytest.raises(TraceError) as caught:
        parse_trace(text, "t.json")
    assert "\n" not in str(caught.value)


def test_tensors_without_elements_and_with_huge_strides_load_and_run_nothing_beyond() -> None:
    empty = Tensor(shape=(0, 2**20), stride=(2**40, 2**40), dtype="float32", storage=0, role="input", init=ONES)
    made = trace_of([op("aten.sum.default", t(0), outputs=(1,))], [empty, tensor(2, storage=1, init=None)])
    with pytest.raises(GpusimError):
        run(made)


# --- Replay: memory and order ---


def test_write_through_an_expanded_view_is_refused() -> None:
    """Many elements share memory: torch refuses, in place and for initial tensors."""
    wide = Tensor(shape=(4,), stride=(0,), dtype="float32", storage=0, role="activation")
    made = [
        op("aten.expand.default", t(0), [4], outputs=(1,)),
        op("aten.add_.Tensor", t(1), t(2), outputs=(1,)),
    ]
    with pytest.raises(ReplayError, match=r"more than one element|single memory location"):
        run(trace_of(made, [tensor(1), wide, tensor(4, storage=1)]))
    filled = msgspec.structs.replace(wide, role="input", init=TensorInit(kind="values", values=(1.0, 2.0, 3.0, 4.0)))
    with pytest.raises(ReplayError, match="cannot be filled"):
        make_initial(trace_of([made[0]], [filled, wide]), CPU, seed=0)


def test_op_that_overlaps_its_own_input_is_refused() -> None:
    part = Tensor(shape=(3,), stride=(1,), dtype="float32", storage=0, offset=1, role="activation")
    head = msgspec.structs.replace(part, offset=0)
    made = [
        op("aten.slice.Tensor", t(0), 0, 1, 4, outputs=(1,)),
        op("aten.slice.Tensor", t(0), 0, 0, 3, outputs=(2,)),
        op("aten.add_.Tensor", t(1), t(2), outputs=(1,)),
    ]
    with pytest.raises(ReplayError, match="memory"):
        run(trace_of(made, [tensor(4), part, head]))


@pytest.mark.parametrize(
    ("kind", "a", "b"),
    [
        ("integers", 0.0, 1e300),
        ("integers", 5.0, -5.0),
        ("normal", 0.0, -1.0),
        ("uniform", 1.0, 0.0),
        ("constant", 1e300, 0.0),
    ],
)
def test_numbers_that_cannot_be_drawn_are_one_line(kind: Any, a: float, b: float) -> None:
    wrong = tensor(4, dtype="int32", init=TensorInit(kind=kind, a=a, b=b))
    with pytest.raises(ReplayError, match="cannot be filled"):
        make_initial(trace_of([op("aten.neg.default", t(0), outputs=(0,))], [wrong]), CPU, seed=0)


def test_storage_larger_than_any_memory_is_one_line() -> None:
    made = trace_of([op("aten.neg.default", t(0), outputs=(0,))], [tensor(2)])
    made = msgspec.structs.replace(made, storages=(Storage(bytes=2**40),))
    with pytest.raises(ReplayError, match="cannot be filled"):
        make_initial(made, CPU, seed=0)


# --- Models and recipes ---


@pytest.mark.parametrize(
    "spec", ["./x.py:f", "X.PY:f", "x.pyc:f", "/x.so:f", "timm :x", "Timm:x", "file:x", "x", ":f", "TIMM:resnet50"]
)
def test_whatever_is_no_name_of_a_library_counts_as_code(spec: str) -> None:
    assert names_code(spec)


@pytest.mark.parametrize(
    "spec",
    [
        "torchvision:../../x",
        "torchvision:/etc/passwd",
        "torchvision:x.py:f",
        "timm:hf-hub:someone/model",
        "timm:hf_hub:someone/model",
        "timm:local-dir:/tmp/model",
        "timm:https://example.org/x",
        "timm:../x",
        "timm:resnet50\x1b[2J",
        "timm:resnet50\n",
    ],
)
def test_name_that_leads_out_of_a_library_is_refused_before_the_library_is_imported(spec: str, tmp_path: Path) -> None:
    before = {*sys.modules}
    with pytest.raises(GpusimError):
        load_step(spec, mode="infer", batch=1, dtype="fp32", memory_format="contiguous", device=CPU)
    assert not {"timm", "torchvision"} & ({*sys.modules} - before)
    path = tmp_path / "r.toml"
    path.write_text(f'name = "r"\n[[case]]\nspec = {json.dumps(spec)}\nmode = "infer"\nbatch = 1\n')
    with pytest.raises(RecipeError, match=r"is no name of a model"):
        read_recipe(path)
    assert [file.name for file in tmp_path.iterdir()] == ["r.toml"]


def test_function_of_a_recipe_is_a_name_and_no_path(tmp_path: Path) -> None:
    """Its name becomes a file name."""
    path = tmp_path / "r.toml"
    path.write_text('name = "r"\n[[case]]\nspec = "m.py:../../x"\nmode = "infer"\nbatch = 1\n')
    with pytest.raises(RecipeError, match=r"\$\.case\[0\]"):
        read_recipe(path)


@pytest.mark.parametrize(
    "trace",
    [
        "/proc/self/environ",
        "/proc/self/mem",
        "/dev/zero",
        "/dev/stdin",
        "file:///etc/passwd",
        "..",
        "",
        "a\\u0000b",
        "~/x",
    ],
)
def test_recipe_that_names_a_device_or_another_file_is_one_line(trace: str, tmp_path: Path) -> None:
    path = tmp_path / "r.toml"
    path.write_text(f'name = "r"\n[[case]]\ntrace = "{trace}"\n')
    with pytest.raises(GpusimError) as caught:
        check_recipe(read_recipe(path), str(path), trust_code=True)
    assert not isinstance(caught.value, TrustError)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("name", ["../x", "a/b", "", ".hidden", "-rf", "x\\n", "con:x"])
def test_recipe_whose_name_is_a_path_is_refused(name: str, tmp_path: Path) -> None:
    path = tmp_path / "r.toml"
    path.write_text(f'name = "{name}"\n[[case]]\ntrace = "googlenet-infer-b1"\n')
    with pytest.raises(RecipeError):
        read_recipe(path)


def test_link_to_itself_and_to_a_device_is_one_line(tmp_path: Path) -> None:
    loop = tmp_path / "loop.json"
    loop.symlink_to(loop)
    with pytest.raises(TraceError, match="cannot be read"):
        read_trace(loop)
    zero = tmp_path / "zero.json"
    zero.symlink_to("/proc/self/mem")
    with pytest.raises(TraceError):
        read_trace(zero)


def test_bundled_name_means_the_bundled_trace_unless_it_is_a_path(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A file of a bundled trace's name in the working folder cannot take its place."""
    write_trace(chain_trace(1), tmp_path / "googlenet-infer-b1")
    monkeypatch.chdir(tmp_path)
    done = CliRunner().invoke(cli, ["limits", "googlenet-infer-b1", "--json"])
    assert done.exit_code == 0
    assert "tiny" not in done.output


# --- Stores ---


def damage(path: Path, *statements: str) -> None:
    with sqlite3.connect(path) as connection:
        connection.execute("PRAGMA writable_schema = ON")
        for statement in statements:
            connection.execute(statement)
    connection.close()


@pytest.mark.parametrize(
    "statements",
    [
        ("CREATE TRIGGER x AFTER INSERT ON points BEGIN DELETE FROM points; END",),
        ("CREATE VIEW other AS SELECT load_extension('x')",),
        ("CREATE INDEX x ON points (trace) WHERE hex(key) > ''",),
        ("CREATE VIRTUAL TABLE x USING fts5(y)",),
        ("CREATE TABLE other (x)",),
        ("ALTER TABLE points RENAME TO other", "CREATE VIEW points AS SELECT * FROM other"),
        ("ALTER TABLE points ADD COLUMN x GENERATED ALWAYS AS (zeroblob(1000000000))",),
        ("PRAGMA user_version = 2147483647",),
        ("PRAGMA application_id = 7",),
    ],
    ids=["trigger", "view", "index", "virtual", "table", "view_for_table", "generated", "version", "application"],
)
def test_store_with_more_than_its_table_is_refused(statements: tuple[str, ...], tmp_path: Path) -> None:
    from gpusim.sweep.store import Store

    path = tmp_path / "s.sqlite"
    Store(path).__exit__(None, None, None)
    damage(path, *statements)
    before = path.read_bytes()
    for words in (["sweep", "--summary", str(path)], ["sweep", "--export", str(tmp_path / "x.csv"), "-o", str(path)]):
        done = CliRunner().invoke(cli, words)
        assert done.exception is not None
        assert isinstance(done.exception, GpusimError | SystemExit), done.exception
    with pytest.raises(GpusimError, match=re.escape(str(path))):
        Store(path)
    assert path.read_bytes() == before


# --- Names, environment, output ---

ESCAPE = "\x1b]0;x\x07\x1b[2J\u202egnp.json"


@pytest.mark.parametrize("words", [("simulate",), ("explore",), ("limits",), ("explain",), ("replay", "--trace")])
def test_file_name_with_escapes_reaches_no_terminal(words: tuple[str, ...], tmp_path: Path) -> None:
    one_line(gpusim(*words, str(tmp_path / ESCAPE)))


def test_names_in_a_trace_reach_no_terminal(tmp_path: Path) -> None:
    found = chain_trace(2)
    found = msgspec.structs.replace(found, model=msgspec.structs.replace(found.model, network=ESCAPE + "[/red]" * 50))
    path = tmp_path / "t.json"
    write_trace(found, path)
    for words in (("simulate",), ("limits",), ("explain",)):
        done = gpusim(*words, str(path))
        assert done.returncode == 0, done.stderr
        assert not CONTROL.search(done.stdout.decode())
        assert not CONTROL.search(done.stderr.decode())


@pytest.fixture(scope="module")
def plain_limits(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Any]:
    """Return a trace's file, and its limits in the environment of the tests."""
    path = tmp_path_factory.mktemp("plain") / "t.json"
    write_trace(chain_trace(3), path)
    return path, json.loads(gpusim("limits", str(path), "--json").stdout)


@pytest.mark.parametrize(
    "environment",
    [
        {"COLUMNS": "-5"},
        {"COLUMNS": "9" * 30},
        {"COLUMNS": "80\x1b[2J"},
        {"LC_ALL": "C", "PYTHONIOENCODING": "ascii"},
        {"TERM": "\x1b[2J"},
        {"NUMBA_CACHE_DIR": "/proc/none"},
        {"HOME": "/nonexistent", "XDG_CACHE_HOME": "relative/../.."},
        {"LINES": "x", "FORCE_COLOR": "1", "NO_COLOR": ""},
    ],
    ids=["negative", "huge", "escape", "ascii", "terminal", "numba", "home", "colour"],
)
def test_environment_changes_no_numbers_and_breaks_nothing(
    environment: dict[str, str], plain_limits: tuple[Path, Any]
) -> None:
    path, expected = plain_limits
    done = gpusim("limits", str(path), "--json", **environment)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout) == expected
    assert b"\x1b[2J" not in done.stdout + done.stderr


@pytest.mark.parametrize("name", ["=cmd|' /C calc'!A0", "@SUM(1)", "+1", "-1", "\t=1", "<script>alert(1)</script>"])
def test_names_are_text_in_tables_and_pages(name: str, tmp_path: Path) -> None:
    found: Trace = chain_trace(2)
    found = msgspec.structs.replace(found, model=msgspec.structs.replace(found.model, network=name))
    path = tmp_path / "t.json"
    write_trace(found, path)
    table, page = tmp_path / "x.csv", tmp_path / "x.html"
    assert CliRunner().invoke(cli, ["limits", str(path), "--csv", str(table)]).exit_code == 0
    cells = [cell for line in table.read_text().splitlines() for cell in line.split(",")]
    assert not any(cell.lstrip('"')[:1] in ("=", "@", "\t") for cell in cells)
    assert CliRunner().invoke(cli, ["simulate", str(path), "--html", str(page)]).exit_code == 0
    assert "<script>alert(1)</script>" not in page.read_text()


# --- Hardware models and schedules ---


@pytest.mark.parametrize("content", ["[]", "null", "{}", '"h200"', '{"schema": "gpusim-trace/1"}', "[" * 5000])
@pytest.mark.parametrize("option", ["--hw", "--schedule"])
def test_document_of_another_kind_is_one_line(option: str, content: str, tmp_path: Path) -> None:
    path, wrong = tmp_path / "t.json", tmp_path / "x.json"
    write_trace(chain_trace(2), path)
    wrong.write_text(content)
    done = CliRunner().invoke(cli, ["simulate", str(path), option, str(wrong)])
    assert isinstance(done.exception, GpusimError), (done.output, done.exception)
    assert str(wrong) in str(done.exception)


@pytest.mark.parametrize(
    "changes",
    [
        {"streams": 2**62},
        {"streams": -1},
        {"policy": "x" * 10**6, "streams": 0},
        {"placements": [{"op": "op0", "stream": 2**60}, {"op": "op1", "stream": 0}]},
        {"placements": [{"op": "../../x", "stream": 0}, {"op": "op1", "stream": 0}]},
        {"placements": [{"op": "op0", "stream": 0}] * 1000},
        {"placements": [{"op": "op0", "stream": 0, "variant": "__init__"}, {"op": "op1", "stream": 0}]},
        {"partitions": [{"streams": [0], "sms": -1}]},
        {"partitions": [{"streams": [2**60], "sms": 1}]},
    ],
    ids=["many", "negative", "long", "far", "path", "again", "variant", "sms", "stream"],
)
def test_schedule_that_lies_is_one_line(changes: dict[str, Any], tmp_path: Path) -> None:
    path, wrong = tmp_path / "t.json", tmp_path / "s.json"
    write_trace(chain_trace(2), path)
    good = Schedule.in_recorded_order(2).made("sequential", "test").to_document(chain_trace(2))
    names = [placement.op for placement in good.placements]
    text = json.dumps(msgspec.to_builtins(good) | changes)
    wrong.write_text(text.replace('"op0"', json.dumps(names[0])).replace('"op1"', json.dumps(names[1])))
    done = CliRunner().invoke(cli, ["simulate", str(path), "--schedule", str(wrong)])
    assert isinstance(done.exception, GpusimError), (done.output, done.exception)
    assert not CONTROL.search(message(str(done.exception)))
