"""The predicted eager step: the host's pace, the GPU's, and the slower of the two."""

from __future__ import annotations

import json
import statistics
from dataclasses import replace
from pathlib import Path

import msgspec
import pytest
from click.testing import CliRunner

from gpusim.cli import cli
from gpusim.engine.reference import ReferenceEngine
from gpusim.formats.hardware import load_hardware
from gpusim.formats.trace import Trace
from gpusim.io.packed import files_in
from gpusim.plan.eager import STEPS_IN_A_ROW, eager_plan
from gpusim.plan.graph import OpGraph
from gpusim.search.eager import predict_eager
from gpusim.trace.store import bundled_traces, read_trace, write_trace
from tests.support.helpers import build_graph, kernel, make_hardware, make_trace, op, view


def host_bound(host_ns: int, dur_ns: int, ops: int = 3) -> Trace:
    """Make a chain of `ops` kernels."""
    steps = [replace(op(f"a{i}", f"a{i - 1}" if i else "x", dur_ns=dur_ns), host_ns=host_ns) for i in range(ops)]
    return make_trace(steps)


COSTS = {"launch_ns": 5000.0, "start_ns": 100.0, "stream_chain_ns": 50.0}


def test_slow_host_sets_the_pace() -> None:
    """12 launches of 1000 ns; the last kernel starts 100 after its launch and takes 10: 12110 / 4."""
    graph = build_graph(host_bound(1000, 10), make_hardware(**COSTS))
    assert predict_eager(graph) == round((12 * 1000 + 100 + 10) / STEPS_IN_A_ROW)


def test_slow_gpu_sets_the_pace_and_the_host_runs_ahead_into_the_next_step() -> None:
    """The first kernel starts at 10 + 100; 12 kernels of 2000 with 11 gaps of 50 follow each other."""
    graph = build_graph(host_bound(10, 2000), make_hardware(**COSTS))
    assert predict_eager(graph) == round((110 + 12 * 2000 + 11 * 50) / STEPS_IN_A_ROW)


def test_traced_host_time_includes_the_launches() -> None:
    """An op of two kernels took 600 ns on the host: 300 for each launch, not the 5000 of an untraced launch."""
    step = replace(op("a", "x"), kernels=(kernel(10), kernel(10)), host_ns=600)
    graph = build_graph(make_trace([step]), make_hardware(**COSTS))
    assert [task.host_ns for task in eager_plan(graph).tasks] == [300.0] * 2 * STEPS_IN_A_ROW
    assert predict_eager(graph) == round((600 * STEPS_IN_A_ROW + 100 + 10) / STEPS_IN_A_ROW)


def test_views_cost_host_time() -> None:
    steps = [
        replace(op("a", "x"), host_ns=1000),
        replace(view("v", "a"), host_ns=500),
        replace(op("b", "v"), host_ns=1000),
    ]
    graph = build_graph(make_trace(steps), make_hardware(**COSTS))
    assert [task.host_ns for task in eager_plan(graph).tasks[:2]] == [1000, 1500]


def test_trace_without_host_times_predicts_nothing() -> None:
    assert predict_eager(build_graph(host_bound(0, 10), make_hardware(**COSTS))) is None


def test_both_engines_predict_the_same() -> None:
    graph = OpGraph.build(read_trace(bundled_traces()["squeezenet1_1-infer-b1"]), load_hardware("h200"))
    assert predict_eager(graph) == predict_eager(graph, ReferenceEngine())


@pytest.mark.parametrize("measured", [True, False])
def test_simulate_shows_the_predicted_step_beside_the_measured_one(tmp_path: Path, measured: bool) -> None:
    trace = host_bound(1000, 10)
    if measured:
        truth = make_trace([op("a", "x")], graph_ns=1000, eager_ns=4000).ground_truth
        trace = msgspec.structs.replace(trace, ground_truth=truth)
    path = tmp_path / "t.json"
    write_trace(trace, path)
    text = CliRunner().invoke(cli, ["simulate", str(path)], catch_exceptions=False).output
    document = json.loads(CliRunner().invoke(cli, ["simulate", str(path), "--json"], catch_exceptions=False).stdout)
    assert document["eager"].get("measured_ns") == (4000 if measured else None)
    assert document["eager"]["predicted_ns"] > 3000
    assert ("measured at the capture" in text) == measured
    assert "predicted" in text.partition("eager step")[2].partition("\n")[0]


def eager_errors(folder: Path) -> dict[str, float]:
    """Predicted over measured less 1 of the traces in a folder that were captured in turns (2026-11-21 and later)."""
    found = {}
    for path in files_in(folder, ".json.gz"):
        trace = read_trace(path)
        predicted = predict_eager(OpGraph.build(trace, load_hardware("h200")))
        assert trace.ground_truth is not None
        assert predicted is not None
        found[trace.name] = predicted / trace.ground_truth.eager.median_ns - 1
    return found


def test_eager_steps_of_the_validation_traces_are_within_5_percent_in_the_median() -> None:
    """Wall time within 5 % in the median, though their pace was captured after the wall time, not in turns with it."""
    errors = eager_errors(Path(__file__).parents[2] / "validate" / "traces" / "fidelity")
    assert statistics.median(map(abs, errors.values())) < 0.05


def test_eager_steps_of_the_bundled_traces_are_within_5_percent_in_the_median() -> None:
    """Wall time of the eager step, host-bound or not, from the host times of its ops."""
    errors = eager_errors(Path(__file__).parents[2] / "traces")
    assert len(errors) == len(bundled_traces())
    assert statistics.median(map(abs, errors.values())) < 0.05
