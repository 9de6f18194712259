"""Colours and layout of all figures: one light and one dark theme.

Colours are those of Okabe and Ito ("Color universal design", 2008), distinguishable with any colour vision.
"""

from __future__ import annotations

import html
from dataclasses import dataclass
from typing import Literal

import plotly.graph_objects as go

from gpusim.text import VALUE_CHARACTERS, shortened, visible
from gpusim.units import NS_PER_US

ThemeName = Literal["light", "dark"]

BLUE, ORANGE, GREEN, VERMILION = "#0072B2", "#E69F00", "#009E73", "#D55E00"
SKY, PURPLE, YELLOW = "#56B4E9", "#CC79A7", "#F0E442"

#: Phases, in the order of legends.
PHASES = ("forward", "backward", "optimizer")

#: Marker shapes, in addition to colours; more than there are policies.
SYMBOLS = (
    "circle",
    "diamond",
    "square",
    "triangle-up",
    "cross",
    "star",
    "triangle-down",
    "hexagon",
    "x",
    "pentagon",
    "bowtie",
    "hourglass",
    "triangle-left",
    "hexagram",
    "diamond-tall",
    "triangle-right",
    "star-square",
)

FONT = "Open Sans, Helvetica Neue, Arial, DejaVu Sans, sans-serif"


@dataclass(frozen=True)
class Theme:
    """Colours of the figures."""

    name: ThemeName
    ink: str
    """Colour of text, axes and totals."""
    muted: str
    """Colour of secondary text and of slices without phase."""
    grid: str
    paper: str
    forward: str
    loss: str
    """Colour of lost time."""
    gain: str
    """Colour of saved time."""
    total: str
    """Colour of bars of totals."""

    def phase(self, name: str) -> str:
        """Return the colour of a phase, or of slices without one."""
        return {"forward": self.forward, "backward": ORANGE, "optimizer": GREEN}.get(name, self.muted)

    @property
    def cycle(self) -> tuple[str, ...]:
        """Colours of series without meaning of their own."""
        return (self.forward, ORANGE, GREEN, VERMILION, PURPLE, SKY if self.forward != SKY else YELLOW)

    def marker(self, number: int) -> dict[str, object]:
        """Return the marker of a series of points; shape and colour together are unique for a hundred series."""
        return {
            "size": 9,
            "symbol": SYMBOLS[number % len(SYMBOLS)],
            "color": self.cycle[number % len(self.cycle)],
            "line": {"color": self.paper, "width": 1},
        }

    @property
    def template(self) -> go.layout.Template:
        """Return the base layout of figures."""
        axis = {
            "automargin": True,
            "gridcolor": self.grid,
            "linecolor": self.muted,
            "zerolinecolor": self.grid,
            "ticks": "outside",
            "separatethousands": True,
            "exponentformat": "none",
            "tickcolor": self.muted,
            "title": {"standoff": 8, "font": {"size": 13}},
        }
        return go.layout.Template(
            layout={
                "font": {"family": FONT, "size": 13, "color": self.ink},
                # Distance of the first line above the plot: a second line and the legend fit below.
                "title": {
                    "x": 0.0,
                    "xref": "paper",
                    "xanchor": "left",
                    "y": 1.0,
                    "yref": "paper",
                    "yanchor": "bottom",
                    "pad": {"b": 62},
                    "font": {"size": 17},
                },
                "paper_bgcolor": self.paper,
                "plot_bgcolor": self.paper,
                "colorway": self.cycle,
                "xaxis": axis,
                "yaxis": axis,
                "hoverlabel": {
                    "align": "left",
                    "bgcolor": self.paper,
                    "bordercolor": self.muted,
                    "font": {"color": self.ink, "family": FONT},
                    "namelength": -1,
                },
                "legend": {"orientation": "h", "x": 1.0, "xanchor": "right", "y": 1.0, "yanchor": "bottom"},
                "margin": {"l": 70, "r": 30, "t": 100, "b": 55},
                "bargap": 0.25,
            }
        )


LIGHT = Theme(
    name="light",
    ink="#222222",
    muted="#7A7A7A",
    grid="#E6E6E6",
    paper="#FFFFFF",
    forward=BLUE,
    loss=VERMILION,
    gain=GREEN,
    total="#5B6770",
)
DARK = Theme(
    name="dark",
    ink="#E8E8E8",
    muted="#9AA3AB",
    grid="#30363D",
    paper="#14181D",
    forward=SKY,
    loss=VERMILION,
    gain=GREEN,
    total="#8794A0",
)


def us(time_ns: float) -> float:
    """Return a time in us, for figures."""
    return time_ns / NS_PER_US


def us_text(time_ns: float, *, signed: bool = False) -> str:
    """Format a time in us: `1,234 us`, `12.3 us`, `0.25 us`; `signed` adds a plus sign."""
    time_us = us(time_ns)
    digits = 0 if abs(time_us) >= 100 or not time_us else 1 if abs(time_us) >= 10 else 2
    return f"{time_us:{'+' if signed else ''},.{digits}f} us"


#: A legend at the side, for more entries than fit above; use with `margin={"r": SIDE}`.
SIDE_LEGEND = {
    "orientation": "v",
    "x": 1.02,
    "xanchor": "left",
    "y": 1.0,
    "yanchor": "top",
    "tracegroupgap": 0,
}
SIDE = 150


def escape(text: str) -> str:
    """Escape text from a file for plotly, which interprets tags, entities and, in templates, `%{...}`."""
    return html.escape(visible(text)).replace("%{", "%&#123;")


def heading(title: str, subtitle: str, theme: Theme) -> dict[str, str]:
    """Return a title with a second, smaller line, both plain text."""
    first, second = escape(shortened(title)), escape(shortened(subtitle, 2 * VALUE_CHARACTERS))
    return {"text": f"{first}<br><span style='font-size:13px;color:{theme.muted}'>{second}</span>"}
