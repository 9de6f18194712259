"""A profile and an execution trace that this torch writes of one run: joined by ids, with the true dependencies.

The run is on the CPU. Its operators are given kernels, as a GPU would run them one after the other, and its tensors of
floats the GPU as their device. The numbers that operators read as tensors stay on the CPU.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from gpusim.formats.trace import Trace
from gpusim.importers import import_files
from gpusim.importers.build import Imported
from tests.support.importer_files import call, kernel, write_kineto

#: Operators that launch a kernel of their own on a GPU, by their CPU names.
LAUNCHING = ("mkldnn_convolution", "clamp_min_", "cat", "addmm", "mm", "sum", "div", "threshold_backward")
LAUNCHING += ("convolution_backward",)


class Fork(nn.Module):
    """Two convolutions of one input, concatenated; their ReLUs change them in place."""

    def __init__(self) -> None:
        super().__init__()
        self.left, self.right = nn.Conv2d(3, 4, 3, padding=1), nn.Conv2d(3, 4, 5, padding=2)
        self.head = nn.Linear(8, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        left = torch.relu_(self.left(x))
        right = torch.relu_(self.right(x))
        return self.head(torch.cat([left, right], 1).mean((2, 3)))


def profiled(folder: Path) -> list[str]:
    """Return the profile, with kernels, and the execution trace of a forward pass and of a training step."""
    torch.manual_seed(0)
    model, x = Fork(), torch.randn(2, 3, 8, 8)
    observer = torch.profiler.ExecutionTraceObserver()
    observer.register_callback(str(folder / "et.json"))
    activities = [torch.profiler.ProfilerActivity.CPU]
    with torch.profiler.profile(activities=activities, execution_trace_observer=observer) as profile:
        model(x).sum().backward()
    profile.export_chrome_trace(str(folder / "cpu.json"))
    put_on_gpu(folder / "et.json")
    events = json.loads((folder / "cpu.json").read_text())["traceEvents"]
    return [str(write_kineto(folder / "k.json", with_kernels(events))), str(folder / "et.json")]


def put_on_gpu(execution_trace: Path) -> None:
    """Replace the device of the tensors of floats, lists of them included."""
    document = json.loads(execution_trace.read_text())
    for node in document["nodes"]:
        for side in (node["inputs"], node["outputs"]):
            for value, kind in zip(side["values"], side["types"], strict=True):
                for tensor in value if kind.startswith("GenericList") else [value]:
                    if "Tensor(float)" in kind:
                        tensor[5] = "cuda:0"
    execution_trace.write_text(json.dumps(document))


def with_kernels(events: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Add a kernel to the operators, launched at the end of each of `LAUNCHING`."""
    operators = [event for event in events if event.get("cat") == "cpu_op"]
    added: list[dict[str, Any]] = []
    ends = [(event["tid"], event["ts"] + event["dur"]) for event in operators]
    for event in operators:
        name = event["name"].removeprefix("aten::")
        if name in LAUNCHING:
            number = len(added) // 2 + 1
            begin, end = event["ts"], event["ts"] + event["dur"]
            inside = [time for thread, time in ends if thread == event["tid"] and begin < time < end]
            launch = call("cudaLaunchKernel", (max(inside, default=begin) + end) / 2, 0, number)
            added += [{**launch, "pid": event["pid"], "tid": event["tid"]}, kernel(name, 0, 8.5, 7, number)]
    kernels = sorted((event for event in added if event["cat"] == "kernel"), key=lambda e: launched(added, e))
    first = max(event["ts"] + event["dur"] for event in operators)
    for place, found in enumerate(kernels):
        found["ts"] = first + 10 * place
    return operators + added


def launched(events: list[dict[str, Any]], of: dict[str, Any]) -> float:
    (found,) = [
        float(event["ts"])
        for event in events
        if event["cat"] == "cuda_runtime" and event["args"]["correlation"] == of["args"]["correlation"]
    ]
    return found


@pytest.fixture(scope="module")
def imported(tmp_path_factory: pytest.TempPathFactory) -> Imported:
    return import_files(profiled(tmp_path_factory.mktemp("profiled")))


def reach(trace: Trace) -> list[set[int]]:
    found: list[set[int]] = []
    for op in trace.ops:
        found.append(set().union(*({edge.op} | found[edge.op] for edge in op.after)) if op.after else set())
    return found


def of(trace: Trace, name: str) -> list[int]:
    return [index for index, op in enumerate(trace.ops) if name in op.kernels[0].name]


def test_all_operators_are_tied_by_their_ids(imported: Imported) -> None:
    assert imported.source.dependency_quality == "data"
    assert "joined-operators" not in [finding.code for finding in imported.findings]
    assert {edge.kind for op in imported.trace.ops for edge in op.after} == {"data"}


def test_branches_are_free_of_each_other_and_the_join_waits_for_both(imported: Imported) -> None:
    trace = imported.trace
    before = reach(trace)
    first, second = of(trace, "mkldnn_convolution")
    relu_first, relu_second = of(trace, "clamp_min_")
    (join,) = of(trace, "cat")
    assert first not in before[second]
    assert first in before[relu_first]
    assert second in before[relu_second]
    assert second not in before[relu_first]
    assert first not in before[relu_second]
    assert {first, second, relu_first, relu_second} <= before[join]


def test_backward_pass_waits_for_what_the_forward_pass_kept(imported: Imported) -> None:
    trace = imported.trace
    before = reach(trace)
    backward = of(trace, "convolution_backward")
    assert len(backward) == 2
    assert all(trace.ops[index].phase == "backward" for index in backward)
    relus = of(trace, "clamp_min_")
    assert [[relu in before[index] for relu in relus] for index in backward] == [[False, True], [True, False]]
    assert backward[0] not in before[backward[1]]
