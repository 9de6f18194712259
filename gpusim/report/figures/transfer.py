"""Figure of `gpusim transfer`: a heat map of the time lost with a schedule tuned for another setting."""

from __future__ import annotations

import plotly.graph_objects as go

from gpusim.analysis.transfer import Transfer
from gpusim.report.figures.theme import LIGHT, Theme, escape, heading, us_text

#: Heights of a cell and around the cells, in pixels.
CELL, AROUND = 46, 250
#: Minimum top of the scale, so that a loss of 0.1 % does not look severe.
LEAST_TOP = 0.05
#: Share of the scale above which a cell of the dark theme is bright and needs dark text.
STRONG_SHARE = 0.4


def transfer_figure(transfer: Transfer, theme: Theme = LIGHT) -> go.Figure:
    """Draw the time lost in %, with the tuned setting as row and the used one as column."""
    names = [setting.name for setting in transfer.settings]
    rows = {(row.tuned_for, row.used_on): row for row in transfer.rows}
    top = max(LEAST_TOP, transfer.worst.lost_frac)
    lost = [[rows[tuned, used].lost_frac for used in names] for tuned in names]
    hover = [
        [
            f"tuned for {escape(tuned)}<br>used on {escape(used)}<br>{us_text(rows[tuned, used].time_ns)}, "
            f"best known {us_text(rows[tuned, used].best_ns)}"
            for used in names
        ]
        for tuned in names
    ]
    labels = [escape(name).replace(" on ", "<br>on ", 1) for name in names]
    figure = go.Figure(
        go.Heatmap(
            z=[[100.0 * value for value in line] for line in lost],
            x=labels,
            y=labels,
            zmin=0.0,
            zmax=100.0 * top,
            colorscale=[[0.0, theme.paper], [1.0, theme.loss]],
            colorbar={"title": {"text": "lost, %"}, "thickness": 12},
            hovertext=hover,
            hoverinfo="text",
            xgap=2,
            ygap=2,
        )
    )
    for down, line in enumerate(lost):
        for across, value in enumerate(line):
            strong = value > STRONG_SHARE * top and theme.name == "dark"
            figure.add_annotation(
                x=labels[across],
                y=labels[down],
                text=f"{value:.1%}",
                showarrow=False,
                font={"color": theme.paper if strong else theme.ink},
            )
    figure.update_xaxes(title_text="used on", side="bottom", showgrid=False, ticks="")
    figure.update_yaxes(title_text="tuned for", autorange="reversed", showgrid=False, ticks="")
    figure.update_layout(
        template=theme.template,
        title=heading("Time lost with a schedule tuned for something else", transfer.sentence, theme),
        height=AROUND + CELL * len(names),
    )
    return figure
