"""Nsight Systems: each release's schema gives the same run, and missing data is reported."""

from __future__ import annotations

import sqlite3
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import pytest

from gpusim.errors import TraceError
from gpusim.importers import examine, import_files
from gpusim.importers.build import Imported
from tests.support.importer_files import write_nsys
from tests.support.nsys_files import KERNELS, PROCESS, SCHEMAS, THREAD, write_schema
from tests.support.profile_counts import counts

FULL = [name for name, schema in SCHEMAS.items() if schema.host]


def edges(imported: Imported) -> set[tuple[int, int, str]]:
    return {(edge.op, index, edge.kind) for index, op in enumerate(imported.trace.ops) for edge in op.after}


def codes(path: Path) -> list[str]:
    return [finding.code for finding in examine([str(path)]).findings]


def changed(path: Path, *statements: str) -> Path:
    with closing(sqlite3.connect(path)) as base:
        for statement in statements:
            base.execute(statement)
        base.commit()
    return path


@pytest.mark.parametrize("name", SCHEMAS)
def test_kernels_names_streams_and_busy_time_are_the_same_in_each_schema(name: str, tmp_path: Path) -> None:
    path = write_schema(tmp_path / "n.sqlite", SCHEMAS[name])
    report, counted = examine([str(path)]), counts(path)
    assert (report.kernels, report.streams, report.busy_ns) == (counted.kernels, counted.streams, counted.busy_ns)
    assert report.concurrent_frac == pytest.approx(float(counted.concurrent_ns / counted.busy_ns))
    assert report.gpus == ("NVIDIA A100-SXM4-40GB",)
    ops = import_files([str(path)]).trace.ops
    assert [op.kernels[0].name for op in ops] == [*(kernel[0] for kernel in KERNELS), "Memcpy DtoH"]
    assert [op.kernels[0].grid for op in ops[:3]] == [(8, 1, 1)] * 3


@pytest.mark.parametrize("name", FULL)
def test_wait_of_a_stream_becomes_an_event_edge_in_each_schema(name: str, tmp_path: Path) -> None:
    imported = import_files([str(write_schema(tmp_path / "n.sqlite", SCHEMAS[name]))])
    assert imported.source.dependency_quality == "event"
    assert edges(imported) == {(0, 1, "event"), (0, 2, "stream"), (2, 3, "stream")}


@pytest.mark.parametrize("name", FULL)
def test_range_holds_what_was_launched_in_it_and_calls_before_the_origin_count(name: str, tmp_path: Path) -> None:
    path = write_schema(tmp_path / "n.sqlite", SCHEMAS[name])
    imported = import_files([str(path)], step="the step")
    launches = [op.observed.launch_ns for op in imported.trace.ops if op.observed]
    assert launches == [-1_500, -400, -300, -100]
    assert "no-launches" not in codes(path)


def test_file_of_nvprof_is_refused_with_what_to_use(tmp_path: Path) -> None:
    with closing(sqlite3.connect(tmp_path / "n.nvvp")) as base:
        base.execute("CREATE TABLE CUPTI_ACTIVITY_KIND_CONCURRENT_KERNEL (start INT, end INT, name INT)")
        base.commit()
    with pytest.raises(TraceError, match=r"of nvprof.*nsys profile"):
        examine([str(tmp_path / "n.nvvp")])


def test_writer_and_schema_are_named(tmp_path: Path) -> None:
    path = write_schema(tmp_path / "n.sqlite", SCHEMAS["2022"])
    assert examine([str(path)]).writer == "Nsight Systems 2022.4.1 (schema 2.7.1)"


def test_event_recorded_again_is_waited_for_where_the_wait_says(tmp_path: Path) -> None:
    again = f"INSERT INTO CUPTI_ACTIVITY_KIND_CUDA_EVENT (streamId, correlationId, globalPid, eventId, eventSyncId) VALUES (13, 13, {PROCESS}, 3, 6)"  # noqa: E501
    path = changed(write_schema(tmp_path / "n.sqlite", SCHEMAS["2026"]), again)
    assert (0, 1, "event") in edges(import_files([str(path)]))


def test_graphs_recorded_as_a_whole_are_refused_with_the_option_that_gives_kernels(tmp_path: Path) -> None:
    path = changed(
        write_schema(tmp_path / "n.sqlite", replace(SCHEMAS["2024"], host=False)),
        "DELETE FROM CUPTI_ACTIVITY_KIND_KERNEL",
        "DELETE FROM CUPTI_ACTIVITY_KIND_MEMCPY",
        "CREATE TABLE CUPTI_ACTIVITY_KIND_GRAPH_TRACE (start INT, end INT, deviceId INT, graphId INT, graphExecId INT)",
        "INSERT INTO CUPTI_ACTIVITY_KIND_GRAPH_TRACE VALUES (1, 900, 0, 1, 1), (1000, 1900, 0, 1, 1)",
    )
    report = examine([str(path)])
    assert [finding.code for finding in report.findings] == ["graphs-as-a-whole"]
    with pytest.raises(TraceError, match=r"2 launches of CUDA graphs.*--cuda-graph-trace=node"):
        import_files([str(path)])


