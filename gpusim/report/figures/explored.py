"""Figures of `gpusim explore`: schedules against bounds, and sources of the gain."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import plotly.graph_objects as go
from plotly.subplots import make_subplots

from gpusim.report.figures.theme import LIGHT, Theme, escape, heading, us, us_text
from gpusim.report.figures.waterfall import add_waterfall
from gpusim.report.summary import Summary, summarize
from gpusim.report.waterfall import gain_rows, longest_ns
from gpusim.units import counted

if TYPE_CHECKING:
    from gpusim.search.explored import Explored

#: Heights of a bar and around the bars, in pixels.
BAR, AROUND = 30, 170
SEQUENTIAL = "sequential"


def bounds_figure(explored: Explored | Summary, theme: Theme = LIGHT) -> go.Figure:
    """Draw the sequential graph, the best schedule of each policy, and the lower bounds."""
    summary = _summary(explored)
    largest_ns, largest = summary.largest_bound
    rows = [summary.best_of(policy) for policy in dict.fromkeys(row.policy for row in summary.rows)]
    rows.sort(key=lambda row: (row.policy != SEQUENTIAL, -row.makespan_ns))
    names = [f"{escape(row.policy)}, {counted(row.streams, 'stream')}" for row in rows]
    limits = sorted(((time_ns, f"bound: {name}") for time_ns, name in summary.bounds), reverse=True)
    figure = go.Figure()
    others = [place for place, row in enumerate(rows) if row is not summary.best]
    groups = (
        ("sequential graph", theme.total, [place for place in others if rows[place].policy == SEQUENTIAL]),
        ("best of a policy", theme.forward, [place for place in others if rows[place].policy != SEQUENTIAL]),
        ("recommended", theme.gain, [place for place, row in enumerate(rows) if row is summary.best]),
    )
    for group, colour, chosen in groups:
        if not chosen:
            continue
        figure.add_trace(
            go.Bar(
                orientation="h",
                y=[names[place] for place in chosen],
                x=[us(rows[place].makespan_ns) for place in chosen],
                name=group,
                marker={"color": colour},
                text=[f"{us_text(rows[place].makespan_ns)}, {rows[place].speedup:.2f}x" for place in chosen],
                textposition="outside",
                cliponaxis=False,
                hovertemplate="%{y}<br>%{text}<extra></extra>",
            )
        )
    figure.add_trace(
        go.Bar(
            orientation="h",
            y=[name for _, name in limits],
            x=[us(time_ns) for time_ns, _ in limits],
            name="lower bound",
            marker={"color": theme.paper, "line": {"color": theme.muted, "width": 1.5}},
            text=[us_text(time_ns) for time_ns, _ in limits],
            textposition="outside",
            cliponaxis=False,
            hovertemplate="%{y}<br>%{text}<extra></extra>",
        )
    )
    longest = max(largest_ns, *(row.makespan_ns for row in rows))
    # Only through the schedules: the labels of the bounds are below.
    figure.add_shape(
        type="line",
        x0=us(largest_ns),
        x1=us(largest_ns),
        y0=-0.5,
        y1=len(rows) - 0.5,
        line={"dash": "dash", "width": 1.5, "color": theme.ink},
    )
    figure.update_xaxes(title_text="predicted time of the step, us", range=[0, 1.18 * us(longest)])
    figure.update_yaxes(
        categoryorder="array",
        categoryarray=[*names, *(name for _, name in limits)],
        autorange="reversed",
        showgrid=False,
    )
    figure.update_layout(
        template=theme.template,
        title=heading(
            f"Schedules and bounds: {summary.step} on {summary.hardware}",
            f"speed-up over the sequential graph; dashed: the largest bound, {largest}",
            theme,
        ),
        barmode="overlay",
        height=AROUND + BAR * (len(rows) + len(limits)),
        legend={"traceorder": "normal", "y": 1.0},
    )
    return figure


def gain_figure(explored: Explored | Summary, theme: Theme = LIGHT) -> go.Figure:
    """Draw the savings from the eager step, if measured, to the recommended schedule."""
    summary = _summary(explored)
    rows = [
        row if row.share is None else replace(row, text=f"{us_text(row.length_ns, signed=True)}, {row.share:+.1%}")
        for row in gain_rows(summary)
    ]
    best = summary.best
    figure = make_subplots(rows=1, cols=1)
    add_waterfall(figure, rows, theme, row=1, col=1)
    figure.update_xaxes(title_text="time of the step, us", range=[0, 1.18 * us(longest_ns(rows))])
    figure.update_layout(
        template=theme.template,
        title=heading(
            f"Where the gain comes from: {summary.step} on {summary.hardware}",
            f"{best.policy}, streams: {best.streams}; {best.speedup:.2f}x over the sequential graph",
            theme,
        ),
        height=AROUND + BAR * len(rows),
    )
    return figure


def _summary(explored: Explored | Summary) -> Summary:
    return explored if isinstance(explored, Summary) else summarize(explored)
