"""Figures as data: contents and units. Their looks are for people to judge."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import replace
from itertools import pairwise
from typing import Any

import msgspec
import pytest

from gpusim.analysis.limits import Limits, limits
from gpusim.analysis.relaxed import LIMITS
from gpusim.formats.results import Results
from gpusim.report.figures.comparisons import LINE, kind_of, measured_figure, memory_figure, tornado_figure
from gpusim.report.figures.explored import bounds_figure, gain_figure
from gpusim.report.figures.limits import limits_figure, usual_top
from gpusim.report.figures.output import PNG_TIMEOUT_S, figure_png
from gpusim.report.figures.theme import DARK, LIGHT, Theme, us_text
from gpusim.report.waterfall import limit_rows
from gpusim.search.explore import explore
from gpusim.search.explored import Explored
from tests.support.drawing import (
    all_figures,
    annotations,
    axis_titles,
    bars_of,
    explored_step,
    limited_step,
    loop_results,
    simulated,
)
from tests.support.helpers import Step, build_graph, kernel, make_hardware, make_trace, op, wide_trace

UNIT = re.compile(r"(, |\b)(us|MiB|GB/s|%|x)$")
NO_UNIT = ("ops running at once", "used on")


@pytest.fixture(scope="module")
def found() -> Explored:
    return explored_step()


@pytest.fixture(scope="module")
def limited() -> Limits:
    return limited_step()


@pytest.fixture(scope="module")
def results() -> Results:
    return loop_results()


# --- All figures ---


@pytest.mark.parametrize("theme", [LIGHT, DARK], ids=["light", "dark"])
def test_every_axis_says_its_unit_and_every_figure_its_title(
    theme: Theme, found: Explored, limited: Limits, results: Results
) -> None:
    for name, figure in all_figures(found, limited, results, theme).items():
        titles = axis_titles(figure)
        assert titles, name
        for title in titles:
            assert UNIT.search(title.replace("<br>", " ")) or title in NO_UNIT, (name, titles)
        assert figure.layout.title.text, name
        assert figure.layout.height, name
        assert figure.layout.template.layout.paper_bgcolor == theme.paper, name


def test_axes_are_linear_except_those_of_measurements_of_all_sizes(
    found: Explored, limited: Limits, results: Results
) -> None:
    for name, figure in all_figures(found, limited, results, LIGHT).items():
        assert ('"log"' in figure.to_json()) == (name == "measured"), name


def test_drawing_changes_no_default_of_plotly(found: Explored) -> None:
    import plotly.io

    before = plotly.io.templates.default, set(plotly.io.templates)
    bounds_figure(found, DARK)
    assert (plotly.io.templates.default, set(plotly.io.templates)) == before


@pytest.fixture
def one_browser() -> Iterator[None]:
    """Let Kaleido draw with one browser, which takes a second or two to start; a figure alone starts its own."""
    import kaleido

    kaleido.start_sync_server(mathjax=False, timeout=PNG_TIMEOUT_S)
    yield
    kaleido.stop_sync_server()


def assert_is_png(image: bytes) -> None:
    assert image.startswith(b"\x89PNG")
    assert int.from_bytes(image[16:20], "big") == 2400


@pytest.mark.browser
@pytest.mark.usefixtures("one_browser")
@pytest.mark.filterwarnings("ignore:The kopts argument is ignored:UserWarning")  # as the server has them already
def test_every_figure_comes_out_as_a_png(found: Explored, limited: Limits, results: Results) -> None:
    for figure in all_figures(found, limited, results, LIGHT).values():
        assert_is_png(figure_png(figure))


@pytest.mark.browser
def test_a_figure_comes_out_as_a_png_in_a_browser_of_its_own(
    found: Explored, limited: Limits, results: Results
) -> None:
    assert_is_png(figure_png(all_figures(found, limited, results, DARK)["timeline"]))


# --- Limits ---


def test_waterfall_reaches_from_the_longest_op_to_the_sequential_graph(limited: Limits) -> None:
    scope = limited.scopes[-1]
    rows = limit_rows(scope)
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
    rows = limit_rows(replace(scope, losses=(first, lower_second, *rest)))
    assert (rows[2].length_ns, rows[2].base_ns, rows[2].role) == (-50, first.makespan_ns, "gain")


def test_peak_of_a_moment_is_named_not_drawn() -> None:
    assert usual_top(((0, 60), (1, 2), (1000, 0))) == 2.0
    assert usual_top(((0, 60), (500, 2), (1000, 0))) == 60.0
    assert usual_top(()) == 0.0
    steps = [Step(f"s{i}", f"x{i}", f"s{i}", kernels=(kernel(1),)) for i in range(40)]
    trace = make_trace([*steps, op("long", "x", dur_ns=100_000)])
    figure = limits_figure(limits(build_graph(trace, make_hardware())))
    assert "41 at once for a moment" in annotations(figure)
    assert figure.layout.yaxis.range[1] < 5


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
    found = explore(build_graph(wide_trace(), make_hardware()), streams=2, budget_s=0.01)
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


def test_schedules_of_any_number_of_names_have_a_mark_per_kind(results: Results) -> None:
    """Nobody can tell thirty marks apart; a case has one kind, whatever its name."""
    case = msgspec.structs.replace(results.cases[0], policy="nimble", streams=2, memory_budget_bytes=0)
    kinds: dict[str, dict[str, Any]] = {
        "policy": {},
        "searched": {"policy": "search"},
        "random": {"policy": "random"},
        "memory plan": {"policy": "least_time", "memory_budget_bytes": 1},
        "one stream": {"streams": 1},
        "gpusim.optimize": {"policy": "optimize"},
    }
    cases = {kind: msgspec.structs.replace(case, **changes) for kind, changes in kinds.items()}
    assert {kind: kind_of(each) for kind, each in cases.items()} == dict(zip(kinds, kinds, strict=True))
    assert kind_of(msgspec.structs.replace(case, policy="vdnn_all", streams=1)) == "memory plan"
    more = [msgspec.structs.replace(case, policy=f"name {number}") for number in range(40)]
    figure = measured_figure([msgspec.structs.replace(results, cases=(*cases.values(), *more))])
    legend = [trace.name for trace in figure.data if trace.showlegend is None and trace.mode == "markers"]
    assert sorted(legend) == sorted(f"{kind}, {41 if kind == 'searched' else 1}" for kind in kinds)


def test_logarithmic_axes_of_measurements_hold_every_point_and_two_ticks(results: Results) -> None:
    for count in (1, len(results.cases)):
        figure = measured_figure([msgspec.structs.replace(results, cases=results.cases[:count])])
        for trace in (trace for trace in figure.data if trace.mode == "markers"):
            number = trace.xaxis.removeprefix("x")
            axis = figure.layout[f"xaxis{number}"]
            assert (axis.type, figure.layout[f"yaxis{number}"].range) == ("log", axis.range)
            low, high = (10**end for end in axis.range)
            assert all(low < value < high for value in (*trace.x, *trace.y))
            ticks = axis.tickvals or ()
            assert all(low <= tick <= high for tick in ticks)
            assert len(ticks) > 1 or count == 1


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


def test_names_of_a_tornado_do_not_cover_each_other() -> None:
    """Bars have one height, so each row has room for the lines of the longest name."""
    rows = [("short", 900.0, 1100.0, 1000.0)] * 5
    short = tornado_figure([(f"short {number}", *row[1:]) for number, row in enumerate(rows)])
    long = tornado_figure([(f"short {number}", *row[1:]) for number, row in enumerate(rows[1:])] + [
        (" ".join(["convolution_backward"] * 6), 900.0, 1100.0, 1000.0)
    ])  # fmt: skip
    lines = max(name.count("<br>") for name in long.data[0].y)
    assert lines >= 2
    assert long.layout.height - short.layout.height == 5 * lines * LINE


@pytest.mark.parametrize(
    ("time_ns", "signed", "text"),
    [(0, False, "0 us"), (250, False, "0.25 us"), (12_340, False, "12.3 us"), (1_234_567, False, "1,235 us"),
     (-5000, True, "-5.00 us"), (5000, True, "+5.00 us")],
)  # fmt: skip
def test_times_as_text(time_ns: int, signed: bool, text: str) -> None:
    assert us_text(time_ns, signed=signed) == text
