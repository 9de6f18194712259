"""Nsight Systems: the SQLite file of `nsys export --type sqlite`, schemas of 2021 to 2026.

Tables are read by the columns that the file has, since each release adds some and trimmed files lack others.
Enumeration numbers change between releases, so their names come from the file's own `ENUM_` tables. Times are integer
nanoseconds.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter, deque
from collections.abc import Collection, Iterable
from heapq import heappop, heappush
from pathlib import Path
from typing import Any, Final

from gpusim.formats.trace import TaskKind
from gpusim.importers.model import Activity, GpuFacts, ImportFileError, Profile, Range, Wait, dim3, lane_number, whole
from gpusim.importers.sqlite_tables import Tables, opened
from gpusim.importers.stream_json import Progress
from gpusim.io.file_limits import MAX_PARTS, MAX_STEP_NS
from gpusim.text import shortened

TABLES: Final[dict[str, TaskKind]] = {
    "CUPTI_ACTIVITY_KIND_KERNEL": "kernel",
    "CUPTI_ACTIVITY_KIND_MEMCPY": "memcpy",
    "CUPTI_ACTIVITY_KIND_MEMSET": "memset",
}
#: Longest kernel or range name that is kept.
MAX_NAME: Final = 1024
#: Approximate share of the reading time that GPU records take.
_RECORDS: Final = 0.4
#: Most ranges, and names of ranges, that are kept.
MAX_RANGES: Final = MAX_PARTS
#: Longest chain of graph nodes cloned from each other.
MAX_CLONES: Final = 16
_PUSH_POP, _START_END = 59, 60
#: Kinds of copies by the end of their names in `ENUM_CUDA_MEMCPY_OPER`, and by number for files without that table.
_COPIES: Final = {
    1: "HtoD", 2: "DtoH", 3: "HtoA", 4: "AtoH", 5: "AtoA", 6: "AtoD", 7: "DtoA", 8: "DtoD", 9: "HtoH", 10: "PtoP",
    11: "unified HtoD", 12: "unified DtoH", 13: "unified DtoD",
}  # fmt: skip
#: Kinds of waits by a part of their names, in CUPTI and in the tables' labels, and by CUPTI's numbers.
_EVENT, _STREAM_WAIT, _STREAM, _CONTEXT = "event", "stream waits", "stream", "context"
_SYNC_NAMES: Final = (
    ("STREAM_WAIT", _STREAM_WAIT),
    ("STREAM WAIT", _STREAM_WAIT),
    ("EVENT", _EVENT),
    ("STREAM", _STREAM),
    ("CONTEXT", _CONTEXT),
    ("DEVICE", _CONTEXT),
)
_SYNC_NUMBERS: Final = {1: _EVENT, 2: _STREAM_WAIT, 3: _STREAM, 4: _CONTEXT}
#: CUPTI's number for no stream or event.
_NONE: Final = (-1, 2**32 - 1, 2**64 - 1)


def read_nsys(source: Path | bytes, name: str, report: Progress | None = None) -> Profile:
    """Read the profile in an Nsight Systems export, a file or data in memory. Raises `ImportFileError`."""
    with opened(source, name) as tables:
        return _profile(tables, report or (lambda share: None))


def _profile(base: Tables, report: Progress) -> Profile:
    profile = Profile(file=base.name, format="nsys-sqlite", writer="Nsight Systems")
    if not any(
        table.startswith(("CUPTI_ACTIVITY", "TARGET_INFO", "NVTX_EVENTS", "META_DATA")) for table in base.columns
    ):
        raise ImportFileError(
            base.name, "is an SQLite file without a table of Nsight Systems: write one with `nsys export --type sqlite`"
        )
    if "CUPTI_ACTIVITY_KIND_CONCURRENT_KERNEL" in base.columns:
        raise ImportFileError(base.name, "is an SQLite file of nvprof, which is not read: profile with `nsys profile`")
    meta = base.pairs("META_DATA_EXPORT", "name", "value") or base.pairs("EXPORT_META_DATA", "name", "value")
    version, schema = meta.get("EXPORT_PRODUCT_VERSION"), meta.get("EXPORT_SCHEMA_VERSION")
    if isinstance(version, str):
        profile.writer += f" {version}"
    if isinstance(schema, str):
        profile.writer += f" (schema {schema})"
    odd = _activities(base, profile)
    steps = (_gpus, _launches, _ranges, _waits, _graph_ranges)
    for number, read in enumerate(steps):
        report(_RECORDS + (1 - _RECORDS) * number / len(steps))
        read(base, profile)
    _find(base, profile, odd)
    profile.activities.sort(key=lambda activity: (activity.start_ns, activity.lane))
    return profile


def _texts(base: Tables, wanted: Collection[Any]) -> dict[Any, str]:
    """Return the texts of these numbers in `StringIds`."""
    if not wanted:
        return {}
    rows = base.rows("StringIds", ("id", "value"))
    return {key: shortened(text, MAX_NAME) for key, text in rows if key in wanted and isinstance(text, str)}


def _activities(base: Tables, profile: Profile) -> int:
    """Read the GPU records, and return the number of those with invalid times."""
    wanted = (
        "start",
        "end",
        "deviceId",
        "streamId",
        "correlationId",
        "globalPid",
        "demangledName",
        "shortName",
        "mangledName",
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
    copies = _copies(base)
    names: list[tuple[Any, ...]] = []
    sizes: dict[Any, tuple[int, int, int] | None] = {}
    odd = 0
    for table, kind in TABLES.items():
        for row in base.rows(table, wanted):
            start, end = row[0], row[1]
            if not isinstance(start, int) or not isinstance(end, int) or end - start > MAX_STEP_NS:
                odd += 1
                continue
            odd += end < start
            if len(profile.activities) >= MAX_PARTS:
                raise ImportFileError(base.name, f"has more than {MAX_PARTS} GPU records")
            registers = whole(row[15])
            profile.activities.append(
                Activity(
                    kind=kind,
                    name={"memcpy": f"Memcpy {copies.get(row[22], 'other')}", "memset": "Memset"}.get(kind, ""),
                    device=lane_number(row[2]),
                    stream=lane_number(row[3]),
                    start_ns=start,
                    dur_ns=max(0, end - start),
                    correlation=whole(row[4]),
                    process=_process(row[5]),
                    grid=sizes.setdefault(row[9:12], dim3(row[9:12])),
                    block=sizes.setdefault(row[12:15], dim3(row[12:15])),
                    cluster=sizes.setdefault(row[18:21], dim3(row[18:21])),
                    regs_per_thread=registers if registers >= 0 else None,
                    smem_static_bytes=max(0, whole(row[16], 0)),
                    smem_dynamic_bytes=max(0, whole(row[17], 0)),
                    bytes=max(0, whole(row[21], 0)),
                    graph_node=max(0, whole(row[23], 0)),
                )
            )
            if kind == "kernel":
                names.append(row[6:9])
    texts = _texts(base, {number for some in names for number in some if isinstance(number, int)})
    kernels = (activity for activity in profile.activities if activity.kind == "kernel")
    for activity, some in zip(kernels, names, strict=True):
        activity.name = _first_text(some, texts)
    return odd


def _first_text(some: Iterable[Any], texts: dict[Any, str]) -> str:
    """Return the first non-empty text among texts and numbers of texts; empty without any."""
    for value in some:
        if isinstance(value, str) and value:
            return shortened(value, MAX_NAME)
        if text := texts.get(value):
            return text
    return ""


def _copies(base: Tables) -> dict[Any, str]:
    """Return the kinds of copies by number."""
    known = {name.rpartition(" ")[2].upper(): name for name in _COPIES.values() if " " not in name}
    kinds = dict(_COPIES)
    for number, name in base.rows("ENUM_CUDA_MEMCPY_OPER", ("id", "name"), 1000):
        if isinstance(name, str):
            end = name.rpartition("_")[2].upper()
            kinds[number] = ("unified " if "UVM" in name.upper() else "") + known.get(end, "other")
    return kinds


def _process(serialized: Any) -> int:
    """Return the process in a `globalPid` or `globalTid`, which has the machine's number above it; 0 where there is
    none.
    """
    return whole(serialized, 0) >> 24


def _gpus(base: Tables, profile: Profile) -> None:
    """Add GPUs by CUDA's device number, where the file has the mapping."""
    rows = {}
    for table in base.columns:
        if table.startswith("TARGET_INFO") and table.endswith("GPU"):
            for row in base.rows(table, ("id", "name", "smCount", "clockRate", "cuDevice"), 1000):
                clock = whole(row[3], 0)
                mhz = clock // 1_000_000 if clock > 10_000_000 else clock // 1000
                name = row[1] if isinstance(row[1], str) else ""
                rows[whole(row[0], 0)] = whole(row[4]), GpuFacts(name, max(0, whole(row[2], 0)), max(0, mhz))
    for gpu, number in base.rows("TARGET_INFO_CUDA_DEVICE", ("gpuId", "cudaId"), 100_000):
        if whole(gpu) in rows and whole(number) >= 0:
            profile.gpus.setdefault(whole(number), rows[whole(gpu)][1])
    for number, facts in rows.values():
        if number >= 0:
            profile.gpus.setdefault(number, facts)
    for number, (_, facts) in rows.items():
        profile.gpus.setdefault(number, facts)
    if len({facts.name for _, facts in rows.values()}) == 1:  # all GPUs have one name
        for device in profile.devices():
            profile.gpus.setdefault(device, next(iter(rows.values()))[1])


