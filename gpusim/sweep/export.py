"""Export of a store as one table, Parquet or CSV."""

from __future__ import annotations

import importlib.util
import io
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Final

from gpusim.errors import OptionError, OutputError
from gpusim.io.files import check_writable, write_bytes
from gpusim.sweep.store import COLUMNS, PointRow, column_types
from gpusim.text import csv_cell, short_value

if TYPE_CHECKING:
    import pandas as pd

SUFFIXES: Final = (".parquet", ".csv")
MISSING_PYARROW: Final = "Parquet needs pyarrow, which is not installed (pip install 'gpusim[sweep]'); CSV does not"

_PANDAS_TYPES: Final = {"str": "string", "int": "Int64", "bool": "bool", "float": "Float64"}


def check_export(path: Path) -> None:
    """Check before the work that the export can be written. Raises `OptionError`, `OutputError`."""
    if path.suffix not in SUFFIXES:
        raise OptionError(f"--export {short_value(path)}: the name ends in {' or '.join(SUFFIXES)}")
    if path.suffix == ".parquet" and importlib.util.find_spec("pyarrow") is None:
        raise OutputError(str(path), MISSING_PYARROW)
    check_writable(path)


def rows_frame(rows: Sequence[PointRow]) -> pd.DataFrame:
    """Return a data frame of one row per point, with the store's columns; numbers of failed points are missing."""
    import pandas as pd

    frame = pd.DataFrame([asdict(row) for row in rows], columns=list(COLUMNS))
    return frame.astype({name: _PANDAS_TYPES[kind] for name, (kind, _) in column_types().items()})


def export_rows(rows: Sequence[PointRow], path: Path) -> None:
    """Write rows as Parquet or CSV, by suffix, atomically. Raises `OptionError`, `OutputError`."""
    check_export(path)
    frame = rows_frame(rows)
    buffer = io.BytesIO()
    if path.suffix == ".parquet":
        frame.to_parquet(buffer, engine="pyarrow", index=False)
    else:
        texts = [name for name, (kind, _) in column_types().items() if kind == "str"]
        frame[texts] = frame[texts].map(csv_cell, na_action="ignore")
        frame.to_csv(buffer, index=False)
    write_bytes(path, buffer.getvalue())
