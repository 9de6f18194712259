"""Cases of files of other tools: Kineto, nsys, ncu, execution traces, Chakra, CUDA graphs, archives, and joins."""

from __future__ import annotations

import functools
import gzip
import io
import json
import random
import sqlite3
import tarfile
import tempfile
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tests.fuzz.cases import Case
from tests.fuzz.mutate import change, change_bytes, to_json
from tests.fuzz.values import NUMBERS, TEXTS, Raw
from tests.support import importer_files as made
from tests.support.importer_files import call, kernel, operator, sync
from tests.support.nsys_files import SCHEMAS, write_schema

Document = Any
Changed = tuple[str, bytes, str]
"""Name, bytes and description of the change."""


@functools.cache
def kineto() -> tuple[Document, ...]:
    """Profiles: one stream with operators; two with waits; steps; a graph; several GPUs."""
    chain: list[Document] = []
    for n in range(4):
        begin = 10.5 * n + 2
        chain += [operator(f"aten::{'abcd'[n]}", begin, 9, n), call("cudaLaunchKernel", begin + 2, 2, n)]
        chain += [kernel("gemm<float>(int)", begin + 50, 9.125, 7, n)]
    waits = [
        kernel("a", 10, 10, 7, 1), kernel("b", 30, 5, 8, 5), kernel("c", 12, 3, 8, 2),
        sync("Stream Wait Event", 4, stream=8, wait_on_stream=7, wait_on_cuda_event_record_corr_id=3),
        sync("Context Sync", 9),
    ]  # fmt: skip
    steps: list[Document] = []
    for n in range(3):
        mark = {"ph": "X", "cat": "user_annotation", "name": f"ProfilerStep#{n}", "pid": 9, "tid": 9}
        steps += [{**mark, "ts": 1000 * n, "dur": 900}, call("cudaLaunchKernel", 1000 * n + 10, 5, n + 1)]
        steps += [kernel("k", 1000 * n + 950, 20 + n, 7, n + 1)]
    graph = [call("cudaGraphLaunch", 1, 2, 5)]
    graph += [kernel("k", 10 * n + 10, 9, 7 + n % 2, 5, **{"graph node id": n + 90}) for n in range(4)]
    several = [kernel("k", 5.5 * n, 9, 7, n, device=n % 2) for n in range(4)]
    top = {"schemaVersion": 1, "deviceProperties": [{"id": 0, "name": "NVIDIA A100-SXM4-40GB", "numSms": 108}]}
    more = {"distributedInfo": {"rank": 1, "world_size": 2}, "otherData": {"producer": "gpusim"}}
    return tuple({**top, "traceEvents": events, **more} for events in (chain, waits, steps, graph, several))


@functools.cache
def execution_traces() -> tuple[Document, ...]:
    """Return execution traces of the first profile, in the current schema and the oldest."""
    nodes = [
        made.node(n + 2, f"aten::{'abcd'[n]}", [n], [n + 1], "aten::a(Tensor(a!) x) -> Tensor", n) for n in range(4)
    ]
    old = [
        {"id": n["id"], "name": n["name"], "parent": 1, "rf_id": place, "op_schema": "",
         "inputs": n["inputs"]["values"], "outputs": n["outputs"]["values"]}
        for place, n in enumerate(nodes)
    ]  # fmt: skip
    return ({"schema": "1.1.1-chakra.0.0.4", "pid": 1, "nodes": nodes}, {"schema": "1.0.1", "pid": 1, "nodes": old})


@functools.cache
def graphs() -> tuple[Document, ...]:
    nodes = [
        {"index": n, "node_type": "kernel", "tools_id": n + 90, "kernel_name": "k", "grid_dim": [8, 1, 1],
         "block_dim": [64, 1, 1], "dependencies": [n - 1] if n else []}
        for n in range(4)
    ]  # fmt: skip
    edges = [{"from": 0, "to": 1}, {"from": 0, "to": 2}]
    return ({"schema": "gpusim-cuda-graph/1", "nodes": nodes, "edges": edges}, {"exec_graph_id": 1, "nodes": nodes})


