"""Results of `gpusim explore` as CSV, one row per schedule."""

from __future__ import annotations

import csv
import io
from collections.abc import Sequence

from gpusim.search.explored import Row
from gpusim.text import csv_cell

CSV_FIELDS = ("trace", "hardware", "calibrated", "policy", "streams", "makespan_ns", "speedup", "peak_bytes")


def rows_csv(rows: Sequence[Row], trace: str, hardware: str, calibrated: bool) -> str:
    """Return the schedules in order of discovery, with a header; times in ns, sizes in bytes."""
    out = io.StringIO()
    writer = csv.writer(out, lineterminator="\n")
    writer.writerow(CSV_FIELDS)
    head = [trace, hardware, str(calibrated).lower()]
    for row in rows:
        cells = [*head, row.policy, row.streams, row.makespan_ns, row.speedup, row.peak_bytes]
        writer.writerow(map(csv_cell, cells))
    return out.getvalue()