def _launches(base: Tables, profile: Profile) -> None:
    """Add the launching call of each record: same correlation, and same process where the file has both."""
    shared = Counter((a.process, a.correlation) for a in profile.activities)
    begun: dict[tuple[int, int], tuple[int, int]] = {}
    wanted = ("start", "end", "globalTid", "correlationId")
    for start, end, thread, correlation in base.rows("CUPTI_ACTIVITY_KIND_RUNTIME", wanted):
        number = whole(correlation)
        if not isinstance(start, int):
            continue
        for process in (_process(thread), 0):
            if (process, number) in shared:
                begun.setdefault((process, number), (start, end if isinstance(end, int) else start))
    for activity in profile.activities:
        call = begun.get((activity.process, activity.correlation))
        if call is not None:
            activity.launch_ns, activity.launch_end_ns = call
            activity.shared_launch = shared[activity.process, activity.correlation] > 1


def _ranges(base: Tables, profile: Profile) -> None:
    """Add NVTX ranges; in files without event types, every range with an end."""
    wanted = ("start", "end", "eventType", "text", "textId", "globalTid")
    ranges: list[tuple[Any, ...]] = []
    for row in base.rows("NVTX_EVENTS", wanted, MAX_RANGES):
        start, end, kind = row[:3]
        if kind in (_PUSH_POP, _START_END, None) and isinstance(start, int) and isinstance(end, int) and start <= end:
            ranges.append((start, end, *row[3:]))
    texts = _texts(base, {row[3] for row in ranges if isinstance(row[3], int)})
    for start, end, text, text_id, thread in ranges:
        label = _first_text((text, text_id), texts)
        if label:
            profile.ranges.append(Range(label, start, end, whole(thread, 0)))


