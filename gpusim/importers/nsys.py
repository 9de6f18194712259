"""Nsight Systems: the SQLite file that `nsys export --type sqlite` writes, schemas of 2022 to 2026.

Only tables are read, by the columns that the file has: no view, trigger, virtual table or generated column is used,
and the file is opened read-only and immutable. Times are integer nanoseconds.
"""

from __future__ import annotations

import sqlite3
from bisect import bisect_left
from collections import Counter
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any, Final

from gpusim.file_limits import MAX_DOCUMENT_BYTES, MAX_PARTS, MAX_STEP_NS
from gpusim.importers.model import Activity, Finding, GpuFacts, ImportFileError, Profile, Range, Wait, dim3, whole
from gpusim.trace.schema import TaskKind
from gpusim.units import MIB, format_bytes

TABLES: Final[dict[str, TaskKind]] = {
    "CUPTI_ACTIVITY_KIND_KERNEL": "kernel",
    "CUPTI_ACTIVITY_KIND_MEMCPY": "memcpy",
    "CUPTI_ACTIVITY_KIND_MEMSET": "memset",
}
#: Longest text or row that is read.
MAX_VALUE_BYTES: Final = 16 * MIB
#: Rows of calls and ranges that are read.
MAX_ROWS: Final = 4 * MAX_PARTS
#: Instructions of SQLite's machine for one file: a full scan of the largest tables takes a tenth.
MAX_STEPS: Final = 2_000_000_000
_STEPS_AT_A_TIME: Final = 1_000_000
_PUSH_POP, _START_END = 59, 60
_COPIES: Final = {1: "HtoD", 2: "DtoH", 8: "DtoD", 10: "PtoP"}


class _Base:
    """The tables of a file, by name, with their ordinary columns."""

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
        """The rows of a table with these columns, None for those that it lacks; nothing without the table."""
        there = self.columns.get(table)
        if there is None:
            return
        picked = ", ".join(f'"{column}"' if column in there else "NULL" for column in wanted)
        by = f' ORDER BY "{order}"' if order in there else ""
        yield from self._run(f'SELECT {picked} FROM main."{table}"{by} LIMIT {limit + 1}')

    def pairs(self, table: str, key: str, value: str) -> dict[Any, Any]:
        """Two columns as a dict."""
        return dict(self.rows(table, (key, value)))

    def _run(self, text: str) -> Iterator[tuple[Any, ...]]:
        try:
            yield from self.connection.execute(text)
        except sqlite3.Error as cause:
            problem = "takes too long to read" if "interrupted" in str(cause) else f"is a damaged SQLite file: {cause}"
            raise ImportFileError(self.name, problem) from cause
        except (OverflowError, MemoryError) as cause:
            raise ImportFileError(self.name, f"is a damaged SQLite file: {cause}") from cause


def read_nsys(path: Path, name: str) -> Profile:
    """The profile in an export of Nsight Systems. Raises `ImportFileError`."""
    try:
        size = path.stat().st_size
        address = f"{path.resolve().as_uri()}?mode=ro&immutable=1"
    except (OSError, ValueError) as cause:
        raise ImportFileError(name, f"cannot be read: {getattr(cause, 'strerror', None) or cause}") from cause
    if size > MAX_DOCUMENT_BYTES:
        raise ImportFileError(name, f"is larger than {format_bytes(MAX_DOCUMENT_BYTES)}")
    try:
        connection = sqlite3.connect(address, uri=True, isolation_level=None)
    except sqlite3.Error as cause:
        raise ImportFileError(name, f"cannot be opened: {cause}") from cause
    with closing(connection):
        _lock_down(connection)
        return _profile(_Base(connection, name))


def _lock_down(connection: sqlite3.Connection) -> None:
    """Nothing in the file runs, and nothing in it takes more than its share of memory and time."""
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


def _profile(base: _Base) -> Profile:
    profile = Profile(file=base.name, format="nsys-sqlite", writer="Nsight Systems")
    if not any(
        table.startswith(("CUPTI_ACTIVITY", "TARGET_INFO", "NVTX_EVENTS", "META_DATA")) for table in base.columns
    ):
        raise ImportFileError(base.name, "is an SQLite file, and not one that `nsys export` writes: no table of its")
    meta = base.pairs("META_DATA_EXPORT", "name", "value") or base.pairs("EXPORT_META_DATA", "name", "value")
    version, schema = meta.get("EXPORT_PRODUCT_VERSION"), meta.get("EXPORT_SCHEMA_VERSION")
    if isinstance(version, str):
        profile.writer += f" {version}"
    if isinstance(schema, str):
        profile.writer += f" (schema {schema})"
    texts = base.pairs("StringIds", "id", "value")
    _activities(base, profile, texts)
    _gpus(base, profile)
    _launches(base, profile)
    _ranges(base, profile, texts)
    _waits(base, profile)
    _graph_ranges(base, profile)
    _find(base, profile)
    profile.activities.sort(key=lambda found: (found.start_ns, found.lane))
    return profile


