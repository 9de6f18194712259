"""Figure of `gpusim limits`: parallelism over time, and a waterfall of the potential."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import plotly.graph_objects as go
from plotly.subplots import make_subplots

from gpusim.analysis.limits import STEP, Limits, Scope
from gpusim.report.figures.theme import LIGHT, PHASES, Theme, heading, us, us_text
from gpusim.report.figures.waterfall import add_waterfall
from gpusim.report.waterfall import WaterfallRow, limit_rows, longest_ns

#: The vertical axis covers all but this share of the time; a higher peak is labelled, not drawn.
PEAK_TIME_SHARE = 0.005

#: Top of the lower row in the figure, from the row heights and spacing below.
_DOMAIN_TOP = 0.6 * (1 - 0.24)

#: Height of the figure of parallelism alone, in pixels.
HEIGHT = 380
#: Axis length of a narrow waterfall over its longest bar: room for the label in a window of 1,280 pixels.
NARROW_ROOM = 1.7


def limits_figure(limits: Limits, theme: Theme = LIGHT) -> go.Figure:
    """Draw the parallelism of the whole step above, and a waterfall per scope below."""
    scopes = limits.scopes
    step = next(scope for scope in scopes if scope.name == STEP)
    columns = len(scopes)
    figure = make_subplots(
        rows=2,
        cols=columns,
        specs=[[{"colspan": columns}, *[None] * (columns - 1)], [{}] * columns],
        row_heights=[0.4, 0.6],
        vertical_spacing=0.24,
        horizontal_spacing=0.02,
        subplot_titles=["", *(f"{scope.name}: {scope.speedup:.2f}x" for scope in scopes)],
    )
    figure.update_annotations(font={"size": 13})
    _add_parallelism(figure, step, theme)
    for column, scope in enumerate(scopes, 1):
        _add_scope(figure, scope, column, wide=columns == 1, theme=theme)
    figure.update_layout(
        template=theme.template,
        title=heading(
            f"Limits of inter-op parallelism: {limits.trace} on {limits.hardware}",
            _about(step),
            theme,
        ),
        height=800,
        margin={"r": 60},
        legend={"y": 1.0, "traceorder": "normal"},
    )
    figure.add_annotation(
        text="From the longest op to the sequential graph: what each limit costs when switched on after those<br>"
        f"above, in % of what there is to win, at most {limits.streams} streams",
        x=0,
        xref="paper",
        xanchor="left",
        y=_DOMAIN_TOP,
        yref="paper",
        yanchor="bottom",
        yshift=32,
        showarrow=False,
        align="left",
        font={"color": theme.muted},
    )
    return figure


def parallelism_figure(limits: Limits, theme: Theme = LIGHT) -> go.Figure:
    """Draw only the parallelism of the whole step."""
    step = next(scope for scope in limits.scopes if scope.name == STEP)
    figure = make_subplots(rows=1, cols=1)
    _add_parallelism(figure, step, theme)
    figure.update_layout(
        template=theme.template,
        title=heading(f"Ops that could run at once: {limits.trace} on {limits.hardware}", _about(step), theme),
        height=HEIGHT,
        margin={"r": 60},
    )
    return figure


def _about(step: Scope) -> str:
    parallelism = step.parallelism
    at_least = "" if parallelism.width_exact else "at least "
    return (
        f"Ops that could run at once if only dependencies mattered: {parallelism.mean:.2f} on average, "
        f"at most {parallelism.maximum}, width {at_least}{parallelism.width}"
    )


def _add_parallelism(figure: go.Figure, scope: Scope, theme: Theme) -> None:
    parallelism = scope.parallelism
    phases = dict(parallelism.by_phase)
    for phase in sorted(phases, key=lambda name: PHASES.index(name) if name in PHASES else len(PHASES)):
        figure.add_trace(
            go.Scatter(
                x=[us(time) for time, _ in phases[phase]],
                y=[count for _, count in phases[phase]],
                name=phase,
                mode="lines",
                line={"shape": "hv", "width": 0, "color": theme.phase(phase)},
                fillcolor=theme.phase(phase),
                stackgroup="phases",
                hovertemplate="%{y} of " + phase + " at %{x:,.1f} us<extra></extra>",
            ),
            row=1,
            col=1,
        )
    top = max(2.0, usual_top(parallelism.running), parallelism.mean)
    if parallelism.maximum <= 2 * top:
        top = float(parallelism.maximum)
    else:
        peak_ns = next(time for time, count in parallelism.running if count == parallelism.maximum)
        figure.add_annotation(
            x=us(peak_ns),
            y=1.15 * top,
            text=f"{parallelism.maximum} at once for a moment, cut off here",
            showarrow=False,
            xanchor="left" if peak_ns < parallelism.span_ns / 2 else "right",
            yanchor="top",
            xshift=6 if peak_ns < parallelism.span_ns / 2 else -6,
            row=1,
            col=1,
        )
    figure.add_hline(y=parallelism.mean, line={"dash": "dash", "width": 1.5, "color": theme.ink}, row=1, col=1)
    figure.add_annotation(
        x=us(parallelism.span_ns),
        y=parallelism.mean,
        text=f"mean<br>{parallelism.mean:.2f}",
        showarrow=False,
        align="left",
        xanchor="left",
        xshift=4,
        row=1,
        col=1,
    )
    figure.update_xaxes(
        title_text="time with nothing but dependencies, us", range=[0, us(parallelism.span_ns)], row=1, col=1
    )
    figure.update_yaxes(
        title_text="ops running at once", range=[0, 1.15 * top], dtick=max(1, round(top / 6)), row=1, col=1
    )


def usual_top(running: tuple[tuple[int, int], ...]) -> float:
    """Return the least count that is exceeded during at most `PEAK_TIME_SHARE` of the time."""
    lengths: dict[int, int] = {}
    for (time, count), (until, _) in pairwise(running):
        lengths[count] = lengths.get(count, 0) + until - time
    above, total = 0, sum(lengths.values())
    for count in sorted(lengths, reverse=True):
        above += lengths[count]
        if above > PEAK_TIME_SHARE * total:
            return float(count)
    return 0.0


def _labelled(row: WaterfallRow, wide: bool) -> WaterfallRow:
    """Return a row with its label: length and share for `wide` bars, else only the share."""
    if row.share is None:
        return row
    share = f"{row.share:.1%}"
    text = f"{us_text(row.length_ns, signed=True)}, {share}" if wide else share
    return replace(row, text=text, note=f"{share} of what there is to win")


def _add_scope(figure: go.Figure, scope: Scope, column: int, *, wide: bool, theme: Theme) -> None:
    rows = [_labelled(row, wide) for row in limit_rows(scope)]
    add_waterfall(figure, rows, theme, row=2, col=column)
    end_us = (1.15 if wide else NARROW_ROOM) * us(longest_ns(rows))
    figure.update_xaxes(title_text="time, us", range=[0, end_us], nticks=4, tickangle=0, row=2, col=column)
    if column > 1:
        figure.update_yaxes(showticklabels=False, ticks="", row=2, col=column)
