"""Optimizations that keep large steps linear do not change results."""

from __future__ import annotations

import numpy as np
import pytest

from gpusim.engine.compiled.arrays import encode_tasks
from gpusim.engine.compiled.op_graph import OpArrays
from gpusim.engine.reference import ReferenceEngine
from gpusim.formats.hardware import load_hardware
from gpusim.plan.graph import OpGraph
from gpusim.policies import critical_path
from gpusim.policies.shared.list_scheduling import FastLists
from gpusim.search import explore as exploring
from gpusim.search import verdict
from gpusim.search.eager import predict_eager
from gpusim.trace.store import load_trace
from tests.support.helpers import build_graph, lowered
from tests.support.list_scheduling import list_schedule


def googlenet() -> OpGraph:
    return OpGraph.build(load_trace("googlenet-train-b8"), load_hardware("h200"))


def test_a_step_encoded_several_times_in_a_row_is_its_encoding_repeated() -> None:
    graph = googlenet()
    tasks = lowered(graph, range(len(graph)), [0] * len(graph)).tasks
    assert np.array_equal(encode_tasks(tasks * 3), np.tile(encode_tasks(tasks), 3))


def test_a_plan_without_memory_has_the_same_tasks_and_no_buffers() -> None:
    graph = googlenet()
    arguments = (graph, range(len(graph)), [0] * len(graph))
    without = lowered(*arguments, memory=False)
    assert without.tasks == lowered(*arguments).tasks
    assert (without.buffers, without.kept_bytes) == ((), 0)


@pytest.mark.parametrize("min_share", [0.0, 0.05, 0.6])
@pytest.mark.parametrize("streams", [1, 4, 8])
def test_ready_ops_kept_by_demand_are_chosen_as_from_one_list(streams: int, min_share: float) -> None:
    # The compiled scheduler keeps one list of all ready ops.
    graph = googlenet()
    by_demand = list_schedule(graph, streams, graph.bottom_ns, min_share)
    assert by_demand == FastLists(graph).schedule(streams, graph.bottom_ns, min_share)


def test_a_large_step_is_explored_without_what_takes_too_long_and_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(exploring, "LARGE_STEP_OPS", 10)
    explored = exploring.explore(
        build_graph(load_trace("squeezenet1_1-infer-b1"), load_hardware("h200")), streams=4, budget_s=0.1
    )
    assert {row.policy for row in explored.rows} == {"sequential", "wavefront", "round_robin", "critical_path"}
    assert explored.left_out == ("nimble", "turbodl", "ooo_backprop", "opara", "torchsched", "trtllm", "search")
    assert explored.evaluations == 0


@pytest.mark.parametrize("trace", ["googlenet-train-b8", "squeezenet1_1-infer-b1"])
def test_large_steps_are_concluded_as_small_ones_are(trace: str, monkeypatch: pytest.MonkeyPatch) -> None:
    graph = OpGraph.build(load_trace(trace), load_hardware("h200"))
    made = critical_path.critical_path(graph, 4)
    rows = verdict.verdict_rows(graph, made, 1000, 900, None)
    monkeypatch.setattr(verdict, "COMPILED_FROM_OPS", 0)
    assert verdict.verdict_rows(graph, made, 1000, 900, None) == rows


@pytest.mark.parametrize("trace", ["googlenet-train-b8", "squeezenet1_1-infer-b1"])
def test_eager_steps_made_as_arrays_take_what_their_plan_takes(trace: str) -> None:
    graph = OpGraph.build(load_trace(trace), load_hardware("h200"))
    assert predict_eager(graph) == predict_eager(graph, ReferenceEngine())


def test_op_graph_is_encoded_once() -> None:
    graph = googlenet()
    assert OpArrays.of(graph) is OpArrays.of(graph)
