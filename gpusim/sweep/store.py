"""The store of a sweep: one SQLite file with one row per point, safe against kills at any moment.

It uses a rollback journal with `synchronous=FULL`, not a write-ahead log: between commits all data are in one file, and
it also works without shared `mmap` (network file systems). The writer holds SQLite's write lock from start to end, so
two sweeps cannot share a store; readers always have access, and the system releases the lock of a killed process.
"""

from __future__ import annotations

import contextlib
import os
import sqlite3
from collections.abc import Iterable, Iterator
from dataclasses import astuple, dataclass, fields
from pathlib import Path
from types import TracebackType
from typing import Final

from gpusim.errors import OutputError, SweepError
from gpusim.io.file_limits import MAX_INTEGER
from gpusim.io.files import check_writable
from gpusim.sweep.grid import Grid, Point
from gpusim.sweep.point import Outcome, Result
from gpusim.units import MIB

#: SQLite's field for the owner of a file (`PRAGMA application_id`): "gpsw".
APPLICATION_ID: Final = 0x67707377
#: Version of the table, in `PRAGMA user_version`; research/2026-11-23-sweeps.md describes it.
STORE_VERSION: Final = 1

#: Time to wait for locks of other processes: briefly for a writer's at the start, longer for a reader's later on.
LOCK_WAIT_MS, READER_WAIT_MS = 1_000, 60_000

#: Maximum size of a value read: texts are names, hashes and one-line errors.
MAX_VALUE_BYTES: Final = MIB


@dataclass(frozen=True, slots=True, kw_only=True)
class PointRow:
    """One point in the store; times in ns, sizes in bytes. A failed point has an error and no numbers."""

    key: str
    """Hash of everything that determines the result."""
    trace: str
    network: str
    mode: str
    batch: int
    dtype: str
    memory_format: str
    frontend: str
    hardware: str
    calibrated: bool
    """True if the hardware model's costs were measured on that GPU."""
    policy: str
    streams: int
    engine: str
    seed: int
    makespan_ns: int | None
    sequential_ns: int | None
    speedup: float | None
    """Speed-up over the sequential graph."""
    critical_path_ns: int | None
    area_ns: int | None
    bandwidth_ns: int | None
    front_end_ns: int | None
    contention_ns: int | None
    peak_bytes: int | None
    error: str | None
    seconds: float
    """Time of the worker, in s; the first point of a trace and GPU includes the shared preparation."""
    worker: str
    """Host and process of the worker."""
    trace_hash: str
    hardware_hash: str
    version: str
    """Version of gpusim, with a hash of the simulating code."""


COLUMNS: Final = tuple(field.name for field in fields(PointRow))
_SQL_TYPES: Final = {"str": "TEXT", "int": "INTEGER", "bool": "INTEGER", "float": "REAL"}


def column_types() -> dict[str, tuple[str, bool]]:
    """Return for every column the type's name (`str`, `int`, `bool`, `float`), and True if it may be empty."""
    return {
        field.name: (str(field.type).removesuffix(" | None"), str(field.type).endswith(" | None"))
        for field in fields(PointRow)
    }


def make_row(grid: Grid, point: Point, result: Result) -> PointRow:
    """Return the row of a finished point."""
    trace, hardware, outcome = grid.traces[point.trace_hash], grid.hardware[point.hardware_hash], result.outcome
    return PointRow(
        key=point.key,
        trace=trace.name,
        network=trace.network,
        mode=trace.mode,
        batch=trace.batch,
        dtype=trace.dtype,
        memory_format=trace.memory_format,
        frontend=trace.frontend,
        hardware=hardware.name,
        calibrated=hardware.calibrated,
        policy=point.policy,
        streams=point.streams,
        engine=point.engine,
        seed=point.seed,
        makespan_ns=outcome.makespan_ns if outcome else None,
        sequential_ns=outcome.sequential_ns if outcome else None,
        speedup=_speedup(outcome) if outcome else None,
        critical_path_ns=outcome.bounds.critical_path_ns if outcome else None,
        area_ns=outcome.bounds.area_ns if outcome else None,
        bandwidth_ns=outcome.bounds.bandwidth_ns if outcome else None,
        front_end_ns=outcome.bounds.front_end_ns if outcome else None,
        contention_ns=outcome.bounds.contention_ns if outcome else None,
        peak_bytes=outcome.peak_bytes if outcome else None,
        error=result.error,
        seconds=result.seconds,
        worker=result.worker,
        trace_hash=trace.hash,
        hardware_hash=hardware.hash,
        version=grid.version,
    )


def _speedup(outcome: Outcome) -> float:
    """Return sequential time over makespan; 1 for a step without kernels, where both are 0."""
    return outcome.sequential_ns / outcome.makespan_ns if outcome.makespan_ns else 1.0


