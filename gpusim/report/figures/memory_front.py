"""Figure of step time against peak memory for memory policies, with front, lower bound and the GPU's memory."""

from __future__ import annotations

from collections.abc import Sequence

import plotly.graph_objects as go

from gpusim.memplan.compare import LEAST_TIME, MemoryComparison, PolicyRow
from gpusim.report.figures.theme import LIGHT, Theme, escape, heading, us_text
from gpusim.units import MIB, NS_PER_MS, format_bytes

#: Points nearer than these shares of the axes share a label.
NEAR_X, NEAR_Y = 0.03, 0.03
#: Maximum number of policies named in a label; share of the axis from which labels are left of their points.
NAMED, LEFT_FROM = 2, 0.6


def memory_front_figure(comparison: MemoryComparison, theme: Theme = LIGHT, *, named: bool = True) -> go.Figure:
    """Draw a point per policy and budget, lines for the front and the lower bound, and the GPU's memory.

    `named`: policies' names are next to their points; else in the legend, for any width.
    """
    figure = go.Figure()
    front = [row for row in comparison.front if row.outcome is not None]
    figure.add_trace(
        go.Scatter(
            x=[_peak_mib(row) for row in front],
            y=[_step_ms(row) for row in front],
            mode="lines",
            line={"color": theme.muted, "width": 1.5, "shape": "hv"},
            name="front: no plan needs less memory and less time",
            hoverinfo="skip",
        )
    )
    bounds = [(peak, step) for peak, step in comparison.bounds if step is not None]
    figure.add_trace(
        go.Scatter(
            x=[peak / MIB for peak, _ in bounds],
            y=[step / NS_PER_MS for _, step in bounds],
            mode="lines",
            line={"color": theme.muted, "width": 1.5, "dash": "dot"},
            name="lower bound on one stream",
            hovertext=[f"no plan of {format_bytes(peak)} takes less than {us_text(step)}" for peak, step in bounds],
            hoverinfo="text",
        )
    )
    names = list(dict.fromkeys(row.policy for row in comparison.rows))
    for number, name in enumerate(names):
        rows = [row for row in (*comparison.rows, *comparison.more) if row.policy == name and row.outcome is not None]
        if not rows:
            continue
        marker = dict(theme.marker(number))
        if name == LEAST_TIME:
            marker["size"] = 12
        figure.add_trace(
            go.Scatter(
                x=[_peak_mib(row) for row in rows],
                y=[_step_ms(row) for row in rows],
                mode="markers",
                marker=marker,
                name=escape(name),
                hovertext=[_text(row) for row in rows],
                hoverinfo="text",
            )
        )
    if named:
        figure.add_trace(_labels([row for row in comparison.rows if row.outcome is not None], theme))
    peaks = [_peak_mib(row) for row in comparison.rows if row.outcome is not None]
    limits = {"GPU memory": comparison.capacity_bytes, "budget": comparison.budget_bytes or 0}
    for name, size in limits.items():
        if 0 < size / MIB <= 1.5 * max(peaks, default=0.0):
            figure.add_vline(x=size / MIB, line={"color": theme.loss, "dash": "dash"}, annotation_text=name)
    trace, hardware = comparison.graph.trace, comparison.graph.hardware
    where = f"{trace.name} on {hardware.label}, {format_bytes(comparison.capacity_bytes)}; predicted"
    lines = "; solid: front, dotted: lower bound on one stream" if named else ""
    figure.update_xaxes(title_text="peak of the memory allocated, MiB", rangemode="tozero")
    figure.update_yaxes(title_text="predicted time of the step, ms", rangemode="tozero")
    figure.update_layout(
        template=theme.template,
        title=heading("Time against memory", where + lines, theme),
        height=620,
        hovermode="closest",
        showlegend=not named,
    )
    return figure


def _labels(rows: Sequence[PolicyRow], theme: Theme) -> go.Scatter:
    """Return the policies' names next to their points; overlapping points share a label."""
    right, top = max(map(_peak_mib, rows), default=0.0), max(map(_step_ms, rows), default=0.0)
    groups: list[list[PolicyRow]] = []
    for row in sorted(rows, key=lambda row: (_step_ms(row), _peak_mib(row))):
        for group in groups:
            near = abs(_peak_mib(row) - _peak_mib(group[0])) <= NEAR_X * right
            if near and abs(_step_ms(row) - _step_ms(group[0])) <= NEAR_Y * top:
                group.append(row)
                break
        else:
            groups.append([row])
    places: list[str] = []
    for number, group in enumerate(groups):
        level = number > 0 and _step_ms(group[0]) - _step_ms(groups[number - 1][0]) <= 2 * NEAR_Y * top
        above = not (level and places[-1].startswith("top"))  # next to another label: alternate below and above
        side = "left" if _peak_mib(group[0]) > right * LEFT_FROM else "right"
        places.append(f"{'top' if above else 'bottom'} {side}")
    return go.Scatter(
        x=[max(map(_peak_mib, group)) for group in groups],
        y=[max(map(_step_ms, group)) for group in groups],
        text=[escape(_names(group)) for group in groups],
        textposition=places,
        textfont={"size": 11, "color": theme.muted},
        mode="text",
        hoverinfo="skip",
        cliponaxis=False,
    )


def _names(group: Sequence[PolicyRow]) -> str:
    names = [row.policy for row in group]
    more = f" + {len(names) - NAMED}" if len(names) > NAMED else ""
    return ", ".join(names[:NAMED]) + more


def _peak_mib(row: PolicyRow) -> float:
    assert row.outcome is not None
    return row.outcome.peak_bytes / MIB


def _step_ms(row: PolicyRow) -> float:
    assert row.outcome is not None
    return row.outcome.step_ns / NS_PER_MS


def _text(row: PolicyRow) -> str:
    outcome = row.outcome
    assert outcome is not None
    budget = f", budget {format_bytes(row.budget_bytes)}" if row.budget_bytes else ""
    kernels = f", other kernels {us_text(outcome.variants_ns)}" if outcome.plan.has_variants else ""
    return (
        f"<b>{escape(row.policy)}</b>{budget}<br>"
        f"peak {format_bytes(outcome.peak_bytes)}, {us_text(outcome.step_ns)}<br>"
        f"out {format_bytes(outcome.d2h_bytes)}, back {format_bytes(outcome.h2d_bytes)}<br>"
        f"waiting for copies {us_text(outcome.exposed_copy_ns)}, computed again {us_text(outcome.recompute_ns)}"
        f"{kernels}"
    )
