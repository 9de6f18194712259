"""SQLite files as releases of Nsight Systems write them: one small run, in the tables and columns of each schema.

The run: `first` on stream 7, then `second` on stream 13, which waits for an event after `first`; `third` beside it on
stream 7; a copy at the end. The host begins before the session's origin. All of it is in an NVTX range.
"""

from __future__ import annotations

import sqlite3
from contextlib import closing
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

PROCESS = 0x1000000000000 | 4242 << 24
THREAD = PROCESS | 4243
KERNELS = [("first", 1_000, 5_000, 7, 11), ("second", 8_000, 3_000, 13, 14), ("third", 9_000, 4_000, 7, 15)]
"""Name, start, duration, stream, correlation."""
COPY = (14_000, 500, 7, 16)
LAUNCHES = {11: -500, 12: 200, 13: 400, 14: 600, 15: 700, 16: 900}
"""Start of each call by correlation; 12 records the event, 13 waits for it."""
_GEOMETRY = "gridX INT, gridY INT, gridZ INT, blockX INT, blockY INT, blockZ INT"
_TRIMMED = (
    f"start INT, end INT, deviceId INT, streamId INT, correlationId INT, shortName INT, demangledName INT, {_GEOMETRY}"
)
_2022 = (
    "start INT, end INT, deviceId INT, contextId INT, streamId INT, correlationId INT, globalPid INT, "
    "demangledName INT, shortName INT, mangledName INT, launchType INT, cacheConfig INT, registersPerThread INT, "
    f"{_GEOMETRY}, staticSharedMemory INT, dynamicSharedMemory INT, localMemoryPerThread INT, localMemoryTotal INT, "
    "gridId INT, sharedMemoryExecuted INT, graphNodeId INT, sharedMemoryLimitConfig INT"
)
_2024 = f"{_2022}, greenContextId INT"
_2026 = (
    f"{_2024}, qmdBulkReleaseDone INT, qmdPreexitDone INT, qmdLastCtaDone INT, graphId INT, clusterX INT, "
    "clusterY INT, clusterZ INT, clusterSchedulingPolicy INT, maxPotentialClusterSize INT, maxActiveClusters INT, "
    "sharedMemoryRequestedPercentage INT"
)
_CUPTI = "CUPTI_ACTIVITY_SYNCHRONIZATION_TYPE_"


@dataclass(frozen=True)
class Schema:
    """Differences between releases."""

    version: str
    product: str
    kernels: str
    meta: str = "META_DATA_EXPORT"
    sync_types: tuple[tuple[int, str, str], ...] = ()
    """Rows of `ENUM_CUPTI_SYNC_TYPE`: number, name, label."""
    waits: int = 2
    """Stream number of the waiting stream."""
    sync: str = "syncType INT, eventId INT"
    events: str = "deviceId INT, contextId INT, streamId INT, correlationId INT, globalPid INT, eventId INT"
    nvtx_by_id: bool = True
    """Whether names of ranges are in StringIds."""
    gpu: str = "TARGET_INFO_GPU"
    gpu_columns: str = "id INT, name TEXT, smCount INT, clockRate INT, cuDevice INT"
    text_names: bool = False
    """Whether names of kernels are in the table itself."""
    host: bool = True
    """Whether it has calls, waits and ranges."""
    more: tuple[str, ...] = field(default=())
    """Further statements."""


def _types(*labels: str) -> tuple[tuple[int, str, str], ...]:
    names = ("EVENT_SYNCHRONIZE", "STREAM_WAIT_EVENT", "STREAM_SYNCHRONIZE", "CONTEXT_SYNCHRONIZE")
    return tuple(
        (place, _CUPTI + name, label) for place, (name, label) in enumerate(zip(names, labels, strict=True), 1)
    )


