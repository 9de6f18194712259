"""Figure of two simulated runs on one time axis, each with its lanes and occupied SMs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import plotly.graph_objects as go

from gpusim.analysis.critical_path import critical_path
from gpusim.engine.base import Timeline
from gpusim.formats.hardware import HardwareModel
from gpusim.formats.trace import Trace
from gpusim.report.figures.theme import us, us_text
from gpusim.report.figures.timeline import (
    COUNTER,
    PLAIN,
    Look,
    add_bars,
    add_path,
    finish,
    label_lanes,
    lanes_height,
    slice_text,
    stacked,
)
from gpusim.report.lanes import MAX_BARS, bars, lanes, samples, whole
from gpusim.report.perfetto import run_from_timeline
from gpusim.units import counted

#: Height of the track of SMs under each run, in pixels.
TRACK = COUNTER * 3 // 4


@dataclass(frozen=True)
class Compared:
    """One of the two runs."""

    name: str
    """Short name, shown at the side."""
    timeline: Timeline
    """Timeline recorded by the reference engine."""
    trace: Trace
    hardware: HardwareModel


def compared_figure(runs: Sequence[Compared], look: Look = PLAIN) -> go.Figure:
    """Draw both runs from the same start; a line in each marks its end."""
    drawn = [run_from_timeline(run.timeline, run.trace, run.name, run.hardware) for run in runs]
    rows = [lanes(run) for run in drawn]
    window = look.window_ns or (0, max((whole(run)[1] for run in drawn), default=0))
    heights = [height for lanes_of in rows for height in (lanes_height(lanes_of), TRACK)]
    figure = stacked(heights)
    explained: set[str] = set()
    for number, (run, about, lanes_of) in enumerate(zip(drawn, runs, rows, strict=True)):
        row = 1 + 2 * number
        shown = bars(run, lanes_of, window, MAX_BARS // len(runs))
        texts = [
            slice_text(run, bar.slices[0], about.timeline)
            if bar.bin_ns is None
            else f"{counted(len(bar.slices), 'kernel')}, busy {us_text(bar.dur_ns)}"
            for bar in shown.bars
        ]
        add_bars(figure, row, shown, texts, explained, look.theme, tasks=False)
        explained |= {bar.phase for bar in shown.bars}
        label_lanes(figure, row, lanes_of, about.name)
        add_path(figure, row, critical_path(about.timeline, about.hardware), lanes_of, window, look.theme)
        end_us = us(about.timeline.makespan_ns)
        figure.add_vline(x=end_us, line={"width": 2, "color": look.theme.loss}, row=row, col=1)
        occupied = samples(about.timeline.occupied, window)
        figure.add_scatter(
            x=[us(time) for time in occupied.times_ns],
            y=[100.0 * value for value in occupied.values],
            mode="lines",
            line={"shape": "hv", "width": 1, "color": look.theme.total},
            fill="tozeroy",
            showlegend=False,
            hovertemplate="SMs: %{y:.0f} %<extra></extra>",
            row=row + 1,
            col=1,
        )
        figure.update_yaxes(title_text="SMs, %", range=[0, 100], nticks=3, row=row + 1, col=1)
    title = " and ".join(run.name for run in runs)
    ends = "; ".join(f"{run.name}: {us_text(run.timeline.makespan_ns)}" for run in runs)
    finish(figure, heights, window, look.theme, "" if look.bare else title, ends)
    return figure
