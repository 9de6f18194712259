"""The timeline as data: streams, bars, counters, the measured run, and aggregation beyond the visible."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpusim.analysis.limits import limits
from gpusim.formats.trace import Counters, Kernel, Trace
from gpusim.report.figures.compared import Compared, compared_figure
from gpusim.report.figures.limits import limits_figure
from gpusim.report.figures.theme import LIGHT
from gpusim.report.figures.timeline import BAR, COUNTER, LANE, Look, slice_text, timeline_figure
from gpusim.report.lanes import MAX_BARS, Bar, bars, lanes, samples, whole, with_phases
from gpusim.report.perfetto import Run, Slice, run_from_timeline
from tests.support.drawing import (
    annotations,
    bars_of,
    drawn,
    simulated,
)
from tests.support.helpers import HALF, Step, build_graph, kernel, make_hardware, make_trace, op, view, wide_trace

# --- Timeline ---


def counted_trace() -> Trace:
    """Make a step whose kernels have counted DRAM traffic, and so all tracks."""
    trace = wide_trace()
    counters = Counters(dram_bytes=1_000_000, l2_bytes=0, instructions=0, tensor_instructions=0)

    def counted(kernels: tuple[Kernel, ...]) -> tuple[Kernel, ...]:
        return tuple(msgspec.structs.replace(each, counters=counters) for each in kernels)

    ops = tuple(msgspec.structs.replace(each, kernels=counted(each.kernels)) for each in trace.ops)
    return msgspec.structs.replace(trace, ops=ops)


def test_timeline_has_a_bar_for_each_kernel_in_its_lane() -> None:
    trace = wide_trace(6)
    timeline, hardware = simulated(trace)
    (found,) = bars_of(timeline_figure(timeline, trace, hardware))
    tasks = timeline.plan.tasks
    assert sorted(zip(found.base, found.x, found.y, strict=True)) == sorted(
        (start / 1000, (end - start) / 1000, task.queue)
        for task, start, end in zip(tasks, timeline.start_ns, timeline.end_ns, strict=True)
    )


def test_timeline_has_a_trace_for_each_phase_in_the_order_of_the_step() -> None:
    trace = wide_trace(3)
    phases = ("forward", "backward", "optimizer")
    ops = [msgspec.structs.replace(each, phase=phases[i % 3]) for i, each in enumerate(trace.ops)]
    figure = drawn(msgspec.structs.replace(trace, ops=tuple(ops)))
    assert [bar.name for bar in bars_of(figure)] == list(phases)
    assert {bar.marker.color for bar in bars_of(figure)} == {LIGHT.phase(phase) for phase in phases}
    # Plotly would make the bars of a phase that uses every other lane two lanes high.
    assert {bar.width for bar in bars_of(figure)} == {BAR}


def test_hover_names_kernel_op_layer_shape_and_limit() -> None:
    launch = msgspec.structs.replace(
        kernel(5000, blocks=HALF, threads=256, regs=168, smem=49152), name="void conv<float, 4>(Params&)"
    )
    step = Step("conv_1", "x", "y", kernels=(launch,))
    trace = make_trace([step])
    trace = msgspec.structs.replace(trace, ops=(msgspec.structs.replace(trace.ops[0], layer="features.conv1"),))
    ((text,),) = (bar.hovertext for bar in bars_of(drawn(trace)))
    for words in (
        "void conv&lt;float, 4&gt;(Params&amp;)",
        "op conv_1 (aten.test.default), forward",
        "layer features.conv1",
        "grid 132x1x1, block 256x1x1, 168 registers a thread, 48 KiB shared memory",
        "limited by registers",
        "duration 5.00 us, alone 5.00 us",
    ):
        assert words in text
    assert "<float" not in text  # plotly would take it for a tag and drop it


def test_kernel_held_by_the_front_end_says_so() -> None:
    trace = make_trace([op("a", "x"), op("b", "y")])
    timeline, hardware = simulated(trace, 2, make_hardware(front_end_ns=250))
    run = run_from_timeline(timeline, trace, "t", hardware)
    assert "waited 0.25 us" in slice_text(run, 1, timeline)
    assert "waited" not in slice_text(run, 0, timeline)


def test_long_kernel_name_is_wrapped_and_cut_visibly() -> None:
    run = Run("t", (Slice("word " * 200, 0, 0, 10),))
    first, *_ = slice_text(run, 0).split("</b>")
    lines = first.split("<br>")
    assert 2 <= len(lines) <= 3
    assert all(len(line) < 90 for line in lines)
    assert lines[-1].endswith("...")


def test_critical_path_runs_through_its_lanes_to_the_end() -> None:
    trace = wide_trace(3)
    timeline, hardware = simulated(trace)
    figure = timeline_figure(timeline, trace, hardware)
    (line,) = (each for each in figure.data if each.name == "critical path")
    assert (line.x[0], line.x[-1]) == (0.0, timeline.makespan_ns / 1000)
    assert set(line.y) <= {0, 1, 2}


def test_counters_share_the_axis_of_the_lanes() -> None:
    figure = drawn(counted_trace())
    counters = [each for each in figure.data if each.type == "scatter" and each.name != "critical path"]
    assert [each.name for each in counters] == ["SMs, %", "DRAM, GB/s", "memory, MiB"]
    assert all(0 <= value <= 100 for value in counters[0].y)
    axes = [figure.layout[name] for name in ("xaxis", "xaxis2", "xaxis3", "xaxis4")]
    assert {axis.matches for axis in axes[:-1]} == {"x4"}
    assert len({axis.range for axis in axes}) == 1


def test_a_track_of_which_nothing_is_known_is_left_out() -> None:
    """Kernels without counters, whose tensors stay in the L2 cache, have no known DRAM traffic."""
    names = [each.name for each in drawn(wide_trace()).data if each.type == "scatter"]
    assert names == ["critical path", "SMs, %", "memory, MiB"]


def test_measured_run_is_drawn_below_on_the_same_axis() -> None:
    measured = Run("measured replay", tuple(Slice(f"k{i}", i % 2, 900 * i, 800) for i in range(30)))
    figure = drawn(counted_trace(), measured=measured)
    simulated_bars, measured_bars = bars_of(figure)
    assert (simulated_bars.name, len(simulated_bars.x)) == ("forward", 14)
    assert (measured_bars.name, len(measured_bars.x)) == ("phase unknown", 30)
    assert measured_bars.marker.color != simulated_bars.marker.color
    assert (figure.layout.yaxis.title.text, figure.layout.yaxis5.title.text) == ("simulated", "measured")
    assert "measured replay, 26.9 us" in annotations(figure)
    assert figure.layout.yaxis5.ticktext == ("stream 0", "stream 1")


def test_tracks_stand_between_the_simulated_lanes_and_the_measured_ones() -> None:
    figure = drawn(counted_trace(), measured=Run("m", (Slice("k", 0, 0, 800),)))
    rows = [figure.layout[f"yaxis{row}" if row > 1 else "yaxis"] for row in range(1, 6)]
    assert [row.title.text for row in rows] == ["simulated", "SMs,<br>%", "DRAM,<br>GB/s", "memory,<br>MiB", "measured"]
    assert [row.domain[0] for row in rows] == sorted((row.domain[0] for row in rows), reverse=True)


@pytest.mark.parametrize("streams", [2, 8, 24])
def test_a_lane_is_as_high_however_many_there_are(streams: int) -> None:
    timeline, hardware = simulated(wide_trace(24), streams)
    figure = timeline_figure(timeline, wide_trace(24), hardware)
    low, high = figure.layout.yaxis.domain
    room = figure.layout.height - 155
    assert (high - low) * room == pytest.approx(streams * LANE, abs=2)
    low, high = figure.layout.yaxis2.domain
    assert (high - low) * room == pytest.approx(COUNTER, abs=2)


def test_measured_lanes_are_folded_into_as_few_as_hold_them() -> None:
    """A CUDA graph's executor spreads kernels over many streams of its own: 24 here, of which 2 are busy at once."""
    spread = Run("m", tuple(Slice(f"k{i}", i % 24, 500 * i, 900) for i in range(48)))
    assert len(drawn(counted_trace(), measured=spread).layout.yaxis5.ticktext) == 24
    figure = drawn(counted_trace(), measured=spread, look=Look(fold=True))
    assert figure.layout.yaxis5.ticktext == ("at once 1", "at once 2")
    assert sum(len(bar.x) for bar in bars_of(figure)[1:]) == 48


