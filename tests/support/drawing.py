"""Steps to draw, their figures, and accessors of figures."""

from __future__ import annotations

import functools
import re
import sys
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

import plotly.graph_objects as go
import pytest

from gpusim.analysis.limits import Limits, limits
from gpusim.analysis.transfer import Setting, Transfer, TransferRow
from gpusim.engine.base import Timeline, engine_by_name
from gpusim.formats.hardware import HardwareModel
from gpusim.formats.results import Results, read_results
from gpusim.formats.trace import Trace
from gpusim.plan.lower import lower
from gpusim.policies.registry import POLICIES
from gpusim.report.breakdown import breakdown
from gpusim.report.figures.breakdown import breakdown_figure, front_figure
from gpusim.report.figures.compared import Compared, compared_figure
from gpusim.report.figures.comparisons import measured_figure, memory_figure, tornado_figure
from gpusim.report.figures.explored import bounds_figure, gain_figure
from gpusim.report.figures.limits import limits_figure, parallelism_figure
from gpusim.report.figures.theme import Theme
from gpusim.report.figures.timeline import Look, timeline_figure
from gpusim.report.figures.transfer import transfer_figure
from gpusim.search.explore import explore
from gpusim.search.explored import Explored
from tests.support.helpers import build_graph, make_hardware, wide_trace

ROOT = Path(__file__).parents[2]


def simulated(trace: Trace, streams: int = 3, hardware: HardwareModel | None = None) -> tuple[Timeline, HardwareModel]:
    graph = build_graph(trace, hardware)
    schedule = POLICIES["wavefront"](graph, streams)
    plan = lower(graph, schedule)
    return engine_by_name("reference").run(plan, graph.hardware), graph.hardware


def drawn(trace: Trace, **options: Any) -> go.Figure:
    timeline, hardware = simulated(trace)
    return timeline_figure(timeline, trace, hardware, **options)


def bars_of(figure: go.Figure) -> list[go.Bar]:
    return [trace for trace in figure.data if trace.type == "bar"]


def axis_titles(figure: go.Figure) -> list[str]:
    """Return the titles of axes with numeric tick labels."""
    layout = figure.to_dict()["layout"]
    axes = {name: axis for name, axis in layout.items() if re.fullmatch(r"[xy]axis\d*", name)}
    # Rows that share an x axis have its title only at the bottom; y axes with names need no unit.
    numeric = {
        name: axis
        for name, axis in axes.items()
        if axis.get("showticklabels", True) and "ticktext" not in axis and not _has_names(figure, name)
    }
    return [axis.get("title", {}).get("text", "") for axis in numeric.values()]


def _has_names(figure: go.Figure, axis: str) -> bool:
    """Whether a y axis has words as labels."""
    key = axis.replace("axis", "")
    return axis.startswith("y") and any(
        isinstance(trace.y[0], str) for trace in figure.data if (trace.yaxis or "y") == key and len(trace.y)
    )


def annotations(figure: go.Figure) -> str:
    return "\n".join(note.text for note in figure.layout.annotations)


@functools.cache
def explored_step() -> Explored:
    hardware = make_hardware(chain_ns=100, slowdown=0.5, uncertainty=0.05)
    return explore(build_graph(wide_trace(eager_ns=400_000, graph_ns=130_000), hardware), streams=3, budget_s=0.05)


@functools.cache
def limited_step() -> Limits:
    return limits(build_graph(wide_trace(), make_hardware(chain_ns=100, slowdown=0.5)), streams=2)


def transferred() -> Transfer:
    """Make two settings: a schedule of the second loses half of its time on the first."""
    settings = tuple(Setting(f"net-b{b}", b, "h200", True, "critical_path", 2, 100, 200) for b in (1, 2))
    one, other = (setting.name for setting in settings)
    times = {(one, one): 100, (other, one): 150, (one, other): 120, (other, other): 100}
    return Transfer(settings, tuple(TransferRow(tuned, used, time, 100) for (tuned, used), time in times.items()))


@functools.cache
def loop_results() -> Results:
    return read_results(max((ROOT / "validate" / "results").glob("loop_*.json")))


def all_figures(explored: Explored, limited: Limits, results: Results, theme: Theme) -> dict[str, go.Figure]:
    timeline, hardware = simulated(wide_trace())
    return {
        "limits": limits_figure(limited, theme),
        "parallelism": parallelism_figure(limited, theme),
        "timeline": timeline_figure(timeline, wide_trace(), hardware, look=Look(theme)),
        "compared": compared_figure(
            [Compared(name, timeline, wide_trace(), hardware) for name in ("one", "other")], Look(theme)
        ),
        "transfer": transfer_figure(transferred(), theme),
        "bounds": bounds_figure(explored, theme),
        "gain": gain_figure(explored, theme),
        "breakdown": breakdown_figure(breakdown(build_graph(wide_trace())), "wide", theme),
        "front": front_figure(explored.rows, "wide", theme),
        "measured": measured_figure([results], theme),
        "memory": memory_figure([("one", timeline), ("two", explored.timeline)], theme),
        "tornado": tornado_figure([("gap", 900.0, 1200.0, 1000.0), ("a", 500.0, 1300.0, 1000.0)], theme),
    }


def fake_kaleido(monkeypatch: pytest.MonkeyPatch, draw: Callable[..., bytes]) -> type[Exception]:
    """Install a Kaleido without a browser; returns its error for a missing one."""

    class ChromeNotFoundError(Exception):
        pass

    package, errors = types.ModuleType("kaleido"), types.ModuleType("kaleido.errors")
    package.calc_fig_sync = draw  # type: ignore[attr-defined]
    errors.ChromeNotFoundError = ChromeNotFoundError  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "kaleido", package)
    monkeypatch.setitem(sys.modules, "kaleido.errors", errors)
    return ChromeNotFoundError
