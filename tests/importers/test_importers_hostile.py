"""Hostile files: nothing in them runs, resources are bounded, and each is refused in one line."""

from __future__ import annotations

import gzip
import json
import pickle
import random
import re
import sqlite3
import struct
import zipfile
from collections.abc import Callable
from contextlib import closing
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gpusim.errors import GpusimError, TraceError
from gpusim.importers import examine, import_files
from gpusim.importers.stream_json import PIECE_BYTES, EventFile, unpacked
from gpusim.trace.store import read_trace, write_trace
from tests.support.importer_files import SAMPLES, kernel, write_kineto, write_nsys, write_tar


class Ran:
    """Unpickling makes the file `ran`."""

    def __reduce__(self) -> tuple[object, ...]:
        return open, ("ran", "w")


def test_pickle_is_refused_and_never_loaded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("snapshot.pickle").write_bytes(pickle.dumps(Ran()))
    with pytest.raises(TraceError, match="never loads"):
        examine(["snapshot.pickle"])
    assert not Path("ran").exists()


def test_view_in_place_of_the_table_is_not_used(tmp_path: Path) -> None:
    path = write_nsys(tmp_path / "n.sqlite", [(1, 2, 0, 7, 1)])
    with closing(sqlite3.connect(path)) as base:
        base.execute("ALTER TABLE CUPTI_ACTIVITY_KIND_KERNEL RENAME TO hidden")
        base.execute("CREATE VIEW CUPTI_ACTIVITY_KIND_KERNEL AS SELECT * FROM hidden")
        base.commit()
    report = examine([str(path)])
    assert report.kernels == 0
    assert "views-left-out" in [finding.code for finding in report.findings]


def test_generated_column_is_not_computed(tmp_path: Path) -> None:
    path = tmp_path / "n.sqlite"
    with closing(sqlite3.connect(path)) as base:
        base.execute(
            "CREATE TABLE CUPTI_ACTIVITY_KIND_KERNEL (start INT, end INT, deviceId INT,"
            " streamId INT GENERATED ALWAYS AS (length(hex(zeroblob(deviceId))) ) VIRTUAL)"
        )
        base.execute("INSERT INTO CUPTI_ACTIVITY_KIND_KERNEL (start, end, deviceId) VALUES (1, 2, 3)")
        base.commit()
    assert import_files([str(path)]).trace.ops[0].observed.stream == 0  # type: ignore[union-attr]


def test_sqlite_file_is_not_changed_and_no_journal_appears(tmp_path: Path) -> None:
    path = write_nsys(tmp_path / "n.sqlite", [(1, 2, 0, 7, 1)])
    before = path.read_bytes()
    examine([str(path)])
    assert path.read_bytes() == before
    assert [found.name for found in tmp_path.iterdir()] == ["n.sqlite"]


def test_other_sqlite_file_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "n.sqlite"
    with closing(sqlite3.connect(path)) as base:
        base.execute("CREATE TABLE users (name TEXT)")
        base.commit()
    with pytest.raises(TraceError, match="nsys export"):
        examine([str(path)])


def test_gzip_bomb_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "b.json.gz"
    path.write_bytes(gzip.compress(b'{"traceEvents": [' + b" " * (64 * 2**20), compresslevel=9))
    with pytest.raises(TraceError, match="is larger than"):
        examine([str(path)])


def test_archive_that_expands_is_refused_before_it_does(tmp_path: Path) -> None:
    path = write_tar(tmp_path / "b.tar.gz", {"a.json": b" " * (48 * 2**20)})
    with pytest.raises(TraceError, match=r"holds more than|is larger than"):
        examine([str(path)])


DEEP = ["[" * 5000, '[{"args": ' + '{"a":' * 5000]


@pytest.mark.parametrize("inside", DEEP, ids=["lists", "objects"])
def test_deep_nesting_is_refused(inside: str, tmp_path: Path) -> None:
    path = tmp_path / "d.json"
    path.write_text('{"traceEvents": ' + inside)
    with pytest.raises(TraceError, match="nested deeper"):
        examine([str(path)])