def test_measured_kernels_take_phase_and_layer_of_the_simulated_ones_by_name_and_order() -> None:
    args = [{"phase": phase, "layer": layer} for phase, layer in (("forward", "a"), ("backward", "b"))]
    simulated_run = Run("s", tuple(Slice("k", 0, 100 * i, 50, args[i]) for i in range(2)))
    late_first = Run("m", (Slice("k", 3, 700, 50), Slice("k", 5, 600, 50), Slice("other", 5, 0, 50)))
    found = with_phases(late_first, simulated_run)
    assert [piece.args for piece in found.slices] == [args[1], args[0], {}]
    thrice = Run("m", tuple(Slice("k", 0, 100 * i, 50) for i in range(3)))
    assert with_phases(thrice, simulated_run) == thrice


def test_a_marked_op_is_a_band_over_its_time_and_a_bare_figure_has_neither_title_nor_legend() -> None:
    timeline, hardware = simulated(wide_trace())
    figure = timeline_figure(timeline, wide_trace(), hardware, look=Look(marked=frozenset({3}), bare=True))
    [band] = [shape for shape in figure.layout.shapes if shape.type == "rect"]
    assert (band.x0, band.x1) == (timeline.start_ns[3] / 1000, timeline.end_ns[3] / 1000)
    assert figure.layout.title.text is None
    assert not figure.layout.showlegend
    away = Look(marked=frozenset({3}), window_ns=(timeline.end_ns[3] + 1, timeline.makespan_ns))
    assert not [
        shape
        for shape in timeline_figure(timeline, wide_trace(), hardware, look=away).layout.shapes
        if shape.type == "rect"
    ]


