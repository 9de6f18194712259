"""Parts of a step: where its time and its memory go, and what kernels wait for."""

from __future__ import annotations

from dataclasses import replace

import msgspec
import pytest

from gpusim.analysis.critical_path import waits
from gpusim.engine.base import engine_by_name
from gpusim.plan.lower import lower
from gpusim.policies.registry import POLICIES
from gpusim.report.breakdown import Part, breakdown, family, largest
from gpusim.report.figures.breakdown import breakdown_figure, front, front_figure
from gpusim.report.live import by_role, live_at, peak
from gpusim.report.perfetto import run_from_timeline
from gpusim.report.waiting import waiting_chain, waiting_text
from gpusim.search.explore import explore
from tests.support.helpers import build_graph, chain_trace, make_hardware, make_trace, op, wide_trace

# --- Where the time goes ---


def test_breakdown_adds_up_three_times() -> None:
    trace = wide_trace()
    found = breakdown(build_graph(trace))
    for parts in (found.phases, found.layers, found.families):
        assert sum(part.time_ns for part in parts) == found.total_ns
        assert sum(part.kernels for part in parts) == found.kernels
        assert [part.time_ns for part in parts] == sorted((part.time_ns for part in parts), reverse=True)


@pytest.mark.parametrize(
    ("target", "expected"),
    [
        ("aten.convolution.default", "convolution"),
        ("aten.add_.Tensor", "add_"),
        ("triton_poi_fused_relu_3", "fused pointwise"),
        ("triton_red_fused_sum_1", "fused reduction"),
    ],
)
def test_family_is_the_operator_or_what_a_fused_kernel_does(target: str, expected: str) -> None:
    trace = chain_trace(1)
    assert family(msgspec.structs.replace(trace.ops[0], target=target)) == expected


def test_small_parts_become_one_that_says_how_many() -> None:
    parts = tuple(Part(f"p{n}", 10 - n, 1) for n in range(5))
    assert largest(parts, 5) == parts
    assert largest(parts, 3) == (*parts[:2], Part("3 others", 8 + 7 + 6, 3))


def test_breakdown_figure_has_units_and_every_part() -> None:
    figure = breakdown_figure(breakdown(build_graph(wide_trace())), "tiny <b>")
    assert all(axis.title.text.endswith(", us") for axis in figure.select_xaxes())
    assert "&lt;b&gt;" in figure.layout.title.text
    assert [len(bar.x) for bar in figure.data] == [1, 1, 1]


# --- Memory ---


def test_what_is_live_at_the_peak_adds_up_to_the_peak() -> None:
    trace = wide_trace()
    graph = build_graph(trace)
    for policy in ("sequential", "wavefront"):
        made = POLICIES[policy](graph, 3)
        timeline = engine_by_name("reference").run(lower(graph, made), graph.hardware)
        found = peak(timeline, trace)
        assert found.bytes == timeline.peak_bytes == sum(live.bytes for live in found.live)
        assert sum(by_role(found.live).values()) == found.bytes


def test_a_chain_has_what_is_read_and_written_in_memory() -> None:
    trace = chain_trace(3)
    graph = build_graph(trace)
    made = POLICIES["sequential"](graph, 1)
    timeline = engine_by_name("reference").run(lower(graph, made), graph.hardware)
    # In the middle of the second op: the input x, which is kept, a0, which it reads, and a1, which it writes.
    assert sorted(live.name for live in live_at(timeline, trace, 1500)) == ["a0", "a1", "x"]


def test_front_has_only_what_nothing_beats_in_both() -> None:
    row = explore(build_graph(wide_trace(), make_hardware()), streams=3, budget_s=60.0, evaluations=8).rows[0]
    times = ((10, 5), (20, 5), (12, 4), (12, 3), (30, 1))
    rows = [replace(row, makespan_ns=time, peak_bytes=size) for time, size in times]
    assert [(r.makespan_ns, r.peak_bytes) for r in front(rows)] == [(10, 5), (12, 3), (30, 1)]
    figure = front_figure(rows, "tiny")
    assert len(figure.data[0].x) == 3
    assert sum(len(trace.x) for trace in figure.data[1:]) == len(rows)


# --- Why a kernel did not start sooner ---


def test_wait_names_the_predecessor_and_the_chain_goes_back_to_the_start() -> None:
    trace = chain_trace(3)
    graph = build_graph(trace, make_hardware(chain_ns=100.0))
    made = POLICIES["sequential"](graph, 1)
    timeline = engine_by_name("reference").run(lower(graph, made), graph.hardware)
    wait = waits(timeline, graph.hardware)[2]
    assert (wait.cause, wait.blocker, wait.wait_ns) == ("stream", 1, 100)
    assert [each.task for each in waiting_chain(timeline, graph.hardware, 2)] == [2, 1, 0]
    run = run_from_timeline(timeline, trace, "t", graph.hardware)
    text = waiting_text(timeline, trace, graph.hardware, run, 2)
    assert "`a1`" in text
    assert "100 ns before" in text


def test_names_from_a_trace_cannot_become_markup() -> None:
    trace = make_trace([op("a`<b>", "x"), op("c", "a`<b>")])
    graph = build_graph(trace)
    made = POLICIES["sequential"](graph, 1)
    timeline = engine_by_name("reference").run(lower(graph, made), graph.hardware)
    run = run_from_timeline(timeline, trace, "t", graph.hardware)
    assert "`a'<b>`" in waiting_text(timeline, trace, graph.hardware, run, 1)