class Store:
    """An open store, as a context manager; `write=False` opens it for reading, even while a sweep writes to it.

    Raises `SweepError` for a file that is no store, a newer one, or one in use, and `OutputError` if it cannot be
    written.
    """

    def __init__(self, path: Path, *, write: bool = True) -> None:
        self.path = path
        self.write = write
        if write:
            check_writable(path)
        elif not os.path.isfile(path):
            raise SweepError(str(path), "cannot be read: there is no such store")
        self._check_journal()
        self._check_no_log()
        # Reading may also have to roll back a transaction of a killed writer.
        mode = "rwc" if write else "rw" if os.path.exists(f"{path}-journal") else "ro"
        self._made_here = write and not os.path.exists(path)
        with self._explaining():
            self.connection = sqlite3.connect(f"{path.absolute().as_uri()}?mode={mode}", uri=True, isolation_level=None)
        try:
            with self._explaining():
                self._open()
        except BaseException as error:
            self._close(remove=not isinstance(error, SweepError))
            raise

    def __enter__(self) -> Store:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._close(remove=error is not None)

    def _close(self, *, remove: bool) -> None:
        """Close the file; with `remove`, delete a store that this sweep created and left empty."""
        if remove and self._made_here:
            with contextlib.suppress(OSError, sqlite3.Error):
                self.connection.rollback()
                tables = self.connection.execute("SELECT count(*) FROM sqlite_master WHERE name = 'points'").fetchone()
                if not tables[0] or not self.connection.execute("SELECT count(*) FROM points").fetchone()[0]:
                    # Another sweep that waits for the lock gets an error of SQLite, which sees that its file is gone.
                    self.path.unlink(missing_ok=True)
        self.connection.close()

    def finished(self) -> dict[str, bool]:
        """Return the key of every point in the store, with True if it has numbers and False if it has an error."""
        with self._explaining():
            rows = self.connection.execute("SELECT key, error IS NULL FROM points")
            return {str(key): bool(good) for key, good in rows}

    def add(self, rows: Iterable[PointRow]) -> None:
        """Add rows, which are on disk on return; a row with the same key is replaced."""
        marks = ", ".join("?" for _ in COLUMNS)
        with self._explaining():
            self.connection.executemany(f"INSERT OR REPLACE INTO points VALUES ({marks})", map(astuple, rows))
            self.connection.execute("COMMIT")
            self.connection.execute("BEGIN IMMEDIATE")

    def rows(self, keys: Iterable[str] | None = None) -> list[PointRow]:
        """Return all rows, or those with the given keys, ordered by names."""
        order = "trace, hardware, policy, streams, engine, seed, version, key"
        wanted = None if keys is None else set(keys)
        with self._explaining():
            records = self.connection.execute(f"SELECT {', '.join(COLUMNS)} FROM points ORDER BY {order}")
            return [self._row(values) for values in records if wanted is None or values[0] in wanted]

    def _check_journal(self) -> None:
        """Refuse a journal that names another file, as for several databases: SQLite would delete that file.

        Stores have no such journals; their last bytes differ (sqlite.org/fileformat2.html, "The Rollback Journal").
        """
        journal = Path(f"{self.path}-journal")
        with contextlib.suppress(OSError):
            with journal.open("rb") as file:
                file.seek(-len(_JOURNAL_MAGIC), os.SEEK_END)
                names_another = file.read() == _JOURNAL_MAGIC
            if names_another:
                raise SweepError(str(journal), "is no journal of a store: it names another file")

    def _check_no_log(self) -> None:
        """Refuse a store with a write-ahead log: SQLite would create files next to it, even for reading.

        Stores have none; the file header tells (sqlite.org/fileformat2.html, "File format version numbers").
        """
        with contextlib.suppress(OSError):
            with self.path.open("rb") as file:
                versions = file.read(_LOG_AT + 2)[_LOG_AT:]
            if _LOG_VERSION in versions or os.path.exists(f"{self.path}-wal"):
                raise SweepError(str(self.path), "is not a store of gpusim sweep: it has a write-ahead log")

    def _open(self) -> None:
        """Take the write lock, and create the table or check its owner and version."""
        run = self.connection.execute
        # A store may be untrusted: nothing named in its schema is run, and its texts need not be UTF-8.
        run("PRAGMA trusted_schema = OFF")
        run("PRAGMA cell_size_check = ON")
        self.connection.setlimit(sqlite3.SQLITE_LIMIT_LENGTH, MAX_VALUE_BYTES)
        self.connection.text_factory = _text
        run(f"PRAGMA busy_timeout = {LOCK_WAIT_MS}")
        run("PRAGMA synchronous = FULL")
        if self.write:
            run("BEGIN IMMEDIATE")
        ours = run("PRAGMA application_id").fetchone()[0] == APPLICATION_ID
        version = run("PRAGMA user_version").fetchone()[0]
        if ours and version > STORE_VERSION:
            problem = f"was written by a newer gpusim: store version {version}, this one knows {STORE_VERSION}"
            raise SweepError(str(self.path), problem)
        schema = run("SELECT type, name, tbl_name, sql FROM sqlite_master ORDER BY type DESC LIMIT 4").fetchall()
        if not ours and (schema or not self.write):
            raise SweepError(str(self.path), "is not a store of gpusim sweep")
        if not ours:
            run(_TABLE)
            run(f"PRAGMA application_id = {APPLICATION_ID}")
            run(f"PRAGMA user_version = {STORE_VERSION}")
            run("COMMIT")
            run("BEGIN IMMEDIATE")
        elif schema != _SCHEMA:
            raise SweepError(str(self.path), "is damaged: its tables are not those of a store")
        run(f"PRAGMA busy_timeout = {READER_WAIT_MS}")

    def _row(self, values: tuple[object, ...]) -> PointRow:
        """Return a row after checking its values against `make_row`; SQLite itself accepts any type in any column."""
        named = dict(zip(COLUMNS, values, strict=True))
        for name, (kind, optional) in column_types().items():
            value = named[name]
            if not (optional and value is None) and not _fits(value, kind):
                raise SweepError(
                    str(self.path), f"is damaged: column '{name}' holds {_short(value)}, no {_WORDS[kind]}"
                )
        for name in _OF_GOOD_POINTS:
            if (named[name] is None) != (named["error"] is not None):
                problem = f"is damaged: a point has {'no' if named[name] is None else 'an error and a'} '{name}'"
                raise SweepError(str(self.path), problem)
        named["calibrated"] = bool(named["calibrated"])
        return PointRow(**named)  # type: ignore[arg-type]

    @contextlib.contextmanager
    def _explaining(self) -> Iterator[None]:
        """Turn SQLite's errors about the file or the disk into one line; a wrong statement stays a bug."""
        try:
            yield
        except UnicodeDecodeError as cause:  # a message of SQLite with bytes of a damaged file
            raise SweepError(str(self.path), "is damaged: a name in it is no text") from cause
        except sqlite3.DatabaseError as cause:
            code = getattr(cause, "sqlite_errorcode", 0) & 0xFF
            if code == sqlite3.SQLITE_TOOBIG:
                raise SweepError(str(self.path), f"is damaged: a value of over {MAX_VALUE_BYTES} bytes") from cause
            if code in (sqlite3.SQLITE_BUSY, sqlite3.SQLITE_LOCKED):
                raise SweepError(str(self.path), "is in use by another sweep") from cause
            if code == sqlite3.SQLITE_NOTADB:
                raise SweepError(str(self.path), "is not a store of gpusim sweep") from cause
            if code == sqlite3.SQLITE_CORRUPT:
                raise SweepError(str(self.path), f"is damaged: {cause}") from cause
            if code in (
                sqlite3.SQLITE_FULL,
                sqlite3.SQLITE_IOERR,
                sqlite3.SQLITE_READONLY,
                sqlite3.SQLITE_CANTOPEN,
                sqlite3.SQLITE_PERM,
            ):
                verb = "written" if self.write else "read"
                raise OutputError(str(self.path), f"cannot be {verb}: {cause}") from cause
            raise