def _waits(base: Tables, profile: Profile) -> None:
    """Add waits of streams for events, and of the host for events, streams and the GPU.

    A wait names the record of its event by `eventSyncId`, in files that have it; otherwise it is the event's last one.
    """
    records: dict[tuple[int, int], list[tuple[int, int]]] = {}
    exact: dict[tuple[int, int], tuple[int, int]] = {}
    for event, sync, stream, correlation, process in base.rows(
        "CUPTI_ACTIVITY_KIND_CUDA_EVENT", ("eventId", "eventSyncId", "streamId", "correlationId", "globalPid")
    ):
        record = whole(correlation), whole(stream)
        records.setdefault((_process(process), whole(event)), []).append(record)
        if whole(sync) > 0 and whole(sync) not in _NONE:
            exact[_process(process), whole(sync)] = record
    for some in records.values():
        some.sort()
    kinds = _sync_kinds(base)
    wanted = ("syncType", "eventId", "eventSyncId", "streamId", "correlationId", "globalPid", "deprecatedSyncType")
    for row in base.rows("CUPTI_ACTIVITY_KIND_SYNCHRONIZATION", wanted):
        number, owner = whole(row[4]), _process(row[5])
        kind = kinds.get(row[0], kinds.get(row[6], ""))
        if kind in (_EVENT, _STREAM_WAIT):
            awaited = exact.get((owner, whole(row[2]))) or _last_before(records.get((owner, whole(row[1])), []), number)
            if awaited is not None:
                waiting = whole(row[3]) if kind == _STREAM_WAIT else None
                profile.waits.append(Wait(number, awaited[0], awaited[1], waiting, owner))
        elif kind == _STREAM and whole(row[3]) not in _NONE:
            profile.waits.append(Wait(number, number, whole(row[3]), None, owner))
        elif kind in (_STREAM, _CONTEXT):
            profile.waits.append(Wait(number, number, None, None, owner))
    profile.has_waits = bool(records)


def _last_before(records: list[tuple[int, int]], number: int) -> tuple[int, int] | None:
    place = bisect_left(records, (number, -1)) - 1
    return records[place] if place >= 0 else None


def _sync_kinds(base: Tables) -> dict[Any, str]:
    """Return the kinds of waits by number."""
    kinds: dict[Any, str] = {}
    for table in ("ENUM_CUPTI_SYNC_TYPE", "ENUM_CUDA_SYNC_TYPE"):
        for number, name, label in base.rows(table, ("id", "name", "label"), 1000):
            text = f"{name} {label}".upper().partition("SYNCHRONIZATION_TYPE_")
            kind = next((kind for part, kind in _SYNC_NAMES if part in (text[2] or text[0])), None)
            if kind is not None:
                kinds[number] = kind
    return kinds or dict(_SYNC_NUMBERS)


