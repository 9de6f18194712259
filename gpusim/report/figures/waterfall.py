"""Waterfall figures as bars, with the first row on top."""

from __future__ import annotations

from collections.abc import Sequence

import plotly.graph_objects as go

from gpusim.report.figures.theme import Theme, us, us_text
from gpusim.report.waterfall import WaterfallRow


def row_text(row: WaterfallRow) -> str:
    """Return the label at the end of a bar."""
    return row.text or us_text(row.length_ns, signed=row.role != "total")


def add_waterfall(figure: go.Figure, rows: Sequence[WaterfallRow], theme: Theme, *, row: int, col: int) -> None:
    """Draw a waterfall into one cell of a figure, with its first row on top."""
    colours = {"total": theme.total, "loss": theme.loss, "gain": theme.gain}
    figure.add_trace(
        go.Bar(
            orientation="h",
            y=[entry.name for entry in rows],
            base=[us(entry.base_ns) for entry in rows],
            x=[us(entry.length_ns) for entry in rows],
            marker={"color": [colours[entry.role] for entry in rows]},
            hovertext=[_hover(entry) for entry in rows],
            hoverinfo="text",
            showlegend=False,
        ),
        row=row,
        col=col,
    )
    # Not as the bars' own text, which would be inside or left of some bars.
    for entry in rows:
        right_ns = max(entry.base_ns, entry.base_ns + entry.length_ns)
        style = {"text": row_text(entry), "showarrow": False, "xanchor": "left", "xshift": 4}
        figure.add_annotation(x=us(right_ns), y=entry.name, row=row, col=col, **style)
    figure.update_yaxes(autorange="reversed", showgrid=False, row=row, col=col)


def _hover(row: WaterfallRow) -> str:
    lines = [f"<b>{row.name}</b>", us_text(row.length_ns, signed=row.role != "total")]
    if row.role != "total":
        lines.append(f"to {us_text(row.base_ns + row.length_ns)} in all")
    return "<br>".join([*lines, *([row.note] if row.note else [])])
