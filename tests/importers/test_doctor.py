"""`gpusim doctor`: each finding appears with its cause, and only then."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

import gpusim
from gpusim.api.other_tools import export
from gpusim.cli import cli
from gpusim.errors import TraceError
from gpusim.importers import examine, import_files
from gpusim.trace.store import load_trace, write_trace
from tests.support import importer_files as made
from tests.support.importer_files import call, kernel, operator, sync
from tests.support.nsys_files import SCHEMAS, write_schema

Make = Callable[[Path], list[Path]]
ROOT = Path(__file__).parents[2]
NAME = "squeezenet1_1-infer-b1"


def clean(folder: Path) -> list[Path]:
    """Make a profile of one stream and one step with everything that a file can have."""
    events = [{"ph": "X", "cat": "user_annotation", "name": "ProfilerStep#1", "pid": 9, "tid": 9, "ts": 1, "dur": 90}]
    for n in range(4):
        begin = 10.5 * n + 2
        events += [operator("aten::mm", begin, 9, n), call("cudaLaunchKernel", begin + 2, 2, n)]
        events += [kernel("gemm", begin + 50, 9.125, 7, n)]
    return [made.write_kineto(folder / "clean.json", events)]


def kineto(*events: dict[str, Any], **top: Any) -> Make:
    return lambda folder: [made.write_kineto(folder / "k.json", list(events), **top)]


def with_changes(change: Callable[[dict[str, Any]], None]) -> Make:
    """Change each event of the clean profile."""

    def make(folder: Path) -> list[Path]:
        (path,) = clean(folder)
        document = json.loads(path.read_text())
        for event in document["traceEvents"]:
            change(event)
        path.write_text(json.dumps(document))
        return [path]

    return make


def on_kernels(change: Callable[[dict[str, Any]], object]) -> Make:
    return with_changes(lambda event: change(event) if event["cat"] == "kernel" else None)


def graph(folder: Path) -> list[Path]:
    return [
        made.write_kineto(
            folder / "g.json",
            [call("cudaGraphLaunch", 1, 2, 5), *(kernel("k", 10.5 * n + 10, 9.5, 7, 5) for n in range(3))],
        )
    ]


def nsys(name: str, *statements: str) -> Make:
    def make(folder: Path) -> list[Path]:
        import sqlite3
        from contextlib import closing

        path = write_schema(folder / "n.sqlite", SCHEMAS[name])
        with closing(sqlite3.connect(path)) as base:
            for statement in statements:
                base.execute(statement)
            base.commit()
        return [path]

    return make


def table(header: str, *rows: str) -> Make:
    def make(folder: Path) -> list[Path]:
        path = folder / "t.csv"
        path.write_text("\n".join([header, *rows]))
        return [path]

    return make


def execution_trace(record: int = -1, **attributes: Any) -> Make:
    def make(folder: Path) -> list[Path]:
        node = made.node(1, "aten::mm", [0], [1], record=record)
        node["attrs"] += [{"name": key, "type": "string", "value": value} for key, value in attributes.items()]
        return [made.write_execution_trace(folder / "e.json", [node])]

    return make


def exported(folder: Path) -> list[Path]:
    simulated = gpusim.simulate(NAME, "round_robin", streams=4)
    export(simulated, {"kineto": folder / "k.json", "execution_trace": folder / "e.json"})
    return [folder / "k.json", folder / "e.json"]


def slowed(folder: Path) -> list[Path]:
    """An execution trace and a profile that says nothing of kernels alone, half of them beside others."""
    paths = exported(folder)
    paths[0].write_text(paths[0].read_text().replace("alone (us)", "other (us)"))
    return paths


def chakra(folder: Path) -> list[Path]:
    export(gpusim.simulate(NAME, "sequential"), {"chakra": folder / "c.et"})
    data = (folder / "c.et").read_bytes()
    (folder / "c.et").write_bytes(
        data.replace(b"true_data_deps", b"some_data_deps").replace(b"duration_nanos", b"duration_other")
    )
    return [folder / "c.et"]


def ranks(folder: Path) -> list[Path]:
    members = {}
    for rank in range(2):
        path = made.write_kineto(folder / "k.json", [kernel("k", 1.5, 10)], distributedInfo={"rank": rank})
        members[f"rank{rank}.json"] = path.read_bytes()
    return [made.write_tar(folder / "ranks.tar.gz", members)]


def joined_graph(folder: Path) -> list[Path]:
    """Make a dump of a graph whose edge contradicts the order of the profile."""
    (profile,) = graph(folder)
    nodes = [{"index": n, "node_type": "kernel", "tools_id": 0, "kernel_name": "k"} for n in range(3)]
    (folder / "d.json").write_text(json.dumps({"exec_graph_id": 1, "nodes": nodes, "edges": [{"from": 2, "to": 0}]}))
    return [profile, folder / "d.json"]


def joined_operators(profile: Make, attributes: dict[str, Any] | None = None) -> Make:
    def make(folder: Path) -> list[Path]:
        nodes = [made.node(n + 2, "aten::mm", [n], [n + 1], record=n) for n in range(4)]
        for node in nodes:
            node["attrs"] += [{"name": key, "value": value} for key, value in (attributes or {}).items()]
        return [*profile(folder), made.write_execution_trace(folder / "e.json", nodes)]

    return make


def joined_counters(folder: Path) -> list[Path]:
    (table_path,) = table("ID,Kernel Name,Block Size,Grid Size", "0,gemm,(64 1 1),(8 1 1)")(folder)
    return [*clean(folder), table_path]


def no_launch_of_one(event: dict[str, Any]) -> None:
    if event["cat"] == "cuda_runtime" and event["args"]["correlation"] == 2:
        event["cat"] = "other"


LONG = {"grid": [2**40, 1, 1]}
CONCURRENT = [kernel("a", 10, 10.5, 7, 1), kernel("b", 30.5, 5, 8, 2)]
#: A wait that contradicts the times: `b` waits for `a`, and begins before `a` ends.
CONTRADICTED = [
    kernel("a", 10, 50.5, 7, 1), kernel("b", 12.5, 5, 8, 4),
    sync("Stream Wait Event", 3, stream=8, wait_on_stream=7, wait_on_cuda_event_record_corr_id=2),
]  # fmt: skip
#: As in CUDA 13's profiler: the wait does not name its event's record.
NAMELESS = [
    kernel("a", 10, 10.5, 7, 1), kernel("b", 30.5, 5, 8, 4),
    sync("Stream Wait Event", 3, stream=8, wait_on_stream=-1, wait_on_cuda_event_record_corr_id=-1),
]  # fmt: skip
#: The same with a host wait for a stream, which names no record either, and needs none.
NAMELESS_SYNCED = [*NAMELESS, sync("Stream Sync", 5, stream=8)]
IDLE = [kernel("k", 10.5 + 5 * n + 900 * (n // 5), 4, 7, n) for n in range(10)]
NCU = "ID,Kernel Name,Block Size,Grid Size,gpu__time_duration.sum"

FOUND: dict[str, Make] = {
    # Named in the description of the command.
    "integer-microseconds": kineto(*(kernel("k", 10 * n, 5, 7, n) for n in range(3))),
    "shared-correlation": graph,
    "no-registers": on_kernels(lambda event: event["args"].pop("registers per thread")),
    "dropped-events": with_changes(
        lambda event: event.update(cat="other") if event["cat"] == "kernel" and event["args"]["correlation"] else None
    ),
    "no-gpu-properties": kineto(kernel("k", 1.5, 5), deviceProperties=[]),
    "clocks": clean,
    "unattributed-time": with_changes(
        lambda event: event.update(cat="other") if event["cat"] == "cpu_op" and event["ts"] > 20 else None
    ),
    "short-kernels": on_kernels(lambda event: event.update(dur=0.3)),
    # All others.
    "no-launches": with_changes(no_launch_of_one),
    "not-strict-json": kineto(kernel("k", 1.5, 5, occupancy=float("nan"))),
    "odd-times": kineto(kernel("k", 1.5, 5), kernel("k", 10, -3)),
    "odd-launches": kineto(kernel("k", 1.5, 5, **LONG)),
    "overlap-on-stream": kineto(kernel("k", 1.5, 50), kernel("k", 10, 70)),
    "no-sync-events": kineto(*CONCURRENT),
    "contradicted-waits": kineto(*CONTRADICTED),
    "unknown-waits": kineto(*NAMELESS),
    "no-steps": kineto(kernel("k", 1.5, 5)),
    "resimulated": kineto(*IDLE),
    "no-data-edges": clean,
    "no-kernels": kineto(operator("aten::add", 1, 2)),
    "other-accelerator": kineto({**operator("run", 1, 2), "cat": "mtia_ccp_events"}),
    "several-profiles": ranks,
    "several-devices": kineto(kernel("k", 1.5, 5), kernel("k", 1.5, 5, device=1)),
    "not-importable": kineto(kernel("k", 1.5, 0)),
    "slowed-kernels": slowed,
    "no-record-functions": execution_trace(),
    "joined-operators": joined_operators(with_changes(no_launch_of_one)),
    "unknown-roles": joined_operators(clean, {"kernel_backend": "triton"}),
    "joined-counters": joined_counters,
    "edges-against-order": joined_graph,
    "no-times": table(NCU, "0,k,(64 1 1),(8 1 1),100"),
    "no-durations": table(NCU, "0,k,(64 1 1),(8 1 1),"),
    "locale": table(NCU.replace(",", ";"), "0;k;(64 1 1);(8 1 1);117,34"),
    "units": table(NCU, ",,,,parsec", "0,k,(64 1 1),(8 1 1),100"),
    "order-as-data": chakra,
    "graphs-as-a-whole": nsys(
        "2024",
        "CREATE TABLE CUPTI_ACTIVITY_KIND_GRAPH_TRACE (start INT)",
        "INSERT INTO CUPTI_ACTIVITY_KIND_GRAPH_TRACE VALUES (1)",
    ),
    "no-names": nsys("2024", "DELETE FROM StringIds"),
    "views-left-out": nsys("2024", "CREATE VIEW v AS SELECT 1"),
}


def codes(paths: list[Path]) -> list[str]:
    return [finding.code for finding in examine([str(path) for path in paths]).findings]


@pytest.mark.parametrize("code", FOUND)
def test_finding_is_there_where_its_cause_is(code: str, tmp_path: Path) -> None:
    paths = [str(path) for path in FOUND[code](tmp_path)]
    findings = {finding.code: finding for finding in examine(paths).findings}
    assert code in findings
    assert "\n" not in findings[code].text + findings[code].action
    assert len(findings[code].text) < 300


def test_clean_profile_has_no_finding_but_those_that_each_profile_of_one_file_has(tmp_path: Path) -> None:
    assert codes(clean(tmp_path)) == ["clocks", "no-data-edges"]


def test_profile_with_its_execution_trace_has_no_finding_but_that_on_clocks(tmp_path: Path) -> None:
    assert codes(joined_operators(clean)(tmp_path)) == ["clocks"]


def test_each_code_of_a_finding_has_a_case_here() -> None:
    text = "".join(path.read_text() for path in (ROOT / "gpusim" / "importers").glob("*.py"))
    given = set(re.findall(r'(?:Finding|note)\(\s*"([a-z-]+)"', text))
    assert given == set(FOUND) | {"no-ground-truth", "estimated"}  # of gpusim's own traces: below, and test_estimate


def test_findings_are_numbered_with_reason_and_what_to_do(tmp_path: Path) -> None:
    (path,) = graph(tmp_path)
    result = CliRunner().invoke(cli, ["doctor", str(path)])
    assert result.exit_code == 1
    assert re.search(r"^1\. [a-z-]+: .+\n   -> .+$", result.stderr + result.output, re.MULTILINE)


def test_finding_on_a_resimulated_step_says_why_and_keeps_the_error(tmp_path: Path) -> None:
    imported = import_files([str(path) for path in FOUND["resimulated"](tmp_path)])
    (finding,) = [finding for finding in imported.findings if finding.code == "resimulated"]
    assert "1 record waited 901 us in all for something outside the file, 1 of them without a launch" in finding.text
    assert imported.error == pytest.approx(-0.94, abs=0.01)
    assert imported.source.resimulated_ns > 0


# --- gpusim's own traces ---


def test_own_trace_without_measured_times_says_so(tmp_path: Path) -> None:
    import msgspec

    write_trace(msgspec.structs.replace(load_trace(NAME), ground_truth=None), tmp_path / "t.json")
    assert codes([tmp_path / "t.json"]) == ["no-ground-truth"]


@pytest.mark.parametrize("other", ["a trace", "a profile"])
def test_own_trace_among_several_files_is_refused_as_the_others_would_not_be_described(
    other: str, tmp_path: Path
) -> None:
    one, two = tmp_path / "one.json", tmp_path / "two.json"
    write_trace(load_trace(NAME), one)
    if other == "a trace":
        write_trace(load_trace(NAME), two)
    else:
        made.write_kineto(two, [kernel("k", 1.5, 5)])
    with pytest.raises(TraceError, match=r"one\.json: is a gpusim trace, complete without other files: give it alone"):
        examine([str(one), str(two)])


@pytest.mark.parametrize("name", [NAME, "googlenet-train-b8"])
def test_own_trace_is_described_as_it_is(name: str) -> None:
    report = examine([name])
    trace = load_trace(name)
    assert (report.format, report.steps, report.streams, report.findings) == ("gpusim-trace", 1, 1, ())
    kernels = [kernel for op in trace.ops for kernel in op.kernels if kernel.kind == "kernel"]
    assert (report.kernels, report.busy_ns) == (len(kernels), sum(kernel.dur_ns for kernel in kernels))
    assert report.gpus == ("NVIDIA H200",)


def test_wait_of_the_host_for_a_stream_does_not_name_what_others_wait_for(tmp_path: Path) -> None:
    imported = import_files([str(path) for path in kineto(*NAMELESS_SYNCED)(tmp_path)])
    assert imported.source.dependency_quality == "assumed"
    assert "unknown-waits" in [finding.code for finding in imported.findings]
    assert [[(edge.op, edge.kind) for edge in op.after] for op in imported.trace.ops] == [[], [(0, "assumed")]]


def test_imported_trace_is_described_with_its_quality_and_what_it_shows(tmp_path: Path) -> None:
    imported = import_files([str(path) for path in FOUND["no-sync-events"](tmp_path)])
    write_trace(imported.trace, tmp_path / "t.json")
    report = examine([str(tmp_path / "t.json")])
    assert (report.dependency_quality, report.streams, report.kernels) == ("assumed", 2, 2)
    assert report.busy_ns == imported.source.busy_ns == 15_500
    assert [finding.code for finding in report.findings] == ["no-data-edges", "clocks"]