def _graph_ranges(base: Tables, profile: Profile) -> None:
    """Give kernels of a CUDA graph the innermost NVTX range that was open when their node was captured."""
    wanted = ("graphNodeId", "originalGraphNodeId", "start", "globalTid")
    captured: dict[int, tuple[int, int, int]] = {}
    for table in ("CUDA_GRAPH_NODE_EVENTS", "CUDA_GRAPH_EVENTS"):
        for node, original, start, thread in base.rows(table, wanted):
            if whole(node, 0) > 0:
                captured.setdefault(whole(node), (whole(original, 0), whole(start), whole(thread, 0)))
    spans: dict[int, list[Range]] = {}
    for span in profile.ranges:
        spans.setdefault(span.thread, []).append(span)
    wanted_at: dict[int, list[tuple[int, int]]] = {}
    """Capture time and number of each node, by thread."""
    for node in {activity.graph_node for activity in profile.activities} & captured.keys():
        at, steps = node, 0
        while captured[at][0] in captured and steps < MAX_CLONES:
            at, steps = captured[at][0], steps + 1
        _, time_ns, thread = captured[at]
        wanted_at.setdefault(thread, []).append((time_ns, node))
    module_of: dict[int, str] = {}
    for thread, times in wanted_at.items():
        module_of.update(_innermost(spans.get(thread, []), times))
    for activity in profile.activities:
        activity.module = module_of.get(activity.graph_node, activity.module)


def _innermost(spans: Iterable[Range], times: list[tuple[int, int]]) -> dict[int, str]:
    """Return, for each numbered time, the name of the span around it that began last; of equals, the first."""
    waiting = deque(sorted(enumerate(spans), key=lambda item: item[1].start_ns))
    around: list[tuple[int, int, Range]] = []
    names: dict[int, str] = {}
    for time_ns, number in sorted(times):
        while waiting and waiting[0][1].start_ns <= time_ns:
            place, span = waiting.popleft()
            heappush(around, (-span.start_ns, place, span))
        while around and around[0][2].end_ns < time_ns:
            heappop(around)
        names[number] = around[0][2].name if around else ""
    return names


def _find(base: Tables, profile: Profile, odd: int) -> None:
    kernels = profile.kernels()
    whole_graphs = sum(1 for _ in base.rows("CUPTI_ACTIVITY_KIND_GRAPH_TRACE", ("start",), MAX_PARTS))
    if whole_graphs:
        text = f"{whole_graphs} launches of CUDA graphs are recorded as a whole, without kernels"
        profile.note("graphs-as-a-whole", text, "profile with `nsys profile --cuda-graph-trace=node`")
    if base.left_out:
        text = f"{len(base.left_out)} views, triggers or virtual tables are in the file and are not used"
        profile.note("views-left-out", text)
    if odd:
        text = f"{odd} records have no end, or end before they start: left out, or without a duration"
        profile.note("odd-times", text, "profile again, and end the program before nsys stops")
    if not profile.activities:
        return
    if kernels and "registersPerThread" not in base.columns.get("CUPTI_ACTIVITY_KIND_KERNEL", []):
        text = "the table of kernels has no registers and no shared memory: it was trimmed"
        profile.note("no-registers", text, "export the .nsys-rep again with `nsys export --type sqlite`")
    nameless = sum(not kernel.name for kernel in kernels)
    if nameless:
        text = f"{nameless} of {len(kernels)} kernels have no name: StringIds is missing or short"
        profile.note("no-names", text, "export the .nsys-rep again with `nsys export --type sqlite`")
    missing = [device for device in profile.devices() if not profile.gpus.get(device, GpuFacts()).name]
    if missing:
        devices = shortened(", ".join(map(str, missing)))
        text = f"the file does not name the GPU (device {devices}): TARGET_INFO_GPU is missing or short"
        profile.note("no-gpu-properties", text, "export the .nsys-rep again, or name the GPU with --gpu")
    graph = [activity for activity in kernels if activity.shared_launch or activity.graph_node]
    if graph:
        text = f"{len(graph)} kernels ran from CUDA graphs, and have no launch of their own"
        profile.note("shared-correlation", text, "add a dump of the graph for its edges")
    unlaunched = sum(activity.launch_ns is None for activity in kernels)
    if unlaunched:
        text = f"{unlaunched} of {len(kernels)} kernels have no launch in the file"
        profile.note("no-launches", text, "profile from before the step begins")
