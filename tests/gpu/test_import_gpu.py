"""Imports and exports on a GPU: profiles of this torch, a captured graph's edges, exported code."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import gpusim
from gpusim.gpu.capture.graph_dump import dump_graph
from gpusim.gpu.replay.execute import make_initial
from gpusim.importers import examine, import_files
from gpusim.importers.build import Imported
from gpusim.report.schedule_python import given_names, schedule_python
from gpusim.trace.store import load_trace

pytestmark = [pytest.mark.gpu, pytest.mark.filterwarnings("ignore:Warning. Profiler clears events")]

SIZE = 1024


def model() -> Any:
    return torch.nn.Sequential(
        torch.nn.Linear(SIZE, SIZE),
        torch.nn.ReLU(),
        torch.nn.Linear(SIZE, SIZE),
        torch.nn.ReLU(),
        torch.nn.Linear(SIZE, 8),
    ).cuda()


def profiled(folder: Path, step: Callable[[], None], **options: Any) -> str:
    """Return the profile of three steps after warm-up."""
    for _ in range(3):
        step()
    torch.cuda.synchronize()
    with torch.profiler.profile(**options) as profile:
        for number in range(3):
            with torch.profiler.record_function(f"ProfilerStep#{number}"):
                step()
        torch.cuda.synchronize()
    path = folder / "k.json"
    profile.export_chrome_trace(str(path))
    return str(path)


def close(imported: Imported) -> bool:
    return imported.error is not None and abs(imported.error) < 0.02


def test_training_step_joins_its_execution_trace_and_takes_what_it_took(tmp_path: Path) -> None:
    net, x = model(), torch.randn(64, SIZE, device="cuda")

    def step() -> None:
        net(x).sum().backward()

    observer = torch.profiler.ExecutionTraceObserver()
    observer.register_callback(str(tmp_path / "et.json"))
    profile = profiled(tmp_path, step, execution_trace_observer=observer)
    imported = import_files([profile, str(tmp_path / "et.json")])
    assert imported.source.dependency_quality == "data"
    assert close(imported)
    assert gpusim.explore(imported.trace, evaluations=16, budget_s=10).best.makespan_ns > 0


def test_two_streams_with_recorded_waits_are_ordered_by_events(tmp_path: Path) -> None:
    x = torch.randn(SIZE, SIZE, device="cuda")
    other = torch.cuda.Stream()

    def step() -> None:
        y = x @ x
        other.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(other):
            z = y @ y
        w = y @ x
        torch.cuda.current_stream().wait_stream(other)
        (z + w).relu_()

    config = torch._C._profiler._ExperimentalConfig(enable_cuda_sync_events=True)
    imported = import_files([profiled(tmp_path, step, experimental_config=config)])
    assert imported.source.streams == 2
    quality = imported.source.dependency_quality
    assert quality in ("event", "assumed")  # CUPTI of CUDA 13.0 does not name the awaited records
    assert ("unknown-waits" in [finding.code for finding in imported.findings]) == (quality == "assumed")
    assert [{edge.op for edge in op.after} for op in imported.trace.ops[:4]] == [set(), {0}, {0}, {1, 2}]
    assert {edge.kind for op in imported.trace.ops for edge in op.after} == {"stream", quality}
    assert close(imported)


def test_captured_graph_gives_its_edges_to_the_profile_of_its_replay(tmp_path: Path) -> None:
    x = torch.randn(SIZE, SIZE, device="cuda")
    side = torch.cuda.Stream()
    x @ x
    graph = torch.cuda.CUDAGraph(keep_graph=True)
    with torch.cuda.graph(graph):
        y = x @ x
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            z = torch.relu(y)
        w = torch.sigmoid(y)
        torch.cuda.current_stream().wait_stream(side)
        z + w
    graph.instantiate()
    assert dump_graph(graph, tmp_path / "g.json") >= 4
    profile = profiled(tmp_path, graph.replay)
    assert "shared-correlation" in [finding.code for finding in examine([profile]).findings]
    imported = import_files([profile, str(tmp_path / "g.json")], step="ProfilerStep#1")
    assert imported.source.dependency_quality == "graph"
    preds = [{edge.op for edge in op.after if edge.kind == "graph"} for op in imported.trace.ops]
    assert preds[-1] == {1, 2}
    assert preds[1] == preds[2] == {0}


@pytest.mark.parametrize("policy", ["critical_path", "round_robin"])
def test_exported_code_gives_the_results_of_one_stream(policy: str) -> None:
    trace = load_trace("squeezenet1_1-infer-b1")
    initial = make_initial(trace, torch.device("cuda"), 0).tensors
    given = {key: initial[index] for index, key in given_names(trace).items()}
    results = []
    for name in ("sequential", policy):
        scope: dict[str, Any] = {}
        exec(schedule_python(gpusim.simulate(trace, name, streams=4)), scope)
        for _ in range(20):
            (result,) = scope["step"](given).values()
        torch.cuda.synchronize()
        results.append(result.clone())
    assert torch.equal(*results)