def test_huge_launch_sizes_and_numbers_do_not_get_into_the_trace(tmp_path: Path) -> None:
    events = [kernel("k", 1, 2, grid=[2**40, 1, 1]), kernel("k", 5, 2, block=[10**30, 1, 1], bytes=10**40)]
    imported = import_files([str(write_kineto(tmp_path / "k.json", events))])
    assert [op.kernels[0].grid for op in imported.trace.ops] == [(1, 1, 1), (8, 1, 1)]
    assert "odd-launches" in [finding.code for finding in imported.findings]


def with_time(path: Path, time: str) -> str:
    good, bad = json.dumps(kernel("k", 5, 2)), json.dumps(kernel("k", 123456, 2)).replace("123456", time)
    path.write_text(f'{{"schemaVersion": 1, "traceEvents": [{good}, {bad}]}}')
    return str(path)


@pytest.mark.parametrize("number", [2**53 + 1, 2**62, -1, 10**30])
def test_number_of_a_stream_that_no_trace_can_hold_does_not_get_into_it(number: int, tmp_path: Path) -> None:
    paths = [write_kineto(tmp_path / "k.json", [kernel("k", 1, 2, stream=number, device=number)])]
    if number < 2**63:
        paths.append(write_nsys(tmp_path / "n.sqlite", [(1, 2, number, number, 1)]))
    for path in paths:
        trace = import_files([str(path)]).trace
        write_trace(trace, tmp_path / "t.json")
        assert read_trace(tmp_path / "t.json") == trace


TIMES = ["-1e300", "1e400", "true", "[]", '"x"', "99999999999999999999999", "NaN", "Infinity", "-inf"]


@pytest.mark.parametrize("time", TIMES)
def test_event_without_a_sensible_time_is_left_out_and_said(time: str, tmp_path: Path) -> None:
    report = examine([with_time(tmp_path / "k.json", time)])
    assert report.kernels == 1
    assert "odd-times" in [finding.code for finding in report.findings]


@pytest.mark.parametrize("duration", [None, float("nan"), float("inf")])
def test_kernel_without_a_duration_is_left_out_and_not_taken_as_one_of_0_ns(
    duration: float | None, tmp_path: Path
) -> None:
    endless = kernel("endless", 20, 5) | {"dur": duration}
    missing = {key: value for key, value in endless.items() if key != "dur"}
    for event in (endless, missing):
        report = examine([str(write_kineto(tmp_path / "k.json", [kernel("k", 1.5, 5), event]))])
        assert (report.kernels, report.busy_ns) == (1, 5_000)
        [finding] = [finding for finding in report.findings if finding.code == "odd-times"]
        assert finding.text == "1 event has no valid time and is left out"


BROKEN = [b"\x05\x0a\x050.0.4" + b"\xff" * 20, b"\x07\x0a\x050.0.4\x10\x02" + struct.pack("<Q", 2**63)]


@pytest.mark.parametrize("data", BROKEN, ids=["number", "length"])
def test_broken_protocol_buffer_is_refused(data: bytes, tmp_path: Path) -> None:
    path = tmp_path / "c.et"
    path.write_bytes(data)
    with pytest.raises(TraceError, match="Chakra"):
        examine([str(path)])


def test_text_of_an_empty_or_unknown_file_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "x.json"
    for data, problem in ((b"", "is empty"), (b"hello", "no known format"), (b"PK\x03\x04", "zip archive")):
        path.write_bytes(data)
        with pytest.raises(TraceError, match=problem):
            examine([str(path)])


@pytest.mark.parametrize("seed", range(8))
def test_mutated_files_are_read_or_refused_in_one_line(seed: int, tmp_path: Path) -> None:
    rng = random.Random(seed)
    samples = [path for path in sorted(SAMPLES.iterdir()) if path.suffix != ".md" and path.stat().st_size < 60_000]
    for _ in range(12):
        sample = rng.choice(samples)
        data = sample.read_bytes()
        name = sample.name
        if name.endswith(".json.gz") and rng.random() < 0.8:
            data, name = gzip.decompress(data), name[:-3]
        path = tmp_path / name
        path.write_bytes(mutated(data, rng))
        for read in (examine, import_files):
            assert "\n" not in refusal(read, str(path))


def refusal(read: Callable[[list[str]], object], path: str) -> str:
    try:
        read([path])
    except GpusimError as cause:
        return str(cause)
    return ""


