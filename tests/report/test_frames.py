"""Frames have the contents of timelines and results, under names with units."""

from __future__ import annotations

from pathlib import Path

import pytest

from gpusim.engine.reference import ReferenceEngine
from gpusim.formats.results import read_results
from gpusim.plan.graph import OpGraph
from gpusim.plan.lower import lower
from gpusim.policies.registry import POLICIES
from gpusim.report.frames import results_frame, timeline_frame
from tests.support.helpers import make_hardware, wide_trace

RESULTS = sorted((Path(__file__).parents[2] / "validate" / "results").glob("loop_*.json"))


def test_timeline_frame_has_every_task_once_with_its_op() -> None:
    trace = wide_trace(3, 9000, 2)
    graph = OpGraph.build(trace, make_hardware())
    made = POLICIES["round_robin"](graph, 3)
    timeline = ReferenceEngine().run(lower(graph, made), graph.hardware)
    frame = timeline_frame(timeline, trace)
    assert sorted(frame["op"]) == sorted(op.name for op in trace.ops if op.kernels)
    assert frame["end_ns"].max() == timeline.makespan_ns
    assert (frame["slowdown"] >= 1 - 1e-9).all()
    assert (frame["start_ns"] >= frame["ready_ns"]).all()


def test_results_frame_agrees_with_the_file() -> None:
    results = read_results(RESULTS[-1])
    frame = results_frame(results)
    assert len(frame) == len(results.cases)
    assert frame["error"].tolist() == pytest.approx([case.error for case in results.cases])
    assert (frame["speedup"] == frame["sequential_ns"] / frame["measured_ns"]).all()