def test_missing_names_registers_and_gpu_are_said_and_the_file_is_read(tmp_path: Path) -> None:
    path = changed(
        write_schema(tmp_path / "n.sqlite", SCHEMAS["trimmed"]), "DROP TABLE StringIds", "DROP TABLE TARGET_INFO_GPU"
    )
    assert {"no-names", "no-registers", "no-gpu-properties", "no-launches"} <= set(codes(path))
    assert [op.kernels[0].name for op in import_files([str(path)]).trace.ops] == ["", "", "", "Memcpy DtoH"]


def test_rows_without_an_end_are_left_out_and_rows_that_end_too_early_take_no_time(tmp_path: Path) -> None:
    path = changed(
        write_nsys(tmp_path / "n.sqlite", [(10, 30, 0, 7, 1), (40, None, 0, 7, 2), (60, 50, 0, 7, 3)]),
    )
    report = examine([str(path)])
    assert (report.kernels, report.busy_ns) == (2, 20)
    assert "odd-times" in codes(path)


def test_records_before_the_sessions_origin_are_read(tmp_path: Path) -> None:
    path = write_nsys(tmp_path / "n.sqlite", [(-100, -60, 0, 7, 1), (10, 30, 0, 7, 2)])
    assert import_files([str(path)]).source.observed_ns == 130


def test_two_processes_on_one_gpu_are_two_sets_of_streams_and_one_of_them_is_imported(tmp_path: Path) -> None:
    path = write_schema(tmp_path / "n.sqlite", SCHEMAS["2024"])
    columns = "start, end, deviceId, streamId, correlationId, globalPid"
    changed(path, f"INSERT INTO CUPTI_ACTIVITY_KIND_KERNEL ({columns}) VALUES (2000, 9000, 0, 7, 11, {7 << 24})")
    report = examine([str(path)])
    assert (report.kernels, report.streams) == (counts(path).kernels, counts(path).streams) == (4, 3)
    assert report.busy_ns == counts(path).busy_ns
    assert "several-devices" in codes(path)
    assert len(import_files([str(path)]).trace.ops) == 4


def test_ranges_without_types_of_events_are_read(tmp_path: Path) -> None:
    path = write_schema(tmp_path / "n.sqlite", SCHEMAS["2023"])
    changed(path, "ALTER TABLE NVTX_EVENTS DROP COLUMN eventType")
    assert len(import_files([str(path)], step="the step").trace.ops) == 4


def test_kernels_of_a_replayed_graph_are_named_by_the_range_in_which_they_were_captured(tmp_path: Path) -> None:
    """The running node is a copy of the captured one, made within a range on the host."""
    path = write_schema(tmp_path / "n.sqlite", SCHEMAS["2026"])
    changed(
        path,
        "CREATE TABLE CUDA_GRAPH_NODE_EVENTS (start INT, globalTid INT, graphNodeId INT, originalGraphNodeId INT)",
        f"INSERT INTO CUDA_GRAPH_NODE_EVENTS VALUES (-600, {THREAD}, 91, NULL), (5000, {THREAD}, 92, 91)",
        f"INSERT INTO CUDA_GRAPH_NODE_EVENTS VALUES (-100, {THREAD + 1}, 93, NULL)",
        f"INSERT INTO NVTX_EVENTS VALUES (-700, -500, 59, 'layer 1', NULL, {THREAD})",
        "UPDATE CUPTI_ACTIVITY_KIND_KERNEL SET graphNodeId = 92 WHERE correlationId = 11",
        "UPDATE CUPTI_ACTIVITY_KIND_KERNEL SET graphNodeId = 93 WHERE correlationId = 14",
    )
    assert [op.layer for op in import_files([str(path)]).trace.ops] == ["layer 1", "", "", ""]
    assert "shared-correlation" in codes(path)


def test_table_of_nsight_compute_joins_a_profile_of_nsight_systems(tmp_path: Path) -> None:
    path = write_schema(tmp_path / "n.sqlite", SCHEMAS["2024"])
    table = tmp_path / "t.csv"
    header = "ID,Kernel Name,Block Size,Grid Size,dram__bytes.sum,lts__t_bytes.sum,sm__inst_executed.sum"
    table.write_text(f"{header}\n,,,,byte,byte,inst\n0,second,(64 1 1),(8 1 1),10,20,30\n")
    counters = [op.kernels[0].counters for op in import_files([str(path), str(table)]).trace.ops]
    assert [found and found.dram_bytes for found in counters] == [None, 10, None, None]


def test_reading_reports_how_far_it_is(tmp_path: Path) -> None:
    shares: list[float] = []
    examine([str(write_schema(tmp_path / "n.sqlite", SCHEMAS["2024"]))], shares.append)
    assert len(shares) > 2
    assert shares == sorted(shares)
    assert 0 <= shares[0] <= shares[-1] <= 1
