"""The store of a sweep: rows kept and given back, refusals, export."""

from __future__ import annotations

import csv
import dataclasses
import importlib.util
import os
import resource
import sqlite3
import subprocess
import sys
from pathlib import Path
from typing import Any

import pandas as pd
import pytest

from gpusim.errors import OptionError, OutputError, SweepError
from gpusim.formats.sweep import Sweep
from gpusim.sweep import store as store_module
from gpusim.sweep.export import export_rows
from gpusim.sweep.grid import Grid, build_grid
from gpusim.sweep.store import COLUMNS, STORE_VERSION, PointRow, Store, column_types
from gpusim.trace.store import write_trace
from tests.cli.test_cli import Run, refused, run
from tests.support.sweeping import (
    ENGINE,
    ROOT,
    arguments,
    computed,
    grid,
    over_the_limit,
    rows_of,
    write_traces,
)

__all__ = ["grid", "run"]  # fixtures


# --- The store ---


@pytest.fixture
def path(grid: Grid, tmp_path: Path) -> Path:
    """A store with all points of the grid."""
    computed(grid, tmp_path / "store.sqlite")
    return tmp_path / "store.sqlite"


def test_rows_come_back_as_they_were(path: Path) -> None:
    rows = rows_of(path)
    numbers = {name: None for name, (_, optional) in column_types().items() if optional}
    failed = {**numbers, "calibrated": False, "error": "é\n'\""}
    changed = [dataclasses.replace(row, key=f"{row.key}x", **failed) for row in rows]
    with Store(path) as store:
        store.add(changed)
        assert sorted(store.rows(), key=lambda row: row.key) == sorted([*rows, *changed], key=lambda row: row.key)
        assert store.rows([rows[0].key]) == [rows[0]]
        assert store.finished() == {row.key: row.error is None for row in [*rows, *changed]}


def other_database(path: Path) -> None:
    connection = sqlite3.connect(path)
    connection.execute("CREATE TABLE points (key TEXT)")
    connection.commit()
    connection.close()


