"""Profiles, execution traces and CUDA graphs: contents, step, edges, joins and answers."""

from __future__ import annotations

import json
import sqlite3
from pathlib import Path
from typing import Any

import pytest

import gpusim
from gpusim.analysis.as_imported import as_imported, searchable
from gpusim.errors import OperatorError, OptionError, TraceError, UnknownNameError
from gpusim.formats.hardware import load_hardware
from gpusim.gpu.replay.allowlist import check_operators
from gpusim.importers import examine, import_files
from gpusim.importers.build import Imported
from gpusim.plan.graph import OpGraph
from gpusim.trace.store import read_trace, structure_hash, write_trace
from tests.support.importer_files import (
    PROFILES,
    SAMPLES,
    WITHOUT_TIMES,
    call,
    kernel,
    node,
    operator,
    sync,
    write_execution_trace,
    write_joined,
    write_kineto,
    write_nsys,
    write_tar,
)
from tests.support.profile_counts import counts


def edges(imported: Imported) -> set[tuple[int, int, str]]:
    return {(edge.op, index, edge.kind) for index, op in enumerate(imported.trace.ops) for edge in op.after}


def codes(path: Path) -> list[str]:
    return [finding.code for finding in examine([str(path)]).findings]


@pytest.mark.parametrize("path", PROFILES, ids=lambda path: path.name[:40])
def test_kernels_streams_and_busy_time_are_those_of_an_independent_count(path: Path) -> None:
    report = examine([str(path)])
    counted = counts(path)
    assert (report.kernels, report.streams, report.busy_ns) == (counted.kernels, counted.streams, counted.busy_ns)
    assert report.concurrent_frac == pytest.approx(float(counted.concurrent_ns / max(1, counted.busy_ns)))


@pytest.mark.parametrize("path", PROFILES, ids=lambda path: path.name[:40])
def test_imported_trace_is_read_back_as_it_was_and_answers(path: Path, tmp_path: Path) -> None:
    imported = import_files([str(path)])
    file = tmp_path / "t.json.gz"
    write_trace(imported.trace, file)
    trace = read_trace(file)
    assert trace == imported.trace
    found = as_imported(OpGraph.build(trace, load_hardware("h200")))
    assert 0 < found.bound_ns <= found.graph_ns + 1
    assert found.no_edges_bound_ns <= found.graph_ns
    report = examine([str(file)])
    assert report.dependency_quality == imported.source.dependency_quality


@pytest.mark.parametrize("path", WITHOUT_TIMES, ids=lambda path: path.name[:40])
def test_file_without_kernels_is_examined_and_import_says_what_to_give_with_it(path: Path) -> None:
    report = examine([str(path)])
    assert (report.format, report.kernels, report.dependency_quality) == ("execution-trace", 0, "data")
    with pytest.raises(TraceError, match="PROFILE"):
        import_files([str(path)])


def test_profile_without_a_gpu_is_refused_with_its_reason(tmp_path: Path) -> None:
    path = write_kineto(tmp_path / "cpu.json", [operator("aten::add", 1, 2)])
    with pytest.raises(TraceError, match="without a GPU kernel"):
        import_files([str(path)])
    assert codes(path)[0] == "no-kernels"


def test_an_export_of_nsight_systems_without_kernels_is_told_how_nsight_records_them(tmp_path: Path) -> None:
    path = tmp_path / "cpu.sqlite"
    with sqlite3.connect(path) as base:
        base.execute("create table NVTX_EVENTS (start integer)")
    base.close()
    with pytest.raises(TraceError, match="nsys profile --trace=cuda"):
        import_files([str(path)])


def test_table_of_nsight_compute_becomes_a_chain_with_counters() -> None:
    imported = import_files([str(SAMPLES / "ncu_raw.csv")], gpu="NVIDIA H200")
    first = imported.trace.ops[0].kernels[0]
    assert (first.dur_ns, first.grid, first.block, first.regs_per_thread) == (98656, (3136, 2, 1), (8, 8, 1), 64)
    assert first.counters is not None
    assert first.counters.dram_bytes == 16933376
    assert imported.source.dependency_quality == "none"
    assert imported.source.observed_ns == 0


