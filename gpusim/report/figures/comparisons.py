"""Comparison figures: predictions with measurements, memory of several schedules, and sensitivities."""

from __future__ import annotations

import math
import textwrap
from collections.abc import Sequence
from typing import Final, Literal

import plotly.graph_objects as go
from plotly.subplots import make_subplots

from gpusim.engine.base import Timeline
from gpusim.formats.results import ResultCase, Results
from gpusim.memplan.policies.registry import MEMORY_POLICIES
from gpusim.policies.random_schedules import RANDOM
from gpusim.policies.registry import POLICIES
from gpusim.report.advice import OPTIMIZE
from gpusim.report.figures.theme import LIGHT, SIDE, SIDE_LEGEND, Theme, escape, heading, us, us_text
from gpusim.report.lanes import samples
from gpusim.text import visible
from gpusim.units import MIB, counted

#: Half width of the band around perfect predictions, as a share.
BAND = 0.05
#: Height of the figure of measurements, in pixels; its axes go this factor beyond the points.
HEIGHT, MARGIN = 640, 1.15
#: Ratio of the ends of a logarithmic axis from which only powers of ten are marked.
TWO_DECADES = 100.0
#: Heights of a bar and around the bars, in pixels.
BAR, AROUND = 34, 150
#: Height of a further line of a bar's name, in pixels, and columns of a line.
LINE, NAME_COLUMNS = 16, 34


Kind = Literal["one stream", "policy", "searched", "random", "gpusim.optimize", "memory plan"]
#: Kinds of replayed schedules as drawn: rarer ones in our results over more frequent ones.
KINDS: Final[tuple[Kind, ...]] = ("policy", "searched", "random", "memory plan", "one stream", "gpusim.optimize")


def kind_of(case: ResultCase) -> Kind:
    """Return the kind of a replayed schedule: files of results have more names than a legend can tell apart."""
    if case.memory_budget_bytes or case.policy in MEMORY_POLICIES:
        return "memory plan"
    if case.policy == OPTIMIZE:
        return "gpusim.optimize"
    if case.streams == 1:
        return "one stream"
    if case.policy == RANDOM:
        return "random"
    return "policy" if case.policy in POLICIES else "searched"


def measured_figure(files: Sequence[Results], theme: Theme = LIGHT) -> go.Figure:
    """Draw predictions against measurements of all cases of results files: times left, speed-ups right."""
    cases = [case for results in files for case in results.cases]
    figure = make_subplots(rows=1, cols=2, horizontal_spacing=0.1)
    for number, kind in enumerate(KINDS):
        mine = [case for case in cases if kind_of(case) == kind]
        if not mine:
            continue
        common = {
            "mode": "markers",
            "marker": {**theme.marker(number), "size": 7, "opacity": 0.8},
            "name": f"{kind}, {len(mine)}",
            "legendgroup": kind,
            "hovertext": [_case_text(case) for case in mine],
            "hoverinfo": "text",
        }
        measured, predicted = [us(case.measured_ns) for case in mine], [us(case.predicted_ns) for case in mine]
        figure.add_trace(go.Scatter(x=measured, y=predicted, **common), row=1, col=1)
        gains, predicted = [case.speedup for case in mine], [case.predicted_speedup for case in mine]
        figure.add_trace(go.Scatter(x=gains, y=predicted, showlegend=False, **common), row=1, col=2)
    times = [us(time) for case in cases for time in (case.measured_ns, case.predicted_ns)] or [1.0]
    gains = [gain for case in cases for gain in (case.speedup, case.predicted_speedup)] or [1.0]
    _add_diagonal(figure, min(times) / MARGIN, max(times) * MARGIN, theme, col=1)
    _add_diagonal(figure, min(gains) / MARGIN, max(gains) * MARGIN, theme, col=2)
    figure.update_xaxes(title_text="measured time of the step, us", row=1, col=1)
    figure.update_yaxes(title_text="predicted time of the step, us", row=1, col=1)
    figure.update_xaxes(title_text="measured speed-up over the sequential graph, x", row=1, col=2)
    figure.update_yaxes(title_text="predicted speed-up over the sequential graph, x", row=1, col=2)
    figure.update_layout(
        template=theme.template,
        title=heading(
            "Predicted against measured",
            f"{len(cases)} replayed schedules on {', '.join(sorted({results.gpu for results in files})) or 'no GPU'}",
            theme,
        ),
        height=HEIGHT,
        hovermode="closest",
        legend=SIDE_LEGEND,
        margin={"r": SIDE},
    )
    return figure


def _add_diagonal(figure: go.Figure, low: float, high: float, theme: Theme, *, col: int) -> None:
    """Draw the line of perfect predictions with a band, behind the points, on logarithmic axes."""
    band = {"fill": "toself", "fillcolor": theme.grid, "line": {"width": 0}, "mode": "lines", "hoverinfo": "skip"}
    ends = [low, high, high, low]
    edges = [low * (1 - BAND), high * (1 - BAND), high * (1 + BAND), low * (1 + BAND)]
    figure.add_trace(
        go.Scatter(x=ends, y=edges, name=f"within {BAND:.0%}", showlegend=col == 1, zorder=-2, **band), row=1, col=col
    )
    line = {"color": theme.muted, "width": 1}
    figure.add_trace(
        go.Scatter(
            x=[low, high], y=[low, high], mode="lines", line=line, showlegend=False, hoverinfo="skip", zorder=-1
        ),
        row=1,
        col=col,
    )
    for update in (figure.update_xaxes, figure.update_yaxes):
        update(type="log", range=[math.log10(low), math.log10(high)], **_ticks(low, high), row=1, col=col)


