"""Figures of what `gpusim explore` found: schedules against bounds, and where the gain comes from."""

from __future__ import annotations

import plotly.graph_objects as go
from plotly.subplots import make_subplots

from gpusim.report.figures.theme import LIGHT, Theme, heading, us, us_text
from gpusim.report.figures.waterfall import Role, WaterfallRow, add_waterfall, longest_ns
from gpusim.search.explore import Explored
from gpusim.units import counted

#: Heights in pixels: of one bar, and of all around the bars.
BAR, AROUND = 30, 170
SEQUENTIAL = "sequential"


def bounds_figure(explored: Explored, theme: Theme = LIGHT) -> go.Figure:
    """The sequential graph, the best schedule of each policy, and the lower bounds."""
    bound = explored.bounds
    rows = [explored.best_of(policy) for policy in dict.fromkeys(row.policy for row in explored.rows)]
    rows.sort(key=lambda row: (row.policy != SEQUENTIAL, -row.makespan_ns))
    names = [f"{row.policy}, {counted(row.streams, 'stream')}" for row in rows]
    limits = sorted(((time_ns, f"bound: {name}") for time_ns, name in bound.named), reverse=True)
    figure = go.Figure()
    others = [place for place, row in enumerate(rows) if row is not explored.best]
    groups = (
        ("sequential graph", theme.total, [place for place in others if rows[place].policy == SEQUENTIAL]),
        ("best of a policy", theme.forward, [place for place in others if rows[place].policy != SEQUENTIAL]),
        ("recommended", theme.gain, [place for place, row in enumerate(rows) if row is explored.best]),
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
    longest = max(bound.largest[0], *(row.makespan_ns for row in rows))
    # Through the schedules only: below them stand the bounds' own labels.
    figure.add_shape(
        type="line",
        x0=us(bound.largest[0]),
        x1=us(bound.largest[0]),
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
            f"Schedules and bounds: {explored.trace.name} on {explored.hardware.label}",
            f"speed-up over the sequential graph; dashed: the largest bound, {bound.largest[1]}",
            theme,
        ),
        barmode="overlay",
        height=AROUND + BAR * (len(rows) + len(limits)),
        legend={"traceorder": "normal", "y": 1.0},
    )
    return figure


def gain_figure(explored: Explored, theme: Theme = LIGHT) -> go.Figure:
    """From the eager step, where it was measured, to the recommended schedule: what each step saves."""
    gain = explored.attribution
    rows: list[WaterfallRow] = []
    if gain.eager_ns is not None:
        rows.append(WaterfallRow("eager step (measured)", gain.eager_ns))
        rows.append(_saved("launches from a CUDA graph", gain.eager_ns, explored.sequential_ns))
    rows.append(WaterfallRow("= sequential graph", explored.sequential_ns))
    program_ns = explored.sequential_ns - gain.concurrency_ns
    rows.append(_saved("streams, ops in recorded order", explored.sequential_ns, program_ns))
    rows.append(_saved("better order and placement", program_ns, explored.best.makespan_ns))
    rows.append(WaterfallRow("= recommended schedule", explored.best.makespan_ns))
    figure = make_subplots(rows=1, cols=1)
    add_waterfall(figure, rows, theme, row=1, col=1)
    figure.update_xaxes(title_text="time of the step, us", range=[0, 1.18 * us(longest_ns(rows))])
    figure.update_layout(
        template=theme.template,
        title=heading(
            f"Where the gain comes from: {explored.trace.name} on {explored.hardware.label}",
            f"{explored.best.policy}, streams: {explored.best.streams}; "
            f"{explored.best.speedup:.2f}x over the sequential graph",
            theme,
        ),
        height=AROUND + BAR * len(rows),
    )
    return figure


def _saved(name: str, before_ns: int, after_ns: int) -> WaterfallRow:
    change_ns = after_ns - before_ns
    role: Role = "gain" if change_ns <= 0 else "loss"
    text = f"{us_text(change_ns, signed=True)}, {change_ns / before_ns:+.1%}"
    return WaterfallRow(name, change_ns, before_ns, role, text)