def test_comma_as_the_point_and_long_form_of_ncu_are_read(tmp_path: Path) -> None:
    rows = [
        "==PROF== Connected",
        '"ID";"Kernel Name";"Block Size";"Grid Size";"Metric Name";"Metric Unit";"Metric Value"',
    ]
    rows += ['"0";"k";"(128, 1, 1)";"(4, 1, 1)";"gpu__time_duration.sum";"us";"1.117,344"']
    rows += ['"1";"k";"(128, 1, 1)";"(4, 1, 1)";"gpu__time_duration.sum";"us";"27,5"']
    path = tmp_path / "t.csv"
    path.write_text("\n".join(rows))
    imported = import_files([str(path)])
    assert [op.kernels[0].dur_ns for op in imported.trace.ops] == [1117344, 27500]
    assert "locale" in codes(path)


DETAILS = (
    '"ID","Process ID","Kernel Name","Block Size","Grid Size","Section Name","Metric Name","Metric Unit","Metric Value"'
)
RAW = ["ID,Kernel Name,Block Size,Grid Size,gpu__time_duration.sum", ",,,,ns"]
TABLES: dict[str, tuple[bytes, list[int]]] = {
    "below the output of a program, with more after it": (
        "\n".join(["==PROF== Connected", "a,b,c,d,e,f", *RAW, '0,k,"(64, 1, 1)","(8, 1, 1)","1,100"',
                   "loss, 1, 2, 3, 4, 5", "==PROF== Disconnected"]).encode(), [1100],
    ),
    "two tables one after the other": (
        "\n".join([*RAW, "0,k,(64 1 1),(8 1 1),100", *RAW, "0,k,(64 1 1),(8 1 1),200"]).encode(), [100, 200],
    ),
    "thousands apart by narrow spaces": (
        "\n".join([RAW[0].replace(",", ";"), ";;;;ns", "0;k;(64 1 1);(8 1 1);12\u202f345,5"]).encode(), [12346],
    ),
    "thousands apart by apostrophes": ("\n".join([*RAW, "0,k,(64 1 1),(8 1 1),12'345.5"]).encode(), [12346]),
    "UTF-16": ("\r\n".join([*RAW, "0,k,(64 1 1),(8 1 1),100"]).encode("utf-16"), [100]),
    "descriptions over several lines": (
        (DETAILS + '\n"0","7","k","(64, 1, 1)","(8, 1, 1)","Speed Of Light","Duration","us","3.5"\n'
         '"0","7","k","(64, 1, 1)","(8, 1, 1)","","","",""\n'
         '"0","7","k","(64, 1, 1)","(8, 1, 1)","Rule\nover\nlines","","",""\n'
         ).encode(), [3500],
    ),
}  # fmt: skip


@pytest.mark.parametrize("form", TABLES)
def test_table_of_ncu_is_read_in_each_form(form: str, tmp_path: Path) -> None:
    data, durations = TABLES[form]
    (tmp_path / "t.csv").write_bytes(data)
    imported = import_files([str(tmp_path / "t.csv")])
    assert [op.kernels[0].dur_ns for op in imported.trace.ops] == durations
    assert {op.kernels[0].grid for op in imported.trace.ops} == {(8, 1, 1)}


def test_registers_and_shared_memory_of_the_details_page_are_read(tmp_path: Path) -> None:
    cells = {"Registers Per Thread": ("register/thread", "64"), "Duration": ("usecond", "3.5")}
    cells |= {
        "Static Shared Memory Per Block": ("Kbyte/block", "1.5"),
        "Dynamic Shared Memory Per Block": ("byte", "24"),
    }
    start = '"0","7","k","(64, 1, 1)","(8, 1, 1)","Launch Statistics"'
    rows = [f'{start},"{name}","{unit}","{value}"' for name, (unit, value) in cells.items()]
    (tmp_path / "t.csv").write_text("\n".join([DETAILS, *rows]))
    (op,) = import_files([str(tmp_path / "t.csv")]).trace.ops
    assert (op.kernels[0].regs_per_thread, op.kernels[0].smem_bytes, op.kernels[0].dur_ns) == (64, 1524, 3500)


NO_TABLES = {
    "summary": ('"Kernel Name","Invocations","Metric Name","Average"\n"k","2","Duration","3"\n', "summary"),
    "text": ("==PROF== Connected to process 7\n  k (8, 1, 1)x(64, 1, 1)\n    Section: Speed\n", "without a table"),
}  # fmt: skip


