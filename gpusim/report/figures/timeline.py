"""Timeline figure: a lane per stream, a bar per kernel, and below on the same axis the load of the GPU."""

from __future__ import annotations

import functools
import textwrap
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import plotly.graph_objects as go
from plotly.subplots import make_subplots

from gpusim.analysis.critical_path import CriticalPath, critical_path
from gpusim.engine.base import Timeline
from gpusim.formats.hardware import HardwareModel
from gpusim.formats.trace import Trace
from gpusim.report.figures.theme import LIGHT, PHASES, Theme, escape, heading, us, us_text
from gpusim.report.lanes import (
    MAX_BARS,
    MAX_SAMPLES,
    Bar,
    Bars,
    Lane,
    Samples,
    Window,
    bars,
    folded,
    lanes,
    samples,
    whole,
    with_phases,
)
from gpusim.report.perfetto import Run, run_from_timeline
from gpusim.text import shortened, visible
from gpusim.units import counted, format_bytes

#: Height of a bar, as a share of its lane.
BAR = 0.8
#: Heights in pixels; the height of a lane does not depend on their number.
LANE, COUNTER, GAP, AROUND = 18, 56, 14, 155
#: Height around the rows of a figure without title and legend, in pixels.
AROUND_BARE = 52
#: Axis title and factor of the counters of `run_from_timeline`; others are shown unchanged.
COUNTERS = {
    "SM residency": ("SMs, %", 100.0),
    "DRAM GB/s": ("DRAM, GB/s", 1.0),
    "memory MiB": ("memory, MiB", 1.0),
}
NAME_COLUMNS, NAME_LINES = 76, 3
#: Kernels' names that are wrapped once: a step has few of them, and many kernels of each.
NAMES_KEPT = 1024
NO_PHASE = "phase unknown"


@dataclass(frozen=True)
class Look:
    """Drawing options of a timeline."""

    theme: Theme = LIGHT
    window_ns: Window | None = None
    """Window shown; None for the whole run."""
    fold: bool = False
    """Draws measured kernels in the fewest lanes, not in those of the CUDA graph's executor."""
    marked: frozenset[int] = frozenset()
    """Tasks with their time marked."""
    bare: bool = False
    """Omits title, legend and right labels, for a page that has them as text."""


#: The whole run, with title and legend.
PLAIN = Look()


