"""Figure of `gpusim parallel`: layers by GPUs, and a comparison of plans."""

from __future__ import annotations

import numpy as np
import plotly.graph_objects as go
from plotly.subplots import make_subplots

from gpusim.layerwise.configs import Config, boxes, volume
from gpusim.layerwise.explore import Parallel
from gpusim.report.figures.theme import LIGHT, Theme, escape, heading, us_text
from gpusim.report.parallel_table import PARTS, plan_parts_ns
from gpusim.units import NS_PER_MS, counted

#: Maximum number of GPUs drawn.
_MOST_GPUS = 64
#: Height of a layer, and minimum and maximum height of all layers, in pixels.
_ROW, _LEAST, _MOST = 15, 260, 2600
#: Height around the map, in pixels.
_AROUND = 430


def parallel_figure(parallel: Parallel, theme: Theme = LIGHT) -> go.Figure:
    """Draw the parts of each plan's step above, and the split of each layer over the GPUs below."""
    rows = parallel.rows()
    gpus = min(parallel.gpus, _MOST_GPUS)
    shares = np.zeros((len(rows), gpus))
    words: list[list[str]] = []
    devices = np.arange(gpus)
    for number, row in enumerate(rows):
        low, high = boxes(row.output, row.config, devices)
        sizes = volume(low, high)
        shares[number] = sizes / np.prod(row.output)
        cost = us_text(row.cost.forward_ns + row.cost.backward_ns)
        words.append(
            [
                f"{escape(row.name)} ({escape(row.kind)})<br>GPU {gpu}: {_part(row.config, size, row.output)}<br>"
                f"split {row.config}; {cost} on the busiest GPU"
                for gpu, size in enumerate(sizes)
            ]
        )
    height = min(_MOST, max(_LEAST, _ROW * len(rows)))
    total = height + _AROUND
    figure = make_subplots(
        rows=2,
        cols=1,
        row_heights=[170, height],
        vertical_spacing=110 / total,
        subplot_titles=["", "Part of each layer on each GPU"],  # the legend is above the first
    )
    _add_plans(figure, parallel, theme)
    figure.add_trace(
        go.Heatmap(
            z=shares,
            x=[f"GPU {gpu}" for gpu in range(gpus)],
            y=[f"{number}  {_short(row.name)}  {row.config}" for number, row in enumerate(rows)],
            customdata=words,
            hovertemplate="%{customdata}<extra></extra>",
            colorscale=[[0.0, theme.paper], [1e-9, theme.grid], [1.0, theme.forward]],
            zmin=0.0,
            zmax=1.0,
            xgap=1,
            ygap=1,
            colorbar={"title": "part", "tickformat": ".0%", "len": 0.3, "y": 0.2},
            showscale=True,
        ),
        row=2,
        col=1,
    )
    figure.update_yaxes(autorange="reversed", row=2, col=1, tickfont={"size": 10}, showgrid=False)
    figure.update_xaxes(row=2, col=1, showgrid=False)
    best, data = parallel.best, parallel.plan("data")
    drawn = "" if gpus == parallel.gpus else f"; the first {gpus} are drawn"
    figure.update_layout(
        template=theme.template,
        title=heading(
            f"{parallel.name} on {counted(parallel.gpus, 'GPU')}",
            f"Layer-wise {best.step_ns / NS_PER_MS:.2f} ms a step, {data.step_ns / best.step_ns:.2f}x over data "
            f"parallelism{drawn}",
            theme,
        ),
        height=total,
        barmode="stack",
        legend={"y": 1.0, "traceorder": "normal"},
        margin={"l": 260},
    )
    return figure


def _add_plans(figure: go.Figure, parallel: Parallel, theme: Theme) -> None:
    names = [plan.name for plan in parallel.plans]
    colours = (theme.forward, theme.loss, theme.cycle[1], theme.cycle[4], theme.muted)
    for part, colour in zip(PARTS, colours, strict=True):
        times = [plan_parts_ns(plan)[part] / NS_PER_MS for plan in parallel.plans]
        figure.add_trace(
            go.Bar(
                y=names,
                x=times,
                name=part,
                orientation="h",
                marker={"color": colour},
                hovertemplate=f"{part}: %{{x:.3f}} ms<extra>%{{y}}</extra>",
            ),
            row=1,
            col=1,
        )
    figure.update_xaxes(title_text="where the time of a step goes, ms", row=1, col=1)
    figure.update_yaxes(autorange="reversed", row=1, col=1)


def _part(config: Config, size: int, output: tuple[int, int, int, int]) -> str:
    if config.replicated:
        return "all of it, as every GPU"
    return f"{size / np.prod(output):.1%} of it" if size else "nothing"


def _short(name: str) -> str:
    shown = escape(name)
    return shown if len(shown) <= 28 else f"...{shown[-25:]}"