@pytest.mark.parametrize("what", NO_TABLES)
def test_output_of_ncu_that_is_no_table_is_refused_with_the_command_that_writes_one(what: str, tmp_path: Path) -> None:
    text, problem = NO_TABLES[what]
    (tmp_path / "t.csv").write_text(text)
    with pytest.raises(TraceError, match=f"{problem}.*--csv --page raw"):
        examine([str(tmp_path / "t.csv")])


def test_recorded_wait_becomes_an_event_edge(tmp_path: Path) -> None:
    events = [
        kernel("a", 10, 10, 7, 1), kernel("b", 30, 5, 8, 5), kernel("c", 12, 3, 8, 2),
        sync("Stream Wait Event", 4, stream=8, wait_on_stream=7, wait_on_cuda_event_record_corr_id=3),
    ]  # fmt: skip
    imported = import_files([str(write_kineto(tmp_path / "k.json", events))])
    assert edges(imported) == {(0, 2, "event"), (1, 2, "stream")}
    assert imported.source.dependency_quality == "event"


def test_order_across_streams_without_waits_is_assumed_and_said(tmp_path: Path) -> None:
    path = write_kineto(tmp_path / "k.json", [kernel("a", 10, 10, 7, 1), kernel("b", 30, 5, 8, 2)])
    imported = import_files([str(path)])
    assert edges(imported) == {(0, 1, "assumed")}
    assert imported.source.dependency_quality == "assumed"
    assert "no-sync-events" in codes(path)


def test_overlapping_kernels_of_two_streams_have_no_edge(tmp_path: Path) -> None:
    path = write_kineto(tmp_path / "k.json", [kernel("a", 10, 10, 7, 1), kernel("b", 12, 5, 8, 2)])
    assert edges(import_files([str(path)])) == set()
    assert examine([str(path)]).concurrent_frac == 0.5


@pytest.mark.parametrize("ids", [True, False], ids=["record function ids", "names in order"])
def test_execution_trace_gives_data_edges(ids: bool, tmp_path: Path) -> None:
    imported = import_files(write_joined(tmp_path, ids))
    assert edges(imported) == {(0, 1, "data"), (0, 2, "data"), (1, 3, "data"), (2, 3, "data")}
    assert imported.source.dependency_quality == "data"
    assert searchable(imported.trace)
    explored = gpusim.explore(imported.trace, evaluations=8, budget_s=5)
    assert explored.best.makespan_ns > 0


@pytest.mark.parametrize("in_archives", [False, True])
def test_execution_trace_of_the_same_rank_is_joined(in_archives: bool, tmp_path: Path) -> None:
    """Rank 1 runs `b` and `d`, which are independent; the others run other operators."""
    profiles, traces = [], []
    for rank in range(3):
        names = ["aten::b", "aten::d"] if rank == 1 else [f"aten::x{rank}", f"aten::y{rank}"]
        events = []
        for n, name in enumerate(names):
            events += [operator(name, 10 * n, 9, n), call("cudaLaunchKernel", 10 * n + 2, 2, n + 1)]
            events += [kernel(f"k{n}", 10 * n + 5.5, 4, 7, n + 1)]
        info = {"rank": rank, "world_size": 3}
        profiles.append(write_kineto(tmp_path / f"rank-{rank}.json", events, distributedInfo=info))
        nodes = [node(n + 2, name, [2 * n], [2 * n + 1], record=n) for n, name in enumerate(names)]
        traces.append(write_execution_trace(tmp_path / f"et_{2 - rank if in_archives else rank}.json", nodes))
    files = [str(path) for path in [*profiles, *traces]]
    if in_archives:  # in the order of ranks, with other numbers in their names
        members = [{path.name: path.read_bytes() for path in some} for some in (profiles, traces)]
        files = [str(write_tar(tmp_path / f"{n}.tar.gz", found)) for n, found in enumerate(members)]
    imported = import_files(files, rank=1)
    assert imported.source.dependency_quality == "data"
    assert "joined-operators" not in [finding.code for finding in imported.findings]
    assert [[after.op for after in op.after] for op in imported.trace.ops] == [[], []]