@functools.cache
def chakra_json() -> tuple[Document, ...]:
    rows = [
        {"Id": n, "Name": f"k{n}", "NodeType": 4, "runtime": 5 + n, "data_deps": [n - 1] if n else [],
         "is_cpu_op": n % 2}
        for n in range(6)
    ]  # fmt: skip
    return ({"workload_graph": rows},)


@functools.cache
def chakra() -> bytes:
    import gpusim
    from gpusim.api.other_tools import export
    from tests.fuzz.bases import as_trace, traces

    with tempfile.TemporaryDirectory() as folder:
        export(gpusim.simulate(as_trace(traces()[0]), "round_robin", streams=2), {"chakra": Path(folder) / "c.et"})
        return (Path(folder) / "c.et").read_bytes()


TABLES = (
    b"==PROF== Connected\nhello\n"
    b'"ID","Process ID","Kernel Name","Context","Stream","Block Size","Grid Size","Device","CC",'
    b'"gpu__time_duration.sum","dram__bytes.sum","lts__t_bytes.sum","sm__inst_executed.sum","launch__registers_per_thread"\n'
    b'"","","","","","","","","","ns","byte","byte","inst","register/thread"\n'
    b'"0","77","gemm<float>(int)","1","7","(64, 1, 1)","(8, 1, 1)","0","8.0","9,125","1,024","2,048","512","32"\n'
    b'"1","77","gemm<float>(int)","1","7","(64, 1, 1)","(8, 1, 1)","0","8.0","9.125","1024","n/a","512","32"\n',
    b'"ID";"Kernel Name";"Block Size";"Grid Size";"Metric Name";"Metric Unit";"Metric Value"\n'
    b'"0";"k";"(128 1 1)";"(4 1 1)";"gpu__time_duration.sum";"us";"1.117,344"\n'
    b'"0";"k";"(128 1 1)";"(4 1 1)";"launch__registers_per_thread";"";"32"\n'
    b'"1";"k";"(128 1 1)";"(4 1 1)";"Duration";"ms";"27,5"\n',
)


def _document(stem: str, documents: Callable[[], tuple[Document, ...]]) -> Callable[[random.Random], Changed]:
    def make(rng: random.Random) -> Changed:
        some = documents()
        document = json.loads(json.dumps(rng.choice(some)))
        said = []
        draw = rng.random()
        if draw > 0.15:
            for _ in range(rng.choice((1, 1, 2, 3))):
                said.append(change(document, rng.choice(some), rng))
        data = to_json(document)
        if draw < 0.2:
            data, how = change_bytes(data, "", rng)
            said.append(how)
        if rng.random() < 0.15:
            return f"{stem}.json.gz", gzip.compress(data, 1), "; ".join(said)
        return f"{stem}.json", data, "; ".join(said)

    return make


def _bytes(name: str, bases: Callable[[], tuple[bytes, ...]]) -> Callable[[random.Random], Changed]:
    def make(rng: random.Random) -> Changed:
        data, how = change_bytes(rng.choice(bases()), name, rng)
        return name, data, how

    return make


def ncu_file(rng: random.Random) -> Changed:
    """Make a table with mutated cells, or bytes."""
    data = rng.choice(TABLES)
    if rng.random() < 0.25:
        data, how = change_bytes(data, "t.csv", rng)
        return "t.csv", data, how
    lines = [line.split(b'"') for line in data.split(b"\n")]
    said = []
    for _ in range(rng.choice((1, 1, 2, 4))):
        cells = rng.choice(lines)
        at = rng.randrange(len(cells))
        cells[at] = _plain(rng).encode("utf-8", "replace")
        said.append(f"a cell {cells[at][:40]!r}")
    return "t.csv", b"\n".join(b'"'.join(cells) for cells in lines), "; ".join(said)


def _plain(rng: random.Random) -> str:
    value = rng.choice((*NUMBERS, *TEXTS))
    return value.text if isinstance(value, Raw) else str(value)