def _activities(base: _Base, profile: Profile, texts: dict[Any, Any]) -> None:
    wanted = (
        "start",
        "end",
        "deviceId",
        "streamId",
        "correlationId",
        "globalPid",
        "demangledName",
        "shortName",
        "gridX",
        "gridY",
        "gridZ",
        "blockX",
        "blockY",
        "blockZ",
        "registersPerThread",
        "staticSharedMemory",
        "dynamicSharedMemory",
        "clusterX",
        "clusterY",
        "clusterZ",
        "bytes",
        "copyKind",
        "graphNodeId",
    )
    for table, kind in TABLES.items():
        for row in base.rows(table, wanted):
            start, end = whole(row[0]), whole(row[1])
            if start < 0 or end < start or end - start > MAX_STEP_NS:
                raise ImportFileError(base.name, f"a row of {table} has the times {row[0]!r} to {row[1]!r}")
            if len(profile.activities) >= MAX_PARTS:
                raise ImportFileError(base.name, f"has more than {MAX_PARTS} GPU records")
            text = texts.get(row[6]) or texts.get(row[7])
            if kind == "memcpy":
                text = f"Memcpy {_COPIES.get(row[21], 'other')}"
            elif kind == "memset":
                text = "Memset"
            registers = whole(row[14])
            profile.activities.append(
                Activity(
                    kind=kind,
                    name=text if isinstance(text, str) else "",
                    device=max(0, whole(row[2], 0)),
                    stream=max(0, whole(row[3], 0)),
                    start_ns=start,
                    dur_ns=end - start,
                    correlation=whole(row[4]),
                    process=whole(row[5], 0) >> 24,
                    grid=dim3(row[8:11]),
                    block=dim3(row[11:14]),
                    cluster=dim3(row[17:20]),
                    regs_per_thread=registers if registers >= 0 else None,
                    smem_static_bytes=max(0, whole(row[15], 0)),
                    smem_dynamic_bytes=max(0, whole(row[16], 0)),
                    bytes=max(0, whole(row[20], 0)),
                    graph_node=max(0, whole(row[22], 0)),
                )
            )


def _gpus(base: _Base, profile: Profile) -> None:
    cuda_numbers: dict[int, int] = {}
    for gpu, number in base.rows("TARGET_INFO_CUDA_DEVICE", ("gpuId", "cudaId")):
        cuda_numbers.setdefault(whole(gpu), whole(number))
    for row in base.rows("TARGET_INFO_GPU", ("id", "name", "smCount", "clockRate", "cuDevice")):
        number = whole(row[4])
        number = number if number >= 0 else cuda_numbers.get(whole(row[0]), whole(row[0], 0))
        clock = whole(row[3], 0)
        mhz = clock // 1_000_000 if clock > 10_000_000 else clock // 1000
        profile.gpus[number] = GpuFacts(
            row[1] if isinstance(row[1], str) else "", max(0, whole(row[2], 0)), max(0, mhz)
        )


def _launches(base: _Base, profile: Profile) -> None:
    """The call that launched each record: the same correlation, and the same process where the file has both."""
    shared = Counter((a.process, a.correlation) for a in profile.activities)
    begun: dict[tuple[int, int], tuple[int, int]] = {}
    wanted = ("start", "end", "globalTid", "correlationId")
    for start, end, thread, correlation in base.rows("CUPTI_ACTIVITY_KIND_RUNTIME", wanted):
        number, time_ns = whole(correlation), whole(start)
        for process in (whole(thread, 0) >> 24, 0):
            if (process, number) in shared:
                begun.setdefault((process, number), (time_ns, whole(end)))
    for activity in profile.activities:
        found = begun.get((activity.process, activity.correlation))
        if found is not None:
            activity.launch_ns, activity.launch_end_ns = found
            activity.shared_launch = shared[activity.process, activity.correlation] > 1


def _ranges(base: _Base, profile: Profile, texts: dict[Any, Any]) -> None:
    wanted = ("start", "end", "eventType", "text", "textId", "globalTid")
    for start, end, kind, text, text_id, thread in base.rows("NVTX_EVENTS", wanted):
        begin_ns, end_ns = whole(start), whole(end)
        label = text if isinstance(text, str) else texts.get(text_id)
        if kind in (_PUSH_POP, _START_END) and isinstance(label, str) and label and 0 <= begin_ns <= end_ns:
            profile.ranges.append(Range(label, begin_ns, end_ns, whole(thread, 0)))