def test_execution_trace_of_another_rank_is_joined_and_said(tmp_path: Path) -> None:
    events = [operator("aten::a", 0, 9, 1), call("cudaLaunchKernel", 2, 2, 1), kernel("k", 5.5, 4, 7, 1)]
    files = [str(write_kineto(tmp_path / "k.json", events, distributedInfo={"rank": 0}))]
    for rank, name in enumerate(["aten::other", "aten::a"]):
        files.append(str(write_execution_trace(tmp_path / f"et_{rank}.json", [node(2, name, [0], [1], record=1)])))
    imported = import_files(files)
    (found,) = [finding for finding in imported.findings if finding.code == "joined-operators"]
    assert "et_1.json" in found.text


def test_execution_trace_of_another_run_is_refused(tmp_path: Path) -> None:
    profile, _ = write_joined(tmp_path, False)
    other = write_execution_trace(tmp_path / "o.json", [node(1, "aten::x", [0], [1], record=1)])
    with pytest.raises(TraceError, match="not of the same run"):
        import_files([profile, str(other)])


def test_address_used_again_gives_no_edge_and_a_write_in_place_does(tmp_path: Path) -> None:
    names = ["aten::a", "aten::b", "aten::relu_"]
    nodes = [
        node(1, names[0], [0], [1], record=1),
        node(2, names[1], [2], [1], record=2),  # storage 101 is new memory here: it is not among the inputs
        node(3, names[2], [1], [1], "aten::relu_(Tensor(a!) self) -> Tensor(a!)", 3),
    ]
    events: list[dict[str, Any]] = []
    for n, name in enumerate(names):
        events += [
            operator(name, 10 * n, 8, n + 1),
            call("cudaLaunchKernel", 10 * n + 2, 2, n),
            kernel("k", 100 + 10 * n, 9, 7, n),
        ]
    files = [str(write_kineto(tmp_path / "k.json", events)), str(write_execution_trace(tmp_path / "e.json", nodes))]
    assert edges(import_files(files)) == {(1, 2, "data")}


def test_number_read_as_a_cpu_tensor_with_the_id_of_a_freed_gpu_tensor_gives_no_edge(tmp_path: Path) -> None:
    """No operator allocates the tensor of a number, so only its device tells it from the freed one."""
    divided = node(2, "aten::div", [2, 1], [3], record=2)
    divided["inputs"]["values"][1][5] = "cpu"
    nodes = [node(1, "aten::sum", [0], [1], record=1), divided]
    events: list[dict[str, Any]] = []
    for n, name in enumerate(["aten::sum", "aten::div"]):
        events += [
            operator(name, 10 * n, 8, n + 1),
            call("cudaLaunchKernel", 10 * n + 2, 2, n),
            kernel("k", 100 + 10 * n, 9, 7, n),
        ]
    files = [str(write_kineto(tmp_path / "k.json", events)), str(write_execution_trace(tmp_path / "e.json", nodes))]
    assert edges(import_files(files)) == set()


def test_memory_that_was_allocated_since_is_other_memory_and_that_of_a_call_within_is_not(tmp_path: Path) -> None:
    fill = "aten::fill_(Tensor(a!) self, Scalar value) -> Tensor(a!)"
    nodes = [
        node(10, "aten::mm", [0], [1], record=10),
        {**node(11, "aten::empty", [], [1], record=11), "ctrl_deps": 10},  # where mm put its result
        node(12, "aten::tanh", [1], [2], record=12),
        node(13, "aten::empty_strided", [], [1], record=13),  # mm's memory was free by then
        node(14, "aten::fill_", [1], [1], fill, 14),
        node(15, "aten::neg", [1], [3], record=15),
    ]
    events: list[dict[str, Any]] = []
    for n, (number, name) in enumerate([(10, "aten::mm"), (12, "aten::tanh"), (14, "aten::fill_"), (15, "aten::neg")]):
        events += [
            operator(name, 10 * n, 8, number),
            call("cudaLaunchKernel", 10 * n + 2, 2, n),
            kernel("k", 100 + 10 * n, 9, 7, n),
        ]
    files = [str(write_kineto(tmp_path / "k.json", events)), str(write_execution_trace(tmp_path / "e.json", nodes))]
    assert edges(import_files(files)) == {(0, 1, "data"), (2, 3, "data")}


