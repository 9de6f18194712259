"""Tables of an untrusted SQLite file, opened read-only and immutable, within limits.

Nothing in the file runs: views, triggers, virtual tables and generated columns are not used.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any, Final

from gpusim.importers.model import ImportFileError
from gpusim.io.file_limits import MAX_DOCUMENT_BYTES, MAX_PARTS
from gpusim.units import MIB, format_bytes

#: Longest text or row that is read.
MAX_VALUE_BYTES: Final = 16 * MIB
#: Most rows of calls and ranges that are read.
MAX_ROWS: Final = 4 * MAX_PARTS
#: Most SQLite instructions for one file: a full scan of the largest tables takes a tenth.
MAX_STEPS: Final = 2_000_000_000
_STEPS_AT_A_TIME: Final = 1_000_000


class Tables:
    """Tables of a file, by name, with their ordinary columns."""

    def __init__(self, connection: sqlite3.Connection, name: str) -> None:
        self.connection = connection
        self.name = name
        self.columns: dict[str, list[str]] = {}
        self.left_out: list[str] = []
        for kind, table, text in self._run("SELECT type, name, sql FROM main.sqlite_master LIMIT 5000"):
            if not isinstance(table, str) or not isinstance(text, str):
                continue
            if kind == "table" and text[:13].upper() == "CREATE TABLE " and table.isidentifier():
                # `table_info` has neither hidden nor generated columns.
                self.columns[table] = [str(row[1]) for row in self._run(f'PRAGMA main.table_info("{table}")')]
            elif kind in ("view", "trigger", "table"):
                self.left_out.append(table)

    def rows(
        self, table: str, wanted: tuple[str, ...], limit: int = MAX_ROWS, order: str = ""
    ) -> Iterator[tuple[Any, ...]]:
        """Yield the rows of a table with these columns, None for absent ones; nothing without the table."""
        there = self.columns.get(table)
        if there is None:
            return
        picked = ", ".join(f'"{column}"' if column in there else "NULL" for column in wanted)
        by = f' ORDER BY "{order}"' if order in there else ""
        yield from self._run(f'SELECT {picked} FROM main."{table}"{by} LIMIT {limit + 1}')

    def pairs(self, table: str, key: str, value: str) -> dict[Any, Any]:
        """Return two columns as a dict."""
        return dict(self.rows(table, (key, value)))

    def _run(self, text: str) -> Iterator[tuple[Any, ...]]:
        try:
            yield from self.connection.execute(text)
        except sqlite3.Error as cause:
            problem = "takes too long to read" if "interrupted" in str(cause) else f"is a damaged SQLite file: {cause}"
            raise ImportFileError(self.name, problem) from cause
        except UnicodeDecodeError as cause:  # a message about a damaged name
            raise ImportFileError(self.name, "is a damaged SQLite file: a name in it is not text") from cause
        except (OverflowError, MemoryError) as cause:
            raise ImportFileError(self.name, f"is a damaged SQLite file: {cause}") from cause


@contextmanager
def opened(source: Path | bytes, name: str) -> Iterator[Tables]:
    """Open the tables of a file, or of data in memory. Raises `ImportFileError`."""
    try:
        connection = _in_memory(source) if isinstance(source, bytes) else _on_disk(source, name)
    except (OSError, ValueError) as cause:
        raise ImportFileError(name, f"cannot be read: {getattr(cause, 'strerror', None) or cause}") from cause
    except sqlite3.Error as cause:
        raise ImportFileError(name, f"cannot be opened: {cause}") from cause
    with closing(connection):
        _lock_down(connection)
        yield Tables(connection, name)


def _on_disk(path: Path, name: str) -> sqlite3.Connection:
    if path.stat().st_size > MAX_DOCUMENT_BYTES:
        raise ImportFileError(name, f"is larger than {format_bytes(MAX_DOCUMENT_BYTES)}")
    return sqlite3.connect(f"{path.resolve().as_uri()}?mode=ro&immutable=1", uri=True, isolation_level=None)


def _in_memory(data: bytes) -> sqlite3.Connection:
    connection = sqlite3.connect(":memory:", isolation_level=None)
    # Two header bytes select a write-ahead log next to the file; there is none.
    connection.deserialize(data[:18] + b"\1\1" + data[20:])
    return connection


def _lock_down(connection: sqlite3.Connection) -> None:
    """Keep the file from running anything, and limit its memory and time."""
    for pragma in ("trusted_schema=OFF", "query_only=ON", "cell_size_check=ON", "mmap_size=0", "temp_store=MEMORY"):
        connection.execute(f"PRAGMA {pragma}")
    connection.setlimit(sqlite3.SQLITE_LIMIT_LENGTH, MAX_VALUE_BYTES)
    connection.setlimit(sqlite3.SQLITE_LIMIT_ATTACHED, 0)
    connection.text_factory = lambda data: data.decode("utf-8", "replace")
    left = [MAX_STEPS // _STEPS_AT_A_TIME]

    def tick() -> int:
        left[0] -= 1
        return left[0] < 0

    connection.set_progress_handler(tick, _STEPS_AT_A_TIME)
