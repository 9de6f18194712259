"""Imported traces in commands and in Python: `doctor`, `import`, `explore`, and `gpusim.load`."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import msgspec
import pytest
from click.testing import CliRunner

import gpusim
from gpusim.analysis.as_imported import as_imported
from gpusim.cli import cli
from gpusim.engine.fast import FastEngine
from gpusim.errors import GpusimError, OptionError, TraceError
from gpusim.formats.hardware import load_hardware
from gpusim.importers import import_files
from gpusim.plan.graph import OpGraph
from gpusim.trace.store import load_trace, write_trace
from tests.support.importer_files import (
    PROFILES,
    SAMPLES,
    WITHOUT_TIMES,
    kernel,
    node,
    write_execution_trace,
    write_joined,
    write_kineto,
)

KEYS = ["format", "writer", "gpus", "kernels", "streams", "steps", "busy_ns", "concurrent_frac"]
KEYS += ["dependency_quality", "findings"]


def invoke(*words: str) -> tuple[int, str]:
    result = CliRunner().invoke(cli, list(words))
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    return result.exit_code, result.stdout


def test_doctor_prints_exactly_its_keys_and_exits_1_with_findings() -> None:
    code, text = invoke("doctor", "--json", str(PROFILES[0]))
    document = json.loads(text)
    assert code == 1
    assert list(document) == KEYS
    assert all(list(finding) == ["code", "text", "action"] for finding in document["findings"])


def test_doctor_of_a_captured_trace_exits_0() -> None:
    code, text = invoke("doctor", "--json", "googlenet-train-b8")
    document = json.loads(text)
    assert (code, document["dependency_quality"], document["findings"]) == (0, "data", [])
    assert document["kernels"] == sum(
        kernel.kind == "kernel" for op in load_trace("googlenet-train-b8").ops for kernel in op.kernels
    )


def test_explore_of_an_imported_trace_searches_nothing_and_says_which_file_gives_more(tmp_path: Path) -> None:
    out = tmp_path / "t.json.gz"
    assert invoke("import", str(PROFILES[0]), "-o", str(out))[0] == 0
    code, text = invoke("explore", str(out))
    assert code == 0
    assert "execution trace" in text
    assert "dependencies: " in text
    with pytest.raises(GpusimError, match="no schedule is searched"):
        invoke("explore", str(out), "-o", str(tmp_path / "s.json"))


def test_simulate_limits_and_whatif_take_an_imported_trace(tmp_path: Path) -> None:
    out = tmp_path / "t.json"
    trace = import_files([str(PROFILES[0])]).trace
    write_trace(trace, out)
    assert invoke("simulate", str(out), "--json", "--perfetto", str(tmp_path / "p.json"))[0] == 0
    assert invoke("limits", str(out), "--json")[0] == 0
    assert invoke("whatif", str(out), "--bandwidth", "2", "--json")[0] == 0


def test_import_writes_nothing_where_it_fails(tmp_path: Path) -> None:
    out = tmp_path / "t.json"
    with pytest.raises(GpusimError):
        invoke("import", str(WITHOUT_TIMES[0]), "-o", str(out))
    assert not out.exists()


def test_kernels_of_a_graph_launch_keep_the_order_of_streams_in_simulation(tmp_path: Path) -> None:
    imported = import_files([str(SAMPLES / "tl__traces__inference__vllm_decode_full__graph_execution.json.gz")])
    found = as_imported(OpGraph.build(imported.trace, load_hardware("h200")), FastEngine())
    assert found.streams == 1
    assert found.graph_ns == found.chain_ns


def test_load_takes_a_bundled_name_a_trace_and_a_profile(tmp_path: Path) -> None:
    assert gpusim.load("squeezenet1_1-infer-b1").trace == load_trace("squeezenet1_1-infer-b1")
    profile = SAMPLES / "hta__triton_example__triton_example.json.gz"
    step = gpusim.load(profile)
    assert step.trace.provenance.imported_from is not None
    step.save(tmp_path / "t.json")
    assert gpusim.load(tmp_path / "t.json").trace == step.trace


def test_load_joins_the_files_of_one_run(tmp_path: Path) -> None:
    files = write_joined(tmp_path, ids=True)
    step = gpusim.load(list(files))
    assert step.trace == import_files(files).trace
    assert "dependencies: data" in repr(step)
    assert gpusim.load((Path(files[0]), Path(files[1])), hw="a100-80gb").trace == step.trace
    assert gpusim.load([files[0]]).trace == gpusim.load(files[0]).trace


@pytest.mark.parametrize("given", [[], [3], [None, "k.json"], {"a": 1}])
def test_load_refuses_what_are_no_files(given: Any) -> None:
    with pytest.raises(OptionError, match="is no trace; give"):
        gpusim.load(given)


def test_load_refuses_files_that_do_not_belong_together(tmp_path: Path) -> None:
    profile, _ = write_joined(tmp_path, ids=True)
    other = write_execution_trace(tmp_path / "o.json", [node(1, "aten::x", [0], [1], record=1)])
    with pytest.raises(TraceError, match="not of the same run"):
        gpusim.load([profile, other])
    with pytest.raises(OptionError, match="2 separate profiles"):
        gpusim.load([profile, shutil.copy(profile, tmp_path / "other.json")])
    write_trace(import_files([profile]).trace, tmp_path / "t.json")
    with pytest.raises(TraceError, match="is already a gpusim trace"):
        gpusim.load([profile, tmp_path / "t.json"])


def test_step_of_a_profile_says_its_dependency_quality_and_one_of_a_captured_trace_has_none(tmp_path: Path) -> None:
    path = write_kineto(tmp_path / "k.json.gz", [kernel("a", 10, 10, 7, 1), kernel("b", 30, 5, 8, 2)])
    assert "dependencies: assumed" in repr(gpusim.load(path))
    assert "dependencies" not in repr(gpusim.load("squeezenet1_1-infer-b1"))


def test_batch_and_dtype_that_no_profile_has_are_not_said(tmp_path: Path) -> None:
    profile, operators = write_joined(tmp_path, ids=True)
    step = gpusim.load([profile, operators])
    assert step.trace.settings == ""
    assert "<td>unknown</td>" in step._repr_html_()
    write_trace(step.trace, tmp_path / "t.json")
    code, text = invoke("explore", str(tmp_path / "t.json"), "--budget", "0.1")
    assert (code, "infer" in text, "batch" in text, "fp32" in text) == (0, False, False, False)
    backward = msgspec.structs.replace(step.trace.model, mode="train")
    assert msgspec.structs.replace(step.trace, model=backward).settings == "train"
    assert load_trace("squeezenet1_1-infer-b1").settings == "infer, batch 1, tf32"


def test_python_searches_no_schedule_of_a_step_without_data_dependencies(tmp_path: Path) -> None:
    path = write_kineto(tmp_path / "k.json", [kernel("a", 10, 10, 7, 1), kernel("b", 30, 5, 8, 2)])
    with pytest.raises(OptionError, match="no schedule is searched"):
        gpusim.explore(str(path), evaluations=8)


def test_commands_take_a_profile_as_it_is_and_note_its_quality(tmp_path: Path) -> None:
    path = write_kineto(tmp_path / "k.json", [kernel("a", 10, 10, 7, 1), kernel("b", 30, 5, 8, 2)])
    for words in (["simulate"], ["limits"], ["whatif", "--bandwidth", "2"], ["explain"], ["explore"]):
        result = CliRunner().invoke(cli, [words[0], str(path), *words[1:]])
        assert result.exit_code == 0, result.output
        assert "dependencies: assumed" in result.stderr
