"""Exports: complete for other tools, and the same step when imported again."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from pathlib import Path

import msgspec
import pytest
from click.testing import CliRunner

from gpusim.cli import cli
from gpusim.engine.base import Timeline
from gpusim.engine.fast import FastEngine
from gpusim.formats.hardware import load_hardware
from gpusim.formats.trace import Trace
from gpusim.importers import import_files
from gpusim.plan.graph import OpGraph
from gpusim.plan.lower import lower
from gpusim.report.export import chakra_bytes, execution_trace_document, kineto_document, kineto_text
from gpusim.search.by_name import schedule_of
from gpusim.trace.dependencies import dependencies
from gpusim.trace.store import load_trace

NAMES = ["googlenet-train-b8", "squeezenet1_1-infer-b1"]


def simulated(trace: Trace, policy: str, streams: int) -> Timeline:
    graph = OpGraph.build(trace, load_hardware("h200"))
    return FastEngine().run(lower(graph, schedule_of(graph, policy, streams)), graph.hardware)


def exported(trace: Trace, folder: Path, streams: int = 4) -> tuple[list[str], Timeline]:
    timeline = simulated(trace, "round_robin" if streams > 1 else "sequential", streams)
    profile, operators = folder / "k.json", folder / "et.json"
    profile.write_bytes(kineto_text(kineto_document(timeline, trace, "t", load_hardware("h200"))))
    operators.write_bytes(msgspec.json.encode(execution_trace_document(trace)))
    return [str(profile), str(operators)], timeline


@pytest.mark.parametrize("name", NAMES)
def test_exported_and_imported_step_takes_as_long_as_before(name: str, tmp_path: Path) -> None:
    trace = load_trace(name)
    files, timeline = exported(trace, tmp_path)
    imported = import_files(files)
    assert imported.source.dependency_quality == "data"
    spans = list(zip(timeline.start_ns, timeline.end_ns, strict=True))
    shown = max(end for _, end in spans) - min(start for start, _ in spans)
    assert imported.source.observed_ns == shown


def reach(preds: Sequence[Sequence[int]]) -> list[int]:
    """Return, for each item, a bit per predecessor, direct or not."""
    found: list[int] = []
    for before in preds:
        found.append(0)
        for pred in before:
            found[-1] |= found[pred] | 1 << pred
    return found


@pytest.mark.parametrize("name", NAMES)
def test_imported_ops_are_the_captured_ones_with_work_and_wait_for_exactly_the_same(name: str, tmp_path: Path) -> None:
    trace = load_trace(name)
    imported = import_files(exported(trace, tmp_path, streams=1)[0]).trace
    with_work = [index for index, op in enumerate(trace.ops) if op.kernels]
    kernels = [[(kernel.name[:80], kernel.dur_ns) for kernel in trace.ops[index].kernels] for index in with_work]
    assert [[(kernel.name[:80], kernel.dur_ns) for kernel in op.kernels] for op in imported.ops] == kernels
    captured, found = reach(dependencies(trace)), reach(dependencies(imported))
    for number, op in enumerate(with_work):
        waits = {with_work[other] for other in range(number) if found[number] >> other & 1}
        assert waits == {other for other in with_work if captured[op] >> other & 1}


def test_kineto_export_has_what_viewers_need(tmp_path: Path) -> None:
    files, _ = exported(load_trace(NAMES[1]), tmp_path)
    text = Path(files[0]).read_text()
    assert re.search(r'"rank":\s+(\d+)', text)
    events = json.loads(text)["traceEvents"]
    arrows = {end: {(e["id"], e["ts"]) for e in events if e["ph"] == end} for end in "sf"}
    events = [event for event in events if event["cat"] != "ac2g"]
    assert all({"ph", "cat", "name", "pid", "tid", "ts", "dur", "args"} <= set(event) for event in events)
    calls = [e for e in events if e["cat"] == "cuda_runtime"]
    assert arrows["s"] == {(e["args"]["correlation"], e["ts"]) for e in calls}
    on_gpu = [e for e in events if e["cat"] in ("kernel", "gpu_memcpy", "gpu_memset")]
    assert arrows["f"] == {(e["args"]["correlation"], e["ts"]) for e in on_gpu}
    launches = {e["args"]["correlation"] for e in events if e["cat"] == "cuda_runtime"}
    kernels = [e for e in events if e["cat"] == "kernel"]
    assert all(e["args"]["correlation"] in launches for e in kernels)
    assert [e["name"] for e in events if e["cat"] == "user_annotation"] == ["ProfilerStep#1"]


def test_operators_have_their_arguments_as_a_profile_with_record_shapes(tmp_path: Path) -> None:
    files, _ = exported(load_trace(NAMES[1]), tmp_path)
    events = json.loads(Path(files[0]).read_text())["traceEvents"]
    first = next(e for e in events if e["name"] == "aten::convolution")["args"]
    assert first["Input Dims"][:2] == [[1, 3, 224, 224], [64, 3, 3, 3]]
    assert first["Input Strides"][:1] == [[150528, 50176, 224, 1]]
    assert first["Input type"][:4] == ["float", "float", "float", "ScalarList"]
    assert first["Concrete Inputs"][3:7] == ["[2, 2]", "[0, 0]", "[1, 1]", "False"]
    assert {len(each) for each in first.values() if isinstance(each, list)} == {9}


def test_chakra_export_keeps_nanoseconds_streams_and_true_dependencies(tmp_path: Path) -> None:
    trace = load_trace(NAMES[1])
    timeline = simulated(trace, "sequential", 1)
    path = tmp_path / "t.et"
    path.write_bytes(chakra_bytes(timeline, trace))
    imported = import_files([str(path)])
    assert imported.source.dependency_quality == "data"
    durations = sorted(end - start for start, end in zip(timeline.start_ns, timeline.end_ns, strict=True))
    assert sorted(op.kernels[0].dur_ns for op in imported.trace.ops) == durations
    assert {edge.kind for op in imported.trace.ops for edge in op.after} == {"data"}


def test_export_command_writes_all_three_and_import_reads_them(tmp_path: Path) -> None:
    paths = [str(tmp_path / name) for name in ("k.json.gz", "e.json.gz", "c.et")]
    words = ["export", NAMES[1], "--policy", "sequential"]
    result = CliRunner().invoke(
        cli, [*words, "--kineto", paths[0], "--execution-trace", paths[1], "--chakra", paths[2]]
    )
    assert result.exit_code == 0, result.output
    assert import_files(paths[:2]).source.dependency_quality == "data"
    assert import_files(paths[2:]).source.format == "chakra-et"