def mutated(data: bytes, rng: random.Random) -> bytes:
    changed = bytearray(data)
    for _ in range(rng.choice([1, 2, 8])):
        place = rng.randrange(len(changed))
        numbers = list(re.finditer(rb'-?\d+|"[^"\\]{0,60}"', bytes(changed[place : place + 500])))
        if numbers and rng.random() < 0.7:
            found = rng.choice(numbers)
            token = rng.choice([b"null", b"-1", b"1e999", b"9" * 30, b"[]", b"{}", b'"x"', b"[[[[", b"}", b"true"])
            changed[place + found.start() : place + found.end()] = token
        elif rng.random() < 0.5:
            changed[place] = rng.randrange(256)
        else:
            del changed[place : place + rng.choice([1, 8, 1000])]
    return bytes(changed) or b"x"


# --- Reading in pieces ---

VALUES = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**53), 2**53) | st.text(max_size=12),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=6), inner, max_size=3),
    max_leaves=8,
)


@given(
    events=st.lists(st.dictionaries(st.text(max_size=6), VALUES, max_size=4), max_size=8),
    top=st.dictionaries(st.text(min_size=1, max_size=6).filter(lambda key: key != "traceEvents"), VALUES, max_size=3),
    size=st.integers(1, 40),
    first=st.booleans(),
)
@settings(max_examples=60, deadline=None)
def test_events_read_in_pieces_of_any_size_are_those_of_the_whole(
    events: list[dict[str, object]], top: dict[str, object], size: int, first: bool
) -> None:
    document = {"traceEvents": events, **top} if first else {**top, "traceEvents": events}
    data = json.dumps(document, ensure_ascii=False).encode("utf-8", "surrogatepass")
    try:
        data.decode()
    except UnicodeDecodeError:
        return
    source = EventFile((data[i : i + size] for i in range(0, len(data), size)), "f", "traceEvents", dict, set(top))
    assert [event for found in source.events() for event in found] == events
    assert source.rest == top


def test_file_of_many_pieces_is_read_whole(tmp_path: Path) -> None:
    events = [kernel('k{"[\\', 10 * n, 5, correlation=n) for n in range(40_000)]
    path = write_kineto(tmp_path / "k.json", events)
    assert path.stat().st_size > 2 * PIECE_BYTES
    with path.open("rb") as file:
        assert len(list(unpacked(file, path.stat().st_size, "k"))) > 1
    assert examine([str(path)]).kernels == 40_000


def test_reading_of_a_long_text_reports_how_far_it_is(tmp_path: Path) -> None:
    events = [kernel("k", 10 * n, 5, correlation=n) for n in range(40_000)]
    shares: list[float] = []
    examine([str(write_kineto(tmp_path / "k.json", events))], shares.append)
    assert len(shares) > 1
    assert shares == sorted(shares)
    assert shares[-1] == 1


def test_huge_texts_are_cut_in_the_trace_and_in_what_is_said(tmp_path: Path) -> None:
    name = "k" * 5_000_000
    path = write_kineto(tmp_path / "k.json", [kernel(name, 1.5, 2, names=name), kernel(name, 5, 2)], traceName=name)
    imported = import_files([str(path)])
    assert [len(op.kernels[0].name) for op in imported.trace.ops] == [1024, 1024]
    assert max(len(finding.text) for finding in examine([str(path)]).findings) < 500


def test_members_that_name_other_places_are_read_in_memory_and_written_nowhere(tmp_path: Path) -> None:
    inner = tmp_path / "inner"
    inner.mkdir()
    data = write_kineto(tmp_path / "k.json", [kernel("k", 1.5, 2)]).read_bytes()
    names = ["../evil.json", "/tmp/evil-gpusim.json", "a/../../evil.json"]
    archive = inner / "a.zip"
    with zipfile.ZipFile(archive, "w") as packed:
        for name in names:
            packed.writestr(name, data)
    before = sorted(tmp_path.rglob("*"))
    assert examine([str(archive)]).kernels == 3
    assert examine([str(write_tar(inner / "a.tar.gz", dict.fromkeys(names, data)))]).kernels == 3
    assert sorted(tmp_path.rglob("*")) == sorted([*before, inner / "a.tar.gz"])
    assert not Path("/tmp/evil-gpusim.json").exists()