SCHEMAS = {
    # No version of the schema, texts in the ranges themselves, and no table of enumerations.
    "2021": Schema("", "2021.5.2", _2022, meta="EXPORT_META_DATA", nvtx_by_id=False, gpu="TARGET_INFO_CUDA_GPU"),
    "2022": Schema(
        "2.7.1", "2022.4.1", _2022, meta="EXPORT_META_DATA",
        sync_types=_types("Event sync", "Stream wait event sync", "Stream sync", "Context sync"),
        more=("CREATE TABLE CUDA_GRAPH_EVENTS (start INT, end INT, graphNodeId INT, originalGraphNodeId INT)",),
    ),
    "2023": Schema(
        "3.1.7", "2023.4.1", _2022, nvtx_by_id=False,
        sync_types=_types("Event sync", "Stream wait event sync", "Stream sync", "Context sync"),
    ),
    "2024": Schema(
        "3.13.2", "2024.5.1", _2024,
        sync_types=_types("Event sync", "Stream wait event sync", "Stream sync", "Context sync"),
        more=("CREATE TABLE CUDA_GRAPH_NODE_EVENTS (start INT, graphNodeId INT, originalGraphNodeId INT)",),
    ),
    # Other numbers than CUPTI's: only the names say what they are.
    "2025": Schema(
        "3.20.0", "2025.3.1", _2024, waits=20,
        sync="deprecatedSyncType INT, syncType INT, eventId INT, eventSyncId INT",
        events="timestamp INT, deviceId INT, contextId INT, streamId INT, correlationId INT, globalPid INT, "
        "eventId INT, eventSyncId INT",
        sync_types=((10, _CUPTI + "EVENT_SYNCHRONIZE", "Event sync"),
                    (20, _CUPTI + "STREAM_WAIT_EVENT", "Stream wait sync"),
                    (30, _CUPTI + "STREAM_SYNCHRONIZE", "Stream sync")),
    ),
    # No `event` in the label of a stream that waits.
    "2026": Schema(
        "3.25.0", "2026.2.1", _2026, sync="deprecatedSyncType INT, syncType INT, eventId INT, eventSyncId INT",
        events="timestamp INT, deviceId INT, contextId INT, streamId INT, correlationId INT, globalPid INT, "
        "eventId INT, eventSyncId INT",
        sync_types=_types("Event sync", "Stream wait sync", "Stream sync", "Context sync"),
        gpu_columns="vmId INT, id INT, name TEXT, smCount INT, clockRate INT",
        more=("CREATE TABLE TARGET_INFO_CUDA_DEVICE (gpuId INT, cudaId INT, pid INT)",
              "INSERT INTO TARGET_INFO_CUDA_DEVICE VALUES (0, 0, 4242)"),
    ),
    "trimmed": Schema("3.1.7", "2023.4.1", _TRIMMED, host=False, gpu_columns="id INT, name TEXT"),
    "named in place": Schema(
        "3.1.7", "2023.4.1", _TRIMMED.replace("Name INT", "Name TEXT"), text_names=True, host=False
    ),
}  # fmt: skip


