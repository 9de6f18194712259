"""Figures of the breakdown of a step's kernel time, and of time against memory."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import plotly.graph_objects as go
from plotly.subplots import make_subplots

from gpusim.report.breakdown import Breakdown, Part, largest
from gpusim.report.figures.theme import LIGHT, SIDE, SIDE_LEGEND, Theme, escape, heading, us, us_text
from gpusim.units import MIB, counted

if TYPE_CHECKING:
    from gpusim.search.explored import Row

#: Bars per panel; further parts are one bar, "others".
BARS = 10
#: Maximum length of a name, in characters.
NAME = 34


def breakdown_figure(breakdown: Breakdown, title: str, theme: Theme = LIGHT) -> go.Figure:
    """Draw kernel time by phase above, by layer and by family below."""
    figure = make_subplots(
        rows=2,
        cols=2,
        specs=[[{"colspan": 2}, None], [{}, {}]],
        row_heights=[0.2, 0.8],
        vertical_spacing=0.22,
        horizontal_spacing=0.3,
        subplot_titles=["by phase", "by layer", "by kernel family (operator)"],
    )
    figure.update_annotations(font={"size": 13})
    for row, col, parts in (
        (1, 1, breakdown.phases),
        (2, 1, largest(breakdown.layers, BARS)),
        (2, 2, largest(breakdown.families, BARS)),
    ):
        _add_parts(figure, parts, breakdown.total_ns, row, col, theme)
        # The label is next to its bar: in the narrow panels the longest one takes half of the width.
        room = 1.25 if row == 1 else 2.0
        end_us = room * us(max((part.time_ns for part in parts), default=0)) or 1.0
        figure.update_xaxes(title_text="kernel time, us", range=[0, end_us], nticks=5, tickangle=0, row=row, col=col)
        figure.update_yaxes(autorange="reversed", showgrid=False, ticks="", ticklabelstandoff=4, row=row, col=col)
    subtitle = (
        f"{breakdown.kernels:,} kernels, {us_text(breakdown.total_ns)} if each ran alone and without gaps between them"
    )
    figure.update_layout(
        template=theme.template,
        title=heading(f"Where the time goes: {title}", subtitle, theme),
        height=620,
        showlegend=False,
    )
    return figure


def _add_parts(figure: go.Figure, parts: Sequence[Part], total_ns: int, row: int, col: int, theme: Theme) -> None:
    shares = [part.time_ns / total_ns if total_ns else 0.0 for part in parts]
    figure.add_trace(
        go.Bar(
            orientation="h",
            y=[_short(part.name) for part in parts],
            x=[us(part.time_ns) for part in parts],
            marker={"color": [theme.phase(part.name) if row == 1 else theme.total for part in parts]},
            text=[f"{us_text(part.time_ns)}, {share:.0%}" for part, share in zip(parts, shares, strict=True)],
            textposition="outside",
            cliponaxis=False,
            hovertext=[
                f"<b>{escape(part.name)}</b><br>{us_text(part.time_ns)}, {share:.1%}<br>{part.kernels:,} kernels"
                for part, share in zip(parts, shares, strict=True)
            ],
            hoverinfo="text",
        ),
        row=row,
        col=col,
    )


def _short(name: str) -> str:
    return escape(name if len(name) <= NAME else f"{name[: NAME - 3]}...")


def front(rows: Sequence[Row]) -> tuple[Row, ...]:
    """Return the rows that no other row beats in both time and memory, fastest first."""
    front_rows: list[Row] = []
    for row in sorted(rows, key=lambda row: (row.makespan_ns, row.peak_bytes)):
        if not front_rows or row.peak_bytes < front_rows[-1].peak_bytes:
            front_rows.append(row)
    return tuple(front_rows)


def front_figure(rows: Sequence[Row], title: str, theme: Theme = LIGHT) -> go.Figure:
    """Draw time against memory of every schedule, with the Pareto front."""
    figure = go.Figure()
    best = front(rows)
    figure.add_trace(
        go.Scatter(
            x=[us(row.makespan_ns) for row in best],
            y=[row.peak_bytes / MIB for row in best],
            mode="lines",
            line={"shape": "hv", "width": 1.5, "dash": "dash", "color": theme.ink},
            name="Pareto front",
            hoverinfo="skip",
        )
    )
    for number, policy in enumerate(dict.fromkeys(row.policy for row in rows)):
        policy_rows = [row for row in rows if row.policy == policy]
        figure.add_trace(
            go.Scatter(
                x=[us(row.makespan_ns) for row in policy_rows],
                y=[row.peak_bytes / MIB for row in policy_rows],
                mode="markers",
                name=escape(policy),
                marker=theme.marker(number),
                hovertext=[
                    f"<b>{escape(policy)}</b>, {counted(row.streams, 'stream')}<br>{us_text(row.makespan_ns)}, "
                    f"{row.speedup:.2f}x<br>{row.peak_bytes / MIB:,.1f} MiB at the peak"
                    for row in policy_rows
                ],
                hoverinfo="text",
            )
        )
    figure.update_xaxes(title_text="predicted time of the step, us")
    figure.update_yaxes(title_text="peak memory, MiB")
    subtitle = f"{len(rows)} schedules; no other is both faster and smaller than those on the dashed line"
    figure.update_layout(
        template=theme.template,
        title=heading(f"Time against memory: {title}", subtitle, theme),
        height=470,
        hovermode="closest",
        legend=SIDE_LEGEND,
        margin={"r": SIDE},
    )
    return figure
