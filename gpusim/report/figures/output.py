"""Figures as files: HTML that needs no network, and PNG through Kaleido and Chrome or Chromium."""

from __future__ import annotations

from html import escape
from pathlib import Path

import plotly.graph_objects as go
import plotly.io

from gpusim.errors import FigureError
from gpusim.io.files import write_bytes
from gpusim.text import shortened, visible

PNG_WIDTH = 1200
#: Dots per layout pixel, for dense screens.
PNG_SCALE = 2
#: Time after which a silent browser is given up.
PNG_TIMEOUT_S = 60
DEFAULT_HEIGHT = 500

NEEDS_KALEIDO = "a PNG needs the package kaleido (pip install 'gpusim[app]'); --html works without"
NEEDS_CHROME = (
    "a PNG needs Chrome or Chromium, and none was found: install one (apt install chromium, or plotly_get_chrome), "
    "or name it in BROWSER_PATH; --html works without"
)


def figure_html(figure: go.Figure, title: str) -> str:
    """Return a self-contained page with plotly.js inside; nothing is loaded."""
    # Newer plotly.js has a button by default that uploads the figure.
    config = {"displaylogo": False, "responsive": True, "showSendToCloud": False}
    body = plotly.io.to_html(
        figure, config=config, include_plotlyjs=True, include_mathjax=False, full_html=False, div_id="figure"
    )
    name = escape(shortened(visible(title)))
    paper = figure.layout.template.layout.paper_bgcolor or "#FFFFFF"
    return (
        f'<!DOCTYPE html>\n<html lang="en">\n<head><meta charset="utf-8"><title>{name}</title></head>\n'
        f'<body style="margin:0;background:{paper}">\n{body}\n</body>\n</html>\n'
    )


def write_html(path: Path, figure: go.Figure, title: str) -> None:
    """Write a figure as one HTML page, atomically. Raises `OutputError`."""
    write_bytes(path, figure_html(figure, title).encode())


def check_png() -> None:
    """Raise `FigureError` if the package for PNGs is missing; a missing browser is noticed when drawing."""
    try:
        import kaleido  # noqa: F401
    except ImportError as cause:
        raise FigureError(NEEDS_KALEIDO) from cause


def figure_png(figure: go.Figure, width: int = PNG_WIDTH) -> bytes:
    """Return the figure as PNG, `width` layout pixels wide. Raises `FigureError` if Kaleido or a browser is missing."""
    check_png()
    import kaleido
    from kaleido.errors import ChromeNotFoundError

    options = {
        "format": "png",
        "width": width,
        "height": figure.layout.height or DEFAULT_HEIGHT,
        "scale": PNG_SCALE,
    }
    try:
        # Not through plotly, which makes Kaleido's page load MathJax from the network.
        image: bytes = kaleido.calc_fig_sync(
            figure.to_dict(), opts=options, kopts={"mathjax": False, "timeout": PNG_TIMEOUT_S}
        )
    except ChromeNotFoundError as cause:
        raise FigureError(NEEDS_CHROME) from cause
    except Exception as cause:
        # Any error of the browser or its driver: the figure itself is valid, since plotly has checked it.
        words = " ".join(map(str, cause.args)) or "no further word"
        raise FigureError(f"the browser drew no PNG ({type(cause).__name__}: {words}); --html works without") from cause
    return image


def write_png(path: Path, figure: go.Figure, width: int = PNG_WIDTH) -> None:
    """Write a figure as PNG, atomically. Raises `FigureError`, `OutputError`."""
    write_bytes(path, figure_png(figure, width))