def write_schema(path: Path, schema: Schema) -> Path:
    """Write the run in one schema."""
    numbers = {name: place for place, (name, *_) in enumerate(KERNELS, 1)} | {"the step": 90}
    with closing(sqlite3.connect(path)) as base:
        run = base.execute
        run(f"CREATE TABLE {schema.meta} (name TEXT, value TEXT)")
        _insert(base, schema.meta, name="EXPORT_PRODUCT_VERSION", value=schema.product)
        if schema.version:
            _insert(base, schema.meta, name="EXPORT_SCHEMA_VERSION", value=schema.version)
        run("CREATE TABLE StringIds (id INTEGER PRIMARY KEY, value TEXT NOT NULL)")
        if not schema.text_names:
            base.executemany("INSERT INTO StringIds VALUES (?, ?)", [(n, name) for name, n in numbers.items()])
        run(f"CREATE TABLE {schema.gpu} ({schema.gpu_columns})")
        _insert(base, schema.gpu, id=0, name="NVIDIA A100-SXM4-40GB", smCount=108, clockRate=1_410_000_000, cuDevice=0)
        run(f"CREATE TABLE CUPTI_ACTIVITY_KIND_KERNEL ({schema.kernels})")
        for name, start, dur, stream, correlation in KERNELS:
            text = name if schema.text_names else numbers[name]
            _insert(
                base, "CUPTI_ACTIVITY_KIND_KERNEL", start=start, end=start + dur, deviceId=0, contextId=1,
                streamId=stream, correlationId=correlation, globalPid=PROCESS, demangledName=text, shortName=text,
                registersPerThread=32, gridX=8, gridY=1, gridZ=1, blockX=64, blockY=1, blockZ=1,
                staticSharedMemory=0, dynamicSharedMemory=1024, graphNodeId=0, clusterX=1, clusterY=1, clusterZ=1,
            )  # fmt: skip
        start, dur, stream, correlation = COPY
        run("CREATE TABLE CUPTI_ACTIVITY_KIND_MEMCPY (start INT, end INT, deviceId INT, streamId INT,"
            " correlationId INT, globalPid INT, bytes INT, copyKind INT)")  # fmt: skip
        process = PROCESS if "globalPid" in schema.kernels else None
        _insert(
            base, "CUPTI_ACTIVITY_KIND_MEMCPY", start=start, end=start + dur, deviceId=0, streamId=stream,
            correlationId=correlation, globalPid=process, bytes=4096, copyKind=2,
        )  # fmt: skip
        if schema.host:
            _write_host(base, schema)
        for statement in schema.more:
            run(statement)
        base.commit()
    return path


def _write_host(base: sqlite3.Connection, schema: Schema) -> None:
    run = base.execute
    run("CREATE TABLE CUPTI_ACTIVITY_KIND_RUNTIME (start INT, end INT, eventClass INT, globalTid INT,"
        " correlationId INT, nameId INT, returnValue INT, callchainId INT)")  # fmt: skip
    for correlation, begin in LAUNCHES.items():
        _insert(
            base,
            "CUPTI_ACTIVITY_KIND_RUNTIME",
            start=begin,
            end=begin + 90,
            globalTid=THREAD,
            correlationId=correlation,
        )
    run(f"CREATE TABLE CUPTI_ACTIVITY_KIND_CUDA_EVENT ({schema.events})")
    _insert(
        base,
        "CUPTI_ACTIVITY_KIND_CUDA_EVENT",
        streamId=7,
        correlationId=12,
        globalPid=PROCESS,
        eventId=3,
        eventSyncId=5,
    )
    run("CREATE TABLE CUPTI_ACTIVITY_KIND_SYNCHRONIZATION (start INT, end INT, deviceId INT, contextId INT,"
        f" streamId INT, correlationId INT, globalPid INT, {schema.sync})")  # fmt: skip
    _insert(
        base, "CUPTI_ACTIVITY_KIND_SYNCHRONIZATION", start=400, end=490, streamId=13, correlationId=13,
        globalPid=PROCESS, syncType=schema.waits, eventId=3, eventSyncId=5,
    )  # fmt: skip
    if schema.sync_types:
        run("CREATE TABLE ENUM_CUPTI_SYNC_TYPE (id INTEGER PRIMARY KEY, name TEXT, label TEXT)")
        base.executemany("INSERT INTO ENUM_CUPTI_SYNC_TYPE VALUES (?, ?, ?)", schema.sync_types)
    run("CREATE TABLE NVTX_EVENTS (start INT, end INT, eventType INT, text TEXT, textId INT, globalTid INT)")
    text, number = (None, 90) if schema.nvtx_by_id else ("the step", None)
    _insert(base, "NVTX_EVENTS", start=-800, end=2_000, eventType=59, text=text, textId=number, globalTid=THREAD)


def _insert(base: sqlite3.Connection, table: str, **values: Any) -> None:
    """Insert a row of the values for which the table has columns."""
    there = {row[1] for row in base.execute(f"PRAGMA table_info({table})")}
    known = {name: value for name, value in values.items() if name in there}
    marks = ", ".join("?" * len(known))
    names = ", ".join(f'"{name}"' for name in known)
    base.execute(f"INSERT INTO {table} ({names}) VALUES ({marks})", list(known.values()))
