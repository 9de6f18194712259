"""Small files whose records combine in many ways: each ends in seconds, with a result or one error line."""

from __future__ import annotations

import io
import json
import tarfile
import zipfile
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpusim.errors import TraceError
from gpusim.importers import examine, import_files, model
from gpusim.importers.model import Profile, Range
from gpusim.importers.nsys import _innermost
from gpusim.importers.steps import find_steps
from gpusim.report.doctor_text import doctor_lines
from tests.importers.test_observed import record
from tests.support.importer_files import (
    call,
    kernel,
    node,
    operator,
    sync,
    write_execution_trace,
    write_kineto,
    write_nsys,
)

TOO_MANY = "combine in too many ways"


@pytest.fixture
def little_work(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(model, "MAX_WORK", 5000)


@pytest.mark.usefixtures("little_work")
def test_record_for_each_of_many_streams_is_refused(tmp_path: Path) -> None:
    """Each would wait for each one before: 400 of them are 80,000 edges."""
    few, many = ([kernel("k", 10 * n + 0.5, 5, stream=n, correlation=n) for n in range(count)] for count in (20, 400))
    assert import_files([str(write_kineto(tmp_path / "few.json", few))]).source.streams == 20
    with pytest.raises(TraceError, match=rf"many\.json: .*{TOO_MANY}"):
        import_files([str(write_kineto(tmp_path / "many.json", many))])


@pytest.mark.usefixtures("little_work")
def test_waits_of_the_host_for_many_streams_are_refused(tmp_path: Path) -> None:
    records = [kernel("k", 10 * n + 0.5, 5, stream=n % 40, correlation=2 * n) for n in range(80)]
    waits = [sync("Context Sync", 2 * n + 1) for n in range(80)]
    with pytest.raises(TraceError, match=TOO_MANY):
        import_files([str(write_kineto(tmp_path / "k.json", [*records, *waits]))])


@pytest.mark.usefixtures("little_work")
def test_names_of_operators_that_agree_nowhere_for_long_are_refused(tmp_path: Path) -> None:
    """Matching places are found, each after a long search."""

    def names(other: str) -> list[str]:
        same = [f"aten::a{n}" for n in range(8)]
        return [name for block in range(20) for name in (*same, *(f"aten::{other}{block}_{n}" for n in range(30)))]

    events = []
    for n, name in enumerate(names("b")):
        at = 100 * n + 0.5
        events += [
            operator(name, at, 50),
            call("cudaLaunchKernel", at + 1, 1, n),
            kernel("k", at + 9, 5, correlation=n),
        ]
    nodes = [node(n + 2, name, [n], [n + 1]) for n, name in enumerate(names("c"))]
    profile = write_kineto(tmp_path / "k.json", events)
    operators = write_execution_trace(tmp_path / "et.json", nodes)
    with pytest.raises(TraceError, match=TOO_MANY):
        import_files([str(profile), str(operators)])


@pytest.mark.usefixtures("little_work")
def test_graph_whose_kernels_all_depend_on_a_long_chain_of_nothing_is_refused(tmp_path: Path) -> None:
    chain = 200
    nodes = [{"index": n, "node_type": "empty", "dependencies": [n - 1] if n else []} for n in range(chain)]
    nodes += [
        {"index": chain + n, "node_type": "kernel", "tools_id": n + 1, "kernel_name": "k", "dependencies": [chain - 1]}
        for n in range(100)
    ]
    dump = tmp_path / "graph.json"
    dump.write_text(json.dumps({"schema": "gpusim-cuda-graph/1", "nodes": nodes}))
    records = [kernel("k", 10 * n + 0.5, 5, correlation=1, **{"graph node id": n + 1}) for n in range(100)]
    with pytest.raises(TraceError, match=TOO_MANY):
        import_files([str(write_kineto(tmp_path / "k.json", records)), str(dump)])


@pytest.mark.usefixtures("little_work")
def test_chakra_kernels_behind_a_long_chain_of_operators_are_refused(tmp_path: Path) -> None:
    chain = [{"Id": n, "Name": "op", "data_deps": [n - 1] if n else [], "is_cpu_op": True} for n in range(200)]
    kernels = [{"Id": 200 + n, "Name": "k", "runtime": 5, "data_deps": [199], "is_cpu_op": False} for n in range(100)]
    path = tmp_path / "c.json"
    path.write_text(json.dumps({"workload_graph": [*chain, *kernels]}))
    with pytest.raises(TraceError, match=TOO_MANY):
        examine([str(path)])


@given(
    st.lists(st.tuples(st.integers(0, 20), st.integers(0, 20)), max_size=12),
    st.lists(st.integers(-2, 42), max_size=12),
)
def test_innermost_range_is_the_one_that_begins_last(pairs: list[tuple[int, int]], times: list[int]) -> None:
    spans = [Range(f"r{n}", begin, begin + length) for n, (begin, length) in enumerate(pairs)]
    found = _innermost(spans, [(time_ns, number) for number, time_ns in enumerate(times)])
    for number, time_ns in enumerate(times):
        inside = [span for span in spans if span.start_ns <= time_ns <= span.end_ns]
        assert found[number] == (max(inside, key=lambda span: span.start_ns).name if inside else "")


def test_node_that_was_made_from_itself_is_read(tmp_path: Path) -> None:
    path = write_nsys(
        tmp_path / "n.sqlite",
        [(1, 2, 0, 7, 1)],
        "ALTER TABLE CUPTI_ACTIVITY_KIND_KERNEL ADD COLUMN graphNodeId INT",
        "UPDATE CUPTI_ACTIVITY_KIND_KERNEL SET graphNodeId = 5",
        "CREATE TABLE CUDA_GRAPH_NODE_EVENTS (graphNodeId INT, originalGraphNodeId INT, start INT, globalTid INT)",
        "INSERT INTO CUDA_GRAPH_NODE_EVENTS VALUES (5, 6, 3, 0), (6, 5, 3, 0)",
    )
    assert import_files([str(path)]).trace.ops[0].layer == ""


def test_short_periods_are_found_in_a_long_file() -> None:
    """30,000 records of period 3: each step has its own, whatever the others are."""
    records = [record(10 * n, 5) for n in range(30_000)]
    for n, found in enumerate(records):
        found.name = "abc"[n % 3]
    steps = find_steps(Profile("p", "kineto", "", activities=records), range(len(records)))
    assert [step.indices for step in steps] == [(n, n + 1, n + 2) for n in range(0, 30_000, 3)]


def test_long_names_of_operators_are_cut_where_they_are_read(tmp_path: Path) -> None:
    name = "aten::" + "x" * 1_000_000
    events = [operator(name, 0.5, 10_000)]
    for n in range(50):
        events += [call("cudaLaunchKernel", n + 1, 0.5, n), kernel("k", 100 + 10 * n, 5, correlation=n)]
    imported = import_files([str(write_kineto(tmp_path / "k.json", events))])
    assert {len(op.target) for op in imported.trace.ops} == {1024}
    assert max(len(op.name) for op in imported.trace.ops) < 70


def test_file_of_very_many_gpus_is_reported_in_a_few_lines(tmp_path: Path) -> None:
    records = [kernel("k", 10 * n + 0.5, 5, device=n, correlation=n) for n in range(2000)]
    report = examine([str(write_kineto(tmp_path / "k.json", records))])
    assert max(len(finding.text) for finding in report.findings) < 400
    assert max(map(len, doctor_lines(report, "k.json"))) < 400


# --- Archives ---


def tar(path: Path, *notes: tuple[bytes, bytes], size: int | None = None) -> Path:
    """Write an uncompressed archive of extended headers (type, content) and then one profile."""
    data = write_kineto(path.with_suffix(".json"), [kernel("k", 1.5, 2)]).read_bytes()
    archive = io.BytesIO()
    for kind, content in notes:
        info = tarfile.TarInfo("note")
        info.type, info.size = kind, len(content) if size is None else size
        archive.write(info.tobuf(tarfile.GNU_FORMAT))
        archive.write(content + b"\0" * (-len(content) % 512))
    info = tarfile.TarInfo("k.json")
    info.size = len(data)
    archive.write(info.tobuf() + data + b"\0" * (-len(data) % 512) + b"\0" * 1024)
    path.write_bytes(archive.getvalue())
    return path


NAME = b"11 path=ab\n"


@pytest.mark.parametrize(
    "notes",
    [
        [(tarfile.XHDTYPE, b"1" * 200_000)],
        [(tarfile.GNUTYPE_LONGNAME, b"n" * 5000)],
        [(tarfile.GNUTYPE_LONGNAME, b"n" * 4000)] * 70,
        [(tarfile.XGLTYPE, b"".join(b"8 %03d=a\n" % n for n in range(200)))],
    ],
    ids=["digits", "one name", "many names", "global"],
)
def test_tar_with_long_notes_is_refused_before_they_are_read(
    notes: list[tuple[bytes, bytes]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tarfile.TarInfo, "_proc_pax", lambda *given: pytest.fail("was read"))
    with pytest.raises(TraceError, match=r"a\.tar: is a damaged archive: its extended headers are too long"):
        examine([str(tar(tmp_path / "a.tar", *notes))])


@pytest.mark.parametrize("kind", [tarfile.XHDTYPE, tarfile.XGLTYPE, tarfile.GNUTYPE_LONGNAME])
def test_tar_with_short_notes_is_read(kind: bytes, tmp_path: Path) -> None:
    assert examine([str(tar(tmp_path / "a.tar", (kind, NAME)))]).kernels == 1


@pytest.mark.parametrize(
    "notes",
    [
        [(tarfile.GNUTYPE_SPARSE, b"")],
        [(tarfile.XHDTYPE, b"22 GNU.sparse.map=0,1\n")],
        [(tarfile.XHDTYPE, b"22 GNU.sparse.major=1\n22 GNU.sparse.minor=0\n")],
    ],
)
def test_tar_with_sparse_files_is_refused(notes: list[tuple[bytes, bytes]], tmp_path: Path) -> None:
    with pytest.raises(TraceError, match="it has sparse files"):
        examine([str(tar(tmp_path / "a.tar", *notes))])


def test_note_of_a_negative_size_is_refused(tmp_path: Path) -> None:
    with pytest.raises(TraceError, match=r"a\.tar: is a damaged archive"):
        examine([str(tar(tmp_path / "a.tar", (tarfile.GNUTYPE_LONGNAME, b"n"), size=-512))])


def test_zip_archive_with_its_list_elsewhere_is_refused(tmp_path: Path) -> None:
    """The small list in the old place is not the one that the library would read."""
    path = tmp_path / "a.zip"
    with zipfile.ZipFile(path, "w") as packed:
        packed.writestr("k.json", "{}")
    data = path.read_bytes()
    end = data.rindex(b"PK\x05\x06")
    path.write_bytes(data[:end] + b"PK\x06\x07" + bytes(16) + data[end:])
    with pytest.raises(TraceError, match="more than 4 GB"):
        examine([str(path)])


def test_name_that_no_file_can_have_is_one_line(tmp_path: Path) -> None:
    for read in (examine, import_files):
        with pytest.raises(TraceError, match="cannot be read"):
            read(["x" * 5000])