def test_compared_runs_share_one_axis_and_each_ends_where_its_step_does() -> None:
    runs = []
    for name, streams in (("one", 1), ("many", 3)):
        timeline, hardware = simulated(wide_trace(), streams)
        runs.append(Compared(name, timeline, wide_trace(), hardware))
    figure = compared_figure(runs)
    ends = [shape.x0 for shape in figure.layout.shapes]
    assert ends == [run.timeline.makespan_ns / 1000 for run in runs]
    assert ends[0] > ends[1]
    assert {figure.layout[f"xaxis{n}" if n > 1 else "xaxis"].range for n in range(1, 5)} == {(0.0, ends[0])}
    assert [len(bar.x) for bar in bars_of(figure)] == [14, 14]
    titles = [figure.layout[f"yaxis{n}" if n > 1 else "yaxis"].title.text for n in range(1, 5)]
    assert titles == ["one", "SMs, %", "many", "SMs, %"]


def test_only_simulated_bars_can_be_asked_why_they_did_not_start_sooner() -> None:
    """A click returns a simulated task, which a measured kernel is not."""
    figure = drawn(counted_trace(), measured=Run("m", (Slice("k", 0, 0, 800),)))
    simulated_bars, measured_bars = bars_of(figure)
    assert sorted(simulated_bars.customdata) == list(range(14))
    assert set(measured_bars.customdata) == {-1}


@pytest.mark.parametrize("run", [None, Run("m", (Slice("k", 0, 0, 800),))])
def test_time_without_a_profiler_is_a_line_through_all_lanes_and_in_the_window(run: Run | None) -> None:
    figure = drawn(wide_trace(), measured=run, measured_ns=90_000)
    dotted = [shape for shape in figure.layout.shapes if shape.line.dash == "dot"]
    assert [shape.x0 for shape in dotted] == [90.0] * (1 if run is None else 2)
    assert figure.layout.xaxis.range[1] == 90.0
    assert "dotted: 90.0 us, timed without a profiler" in figure.layout.title.text + annotations(figure)


def test_window_draws_what_lies_in_it_cut_at_its_edges() -> None:
    figure = drawn(wide_trace(3, dur_ns=10_000, depth=1), look=Look(window_ns=(500, 6000)))
    (found,) = bars_of(figure)
    assert (min(found.base), max(b + x for b, x in zip(found.base, found.x, strict=True))) == (0.5, 6.0)
    assert figure.layout.xaxis.range == (0.5, 6.0)


def test_uncalibrated_hardware_is_named_in_the_title() -> None:
    hardware = make_hardware(calibrated=False)
    timeline, hardware = simulated(wide_trace(), 2, hardware)
    assert "(uncalibrated)" in timeline_figure(timeline, wide_trace(), hardware).layout.title.text


def test_step_without_kernels_is_an_empty_figure() -> None:
    trace = make_trace([view("v", "x")])
    timeline, hardware = simulated(trace)
    assert not bars_of(timeline_figure(timeline, trace, hardware))
    (waterfall,) = bars_of(limits_figure(limits(build_graph(trace, make_hardware()))))
    assert set(waterfall.x) == {0.0}


# --- Aggregation ---


def many(count: int, streams: int = 3, gap_ns: int = 3) -> Run:
    phases = ("forward", "backward")
    slices = []
    for index in range(count):
        place = index // streams
        piece = Slice(f"k{index}", index % streams, place * (10 + gap_ns), 7 + place % 4, {"phase": phases[place % 2]})
        slices.append(piece)
    return Run("many", tuple(slices))