def timeline_figure(
    timeline: Timeline,
    trace: Trace,
    hardware: HardwareModel,
    *,
    title: str = "",
    measured: Run | None = None,
    measured_ns: int | None = None,
    look: Look = PLAIN,
) -> go.Figure:
    """Draw a simulated step with its critical path and the load of the GPU and, if given, a measured run below.

    `measured_ns`, the time of the whole step as measured without a profiler, is a dotted line through the lanes.
    `hardware` is the model of the simulation (the op graph's). Raises `PlanError` if a kernel breaks a limit of the
    GPU.
    """
    theme = look.theme
    run = run_from_timeline(timeline, trace, title or trace.name, hardware)
    window = look.window_ns or (0, max([measured_ns or 0, whole(run)[1], *([whole(measured)[1]] if measured else [])]))
    rows = [lanes(run)]
    if measured is not None:
        measured = with_phases(measured, run)
        rows.append(folded(measured) if look.fold else lanes(measured))
    # A track that is zero throughout is one that nothing is known of: DRAM traffic without counters, or no tensors.
    counters = [each for each in run.counters if any(value for _, value in each.samples)]
    heights = [lanes_height(rows[0]), *[COUNTER] * len(counters), *map(lanes_height, rows[1:])]
    figure = stacked(heights)
    about = f"{counted(len(run.slices), 'task')} on {counted(len(rows[0]), 'stream')}, {us_text(timeline.makespan_ns)}"
    notes = [f"{trace.name} on {hardware.label}: {about}"]
    limit = MAX_BARS // len(rows)
    shown = bars(run, rows[0], window, limit)
    add_bars(figure, 1, shown, [_bar_text(run, bar, timeline) for bar in shown.bars], set(), theme)
    label_lanes(figure, 1, rows[0], "simulated" if measured is not None else None)
    if shown.bin_ns is not None:
        notes.append(f"bars aggregated in bins of {us_text(shown.bin_ns)}")
    add_path(figure, 1, critical_path(timeline, hardware), rows[0], window, theme)
    _mark(figure, 1, timeline, look.marked, window, theme)
    averaged = []
    for row, counter in enumerate(counters, 2):
        points = samples(counter.samples, window)
        _add_counter(figure, row, counter.name, points, theme)
        if points.bin_ns is not None:
            averaged.append(_counter_title(counter.name)[0].split(",")[0])
    if averaged:
        notes.append(f"{' and '.join(averaged)} averaged over {us_text((window[1] - window[0]) / MAX_SAMPLES)}")
    timed = "" if measured_ns is None else f"dotted: {us_text(measured_ns)}, timed without a profiler"
    ends = [(1, whole(run)[1], len(rows[0]))]
    if measured is not None:
        below = 2 + len(counters)
        seen = bars(measured, rows[1], window, limit)
        texts = [_bar_text(measured, bar, None) for bar in seen.bars]
        # Phases in the legend of the first run are not repeated.
        add_bars(figure, below, seen, texts, {bar.phase for bar in bars(run, rows[0], window).bars}, theme, tasks=False)
        label_lanes(figure, below, rows[1], "measured")
        if seen.bin_ns is not None:
            notes.append(f"measured bars aggregated in bins of {us_text(seen.bin_ns)}")
        ends.append((below, whole(measured)[1], len(rows[1])))
        words = f"{escape(shortened(measured.title))}, {us_text(whole(measured)[1])}"
        _name_row(figure, below, f"{words}; {timed}" if timed else words, theme)
    elif timed:
        notes.insert(1, timed)
    for row, end_ns, count in ends:
        if not look.bare:
            _mark_end(figure, row, end_ns, window, count, theme)
        if measured_ns is not None:
            _mark_measured(figure, row, measured_ns, window, theme)
    finish(figure, heights, window, theme, "" if look.bare else run.title, "; ".join(notes))
    return figure


def stacked(heights: Sequence[int]) -> go.Figure:
    """Return an empty figure with rows of these heights on one time axis."""
    total = sum(heights) + GAP * (len(heights) - 1)
    return make_subplots(
        rows=len(heights),
        cols=1,
        shared_xaxes=True,
        row_heights=list(heights),
        vertical_spacing=GAP / total if heights[1:] else 0.0,
    )


def lanes_height(lanes_of: Sequence[Lane]) -> int:
    """Return the height of a row of lanes, in pixels."""
    return LANE * max(2, len(lanes_of))


def finish(figure: go.Figure, heights: Sequence[int], window: Window, theme: Theme, title: str, subtitle: str) -> None:
    """Set layout and axes of stacked rows; without a title, the figure is bare."""
    around = AROUND if title else AROUND_BARE
    figure.update_layout(
        template=theme.template,
        barmode="overlay",
        hovermode="closest",
        height=around + sum(heights) + GAP * (len(heights) - 1),
        margin={"r": 110} if title else {"l": 60, "r": 12, "t": 8, "b": 40},
        legend={"y": 1.0, "traceorder": "normal"},
        showlegend=bool(title),
    )
    if title:
        figure.update_layout(title=heading(title, subtitle, theme))
    # Only time can be zoomed: all lanes and tracks stay visible.
    figure.update_yaxes(fixedrange=True)
    figure.update_xaxes(range=[us(window[0]), us(window[1])], showticklabels=False, ticks="")
    last = {"row": len(heights), "col": 1}
    figure.update_xaxes(title_text="time from the start of the step, us", showticklabels=True, ticks="outside", **last)


