"""Figure of prediction errors, with a row of points per group of steps."""

from __future__ import annotations

from collections.abc import Sequence

import plotly.graph_objects as go

from gpusim.formats.results import ResultCase
from gpusim.quantiles import quantile
from gpusim.report.figures.theme import LIGHT, Theme, escape, heading
from gpusim.units import counted

#: Heights of a row and around the rows, in pixels; spread of the points over a row.
ROW, AROUND, SPREAD = 90, 150, 0.3
#: Number of levels over which the points of a row cycle, so that equal errors do not hide each other.
LEVELS = 11
#: Fewest schedules of which a share of 90 % means anything.
LEAST_SHADED = 10


def accuracy_figure(groups: Sequence[tuple[str, Sequence[ResultCase]]], theme: Theme = LIGHT) -> go.Figure:
    """Draw prediction errors in % of the measured time; groups from top to bottom, large ones with a bar for 90 %."""
    figure = go.Figure()
    for place, (name, cases) in enumerate(groups):
        errors = sorted(abs(100.0 * case.error) for case in cases)
        if len(errors) >= LEAST_SHADED:
            within = quantile(errors, 0.9)
            figure.add_shape(
                type="rect",
                x0=-within,
                x1=within,
                y0=place - 0.42,
                y1=place + 0.42,
                fillcolor=theme.gain,
                opacity=0.18,
                line={"width": 0},
            )
        figure.add_trace(
            go.Scatter(
                x=[100.0 * case.error for case in cases],
                y=[place + SPREAD * (2 * (number % LEVELS) / (LEVELS - 1) - 1) for number in range(len(cases))],
                mode="markers",
                marker={"size": 6, "opacity": 0.6, "color": theme.forward},
                name=escape(name),
                showlegend=False,
                hovertext=[
                    f"<b>{escape(case.trace)}</b><br>{escape(case.policy)}, {counted(case.streams, 'stream')}<br>"
                    f"error {case.error:+.1%}"
                    for case in cases
                ],
                hoverinfo="text",
            )
        )
    figure.add_vline(x=0.0, line={"width": 1, "color": theme.ink})
    figure.update_xaxes(title_text="error, %", zeroline=False)
    figure.update_yaxes(
        tickvals=list(range(len(groups))),
        ticktext=[f"{escape(name)}<br>{counted(len(cases), 'schedule')}" for name, cases in groups],
        range=[len(groups) - 0.5, -0.5],
        showgrid=False,
        ticks="",
    )
    figure.update_layout(
        template=theme.template,
        title=heading(
            "How far predictions were from measurements",
            f"predicted less measured time; shaded: 90 % of a group of {LEAST_SHADED} or more lie within",
            theme,
        ),
        height=AROUND + ROW * len(groups),
        hovermode="closest",
    )
    return figure