def total(found: tuple[Bar, ...], run: Run) -> dict[tuple[int, str], float]:
    """Return the drawn time for each stream and phase."""
    result: dict[tuple[int, str], float] = {}
    for bar in found:
        result[bar.lane, bar.phase] = result.get((bar.lane, bar.phase), 0.0) + bar.dur_ns
    return result


def test_up_to_the_limit_each_kernel_has_its_bar() -> None:
    run = many(MAX_BARS)
    found = bars(run, lanes(run), whole(run))
    assert (len(found.bars), found.bin_ns, found.kernels) == (MAX_BARS, None, MAX_BARS)


@pytest.mark.parametrize("count", [MAX_BARS + 1, 5 * MAX_BARS])
def test_beyond_the_limit_bars_are_bins_that_keep_the_time(count: int) -> None:
    run = many(count)
    found = bars(run, lanes(run), whole(run))
    assert found.bin_ns is not None
    assert found.kernels == count
    assert MAX_BARS / 4 < len(found.bars) <= MAX_BARS
    expected: dict[tuple[int, str], float] = {}
    for piece in run.slices:
        key = piece.stream, str(piece.args["phase"])
        expected[key] = expected.get(key, 0.0) + piece.dur_ns
    assert total(found.bars, run) == pytest.approx(expected)
    assert {index for bar in found.bars for index in bar.slices} == set(range(count))
    for one, other in pairwise(sorted(found.bars, key=lambda bar: (bar.lane, bar.start_ns))):
        # Phases that share a bin lie end to end in it.
        assert one.lane != other.lane or one.start_ns + one.dur_ns <= other.start_ns + 1e-6


@given(
    st.lists(st.tuples(st.integers(0, 2), st.integers(0, 500), st.integers(0, 60)), min_size=1, max_size=40),
    st.integers(1, 30),
    st.integers(0, 200),
    st.integers(1, 400),
)
def test_bins_keep_the_time_within_any_window(
    pieces: list[tuple[int, int, int]], limit: int, begin: int, length: int
) -> None:
    run = Run("r", tuple(Slice(f"k{i}", s, start, dur) for i, (s, start, dur) in enumerate(pieces)))
    rows, window = lanes(run), (begin, begin + length)
    exact, binned = bars(run, rows, window, 10**6), bars(run, rows, window, limit)
    assert total(binned.bars, run) == pytest.approx({k: v for k, v in total(exact.bars, run).items() if v > 0}) or (
        binned.bin_ns is None
    )
    inside = [max(0, min(start + dur, window[1]) - max(start, begin)) for _, start, dur in pieces]
    assert sum(bar.dur_ns for bar in exact.bars) == sum(inside)
    for one, other in pairwise(sorted(binned.bars, key=lambda bar: (bar.lane, bar.start_ns))):
        if one.lane == other.lane:
            assert one.start_ns + one.dur_ns <= other.start_ns + 1e-6


def test_aggregated_timeline_says_so_in_title_and_hover() -> None:
    steps = [op(f"a{i}", "x", dur_ns=100) for i in range(MAX_BARS + 10)]
    figure = drawn(make_trace(steps))
    assert "bars aggregated in bins of" in figure.layout.title.text
    (found,) = bars_of(figure)
    assert len(found.x) <= MAX_BARS
    assert sum(found.x) == pytest.approx((MAX_BARS + 10) * 0.1)
    assert all("kernels, aggregated</b>" in text and "longest: k100" in text for text in found.hovertext)


@given(st.lists(st.tuples(st.integers(1, 50), st.floats(0, 100)), min_size=1, max_size=60), st.integers(1, 20))
def test_averaged_counter_keeps_its_area(changes: list[tuple[int, float]], limit: int) -> None:
    series, time = [], 0
    for step, value in changes:
        series.append((time, value))
        time += step
    exact, averaged = samples(series, (0, time)), samples(series, (0, time), limit)

    def area(found: Any) -> float:
        return sum(v * (b - a) for (a, b), v in zip(pairwise(found.times_ns), found.values, strict=False))

    assert exact.bin_ns is None
    assert area(averaged) == pytest.approx(area(exact))
    assert len(averaged.times_ns) <= max(limit, len(series) if averaged.bin_ns is None else limit) + 1


def test_overlapping_slices_of_a_measured_stream_get_a_lane_of_their_own() -> None:
    run = Run("measured", (Slice("a", 7, 0, 100), Slice("b", 7, 50, 100), Slice("c", 13, 0, 10)))
    assert [lane.name for lane in lanes(run)] == ["stream 7", "stream 7 (2)", "stream 13"]
