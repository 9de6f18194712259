"""Files of any kind: memory is bounded in advance, impossible names and places are refused, kills leave nothing."""

from __future__ import annotations

import fcntl
import gzip
import json
import os
import re
import signal
import stat
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpusim.errors import HardwareError, OutputError, RecipeError, SweepError, TraceError
from gpusim.formats.hardware import bundled_hardware, read_hardware
from gpusim.importers.upload import parse_upload
from gpusim.io import decompression, file_limits
from gpusim.io.decompression import decompress, values_bytes
from gpusim.io.file_limits import LIST_BYTES, NUMBER_BYTES, OBJECT_BYTES, TEXT_BYTES
from gpusim.io.files import check_writable, read_bytes, read_toml, write_bytes
from gpusim.io.sandbox import read_apart
from gpusim.sweep.spec import read_sweep
from gpusim.trace.store import bundled_traces, parse_trace, read_trace
from gpusim.validation.recipe import read_recipe
from tests.cli.test_cli import Run, refused, run  # noqa: F401  (a fixture)
from tests.support.bombs import repeated_gzip
from tests.support.helpers import make_trace, op

ROOT = Path(__file__).parents[2]
ENVIRONMENT = os.environ | {"PYTHONPATH": str(ROOT), "PYTHONDONTWRITEBYTECODE": "1"}
ENOUGH = 1 << 60


# --- Memory ---