@functools.cache
def nsys_base(name: str) -> bytes:
    with tempfile.TemporaryDirectory() as folder:
        return write_schema(Path(folder) / "n.sqlite", SCHEMAS[name]).read_bytes()


def nsys_file(rng: random.Random) -> Changed:
    """Make an SQLite file with mutated values, columns, tables, or bytes."""
    data = nsys_base(rng.choice(tuple(SCHEMAS)))
    if rng.random() < 0.35:
        data, how = change_bytes(data, "n.sqlite", rng)
        return "n.sqlite", data, how
    said = []
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "n"
        path.write_bytes(data)
        base = sqlite3.connect(path, isolation_level=None)
        try:
            for _ in range(rng.choice((1, 1, 2, 3))):
                said.append(_changed_table(base, rng))
        finally:
            base.close()
        return "n.sqlite", path.read_bytes(), "; ".join(said)


def _changed_table(base: sqlite3.Connection, rng: random.Random) -> str:
    tables = [row[0] for row in base.execute("SELECT name FROM sqlite_master WHERE type = 'table'")]
    table = rng.choice(tables) if tables else "none"
    columns = [row[1] for row in base.execute(f'PRAGMA table_info("{table}")')] or ["none"]
    column = rng.choice(columns)
    number = rng.choice([n for n in NUMBERS if not isinstance(n, Raw) and (isinstance(n, float) or abs(n) < 2**63)])
    value = rng.choice((number, number, rng.choice(TEXTS).encode("utf-8", "replace").decode(), None, b"\x00\xff"))
    statement, values = rng.choice(
        (
            *[(f'UPDATE "{table}" SET "{column}" = ?', (value,))] * 5,
            *[(f'UPDATE "{table}" SET "{column}" = ? WHERE rowid = 1', (value,))] * 5,
            (f'UPDATE "{table}" SET "{column}" = -"{column}"', ()),
            (f'UPDATE "{table}" SET "{column}" = "{column}" * 1000003', ()),
            (f'ALTER TABLE "{table}" DROP COLUMN "{column}"', ()),
            (f'ALTER TABLE "{table}" RENAME COLUMN "{column}" TO other', ()),
            (f'ALTER TABLE "{table}" RENAME TO other', ()),
            (f'DROP TABLE "{table}"', ()),
            (f'DELETE FROM "{table}"', ()),
            (f'INSERT INTO "{table}" SELECT * FROM "{table}"', ()),
            (f'CREATE VIEW "v" AS SELECT * FROM "{table}"', ()),
            (f'CREATE TRIGGER t AFTER INSERT ON "{table}" BEGIN DELETE FROM "{table}"; END', ()),
            ("CREATE TABLE CUPTI_ACTIVITY_KIND_GRAPH_TRACE (start INT, end INT)", ()),
            ("PRAGMA user_version = -1", ()),
            ("PRAGMA journal_mode = WAL", ()),
            ("PRAGMA encoding = 'UTF-16'", ()),
        )
    )
    try:
        base.execute(statement, values)
    except (sqlite3.Error, UnicodeEncodeError, OverflowError):
        statement += ": not possible"
    return f"{statement} {values!r}"[:160]


def archive_file(rng: random.Random) -> Changed:
    """Make a tar or zip archive of mutated files, some of them mutated as a whole."""
    members = [rng.choice(PLAIN)(rng) for _ in range(rng.choice((1, 1, 2, 3)))]
    names = [f"{rng.choice(('', '../', 'a/', '/'))}{place}{name}" for place, (name, _, _) in enumerate(members)]
    packed = io.BytesIO()
    if rng.random() < 0.5:
        file = "a.zip"
        with zipfile.ZipFile(packed, "w", rng.choice((zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED))) as archive:
            for name, (_, data, _) in zip(names, members, strict=True):
                archive.writestr(zipfile.ZipInfo(name), data)
    else:
        file = "a.tar.gz"
        with tarfile.open(fileobj=packed, mode=rng.choice(("w:gz", "w"))) as archive_tar:
            for name, (_, data, _) in zip(names, members, strict=True):
                info = tarfile.TarInfo(name)
                info.size = len(data)
                info.type = rng.choice((tarfile.REGTYPE,) * 8 + (tarfile.SYMTYPE, tarfile.LNKTYPE, tarfile.CHRTYPE))
                archive_tar.addfile(info, io.BytesIO(data))
    data, said = packed.getvalue(), f"members {', '.join(names)}: {'; '.join(what for _, _, what in members)}"
    if rng.random() < 0.5:
        data, how = change_bytes(data, file, rng)
        said = f"{said}; {how}"
    return file, data, said