def test_cuda_graph_gives_its_true_edges(tmp_path: Path) -> None:
    events = [call("cudaGraphLaunch", 1, 2, 5)]
    events += [kernel("k", 10 * n + 10, 9, 7, 5, **{"graph node id": n + 90}) for n in range(3)]
    nodes = [{"index": n, "node_type": "kernel", "tools_id": n + 90, "kernel_name": "k"} for n in range(3)]
    dump = {"exec_graph_id": 1, "nodes": nodes, "edges": [{"from": 0, "to": 1}, {"from": 0, "to": 2}]}
    graph = tmp_path / "g.json"
    graph.write_text(json.dumps(dump))
    imported = import_files([str(write_kineto(tmp_path / "k.json", events)), str(graph)])
    assert edges(imported) == {(0, 1, "graph"), (0, 2, "graph")}
    assert imported.source.dependency_quality == "graph"
    assert "shared-correlation" in codes(tmp_path / "k.json")


@pytest.mark.parametrize("mangled", [False, True])
def test_cuda_graph_joins_by_name_where_the_profile_has_no_node_ids(mangled: bool, tmp_path: Path) -> None:
    """Full names distinguish two kernels of one template; the driver's mangled names do not suffice."""
    shown = ["void ns::k<4, ns::B>(int)", "void ns::k<4, ns::A>(int)", "gemm_nn"]
    told = (
        ["_ZN2ns1kILi4ENS_1AEEEvi", "_ZN2ns1kILi4ENS_1BEEEvi", "gemm_nn"] if mangled else [shown[1], shown[0], shown[2]]
    )
    events = [call("cudaGraphLaunch", 1, 2, 5), *(kernel(name, 10 * n + 10, 9, 7, 5) for n, name in enumerate(shown))]
    nodes = [{"index": n, "node_type": "kernel", "kernel_name": name} for n, name in enumerate(told)]
    graph = tmp_path / "g.json"
    graph.write_text(json.dumps({"schema": "gpusim-cuda-graph/1", "nodes": nodes, "edges": [{"from": 1, "to": 2}]}))
    imported = import_files([str(write_kineto(tmp_path / "k.json", events)), str(graph)])
    assert edges(imported) == {(1 if mangled else 0, 2, "graph")}


def test_table_of_ncu_joins_by_name_grid_and_order(tmp_path: Path) -> None:
    path = tmp_path / "t.csv"
    header = "ID,Kernel Name,Block Size,Grid Size,dram__bytes.sum,lts__t_bytes.sum,sm__inst_executed.sum\n"
    path.write_text(header + ",,,,byte,byte,inst\n0,k,(64 1 1),(8 1 1),10,20,30\n1,k,(64 1 1),(8 1 1),11,21,31\n")
    profile = write_kineto(tmp_path / "k.json", [kernel("k", 1, 1), kernel("other", 2, 1), kernel("k", 3, 1)])
    imported = import_files([str(profile), str(path)])
    found = [op.kernels[0].counters for op in imported.trace.ops]
    assert [counters and counters.dram_bytes for counters in found] == [10, None, 11]
    assert "joined-counters" in [finding.code for finding in imported.findings]


def stepped(tmp_path: Path) -> str:
    events: list[dict[str, Any]] = []
    for n in range(3):
        begin = 1000 * n
        step = {"ph": "X", "cat": "user_annotation", "name": f"ProfilerStep#{n + 5}", "pid": 9, "tid": 9}
        events.append({**step, "ts": begin, "dur": 900})
        events += [call("cudaLaunchKernel", begin + 10, 5, n + 1), kernel("k", begin + 950, 20 + n, 7, n + 1)]
    return str(write_kineto(tmp_path / "k.json", events))


def test_step_holds_the_kernels_that_it_launched_and_the_usual_one_is_taken(tmp_path: Path) -> None:
    path = stepped(tmp_path)
    imported = import_files([path])
    assert (imported.source.step, imported.steps) == ("ProfilerStep#6", 3)
    assert [op.kernels[0].dur_ns for op in imported.trace.ops] == [21_000]
    assert examine([path]).steps == 3