def bomb(unit: bytes, megabytes: int) -> bytes:
    """Return an op's arguments of this size, gzipped."""
    head = b'{"schema":"gpusim-trace/1","ops":[{"name":"a","target":"t","args":['
    return repeated_gzip(head, unit * (10**6 // len(unit)), megabytes)


BOMBS = {
    "lists in 250 kB": (b"[],", 240, "more than 128 times"),
    "lists in 500 kB": (b"[],", 500, "more than 128 times"),
    "zeros": (b"\0", 300, "more than 128 times"),
    "lists, as many as may be expanded": (b"[],", 30, "its values need more than 512 MiB"),
    "objects, likewise": (b"{},", 30, "its values need more than 512 MiB"),
    "objects of one key, likewise": (b'{"a":0},', 30, "its values need more than 512 MiB"),
}


@pytest.mark.parametrize("case", BOMBS)
def test_bomb_is_refused_in_one_line_and_a_gigabyte(case: str, tmp_path: Path) -> None:
    unit, megabytes, problem = BOMBS[case]
    path = tmp_path / "bomb.json.gz"
    path.write_bytes(bomb(unit, megabytes))
    # Not `getrusage`: its peak begins with that of the parent process.
    code = (
        "import sys; from pathlib import Path; from gpusim.cli import main\n"
        "try: main()\n"
        "finally: print(Path('/proc/self/status').read_text().split('VmHWM:')[1].split()[0], file=sys.stderr)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, "simulate", path], env=ENVIRONMENT, capture_output=True, text=True, check=False
    )
    line, peak_kib = done.stderr.splitlines()
    assert (done.returncode, done.stdout) == (2, "")
    assert problem in line
    assert int(peak_kib) < 2**20


@given(
    st.recursive(
        st.none() | st.booleans() | st.integers(0, 9) | st.text('a"\\[{,:é', max_size=6),
        lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text('k"\\', max_size=3), inner, max_size=3),
    ),
    st.integers(1, 40),
)
def test_values_are_counted_outside_of_texts_wherever_the_text_is_cut(document: Any, piece: int) -> None:
    def wanted(value: Any) -> int:
        if isinstance(value, dict):
            inside = sum(map(wanted, value.values()))
            return OBJECT_BYTES + NUMBER_BYTES * max(0, len(value) - 1) + inside
        if isinstance(value, list):
            return LIST_BYTES + NUMBER_BYTES * max(0, len(value) - 1) + sum(map(wanted, value))
        return TEXT_BYTES if isinstance(value, str) else 0

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(decompression, "_PIECE_BYTES", piece)
        assert values_bytes(json.dumps(document).encode(), ENOUGH) == wanted(document)


def test_counting_ends_where_it_is_enough() -> None:
    assert values_bytes(b"[" * 10 * 2**20, 1000) == 2**20 * LIST_BYTES


def test_bundled_traces_are_far_from_every_limit() -> None:
    for path in bundled_traces().values():
        data = path.read_bytes()
        text = decompress(data, path.name, TraceError)
        assert len(text) < file_limits.MAX_EXPANSION * len(data) / 4
        assert values_bytes(text, ENOUGH) < file_limits.FREE_VALUES_BYTES / 10


def test_step_of_a_million_kernels_is_within_the_limits() -> None:
    """Counted on a thousandth of it."""
    n = 1000
    data = msgspec.json.encode(make_trace([op(f"op_{i}", "x") for i in range(n)]))
    assert values_bytes(data, ENOUGH) * 10**6 / n < file_limits.MAX_VALUES_BYTES
    assert len(data) * 10**6 / n < file_limits.MAX_DOCUMENT_BYTES
    assert file_limits.MAX_PARTS > 10**6


def test_sums_over_the_largest_step_stay_exact() -> None:
    most = file_limits.MAX_PARTS
    assert most * file_limits.MAX_STORAGE_BYTES < 2**63
    assert most * file_limits.MAX_COST_NS < 2**53
    assert file_limits.MAX_STEP_NS < 2**53


# --- Several gzip members ---


def test_all_members_of_a_gzip_file_are_read_within_the_limits() -> None:
    members = gzip.compress(b"ab") + gzip.compress(b"") + gzip.compress(b"cd")
    assert decompress(members, "t.gz", TraceError) == b"abcd"
    assert decompress(members + bytes(8), "t.gz", TraceError) == b"abcd"
    assert decompress(members, "t.gz", TraceError, max_bytes=4) == b"abcd"
    with pytest.raises(TraceError, match="is larger than 3 bytes when decompressed"):
        decompress(members, "t.gz", TraceError, max_bytes=3)
    with pytest.raises(TraceError, match="is truncated gzip"):
        decompress(members[:-3], "t.gz", TraceError)
    with pytest.raises(TraceError, match="bytes after its gzip data are no gzip"):
        decompress(members + b"junk", "t.gz", TraceError)
    with pytest.raises(TraceError, match="has more than 64 gzip members"):
        decompress(gzip.compress(b"") * 65, "t.gz", TraceError)


# --- Uploads ---


def test_upload_is_read_apart_as_a_file_is_read_here() -> None:
    data = bundled_traces()["squeezenet1_1-infer-b1"].read_bytes()
    assert parse_upload(data, "up.json.gz") == parse_trace(data, "up.json.gz")


@pytest.mark.parametrize("data", [b"", b"x", b"{}", b'{"schema":"gpusim-trace/1"}'])
def test_broken_upload_gives_the_very_line_of_a_file(data: bytes) -> None:
    with pytest.raises(TraceError) as here:
        parse_trace(data, "up.json")
    with pytest.raises(TraceError) as apart:
        parse_upload(data, "up.json")
    assert (str(apart.value), apart.value.place) == (str(here.value), here.value.place)


def test_upload_that_needs_too_much_memory_or_time_is_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(TraceError, match=r"^up: needs more than 1 GiB of memory to be read$"):
        list(read_apart(f"{__name__}:fill", b"x", "up", TraceError))
    monkeypatch.setattr("gpusim.io.sandbox.MAX_APART_S", 2)
    with pytest.raises(TraceError, match=r"^up: needs more than 2 s to be read$"):
        list(read_apart(f"{__name__}:wait", b"x", "up", TraceError))


def test_defect_in_the_other_process_is_not_blamed_on_the_file() -> None:
    with pytest.raises(RuntimeError, match=r"(?s):fail failed in its process:.*ZeroDivisionError"):
        list(read_apart(f"{__name__}:fail", b"x", "up", TraceError))
    with pytest.raises(RuntimeError, match=r":leave: its process ended with status 3$"):
        list(read_apart(f"{__name__}:leave", b"x", "up", TraceError))


def fail(data: bytes, _name: str) -> list[bytes]:
    """Fail in the other process."""
    return [data * (1 // 0)]


def leave(_data: bytes, _name: str) -> list[bytes]:
    """Leave the other process."""
    os._exit(3)


def fill(data: bytes, _name: str) -> list[bytes]:
    """Fill the memory of the other process."""
    return [bytes(data * 2**31)]


def wait(_data: bytes, _name: str) -> list[bytes]:
    """Wait in the other process."""
    time.sleep(60)
    return []


# --- Numbers ---


def put(document: Any, path: str, value: Any) -> None:
    *way, last = [int(part) if part.isdigit() else part for part in path.split(".")]
    for part in way:
        document = document[part]
    document[last] = value


DAY_NS = 24 * 3600 * 10**9
TRACE_LIMITS: dict[str, tuple[Any, Any]] = {
    "storages.0.bytes": (2**40, 2**40 + 1),
    "tensors.0.offset": (None, 2**62),
    "tensors.0.shape": ([0] * 64, [0] * 65),
    "ops.0.host_ns": (DAY_NS, DAY_NS + 1),
    "ops.0.kernels.0.dur_ns": (DAY_NS - 1000, DAY_NS + 1),
    "ops.0.kernels.0.grid": ([2**31 - 1, 1, 1], [2**31, 1, 1]),
    "ops.0.kernels.0.block": ([1024, 1, 1], [1025, 1, 1]),
    "ops.0.kernels.0.regs_per_thread": (2**16, 2**16 + 1),
    "ops.0.kernels.0.smem_bytes": (2**30, 2**30 + 1),
    "ops.0.kernels.0.cluster": ([64, 1, 1], [65, 1, 1]),
}


def small() -> dict[str, Any]:
    document: dict[str, Any] = json.loads(msgspec.json.encode(make_trace([op("a", "x"), op("b", "a")])))
    return document


@pytest.mark.parametrize("path", TRACE_LIMITS)
def test_number_over_its_limit_names_field_value_and_limit(path: str, tmp_path: Path) -> None:
    allowed, refused_value = TRACE_LIMITS[path]
    file = tmp_path / "t.json"
    document = small()
    if allowed is not None:
        put(document, path, allowed)
        if path == "tensors.0.shape":
            put(document, "tensors.0.stride", allowed)
        file.write_text(json.dumps(document))
        read_trace(file)
    put(document, path, refused_value)
    file.write_text(json.dumps(document))
    with pytest.raises(TraceError) as caught:
        read_trace(file)
    place = "".join(f"[{part}]" if part.isdigit() else f".{part}" for part in path.split("."))
    assert caught.value.place.startswith(f"${place}")
    if not isinstance(refused_value, list):
        assert f"found {refused_value}" in caught.value.problem
    assert "<=" in caught.value.problem


TOGETHER: dict[str, tuple[dict[str, Any], str, str]] = {
    "blocks": ({"ops.0.kernels.0.grid": [65536, 65535, 1]}, "$.ops[0].kernels[0].grid", "4294901760 blocks in all"),
    "threads": ({"ops.0.kernels.0.block": [64, 64, 1]}, "$.ops[0].kernels[0].block", "4096 threads in all"),
    "time": (
        {"ops.0.kernels.0.dur_ns": DAY_NS, "ops.1.kernels.0.dur_ns": 1},
        "$.ops[1]",
        f"{DAY_NS + 1} ns of kernels in all; the limit is {DAY_NS}",
    ),
    "time on the host": (
        {"ops.0.host_ns": DAY_NS, "ops.1.host_ns": 1},
        "$.ops[1]",
        f"{DAY_NS + 1} ns on the host in all; the limit is {DAY_NS}",
    ),
    "elements": (
        {"tensors.0.shape": [2**30, 2**30], "tensors.0.stride": [0, 0]},
        "$.tensors[0].shape",
        f"{2**60} elements in all",
    ),
}


@pytest.mark.parametrize("case", TOGETHER)
def test_numbers_are_held_to_a_limit_together(case: str) -> None:
    changes, place, problem = TOGETHER[case]
    document = small()
    for path, value in changes.items():
        put(document, path, value)
    with pytest.raises(TraceError, match=problem) as caught:
        parse_trace(json.dumps(document).encode(), "t.json")
    assert caught.value.place == place


def test_numbers_of_parts_are_held_to_a_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    document = small()
    document["ops"][0]["args"] = [[1, [2, 3]]]
    data = json.dumps(document).encode()
    monkeypatch.setattr("gpusim.trace.check.MAX_PARTS", 1)
    with pytest.raises(TraceError, match=r"\$\.ops\[1\]: .*have 2 kernels, .*; the limit is 1"):
        parse_trace(data, "t.json")
    monkeypatch.setattr("gpusim.trace.check.MAX_ARGUMENTS", 4)
    with pytest.raises(TraceError, match=r"\$\.ops\[0\]: .*have 5 values in arguments in all; the limit is 4"):
        parse_trace(data, "t.json")


HARDWARE_LIMITS = {
    "limits.blocks_per_sm": 10**18,
    "limits.sms": 10**6,
    "limits.warp_threads": 0,
    "limits.regs_per_sm": 2**60,
    "limits.smem_per_sm_bytes": 2**60,
    "limits.resident_grids": 10**9,
    "memory.dram_bytes_per_ns": 1e-300,
    "memory.l2_bytes": 2**62,
    "rates.fp32": 1e300,
    "graph.front_end_ns": 1e18,
    "stream.start_ns": 1e300,
    "stream.event_host_ns": 1e10,
    "stream.queues": 10**9,
    "contention.younger_slowdown": 1e30,
    "uncertainty.schedule_frac": 0.9999999,
}


@pytest.mark.parametrize("path", HARDWARE_LIMITS)
def test_number_of_a_hardware_model_over_its_limit_names_file_and_field(path: str, tmp_path: Path) -> None:
    document = json.loads(bundled_hardware()["h200"].read_bytes())
    put(document, path, HARDWARE_LIMITS[path])
    file = tmp_path / "hw.json"
    file.write_text(json.dumps(document))
    with pytest.raises(HardwareError, match="Expected") as caught:
        read_hardware(file)
    assert caught.value.place == f"$.{path}"


# --- TOML ---

TOMLS = {
    "number of 5,000 digits": ("seed = " + "9" * 5000, "is not valid TOML"),
    "NUL in a name": ('traces = ["a\\u0000b.json"]', "$.traces[0]: a text holds the character NUL"),
    "NUL in another": (
        'traces = ["x"]\nhardware = ["a\\u0000b.json"]',
        "$.hardware[0]: a text holds the character NUL",
    ),
    "NUL in a key": ('"a\\u0000b" = 1', "$: a text holds the character NUL"),
    "number over 64 bits": ('traces = ["x"]\nseed = 99999999999999999999', "$.seed"),
    "deep nesting": ("traces = " + "[" * 10000 + "]" * 10000, "is not valid TOML"),
    "deep keys": (".".join("a" * 3_000) + " = 1", "is nested too deeply"),
    "2 MB": ("#" * 2 * 2**20, "is larger than 1 MiB"),
    "name of 400 letters": (f'traces = ["{"x" * 400}"]', "unknown trace"),
}


@pytest.mark.parametrize("case", TOMLS)
def test_hostile_toml_gives_one_line(case: str, tmp_path: Path) -> None:
    text, problem = TOMLS[case]
    path = tmp_path / "x.toml"
    path.write_text(text)
    with pytest.raises(SweepError) as caught:
        read_sweep(path)
    assert problem in str(caught.value)
    with pytest.raises(RecipeError):
        read_recipe(path)


@pytest.mark.parametrize("name", ["x.json", "x.json.gz", "x.toml"])
def test_document_in_place_of_a_recipe_is_named_with_what_reads_it(name: str, tmp_path: Path) -> None:
    path = tmp_path / name
    data = b'{"schema": "gpusim-results/1", "cases": []}'
    path.write_bytes(gzip.compress(data) if name.endswith(".gz") else data)
    with pytest.raises(RecipeError, match=r"is a file of results, and a TOML .*validate FILE --again"):
        read_recipe(path)


@pytest.mark.parametrize("text", ["import x", "[[case]", "\x1f\x8b"])
def test_damaged_recipe_is_no_other_kind_of_file(text: str, tmp_path: Path) -> None:
    path = tmp_path / "x.toml"
    path.write_text(text, encoding="latin-1")
    with pytest.raises(RecipeError, match="is not valid TOML"):
        read_recipe(path)


def test_recipe_with_a_trace_of_400_letters_gives_one_line(tmp_path: Path) -> None:
    path = tmp_path / "x.toml"
    path.write_text(f'name = "x"\n[[case]]\ntrace = "{"x" * 400}"')
    with pytest.raises(RecipeError, match="neither a file nor bundled"):
        read_recipe(path)


# --- Names ---

LONG = "x" * 400


@pytest.mark.parametrize("option", ["--html", "--perfetto", "--png", "-o"])
def test_output_with_too_long_a_name_is_refused_before_the_work(option: str, tmp_path: Path, run: Run) -> None:  # noqa: F811
    command = ("sweep", "--trace", "missing.json") if option == "-o" else ("simulate", "missing.json")
    text = refused(run(*command, option, tmp_path / LONG))
    assert "missing.json" not in text
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("letters", [250, 255])
def test_longest_name_of_the_file_system_can_be_written(letters: int, tmp_path: Path) -> None:
    path = tmp_path / ("x" * letters)
    check_writable(path)
    write_bytes(path, b"data")
    assert [file.name for file in tmp_path.iterdir()] == [path.name]


def test_input_with_too_long_a_name_or_a_nul_is_one_line() -> None:
    for name in (LONG, "a\0b"):
        with pytest.raises(TraceError, match="cannot be read"):
            read_trace(Path(f"{name}.json"))
        with pytest.raises(SweepError, match="cannot be read"):
            read_toml(Path(f"{name}.toml"), dict, SweepError)
        with pytest.raises(OutputError, match="cannot be written"):
            check_writable(Path(f"{name}.json"))


def test_endless_device_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(file_limits, "MAX_STREAM_BYTES", 2**20)
    with pytest.raises(TraceError, match="is larger than 1 MiB"):
        read_bytes(Path("/dev/zero"), TraceError)


# --- What a kill leaves ---

WRITER = (
    "import os, sys, time; from pathlib import Path; from gpusim.io import files\n"
    "os.fsync = lambda handle: (print('writing', flush=True), time.sleep(60))\n"
    "files.write_bytes(Path(sys.argv[1]), b'new' * 1000)"
)


def writing(path: Path) -> subprocess.Popen[bytes]:
    """Start a process in the middle of writing `path`."""
    process = subprocess.Popen([sys.executable, "-c", WRITER, path], env=ENVIRONMENT, stdout=subprocess.PIPE)
    assert process.stdout is not None
    assert process.stdout.readline() == b"writing\n"
    process.stdout.close()
    return process


def test_file_that_is_replaced_passes_its_permissions_on(tmp_path: Path) -> None:
    """A result that only its owner may read stays so; a link is replaced by a new file, whatever it points to."""
    private, link = tmp_path / "private.json", tmp_path / "link.json"
    write_bytes(private, b"1")
    new = stat.S_IMODE(private.stat().st_mode)
    private.chmod(0o600)
    link.symlink_to(private)
    write_bytes(private, b"2")
    write_bytes(link, b"3")
    assert (private.read_bytes(), stat.S_IMODE(private.stat().st_mode)) == (b"2", 0o600)
    assert (link.read_bytes(), link.is_symlink(), stat.S_IMODE(link.stat().st_mode)) == (b"3", False, new)


def test_what_a_killed_writer_left_is_gone_after_the_next_run(tmp_path: Path) -> None:
    path = tmp_path / "out.json"
    path.write_bytes(b"old")
    for again in (check_writable, lambda path: write_bytes(path, b"old")):
        process = writing(path)
        process.send_signal(signal.SIGKILL)
        process.wait()
        assert len(list(tmp_path.iterdir())) == 2
        again(path)
        assert [file.name for file in tmp_path.iterdir()] == ["out.json"]
        assert path.read_bytes() == b"old"


def test_writer_that_lives_keeps_its_file_from_another_that_writes_the_same(tmp_path: Path) -> None:
    path = tmp_path / "out.json"
    process = writing(path)
    try:
        write_bytes(path, b"mine")
        assert path.read_bytes() == b"mine"
        assert len(list(tmp_path.iterdir())) == 2
    finally:
        process.kill()
        process.wait()


def test_file_that_is_taken_for_a_leftover_before_it_is_locked_is_made_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lock, calls = fcntl.flock, []

    def late(handle: int, how: int) -> None:
        calls.append(how)
        if len(calls) == 1:
            for file in tmp_path.iterdir():
                file.unlink()  # as another process's `_remove_leftovers` does
        lock(handle, how)

    monkeypatch.setattr(fcntl, "flock", late)
    write_bytes(tmp_path / "out.json", b"mine")
    assert [file.name for file in tmp_path.iterdir()] == ["out.json"]
    assert len(calls) == 2


def test_foreign_files_and_links_are_left_alone(tmp_path: Path) -> None:
    (tmp_path / ".other.tmp").touch()
    (tmp_path / "target").touch()
    (tmp_path / ".gpusim-writes-link").symlink_to(tmp_path / "target")
    write_bytes(tmp_path / "out.json", b"mine")
    names = sorted(file.name for file in tmp_path.iterdir())
    assert names == [".gpusim-writes-link", ".other.tmp", "out.json", "target"]


@pytest.mark.parametrize(
    ("old", "new", "place"),
    [
        ('"name"', '"name": "other", "name"', "$.name"),
        ('"sms"', '"sms": 1, "s\\u006ds"', "$.limits.sms"),
    ],
)
def test_a_key_twice_in_a_file_written_by_hand_is_refused_with_its_place(
    tmp_path: Path, old: str, new: str, place: str
) -> None:
    text = bundled_hardware()["h200"].read_text()
    assert old in text
    file = tmp_path / "twice.json"
    file.write_text(text.replace(old, new, 1))
    with pytest.raises(HardwareError, match=re.escape(f"{file}: {place}: ") + ".*twice"):
        read_hardware(file)
    file.write_text(text)
    assert read_hardware(file).name == "h200"