def add_bars(
    figure: go.Figure, row: int, shown: Bars, texts: list[str], explained: set[str], theme: Theme, *, tasks: bool = True
) -> None:
    """Add one trace per phase; phases not yet in the legend are added to it. `tasks`: bars are simulated tasks."""
    phases = {bar.phase for bar in shown.bars}
    for phase in [*(phase for phase in PHASES if phase in phases), *sorted(phases - set(PHASES))]:
        mine = [(bar, text) for bar, text in zip(shown.bars, texts, strict=True) if bar.phase == phase]
        figure.add_trace(
            go.Bar(
                orientation="h",
                y=[bar.lane for bar, _ in mine],
                base=[us(bar.start_ns) for bar, _ in mine],
                x=[us(bar.dur_ns) for bar, _ in mine],
                width=BAR,  # else a phase that uses every other lane gets bars of two lanes
                name=escape(phase or NO_PHASE),
                legendgroup=phase or NO_PHASE,
                showlegend=phase not in explained,
                marker={"color": theme.phase(phase), "line": {"width": 0}},
                hovertext=[text for _, text in mine],
                hoverinfo="text",
                # For pages with clickable bars: the task, if the bar is one.
                customdata=[bar.slices[0] if tasks and bar.bin_ns is None else -1 for bar, _ in mine],
            ),
            row=row,
            col=1,
        )


def label_lanes(figure: go.Figure, row: int, lanes_of: Sequence[Lane], title: str | None) -> None:
    figure.update_yaxes(
        tickvals=list(range(len(lanes_of))),
        ticktext=[lane.name for lane in lanes_of],
        range=[len(lanes_of) - 0.4, -0.6],
        title_text=title,
        ticks="",
        showgrid=False,
        zeroline=False,
        row=row,
        col=1,
    )


def _mark_end(figure: go.Figure, row: int, end_ns: int, window: Window, count: int, theme: Theme) -> None:
    """Mark the end of the run if it is in the window."""
    if window[0] <= end_ns <= window[1]:
        figure.add_vline(x=us(end_ns), line={"width": 1, "color": theme.ink}, row=row, col=1)
        text = {"text": us_text(end_ns), "showarrow": False, "xanchor": "left", "xshift": 6, "bgcolor": theme.paper}
        figure.add_annotation(x=us(end_ns), y=(count - 1) / 2, row=row, col=1, **text)


def _mark_measured(figure: go.Figure, row: int, time_ns: int, window: Window, theme: Theme) -> None:
    """Mark the measured time of the step if it is in the window."""
    if window[0] <= time_ns <= window[1]:
        figure.add_vline(x=us(time_ns), line={"width": 2, "dash": "dot", "color": theme.loss}, row=row, col=1)


def _name_row(figure: go.Figure, row: int, text: str, theme: Theme) -> None:
    """Label a row of lanes in the gap above it."""
    figure.add_annotation(
        text=text,
        x=0,
        xref="paper",
        xanchor="left",
        y=figure.layout[f"yaxis{row}"].domain[1],
        yref="paper",
        yanchor="bottom",
        showarrow=False,
        font={"color": theme.muted, "size": 12},
    )


def _mark(figure: go.Figure, row: int, timeline: Timeline, tasks: frozenset[int], window: Window, theme: Theme) -> None:
    """Draw a band over the time in which these tasks run."""
    inside = [task for task in tasks if timeline.end_ns[task] >= window[0] and timeline.start_ns[task] <= window[1]]
    if inside:
        begin, end = min(timeline.start_ns[t] for t in inside), max(timeline.end_ns[t] for t in inside)
        figure.add_vrect(
            x0=us(max(begin, window[0])),
            x1=us(min(end, window[1])),
            fillcolor=theme.loss,
            opacity=0.25,
            line={"width": 1, "color": theme.loss},
            row=row,
            col=1,
        )


def add_path(
    figure: go.Figure, row: int, path: CriticalPath, lanes_of: Sequence[Lane], window: Window, theme: Theme
) -> None:
    """Draw the critical path as a line through its bars."""
    lane_of = {index: number for number, lane in enumerate(lanes_of) for index in lane.slices}
    # Tasks that only kept the front end busy are left out: the line would jump there and back.
    steps = [step for step in path.steps if step.run_ns and step.leave_ns >= window[0] and step.start_ns <= window[1]]
    points = [(us(time), lane_of[step.task]) for step in steps for time in (step.start_ns, step.leave_ns)]
    figure.add_trace(
        go.Scatter(
            x=[x for x, _ in points],
            y=[y for _, y in points],
            mode="lines",
            name="critical path",
            line={"color": theme.ink, "width": 1.5},
            hoverinfo="skip",
        ),
        row=row,
        col=1,
    )