def _column(name: str, kind: str, optional: bool) -> str:
    constraint = " PRIMARY KEY NOT NULL" if name == "key" else "" if optional else " NOT NULL"
    return f"{name} {_SQL_TYPES[kind]}{constraint}"


def _fits(value: object, kind: str) -> bool:
    """Return True if a value from SQLite has a column's type and, for numbers, range."""
    if kind == "str":
        return isinstance(value, str)
    if kind == "float":
        return isinstance(value, int | float) and 0 <= value <= MAX_INTEGER
    return isinstance(value, int) and 0 <= value <= (1 if kind == "bool" else MAX_INTEGER)


def _text(data: bytes) -> str:
    return data.decode("utf-8", "replace")


def _short(value: object) -> str:
    return "nothing" if value is None else f"{str(value)[:40]!r}"


_JOURNAL_MAGIC: Final = bytes.fromhex("d9d505f920a163d7")
#: Offset of the write and read versions in a SQLite header, and the version of files with a write-ahead log.
_LOG_AT, _LOG_VERSION = 18, 2
#: Columns that are set exactly for points without an error.
_OF_GOOD_POINTS: Final = tuple(name for name, (_, optional) in column_types().items() if optional and name != "error")
_WORDS: Final = {"str": "text", "int": "whole number", "bool": "0 or 1", "float": "number"}
_TABLE: Final = f"CREATE TABLE points ({', '.join(_column(name, *kind) for name, kind in column_types().items())})"
#: Complete schema of a store: type, name, table and statement.
_SCHEMA: Final = [
    ("table", "points", "points", _TABLE),
    ("index", "sqlite_autoindex_points_1", "points", None),
]
