"""Figures as data: what is drawn, in which units, and how the files come out. Their looks are for people to judge."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import types
from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import msgspec
import plotly.graph_objects as go
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpusim.cli import main
from gpusim.engine.base import Timeline, engine_by_name
from gpusim.errors import FigureError, OutputError
from gpusim.hardware.model import HardwareModel
from gpusim.plan.lower import lower
from gpusim.policies.registry import POLICIES
from gpusim.report.figures.comparisons import measured_figure, memory_figure, tornado_figure
from gpusim.report.figures.explored import bounds_figure, gain_figure
from gpusim.report.figures.limits import limits_figure, usual_top, waterfall_rows
from gpusim.report.figures.output import check_png, figure_html, figure_png, write_html, write_png
from gpusim.report.figures.theme import DARK, LIGHT, Theme, us_text
from gpusim.report.figures.timeline import slice_text, timeline_figure
from gpusim.report.lanes import MAX_BARS, Bar, bars, lanes, samples, whole
from gpusim.report.perfetto import Run, Slice, run_from_timeline
from gpusim.report.results import Results, read_results
from gpusim.search.explore import Explored, explore
from gpusim.search.limits import LIMITS, Limits, limits
from gpusim.trace.schema import Trace
from gpusim.trace.store import write_trace
from tests.helpers import HALF, Step, build_graph, kernel, make_hardware, make_trace, op, view, wide_trace

ROOT = Path(__file__).parent.parent
UNIT = re.compile(r"(, |\b)(us|MiB|GB/s|%|x)$")
NO_UNIT = ("ops running at once",)


def simulated(trace: Trace, streams: int = 3, hardware: HardwareModel | None = None) -> tuple[Timeline, HardwareModel]:
    graph = build_graph(trace, hardware)
    made = POLICIES["wavefront"](graph, streams)
    plan = lower(graph, made.order, made.streams)
    return engine_by_name("reference").run(plan, graph.hardware), graph.hardware


def drawn(trace: Trace, **options: Any) -> go.Figure:
    timeline, hardware = simulated(trace)
    return timeline_figure(timeline, trace, hardware, **options)


def bars_of(figure: go.Figure) -> list[go.Bar]:
    return [trace for trace in figure.data if trace.type == "bar"]


def axis_titles(figure: go.Figure) -> list[str]:
    """Titles of the axes that show tick labels with numbers."""
    layout = figure.to_dict()["layout"]
    axes = {name: axis for name, axis in layout.items() if re.fullmatch(r"[xy]axis\d*", name)}
    # Rows that share an x axis have its title only at the bottom; y axes with names on them need no unit.
    numeric = {
        name: axis
        for name, axis in axes.items()
        if axis.get("showticklabels", True) and "ticktext" not in axis and not _has_names(figure, name)
    }
    return [axis.get("title", {}).get("text", "") for axis in numeric.values()]


def _has_names(figure: go.Figure, axis: str) -> bool:
    """Whether a y axis has words on it."""
    key = axis.replace("axis", "")
    return axis.startswith("y") and any(
        isinstance(trace.y[0], str) for trace in figure.data if (trace.yaxis or "y") == key and len(trace.y)
    )


def annotations(figure: go.Figure) -> str:
    return "\n".join(note.text for note in figure.layout.annotations)


@pytest.fixture(scope="module")
def found() -> Explored:
    hardware = make_hardware(chain_ns=100, slowdown=0.5, uncertainty=0.05)
    return explore(wide_trace(eager_ns=400_000, graph_ns=130_000), hardware, streams=3, budget_s=0.05)


@pytest.fixture(scope="module")
def limited() -> Limits:
    return limits(wide_trace(), make_hardware(chain_ns=100, slowdown=0.5), streams=2)


@pytest.fixture(scope="module")
def results() -> Results:
    return read_results(max((ROOT / "validate" / "results").glob("loop_*.json")))


def all_figures(found: Explored, limited: Limits, results: Results, theme: Theme) -> dict[str, go.Figure]:
    timeline, hardware = simulated(wide_trace())
    return {
        "limits": limits_figure(limited, theme),
        "timeline": timeline_figure(timeline, wide_trace(), hardware, theme=theme),
        "bounds": bounds_figure(found, theme),
        "gain": gain_figure(found, theme),
        "measured": measured_figure([results], theme),
        "memory": memory_figure([("one", timeline), ("two", found.timeline)], theme),
        "tornado": tornado_figure([("gap", 900.0, 1200.0, 1000.0), ("a", 500.0, 1300.0, 1000.0)], theme),
    }


# --- All figures ---


@pytest.mark.parametrize("theme", [LIGHT, DARK], ids=["light", "dark"])
def test_every_axis_says_its_unit_and_every_figure_its_title(
    theme: Theme, found: Explored, limited: Limits, results: Results
) -> None:
    for name, figure in all_figures(found, limited, results, theme).items():
        titles = axis_titles(figure)
        assert titles, name
        for title in titles:
            assert UNIT.search(title) or title in NO_UNIT, (name, titles)
        assert figure.layout.title.text, name
        assert figure.layout.height, name
        assert figure.layout.template.layout.paper_bgcolor == theme.paper, name


def test_every_axis_is_linear(found: Explored, limited: Limits, results: Results) -> None:
    for name, figure in all_figures(found, limited, results, LIGHT).items():
        assert '"log"' not in figure.to_json(), name


def test_drawing_changes_no_default_of_plotly(found: Explored) -> None:
    import plotly.io

    before = plotly.io.templates.default, set(plotly.io.templates)
    bounds_figure(found, DARK)
    assert (plotly.io.templates.default, set(plotly.io.templates)) == before


# --- Limits ---


def test_waterfall_reaches_from_the_longest_op_to_the_sequential_graph(limited: Limits) -> None:
    scope = limited.scopes[-1]
    rows = waterfall_rows(scope, wide=True)
    assert [row.name for row in rows] == [
        "longest op",
        *(f"+ {limit}" for limit in LIMITS),
        "= best list schedule",
        "+ won by concurrency",
        "= sequential graph",
    ]
    ends = [row.base_ns + row.length_ns for row in rows]
    for (row, end), after in pairwise([*zip(rows, ends, strict=True), (rows[-1], ends[-1])]):
        if after[0].role != "total":
            assert after[0].base_ns == end, (row, after)
    assert ends[len(LIMITS)] == scope.best_ns == rows[-3].length_ns
    assert ends[-2] == scope.sequential_ns == ends[-1]


def test_limits_figure_has_a_waterfall_for_each_scope_and_bars_in_us(limited: Limits) -> None:
    figure = limits_figure(limited)
    (waterfall,) = bars_of(figure)
    assert len(waterfall.y) == len(LIMITS) + 4
    assert waterfall.x[-1] == limited.scopes[-1].sequential_ns / 1000
    steps = [trace for trace in figure.data if trace.type == "scatter"]
    assert [trace.name for trace in steps] == ["forward"]
    assert steps[0].line.shape == "hv"
    assert max(steps[0].y) == limited.scopes[-1].parallelism.maximum == 6


def test_anomaly_is_drawn_to_the_left_and_not_as_a_loss(limited: Limits) -> None:
    scope = limited.scopes[-1]
    first, second, *rest = scope.losses
    lower_second = replace(second, makespan_ns=first.makespan_ns - 50, loss_ns=-50)
    rows = waterfall_rows(replace(scope, losses=(first, lower_second, *rest)), wide=True)
    assert (rows[2].length_ns, rows[2].base_ns, rows[2].role) == (-50, first.makespan_ns, "gain")


def test_peak_of_a_moment_is_named_not_drawn() -> None:
    assert usual_top(((0, 60), (1, 2), (1000, 0))) == 2.0
    assert usual_top(((0, 60), (500, 2), (1000, 0))) == 60.0
    assert usual_top(()) == 0.0
    steps = [Step(f"s{i}", f"x{i}", f"s{i}", kernels=(kernel(1),)) for i in range(40)]
    trace = make_trace([*steps, op("long", "x", dur_ns=100_000)])
    figure = limits_figure(limits(trace, make_hardware()))
    assert "41 at once for a moment" in annotations(figure)
    assert figure.layout.yaxis.range[1] < 5


# --- Timeline ---


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
    figure = drawn(wide_trace())
    counters = [each for each in figure.data if each.type == "scatter" and each.name != "critical path"]
    assert [each.name for each in counters] == ["SMs, %", "DRAM, GB/s", "memory, MiB"]
    assert all(0 <= value <= 100 for value in counters[0].y)
    axes = [figure.layout[name] for name in ("xaxis", "xaxis2", "xaxis3", "xaxis4")]
    assert {axis.matches for axis in axes[:-1]} == {"x4"}
    assert len({axis.range for axis in axes}) == 1


def test_measured_run_is_drawn_below_on_the_same_axis() -> None:
    measured = Run("measured replay", tuple(Slice(f"k{i}", i % 2, 900 * i, 800) for i in range(30)))
    figure = drawn(wide_trace(), measured=measured)
    simulated_bars, measured_bars = bars_of(figure)
    assert (simulated_bars.name, len(simulated_bars.x)) == ("forward", 14)
    assert (measured_bars.name, len(measured_bars.x)) == ("phase unknown", 30)
    assert measured_bars.marker.color != simulated_bars.marker.color
    assert (figure.layout.yaxis.title.text, figure.layout.yaxis2.title.text) == ("simulated", "measured")
    assert "below: measured replay, 26.9 us" in figure.layout.title.text
    assert figure.layout.yaxis2.ticktext == ("stream 0", "stream 1")


def test_window_draws_what_lies_in_it_cut_at_its_edges() -> None:
    figure = drawn(wide_trace(3, dur_ns=10_000, depth=1), window_ns=(500, 6000))
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
    (waterfall,) = bars_of(limits_figure(limits(trace, make_hardware())))
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
    """Drawn time for each lane and phase."""
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


# --- What explore found ---


def test_bounds_figure_has_every_policy_the_best_and_the_bounds(found: Explored) -> None:
    figure = bounds_figure(found)
    names = {name: bar.name for bar in bars_of(figure) for name in bar.y}
    policies = {row.policy for row in found.rows}
    assert {name.split(",")[0] for name in names if not name.startswith("bound")} == policies
    assert [name for name, group in names.items() if group == "recommended"] == [
        f"{found.best.policy}, {found.best.streams} streams"
    ]
    lengths = {name: x for bar in bars_of(figure) for name, x in zip(bar.y, bar.x, strict=True)}
    assert lengths["bound: critical path"] == found.bounds.critical_path_ns / 1000
    assert lengths["sequential, 1 stream"] == found.sequential_ns / 1000


def test_gain_goes_from_eager_to_the_recommended_schedule(found: Explored) -> None:
    (bar,) = bars_of(gain_figure(found))
    ends = dict(zip(bar.y, (b + x for b, x in zip(bar.base, bar.x, strict=True)), strict=True))
    assert list(ends) == [
        "eager step (measured)",
        "launches from a CUDA graph",
        "= sequential graph",
        "streams, ops in recorded order",
        "better order and placement",
        "= recommended schedule",
    ]
    assert ends["launches from a CUDA graph"] == pytest.approx(found.sequential_ns / 1000)
    assert ends["better order and placement"] == pytest.approx(found.best.makespan_ns / 1000)


def test_gain_without_a_measured_eager_step_begins_with_the_sequential_graph() -> None:
    found = explore(wide_trace(), make_hardware(), streams=2, budget_s=0.01)
    (bar,) = bars_of(gain_figure(found))
    assert bar.y[0] == "= sequential graph"


# --- Comparisons ---


def test_every_case_of_the_results_is_a_point_in_both_panels(results: Results) -> None:
    figure = measured_figure([results])
    points = [trace for trace in figure.data if trace.mode == "markers"]
    for axis, pairs in (
        ("x", {(case.measured_ns / 1000, case.predicted_ns / 1000) for case in results.cases}),
        ("x2", {(case.speedup, case.predicted_speedup) for case in results.cases}),
    ):
        mine = [trace for trace in points if trace.xaxis == axis]
        assert {pair for trace in mine for pair in zip(trace.x, trace.y, strict=True)} == pairs
        assert sum(len(trace.x) for trace in mine) == len(results.cases)
    assert any(results.cases[0].trace in text for trace in points for text in trace.hovertext)


def test_no_results_are_an_empty_figure() -> None:
    assert not [trace for trace in measured_figure([]).data if trace.mode == "markers"]


def test_memory_lines_reach_their_peaks_in_mib() -> None:
    timeline, _ = simulated(wide_trace(elements=1 << 20))
    (line,) = memory_figure([("sequential", timeline)]).data
    assert max(line.y) == timeline.peak_bytes / 2**20
    assert line.x[-1] == timeline.makespan_ns / 1000


def test_tornado_has_the_widest_on_top_around_the_base() -> None:
    figure = tornado_figure([("narrow", 990.0, 1010.0, 1000.0), ("wide", 1400.0, 600.0, 1000.0)])
    low, high = bars_of(figure)
    assert list(low.y) == ["wide", "narrow"]
    assert (list(low.base), list(low.x), list(high.x)) == ([1.0, 1.0], [pytest.approx(0.4), pytest.approx(-0.01)], [
        pytest.approx(-0.4), pytest.approx(0.01)
    ])  # fmt: skip


@pytest.mark.parametrize(
    ("time_ns", "signed", "text"),
    [(0, False, "0 us"), (250, False, "0.25 us"), (12_340, False, "12.3 us"), (1_234_567, False, "1,235 us"),
     (-5000, True, "-5.00 us"), (5000, True, "+5.00 us")],
)  # fmt: skip
def test_times_as_text(time_ns: int, signed: bool, text: str) -> None:
    assert us_text(time_ns, signed=signed) == text


# --- Files ---


def test_html_opens_without_a_network(found: Explored) -> None:
    text = figure_html(gain_figure(found), "a <title>")
    assert "<title>a &lt;title&gt;</title>" in text
    assert "plotly.js v" in text
    assert len(text) > 1_000_000
    assert '"showSendToCloud": false' in text  # no button that uploads
    assert not re.findall(r"<(?:script|link|img|iframe)[^>]*(?:src|href)\s*=", text)


def test_html_of_the_same_figure_is_the_same(found: Explored) -> None:
    assert figure_html(gain_figure(found), "t") == figure_html(gain_figure(found), "t")


def test_html_that_cannot_be_written_leaves_nothing(
    found: Explored, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("os.fsync", full)
    with pytest.raises(OutputError, match="No space left on device"):
        write_html(tmp_path / "f.html", gain_figure(found), "t")
    assert not list(tmp_path.iterdir())


def fake_kaleido(monkeypatch: pytest.MonkeyPatch, draw: Callable[..., bytes]) -> type[Exception]:
    """A Kaleido without a browser. Gives its error for a missing one."""

    class ChromeNotFoundError(Exception):
        pass

    package, errors = types.ModuleType("kaleido"), types.ModuleType("kaleido.errors")
    package.calc_fig_sync = draw  # type: ignore[attr-defined]
    errors.ChromeNotFoundError = ChromeNotFoundError  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "kaleido", package)
    monkeypatch.setitem(sys.modules, "kaleido.errors", errors)
    return ChromeNotFoundError


def test_png_is_asked_for_in_the_size_of_the_figure_and_without_a_network(
    found: Explored, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[tuple[Any, Any]] = []

    def draw(figure: Any, opts: Any, kopts: Any) -> bytes:
        calls.append((opts, kopts))
        return b"picture"

    fake_kaleido(monkeypatch, draw)
    figure = bounds_figure(found)
    write_png(tmp_path / "f.png", figure, width=900)
    assert (tmp_path / "f.png").read_bytes() == b"picture"
    ((options, kaleido_options),) = calls
    assert (options["format"], options["width"], options["height"]) == ("png", 900, figure.layout.height)
    assert kaleido_options["mathjax"] is False


def test_png_without_kaleido_or_browser_is_one_line_that_names_what_to_install(
    found: Explored, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    figure = bounds_figure(found)

    def draw(*_: object, **__: object) -> bytes:
        raise missing

    missing = fake_kaleido(monkeypatch, draw)("no chrome\nhere")
    with pytest.raises(FigureError, match=r"none was found: install one .*chromium"):
        write_png(tmp_path / "f.png", figure)
    missing = TimeoutError("no answer\nfor a minute")
    with pytest.raises(FigureError, match=r"drew no PNG \(TimeoutError: no answer for a minute\)"):
        write_png(tmp_path / "f.png", figure)
    monkeypatch.setitem(sys.modules, "kaleido", None)
    with pytest.raises(FigureError, match="pip install 'gpusim\\[app\\]'"):
        check_png()
    assert not list(tmp_path.iterdir())


@pytest.mark.browser
@pytest.mark.parametrize("theme", [LIGHT, DARK], ids=["light", "dark"])
def test_every_figure_comes_out_as_a_png(theme: Theme, found: Explored, limited: Limits, results: Results) -> None:
    for name, figure in all_figures(found, limited, results, theme).items():
        image = figure_png(figure)
        assert image.startswith(b"\x89PNG"), name
        assert int.from_bytes(image[16:20], "big") == 2400


# --- Commands ---


@pytest.fixture
def trace_file(tmp_path: Path) -> Path:
    path = tmp_path / "step.json"
    write_trace(wide_trace(), path)
    return path


def run(monkeypatch: pytest.MonkeyPatch, *arguments: str | Path) -> int:
    monkeypatch.setattr(sys, "argv", ["gpusim", *map(str, arguments)])
    try:
        main()
    except SystemExit as exited:
        return int(exited.code or 0)
    return 0


@pytest.mark.parametrize("command", ["simulate", "limits"])
def test_commands_write_their_figure(
    command: str,
    trace_file: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    page, picture = tmp_path / "f.html", tmp_path / "f.png"
    fake_kaleido(monkeypatch, lambda *_, **__: b"picture")
    assert run(monkeypatch, command, trace_file, "--html", page, "--png", picture) == 0
    out = capsys.readouterr().out.replace("\n", "")
    assert f"figure written to {page}" in out
    assert f"figure written to {picture}" in out
    assert "tiny-infer-b1" in page.read_text()
    assert picture.read_bytes() == b"picture"


def test_json_stays_alone_on_standard_output_beside_a_figure(
    trace_file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(monkeypatch, "simulate", trace_file, "--html", tmp_path / "f.html", "--json") == 0
    assert json.loads(capsys.readouterr().out)["trace"] == "tiny-infer-b1"


@pytest.mark.parametrize("command", ["simulate", "limits"])
@pytest.mark.parametrize(("missing", "option"), [("plotly", "--html"), ("plotly", "--png"), ("kaleido", "--png")])
def test_without_its_packages_a_figure_is_refused_before_the_work(
    command: str, missing: str, option: str, tmp_path: Path
) -> None:
    """The trace does not exist: that the package is complained about shows which is looked at first."""
    code = f"import sys; sys.modules[{missing!r}] = None; from gpusim.cli import main; main()"
    target = tmp_path / "out"
    words = [sys.executable, "-c", code, command, "missing.json", option, str(target)]
    done = subprocess.run(words, cwd=ROOT, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.count("\n") == 1
    assert missing in done.stderr
    assert "pip install 'gpusim[app]'" in done.stderr
    assert not target.exists()


def test_without_a_figure_asked_for_plotly_is_not_imported(trace_file: Path) -> None:
    """Importing it, or what draws PNGs, would fail."""
    code = """
import sys
sys.modules["plotly"] = sys.modules["kaleido"] = None
from gpusim.cli import main
for words in (["simulate"], ["limits"], ["explore", "--budget", "0.05"]):
    sys.argv = ["gpusim", *words, sys.argv[-1]]
    main()
"""
    done = subprocess.run([sys.executable, "-c", code, str(trace_file)], cwd=ROOT, capture_output=True, check=False)
    assert (done.returncode, done.stderr) == (0, b"")