def _add_counter(figure: go.Figure, row: int, name: str, points: Samples, theme: Theme) -> None:
    title, factor = _counter_title(name)
    mean = "" if points.bin_ns is None else f" (mean of {us_text(points.bin_ns)})"
    figure.add_trace(
        go.Scatter(
            x=[us(time) for time in points.times_ns],
            y=[factor * value for value in points.values],
            mode="lines",
            line={"shape": "hv", "width": 1, "color": theme.total},
            fill="tozeroy",
            name=escape(title),
            showlegend=False,
            hovertemplate=f"{escape(title)}: %{{y:,.4~g}}{mean}<br>%{{x:,.1f}} us<extra></extra>",
        ),
        row=row,
        col=1,
    )
    # Two lines, since the title is longer than the height of the track.
    words = escape(title).replace(", ", ",<br>")
    figure.update_yaxes(title={"text": words, "font": {"size": 11}}, rangemode="tozero", nticks=4, row=row, col=1)
    if factor == 100.0:
        figure.update_yaxes(range=[0, 100], row=row, col=1)


def _counter_title(name: str) -> tuple[str, float]:
    return COUNTERS.get(name, (name, 1.0))


def _bar_text(run: Run, bar: Bar, timeline: Timeline | None) -> str:
    """Return the hover text of a bar."""
    if bar.bin_ns is None:
        return slice_text(run, bar.slices[0], timeline)
    begin, end = bar.bin_ns
    longest = max(bar.slices, key=lambda index: run.slices[index].dur_ns)
    phase = escape(bar.phase or NO_PHASE)
    return (
        f"<b>{len(bar.slices):,} kernels, aggregated</b><br>{phase}: busy {us_text(bar.dur_ns)} of "
        f"{us_text(end - begin)} from {us(begin):,.1f} us<br>longest: {_wrapped(run.slices[longest].name)}"
    )


def slice_text(run: Run, index: int, timeline: Timeline | None = None) -> str:
    """Return the hover text of a slice: kernel, op, layer, launch shape, limiting resource, and duration."""
    piece = run.slices[index]
    args = piece.args
    lines = [f"<b>{_wrapped(piece.name)}</b>"]
    if args.get("op"):
        op = f"{args['op']} ({args.get('target', '')})"
        lines.append(f"op {escape(shortened(op))}{', ' + escape(str(args['phase'])) if args.get('phase') else ''}")
    if args.get("layer"):
        lines.append(f"layer {escape(shortened(str(args['layer'])))}")
    lines += map(escape, _launch_lines(args))
    lines.append(f"start {us(piece.start_ns):,.1f} us, duration {us_text(piece.dur_ns)}")
    if timeline is not None:
        alone_ns = timeline.plan.tasks[index].dur_ns
        if alone_ns:
            lines[-1] += f", alone {us_text(alone_ns)}"
        waited_ns = piece.start_ns - timeline.ready_ns[index]
        if waited_ns > 0:
            lines.append(f"waited {us_text(waited_ns)} for the front end, a grid slot or a copy engine")
    return "<br>".join(lines)


def _launch_lines(args: Mapping[str, Any]) -> list[str]:
    lines = []
    if "grid" in args and "block" in args:
        shape = f"grid {'x'.join(map(str, args['grid']))}, block {'x'.join(map(str, args['block']))}"
        if "registers per thread" in args:
            shape += f", {args['registers per thread']} registers a thread"
        if args.get("shared memory"):
            shape += f", {format_bytes(args['shared memory'])} shared memory"
        lines.append(shape)
    if "limited by" in args:
        share = args.get("est. achieved occupancy %", "?")
        lines.append(f"occupancy {share} % of the GPU's threads; blocks an SM holds limited by {args['limited by']}")
    if args.get("bytes"):
        lines.append(f"{format_bytes(int(args['bytes']))} moved")
    return lines


@functools.lru_cache(maxsize=NAMES_KEPT)
def _wrapped(name: str) -> str:
    """Wrap and escape a kernel's name, since template arguments look like tags to plotly."""
    wrapped = textwrap.wrap(visible(name), NAME_COLUMNS, max_lines=NAME_LINES, placeholder=" ...") or [""]
    return "<br>".join(map(escape, wrapped))