_execution_trace = _document("et", execution_traces)
_graph = _document("graph", graphs)
PLAIN = (_document("k", kineto), _document("k", kineto), _execution_trace, _document("c", chakra_json))
FILES: tuple[Callable[[random.Random], Changed], ...] = (
    *[_document("k", kineto)] * 8,
    *[nsys_file] * 6,
    *[ncu_file] * 3,
    *[_execution_trace] * 2,
    *[_graph] * 1,
    *[_document("c", chakra_json)] * 1,
    *[_bytes("c.et", lambda: (chakra(),))] * 2,
    *[archive_file] * 3,
)


def profiles_case(rng: random.Random) -> Case:
    """Make a mutated file of another tool, alone or with an unchanged one to join."""
    if rng.random() < 0.2:
        return _join_case(rng)
    name, data, what = rng.choice(FILES)(rng)
    argv, outputs = rng.choice(
        (
            *[(("doctor", name), ()), (("doctor", name, "--json"), ()), (("doctor", name, "--json"), ())],
            *[(("import", name, "-o", "out.json"), ("out.json",))] * 3,
            (("import", name, "-o", "out.json.gz", "--json"), ("out.json.gz",)),
            (("import", name, "-o", "out.json", "--step", rng.choice(("0", "1", "all"))), ("out.json",)),
            (("import", name, "-o", "out.json", "--device", "0", "--gpu", _plain_name(rng)), ("out.json",)),
            (("import", name, "-o", "out.json", "--rank", rng.choice(("0", "1"))), ("out.json",)),
            (("simulate", name, "--json"), ()),
            (("simulate", name, "--perfetto", "out.json"), ("out.json",)),
            (("explore", name, "--budget", "0.05", "--evaluations", "2", "--json"), ()),
            (("explore", name, "--budget", "0.05", "--evaluations", "2"), ()),
            (("limits", name, "--json"), ()),
            (("whatif", name, "--json"), ()),
            (("@upload", name), ()),
        )
    )
    return Case("profiles", argv, {name: data}, (name,), outputs, what)


def _plain_name(rng: random.Random) -> str:
    return rng.choice(TEXTS).replace("\x00", "").encode("utf-8", "replace").decode() or "x"


def _join_case(rng: random.Random) -> Case:
    """Make a profile and a file to join, one of them mutated."""
    profile, graph_profile = to_json(kineto()[0]), to_json(kineto()[3])
    other, first = rng.choice(
        (
            (_execution_trace, profile),
            (_execution_trace, profile),
            (ncu_file, profile),
            (_graph, graph_profile),
        )
    )
    if rng.random() < 0.5:
        name, data, what = other(rng)
        files = {"first.json": first, name: data}
        changed = name
    else:
        name, data, what = _document("k", kineto)(rng)
        whole = {_execution_trace: execution_traces()[0], _graph: graphs()[0]}.get(other)
        second = "t.csv" if whole is None else "second.json"
        files = {name: data, second: TABLES[0] if whole is None else to_json(whole)}
        changed = name
    words = rng.choice((("import", *files, "-o", "out.json"), ("doctor", *files, "--json"), ("doctor", *files)))
    # A mismatch may be reported by either name.
    outputs = ("out.json",) if words[0] == "import" else ()
    return Case("profiles", words, files, (changed, *files), outputs, f"joined: {what}")
