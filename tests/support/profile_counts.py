"""Kernels, streams and busy time of a profile, counted from its JSON or SQLite with the standard library.

Independent of gpusim: the reference for `gpusim doctor`. Exact, in fractions of a nanosecond.
"""

from __future__ import annotations

import gzip
import json
import sqlite3
import tarfile
import zipfile
from collections.abc import Iterable, Iterator
from contextlib import closing
from dataclasses import dataclass
from fractions import Fraction
from pathlib import Path
from typing import Any

Span = tuple[Fraction, Fraction]
Kernel = tuple[object, object, Span]
"""Device, stream, start and end in ns."""


@dataclass(frozen=True)
class Counts:
    """Counts of a file, over all ranks and devices."""

    kernels: int
    streams: int
    busy_ns: Fraction
    """Time with at least one kernel, summed over devices."""
    concurrent_ns: Fraction
    """Time with at least two kernels on one device."""


def counts(path: Path) -> Counts:
    """Count a Kineto file (plain, gzip, tar or zip) or an SQLite file of Nsight Systems."""
    parts = [_sqlite_kernels(path)] if path.suffix == ".sqlite" else [_kineto_kernels(text) for text in _texts(path)]
    kernels = streams = 0
    busy_ns = concurrent_ns = Fraction(0)
    for part in parts:
        kernels += len(part)
        streams += len({kernel[:2] for kernel in part})
        for device in {kernel[0] for kernel in part}:
            one_ns, two_ns = _at_least([span for of, _, span in part if of == device])
            busy_ns, concurrent_ns = busy_ns + one_ns, concurrent_ns + two_ns
    return Counts(kernels, streams, busy_ns, concurrent_ns)


def _texts(path: Path) -> Iterator[bytes]:
    if zipfile.is_zipfile(path):
        with zipfile.ZipFile(path) as packed:
            yield from (_unzipped(packed.read(name)) for name in packed.namelist())
    elif tarfile.is_tarfile(path):
        with tarfile.open(path) as archive:
            for member in archive:
                content = archive.extractfile(member)
                if content is not None and not Path(member.name).name.startswith("._"):
                    yield _unzipped(content.read())
    else:
        yield _unzipped(path.read_bytes())


def _unzipped(data: bytes) -> bytes:
    return gzip.decompress(data) if data[:2] == b"\x1f\x8b" else data


def _kineto_kernels(text: bytes) -> list[Kernel]:
    document = json.loads(text, parse_float=Fraction)
    events: list[dict[str, Any]] = document if isinstance(document, list) else document["traceEvents"]
    kernels: list[Kernel] = []
    for event in events:
        if event.get("ph") == "X" and str(event.get("cat")).lower() == "kernel":
            begin, length = Fraction(event["ts"]) * 1000, max(Fraction(0), Fraction(event["dur"]) * 1000)
            args = event.get("args", {})
            device, stream = args.get("device", event.get("pid")), args.get("stream", event.get("tid"))
            kernels.append((str(device), str(stream), (begin, begin + length)))
    return kernels


def _sqlite_kernels(path: Path) -> list[Kernel]:
    with closing(sqlite3.connect(f"file:{path}?mode=ro", uri=True)) as base:
        there = {row[1] for row in base.execute("PRAGMA table_info(CUPTI_ACTIVITY_KIND_KERNEL)")}
        process = "globalPid" if "globalPid" in there else "0"
        rows = base.execute(
            f"SELECT start, end, deviceId, streamId, {process} FROM CUPTI_ACTIVITY_KIND_KERNEL"
        ).fetchall()
    return [(row[2], (row[3], row[4]), (Fraction(row[0]), Fraction(row[1]))) for row in rows]


def _at_least(spans: Iterable[Span]) -> tuple[Fraction, Fraction]:
    """Return the time with at least one and with at least two spans: a sweep over their ends."""
    changes = sorted(change for begin, end in spans for change in ((begin, 1), (end, -1)))
    one_ns = two_ns = last_ns = Fraction(0)
    running = 0
    for time_ns, change in changes:
        one_ns += (time_ns - last_ns) * (running >= 1)
        two_ns += (time_ns - last_ns) * (running >= 2)
        running, last_ns = running + change, time_ns
    return one_ns, two_ns