@pytest.mark.parametrize(("step", "durations"), [("ProfilerStep#7", [22]), ("0", [20]), ("all", [20, 21, 22])])
def test_step_is_taken_by_name_by_number_or_all(step: str, durations: list[int], tmp_path: Path) -> None:
    imported = import_files([stepped(tmp_path)], step=step)
    assert [op.kernels[0].dur_ns // 1000 for op in imported.trace.ops] == durations


def test_unknown_step_device_and_rank_are_refused(tmp_path: Path) -> None:
    path = stepped(tmp_path)
    with pytest.raises(UnknownNameError, match="ProfilerStep"):
        import_files([path], step="ProfilerStep#70")
    with pytest.raises(OptionError, match="3 steps"):
        import_files([path], step="3")
    with pytest.raises(OptionError, match="device 0"):
        import_files([path], device=4)
    with pytest.raises(OptionError, match="ranks"):
        import_files([path], rank=4)


def test_sequence_of_kernels_that_repeats_is_a_step_and_layers_are_not(tmp_path: Path) -> None:
    def profile(names: str) -> str:
        return str(write_kineto(tmp_path / "k.json", [kernel(name, 10 * n, 5) for n, name in enumerate(names)]))

    assert examine([profile("abcdabcdabcd")]).steps == 3
    assert examine([profile("e" + "abcd" * 5 + "h")]).steps == 0


def test_nvtx_ranges_of_steps_are_found_in_nsys(tmp_path: Path) -> None:
    kernels = [(1000 * n + 100, 1000 * n + 200, 0, 7, n) for n in range(3)]
    ranges = [f"INSERT INTO NVTX_EVENTS VALUES ({1000 * n}, {1000 * n + 900}, 59, 'step {n}', 1)" for n in range(3)]
    table = "CREATE TABLE NVTX_EVENTS (start INT, end INT, eventType INT, text TEXT, globalTid INT)"
    path = write_nsys(tmp_path / "n.sqlite", kernels, table, *ranges)
    assert examine([str(path)]).steps == 3
    assert import_files([str(path)], step="step 1").source.step == "step 1"


def test_members_of_an_archive_are_read_and_one_rank_is_picked(tmp_path: Path) -> None:
    members = {}
    for rank in range(2):
        path = write_kineto(tmp_path / "k.json", [kernel("k", 1, 10 + rank)], distributedInfo={"rank": rank})
        members[f"../rank{rank}.json"] = path.read_bytes()
    archive = write_tar(tmp_path / "ranks.tar.gz", members | {"._x.json": b"junk"})
    assert examine([str(archive)]).kernels == 2
    assert import_files([str(archive)], rank=1).trace.ops[0].kernels[0].dur_ns == 11_000
    assert "several-profiles" in [finding.code for finding in import_files([str(archive)]).findings]
    assert not list(tmp_path.parent.glob("rank*.json"))


def test_replay_refuses_an_imported_trace_in_one_line() -> None:
    trace = import_files([str(SAMPLES / "hta__triton_example__triton_example.json.gz")]).trace
    with pytest.raises(OperatorError, match="imported from a profile"):
        check_operators(trace, "t.json")


def test_structure_hash_of_a_captured_trace_does_not_look_at_edges_and_of_an_imported_one_does() -> None:
    import msgspec

    trace = import_files([str(SAMPLES / "tl__traces__torch_compile_triton__trace.json.gz")]).trace
    bare = msgspec.structs.replace(trace, ops=tuple(msgspec.structs.replace(op, after=()) for op in trace.ops))
    assert structure_hash(trace) != structure_hash(bare)


def test_edge_to_a_later_op_is_refused(tmp_path: Path) -> None:
    trace = import_files([str(SAMPLES / "tl__traces__torch_compile_triton__trace.json.gz")]).trace
    path = tmp_path / "t.json"
    write_trace(trace, path)
    path.write_text(path.read_text().replace('"after":[{"op":0', '"after":[{"op":5', 1))
    with pytest.raises(TraceError, match="not an earlier one"):
        read_trace(path)


def test_large_integers_and_clock_are_said(tmp_path: Path) -> None:
    path = write_kineto(tmp_path / "k.json", [kernel("k", 1, 2), kernel("k", 5, 2)])
    assert {"integer-microseconds", "short-kernels", "clocks", "no-launches", "no-data-edges"} <= set(codes(path))
