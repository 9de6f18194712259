"""Small synthetic files of each format."""

from __future__ import annotations

import gzip
import json
import sqlite3
import tarfile
from contextlib import closing
from pathlib import Path
from typing import Any

SAMPLES = Path(__file__).parents[1] / "data" / "importers"
PROFILES = sorted(path for path in SAMPLES.iterdir() if path.name.startswith(("hta_", "tl_", "nsysai_")))
WITHOUT_TIMES = sorted(path for path in SAMPLES.iterdir() if path.name.startswith(("param_", "chakra_")))


def kernel(name: str, ts: float, dur: float, stream: int = 7, correlation: int = 1, **args: Any) -> dict[str, Any]:
    """Make a kernel event of Kineto."""
    fields = {"device": 0, "stream": stream, "correlation": correlation, "grid": [8, 1, 1], "block": [64, 1, 1]}
    fields |= {"registers per thread": 32, "shared memory": 0, **args}
    return {"ph": "X", "cat": "kernel", "name": name, "pid": 0, "tid": stream, "ts": ts, "dur": dur, "args": fields}


def call(name: str, ts: float, dur: float, correlation: int) -> dict[str, Any]:
    """Make a launch on the host."""
    args = {"correlation": correlation}
    return {"ph": "X", "cat": "cuda_runtime", "name": name, "pid": 9, "tid": 9, "ts": ts, "dur": dur, "args": args}


def operator(name: str, ts: float, dur: float, record: int | None = None) -> dict[str, Any]:
    """Make an operator on the host."""
    args = {} if record is None else {"Record function id": record}
    return {"ph": "X", "cat": "cpu_op", "name": name, "pid": 9, "tid": 9, "ts": ts, "dur": dur, "args": args}


def sync(kind: str, correlation: int, **args: Any) -> dict[str, Any]:
    """Make a recorded wait."""
    fields = {"cuda_sync_kind": kind, "correlation": correlation, "device": 0, **args}
    return {"ph": "X", "cat": "cuda_sync", "name": kind, "pid": 0, "tid": 7, "ts": 0, "dur": 1, "args": fields}


def write_kineto(path: Path, events: list[dict[str, Any]], **top: Any) -> Path:
    """Write a Kineto file of an A100."""
    properties = [{"id": 0, "name": "NVIDIA A100-SXM4-40GB", "numSms": 108}]
    document = {"schemaVersion": 1, "deviceProperties": properties, "traceEvents": events, **top}
    data = json.dumps(document).encode()
    path.write_bytes(gzip.compress(data) if path.suffix == ".gz" else data)
    return path


def node(
    number: int, name: str, takes: list[int], makes: list[int], schema: str = "", record: int = -1
) -> dict[str, Any]:
    """Make a node of an execution trace whose tensors have the storage ids 100 + their own."""

    def side(tensors: list[int]) -> dict[str, Any]:
        return {"values": [[t, 100 + t, 0, 4, 4, "cuda:0"] for t in tensors], "shapes": [], "types": [], "strides": []}

    attributes = {"rf_id": record, "op_schema": schema}
    return {
        "id": number,
        "name": name,
        "ctrl_deps": 1,
        "inputs": side(takes),
        "outputs": side(makes),
        "attrs": [{"name": key, "type": "x", "value": value} for key, value in attributes.items()],
    }


def write_execution_trace(path: Path, nodes: list[dict[str, Any]]) -> Path:
    """Write an execution trace of the current schema."""
    path.write_text(json.dumps({"schema": "1.1.1-chakra.0.0.4", "pid": 1, "time": "", "start_ts": 0, "nodes": nodes}))
    return path


def write_nsys(path: Path, kernels: list[tuple[Any, ...]], *more: str) -> Path:
    """Write an export of Nsight Systems with kernels (start, end, device, stream, correlation) and further
    statements.
    """
    with closing(sqlite3.connect(path)) as base:
        base.execute("CREATE TABLE META_DATA_EXPORT (name TEXT, value TEXT)")
        base.execute("INSERT INTO META_DATA_EXPORT VALUES ('EXPORT_SCHEMA_VERSION', '3.13.2')")
        base.execute("CREATE TABLE StringIds (id INTEGER PRIMARY KEY, value TEXT)")
        base.execute("INSERT INTO StringIds VALUES (1, 'gemm'), (2, 'step')")
        columns = "start INT, end INT, deviceId INT, streamId INT, correlationId INT, demangledName INT"
        base.execute(f"CREATE TABLE CUPTI_ACTIVITY_KIND_KERNEL ({columns})")
        base.executemany("INSERT INTO CUPTI_ACTIVITY_KIND_KERNEL VALUES (?, ?, ?, ?, ?, 1)", kernels)
        for statement in more:
            base.execute(statement)
        base.commit()
    return path


def write_tar(path: Path, members: dict[str, bytes]) -> Path:
    """Write a gzipped tar archive."""
    import io

    with tarfile.open(path, "w:gz") as archive:
        for name, data in members.items():
            info = tarfile.TarInfo(name)
            info.size = len(data)
            archive.addfile(info, io.BytesIO(data))
    return path


def write_joined(folder: Path, ids: bool) -> tuple[str, str]:
    """Write profile and execution trace of a diamond on one stream.

    Operator a makes tensor 1; b and c read it and make 2 and 3; d reads those.
    """
    names = ["aten::a", "aten::b", "aten::c", "aten::d"]
    tensors = [([0], [1]), ([1], [2]), ([1], [3]), ([2, 3], [4])]
    events = []
    for number, name in enumerate(names):
        ts = 10 * number
        events += [operator(name, ts, 8, number + 40 if ids else None), call("cudaLaunchKernel", ts + 2, 2, number + 1)]
        events += [kernel(name[-1], ts + 100, 9, 7, number + 1)]
    nodes = [node(n + 10, names[n], *tensors[n], record=n + 40 if ids else n) for n in range(4)]
    profile = write_kineto(folder / "k.json", events)
    return str(profile), str(write_execution_trace(folder / "et.json", nodes))