def _ticks(low: float, high: float) -> dict[str, list[float] | str]:
    """Return the ticks of a logarithmic axis: powers of ten, with 2 and 5 between them over fewer than two decades.

    An axis too short for two of them has those of plotly.
    """
    steps = (1, 2, 5) if high / low < TWO_DECADES else (1,)
    decades = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
    values = [value for decade in decades for step in steps if low <= (value := step * 10.0**decade) <= high]
    if len(values) < 2:
        return {}
    return {"tickvals": values, "tickformat": ",~g"}


def _case_text(case: ResultCase) -> str:
    return (
        f"<b>{escape(case.trace)}</b><br>{escape(case.way)}, {counted(case.streams, 'stream')}<br>"
        f"measured {us_text(case.measured_ns)} ({case.speedup:.2f}x)<br>"
        f"predicted {us_text(case.predicted_ns)} ({case.predicted_speedup:.2f}x), error {case.error:+.1%}"
    )


def memory_figure(
    runs: Sequence[tuple[str, Timeline]], theme: Theme = LIGHT, title: str = "Memory over time"
) -> go.Figure:
    """Draw live bytes over time, one line per labelled timeline, with its peak."""
    figure = go.Figure()
    peaks = []
    for number, (label, timeline) in enumerate(runs):
        memory = samples(timeline.memory, (0, timeline.makespan_ns))
        mean = "" if memory.bin_ns is None else f", mean of {us_text(memory.bin_ns)}"
        colour = theme.cycle[number % len(theme.cycle)]
        peaks.append(f"{label} {timeline.peak_bytes / MIB:,.0f} MiB")
        figure.add_trace(
            go.Scatter(
                x=[us(time) for time in memory.times_ns],
                y=[level / MIB for level in memory.values],
                mode="lines",
                line={"shape": "hv", "width": 2, "color": colour},
                name=escape(label),
                hovertemplate=f"{escape(label)}{mean}: %{{y:,.1f}} MiB at %{{x:,.1f}} us<extra></extra>",
            )
        )
        figure.add_hline(y=timeline.peak_bytes / MIB, line={"dash": "dot", "width": 1, "color": colour})
    figure.update_xaxes(title_text="time from the start of the step, us", rangemode="tozero")
    figure.update_yaxes(title_text="memory allocated, MiB", rangemode="tozero")
    figure.update_layout(
        template=theme.template,
        title=heading(title, f"peak (dotted): {'; '.join(peaks)}", theme),
        height=440,
        showlegend=True,
    )
    return figure


def tornado_figure(
    rows: Sequence[tuple[str, float, float, float]],
    theme: Theme = LIGHT,
    title: str = "What the prediction is sensitive to",
) -> go.Figure:
    """Draw sensitivities, largest on top.

    Each is (name, low, high, base): makespans in ns at the low end and the high end of a parameter's range, and at its
    current value.
    """
    ordered = sorted(rows, key=lambda row: -abs(row[2] - row[1]))
    names = {row[0]: _wrapped(row[0]) for row in ordered}
    # Bars have one height, so the longest name decides about all: otherwise its lines cover those of its neighbours.
    breaks = max((name.count("<br>") for name in names.values()), default=0)
    figure = go.Figure()
    for end, place, colour in (("at its low end", 1, theme.forward), ("at its high end", 2, theme.loss)):
        changes = [(row[0], row[3], float(row[place])) for row in ordered]
        figure.add_trace(
            go.Bar(
                orientation="h",
                y=[names[name] for name, _, _ in changes],
                base=[us(base) for _, base, _ in changes],
                x=[us(value - base) for _, base, value in changes],
                name=end,
                marker={"color": colour},
                hovertext=[
                    f"<b>{escape(name)}</b> {end}<br>{us_text(value)}, {value / base - 1:+.1%}"
                    if base
                    else escape(name)
                    for name, base, value in changes
                ],
                hoverinfo="text",
            )
        )
    for base in dict.fromkeys(row[3] for row in ordered):
        figure.add_vline(x=us(base), line={"width": 1, "color": theme.ink})
    figure.update_xaxes(title_text="predicted time of the step, us")
    figure.update_yaxes(autorange="reversed", showgrid=False)
    bases = ", ".join(us_text(base) for base in dict.fromkeys(row[3] for row in ordered))
    figure.update_layout(
        template=theme.template,
        title=heading(title, f"predicted time as each parameter goes through its range; now {bases}", theme),
        barmode="overlay",
        height=AROUND + len(names) * (BAR + LINE * breaks),
    )
    return figure


def _wrapped(name: str) -> str:
    """Wrap the name of a bar, which is next to the bars, to save width."""
    return "<br>".join(escape(line) for line in textwrap.wrap(visible(name), NAME_COLUMNS)) or escape(name)