@pytest.mark.parametrize("write", [True, False], ids=["writing", "reading"])
def test_file_that_is_no_store_is_refused_and_left_alone(write: bool, tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_text("some notes that are longer than the header of a SQLite file, which has a hundred bytes" * 3)
    before = path.read_bytes()
    with pytest.raises(SweepError, match=r"file: is not a store of gpusim sweep"):
        Store(path, write=write)
    assert path.read_bytes() == before
    path.unlink()
    other_database(path)
    before = path.read_bytes()
    with pytest.raises(SweepError, match=r"file: is not a store of gpusim sweep"):
        Store(path, write=write)
    assert path.read_bytes() == before
    assert list(tmp_path.iterdir()) == [path]


def test_missing_store_is_made_for_writing_only(tmp_path: Path) -> None:
    with pytest.raises(SweepError, match="there is no such store"):
        Store(tmp_path / "s.sqlite", write=False)
    assert not list(tmp_path.iterdir())
    (tmp_path / "s.sqlite").touch()  # an empty file is an empty store, as mktemp makes one
    with Store(tmp_path / "s.sqlite") as store:
        assert store.rows() == []


def test_store_of_a_newer_version_is_refused(path: Path) -> None:
    connection = sqlite3.connect(path)
    connection.execute(f"PRAGMA user_version = {STORE_VERSION + 1}")
    connection.close()
    with pytest.raises(SweepError, match=r"newer gpusim: store version 2, this one knows 1"):
        Store(path)
    with pytest.raises(SweepError, match="newer gpusim"):
        Store(path, write=False)


def test_damaged_store_is_one_line(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[4096:] = os.urandom(len(data) - 4096)
    path.write_bytes(data)
    with pytest.raises(SweepError, match="is damaged"):
        rows_of(path)


def test_two_sweeps_cannot_share_a_store_but_readers_are_let_in(
    path: Path, run: Run, monkeypatch: pytest.MonkeyPatch, grid: Grid
) -> None:
    monkeypatch.setattr(store_module, "LOCK_WAIT_MS", 10)
    with Store(path) as store:
        text = refused(run(*arguments(path.parent)[:-1], path))
        assert text == f"gpusim: {path}: is in use by another sweep\n"
        rows = store.rows()
        store.add([dataclasses.replace(rows[0], key="new")])
        assert len(rows_of(path)) == len(rows) + 1
        with pytest.raises(SweepError, match="in use"):
            Store(path)  # also between two commits
    with Store(path) as store:
        assert len(store.rows()) == len(rows) + 1


def test_row_is_on_the_disk_when_add_returns(grid: Grid, path: Path, tmp_path: Path) -> None:
    """The process ends without closing anything; earlier rows are stored."""
    code = (
        "import os, sys, dataclasses; from pathlib import Path; from gpusim.sweep.store import Store\n"
        "store = Store(Path(sys.argv[1])); row = store.rows()[0]\n"
        "store.add([dataclasses.replace(row, key='added')])\n"
        "store.connection.execute('DELETE FROM points')\n"
        "os._exit(0)"
    )
    environment = os.environ | {"PYTHONPATH": str(ROOT), "PYTHONDONTWRITEBYTECODE": "1"}
    subprocess.run([sys.executable, "-c", code, path], env=environment, check=True)
    assert len(rows_of(path)) == len(grid.points) + 1


def test_folder_that_cannot_be_written_is_refused_before_the_work(
    tmp_path: Path, run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    command = ("sweep", "--trace", "missing.json", "-o")
    assert "there is no folder" in refused(run(*command, tmp_path / "no" / "s.sqlite"))
    assert "it is a folder" in refused(run(*command, tmp_path))
    monkeypatch.setattr(os, "access", lambda path, mode: False)  # root may write anywhere
    assert "no permission" in refused(run(*command, tmp_path / "s.sqlite"))


def test_full_disk_is_one_line_and_keeps_what_was_stored(tmp_path: Path) -> None:
    """The system refuses to let any file grow beyond 20 kB, which the table reaches after some points."""

    def limit() -> None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, 20_000))

    words = [*map(str, arguments(tmp_path)), "--streams", ",".join(map(str, range(2, 40)))]
    environment = os.environ | {"PYTHONPATH": str(ROOT), "PYTHONDONTWRITEBYTECODE": "1"}
    done = subprocess.run(
        [sys.executable, "-m", "gpusim", *words],
        env=environment, capture_output=True, text=True, check=False, preexec_fn=limit,
    )  # fmt: skip
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith(f"gpusim: {tmp_path / 's.sqlite'}: cannot be written: ")
    assert done.stderr.count("\n") == 1
    kept = rows_of(tmp_path / "s.sqlite")
    assert 0 < len(kept) < 100
    assert all(row.makespan_ns for row in kept)


# --- Export ---


@pytest.fixture
def mixed(tmp_path: Path) -> list[PointRow]:
    """Rows with and without numbers."""
    write_trace(over_the_limit(), tmp_path / "big.json")
    write_traces(tmp_path, (3,))
    names = (str(tmp_path / "big.json"), str(tmp_path / "wide3.json"))
    return computed(
        build_grid(Sweep(traces=names, hardware=("p100",), streams=(2,), engine=ENGINE)), tmp_path / "m.sqlite"
    )


def read_back(frame: pd.DataFrame) -> list[dict[str, Any]]:
    return [
        {name: None if pd.isna(value) else value for name, value in record.items()}
        for record in frame.to_dict("records")
    ]


@pytest.mark.cluster
def test_parquet_gives_the_rows_back(mixed: list[PointRow], tmp_path: Path) -> None:
    """Needs pyarrow, which comes with dask in the extra `sweep`."""
    export_rows(mixed, tmp_path / "t.parquet")
    frame = pd.read_parquet(tmp_path / "t.parquet")
    assert list(frame.columns) == list(COLUMNS)
    assert read_back(frame) == [dataclasses.asdict(row) for row in mixed]
    assert str(frame.dtypes["makespan_ns"]) == "Int64"
    assert any(row.error for row in mixed)


def test_csv_gives_the_rows_back(mixed: list[PointRow], tmp_path: Path) -> None:
    export_rows(mixed, tmp_path / "t.csv")
    with (tmp_path / "t.csv").open(newline="", encoding="utf-8") as file:
        found = list(csv.DictReader(file))
    wanted = [
        {name: "" if value is None else str(value) for name, value in dataclasses.asdict(row).items()} for row in mixed
    ]
    assert found == wanted


def test_export_of_another_kind_or_without_pyarrow_is_refused_before_the_work(
    tmp_path: Path, run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    command = ("sweep", "--trace", "missing.json", "-o", tmp_path / "s.sqlite", "--export")
    assert "--export x.xlsx: the name ends in .parquet or .csv" in refused(run(*command, "x.xlsx"))
    assert "there is no folder" in refused(run(*command, tmp_path / "no" / "x.csv"))
    find = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "pyarrow" else find(name))
    assert "pip install 'gpusim[sweep]'" in refused(run(*command, tmp_path / "x.parquet"))
    assert not list(tmp_path.iterdir())
    with pytest.raises(OptionError):
        export_rows([], tmp_path / "x.txt")
    with pytest.raises(OutputError):
        export_rows([], tmp_path / "x.parquet")


# --- Stores from strangers ---

HOSTILE: dict[str, tuple[str, str]] = {
    "no table": ("DROP TABLE points", "its tables are not those of a store"),
    "another table": ("DROP TABLE points; CREATE TABLE points (key TEXT)", "its tables are not those of a store"),
    "view in place of the table": (
        "DROP TABLE points; CREATE VIEW points AS WITH RECURSIVE n(key) AS (SELECT 1 UNION ALL SELECT key + 1 FROM n) "
        "SELECT key FROM n",
        "its tables are not those of a store",
    ),
    "schema that is no SQL": (
        "PRAGMA writable_schema = ON; UPDATE sqlite_master SET sql = 'CREATE TABLE points(' WHERE name = 'points'",
        "is damaged: malformed database schema",
    ),
    "trigger": (
        "CREATE TRIGGER wipe AFTER INSERT ON points BEGIN DELETE FROM points; END",
        "its tables are not those of a store",
    ),
    "index on an expression": ("CREATE INDEX i ON points (abs(seed))", "its tables are not those of a store"),
    "text for a time": ("UPDATE points SET makespan_ns = 'abc'", "column 'makespan_ns' holds 'abc', no whole number"),
    "blob for a name": ("UPDATE points SET trace = x'00ff'", "column 'trace' holds"),
    "fraction for a count": ("UPDATE points SET streams = 1.5", "column 'streams' holds '1.5', no whole number"),
    "infinite time": ("UPDATE points SET seconds = 9e999", "column 'seconds' holds 'inf', no number"),
    "time below 0": ("UPDATE points SET makespan_ns = -1", "column 'makespan_ns' holds '-1', no whole number"),
    "point with neither numbers nor an error": ("UPDATE points SET speedup = NULL", "a point has no 'speedup'"),
    "text of 2 MB": ("UPDATE points SET worker = hex(zeroblob(1000000))", "a value of over 1048576 bytes"),
}


@pytest.mark.parametrize("case", HOSTILE)
def test_hostile_store_gives_one_line_and_runs_nothing(case: str, path: Path, run: Run) -> None:
    statements, problem = HOSTILE[case]
    connection = sqlite3.connect(path)
    connection.executescript(statements)
    connection.close()
    before = path.read_bytes()
    assert problem in refused(run("sweep", "-o", path))
    assert path.read_bytes() == before
    if "tables" in problem:
        with pytest.raises(SweepError, match=problem):
            Store(path)
        assert path.read_bytes() == before


@pytest.mark.parametrize("write", [True, False], ids=["writing", "reading"])
def test_journal_that_names_another_file_is_refused_and_that_file_stays(write: bool, path: Path) -> None:
    victim = path.with_name("victim")
    victim.write_text("precious")
    name = str(victim).encode()
    tail = name + len(name).to_bytes(4, "big") + sum(name).to_bytes(4, "big") + bytes.fromhex("d9d505f920a163d7")
    journal = path.with_name("store.sqlite-journal")
    journal.write_bytes(bytes.fromhex("d9d505f920a163d7") + bytes(504) + tail)
    with pytest.raises(SweepError, match="it names another file"):
        Store(path, write=write)
    assert victim.read_text() == "precious"
    assert journal.exists()


def test_text_that_is_no_utf8_is_read_with_marks_in_its_place(path: Path) -> None:
    connection = sqlite3.connect(path)
    connection.execute("UPDATE points SET worker = CAST(x'41ff42' AS TEXT)")
    connection.commit()
    connection.close()
    assert {row.worker for row in rows_of(path)} == {"A\ufffdB"}


def test_refused_sweep_leaves_no_store_behind(tmp_path: Path) -> None:
    """The system refuses to let any file grow: no point enters the store."""

    def limit() -> None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (0, 0))

    words = [*map(str, arguments(tmp_path))]
    before = sorted(tmp_path.iterdir())
    environment = os.environ | {"PYTHONPATH": str(ROOT), "PYTHONDONTWRITEBYTECODE": "1"}
    done = subprocess.run(
        [sys.executable, "-m", "gpusim", *words],
        env=environment, capture_output=True, text=True, check=False, preexec_fn=limit,
    )  # fmt: skip
    assert (done.returncode, done.stdout, done.stderr.count("\n")) == (2, "", 1)
    assert sorted(tmp_path.iterdir()) == before


def test_sweep_that_cannot_begin_leaves_no_store_and_keeps_one_with_points(tmp_path: Path, path: Path) -> None:
    def fail(file: Path) -> None:
        with Store(file):
            raise RuntimeError

    for file in (tmp_path / "new.sqlite", path):
        with pytest.raises(RuntimeError):
            fail(file)
    assert not (tmp_path / "new.sqlite").exists()
    assert rows_of(path)