def _waits(base: _Base, profile: Profile) -> None:
    """Waits of streams for events and of the host for streams; labels come from the file, whose numbers change."""
    labels = {
        whole(key): str(text)
        for table in ("ENUM_CUPTI_SYNC_TYPE", "ENUM_CUDA_SYNC_TYPE")
        for key, text in base.rows(table, ("id", "label"))
    }
    labels = labels or {1: "Event sync", 2: "Stream wait event sync", 3: "Stream sync", 4: "Context sync"}
    records: dict[tuple[int, int], list[tuple[int, int]]] = {}
    for event, stream, correlation, process in base.rows(
        "CUPTI_ACTIVITY_KIND_CUDA_EVENT", ("eventId", "streamId", "correlationId", "globalPid")
    ):
        records.setdefault((whole(process, 0) >> 24, whole(event)), []).append((whole(correlation), whole(stream)))
    for found in records.values():
        found.sort()
    wanted = ("syncType", "eventId", "streamId", "correlationId", "globalPid")
    for kind, event, stream, correlation, process in base.rows("CUPTI_ACTIVITY_KIND_SYNCHRONIZATION", wanted):
        label = labels.get(whole(kind), "").lower()
        number, owner = whole(correlation), whole(process, 0) >> 24
        if "event" in label:
            made = records.get((owner, whole(event)), [])
            place = bisect_left(made, (number, -1)) - 1
            if place < 0:
                continue
            recorded, source = made[place]
            waits = whole(stream) if "wait" in label else None
            profile.waits.append(Wait(number, recorded, source, waits, owner))
        elif "stream" in label:
            profile.waits.append(Wait(number, number, whole(stream), None, owner))
        elif "context" in label or "device" in label:
            profile.waits.append(Wait(number, number, None, None, owner))
    profile.has_waits = bool(records)


def _graph_ranges(base: _Base, profile: Profile) -> None:
    """Give kernels of a CUDA graph the innermost NVTX range that was open when their node was captured."""
    wanted = ("graphNodeId", "originalGraphNodeId", "start", "globalTid")
    made: dict[int, tuple[int, int, int]] = {}
    for table in ("CUDA_GRAPH_NODE_EVENTS", "CUDA_GRAPH_EVENTS"):
        for node, original, start, thread in base.rows(table, wanted):
            if whole(node, 0) > 0:
                made.setdefault(whole(node), (whole(original, 0), whole(start), whole(thread, 0)))
    spans: dict[int, list[Range]] = {}
    for span in profile.ranges:
        spans.setdefault(span.thread, []).append(span)
    found: dict[int, str] = {}
    for activity in profile.activities:
        node = activity.graph_node
        if not node or node not in made:
            continue
        if node not in found:
            seen: set[int] = set()
            at = node
            while made[at][0] in made and at not in seen:
                seen.add(at)
                at = made[at][0]
            _, time_ns, thread = made[at]
            inside = [span for span in spans.get(thread, ()) if span.start_ns <= time_ns <= span.end_ns]
            found[node] = max(inside, key=lambda span: span.start_ns).name if inside else ""
        activity.module = found[node]


def _find(base: _Base, profile: Profile) -> None:
    add = profile.findings.append
    kernels = profile.kernels()
    if base.left_out:
        add(
            Finding(
                "views-left-out",
                f"{len(base.left_out)} views, triggers or virtual tables are in the file and are not used",
            )
        )
    if not profile.activities:
        return
    there = base.columns.get("CUPTI_ACTIVITY_KIND_KERNEL", [])
    if kernels and "registersPerThread" not in there:
        add(
            Finding(
                "no-registers",
                "the table of kernels has no registers and no shared memory: it was trimmed",
                "export the .nsys-rep again with `nsys export --type sqlite`",
            )
        )
    missing = [device for device in profile.devices() if not profile.gpus.get(device, GpuFacts()).name]
    if missing:
        what = ", ".join(map(str, missing))
        add(
            Finding(
                "no-gpu-properties",
                f"the file does not name the GPU (device {what}): TARGET_INFO_GPU is missing or short",
                "export the .nsys-rep again, or name the GPU with --gpu",
            )
        )
    graph = [activity for activity in kernels if activity.shared_launch or activity.graph_node]
    if graph:
        add(
            Finding(
                "shared-correlation",
                f"{len(graph)} kernels ran from CUDA graphs, and have no launch of their own",
                "add a dump of the graph for its edges",
            )
        )
    unlaunched = sum(activity.launch_ns < 0 for activity in kernels)
    if unlaunched:
        add(
            Finding(
                "no-launches",
                f"{unlaunched} of {len(kernels)} kernels have no launch in the file",
                "profile from before the step begins",
            )
        )
    if "CUPTI_ACTIVITY_KIND_GRAPH_TRACE" in base.columns:
        whole_graphs = sum(1 for _ in base.rows("CUPTI_ACTIVITY_KIND_GRAPH_TRACE", ("start",), 1000))
        if whole_graphs:
            add(
                Finding(
                    "graphs-as-a-whole",
                    f"{whole_graphs} launches of CUDA graphs are recorded as a whole, without kernels",
                    "profile with `nsys profile --cuda-graph-trace=node`",
                )
            )
