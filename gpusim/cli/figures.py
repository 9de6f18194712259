"""Figures as output files of commands: `--html FILE` and `--png FILE`. Imports plotly only where one is asked for."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import click

from gpusim.cli.common import check_output, tell
from gpusim.errors import FigureError

Function = TypeVar("Function", bound=Callable[..., Any])

MISSING_PLOTLY = "figures need plotly, which is not installed (pip install 'gpusim[app]')"


def figure_options(function: Function) -> Function:
    """`--html FILE` and `--png FILE`."""
    function = click.option("--png", "png_file", metavar="FILE", help="The figure as PNG; needs Chrome or Chromium.")(
        function
    )
    return click.option("--html", "html_file", metavar="FILE", help="The figure as a page to open in a browser.")(
        function
    )


@contextmanager
def needs_plotly() -> Iterator[None]:
    """Turn a missing plotly into one line. Raises `FigureError`."""
    try:
        yield
    except ModuleNotFoundError as cause:
        if cause.name is None or cause.name.partition(".")[0] != "plotly":
            raise
        raise FigureError(MISSING_PLOTLY) from cause


@dataclass(frozen=True)
class FigureFiles:
    """The files that a figure was asked for in."""

    html: Path | None
    png: Path | None

    def __bool__(self) -> bool:
        """Whether there is anything to draw."""
        return self.html is not None or self.png is not None

    def write(self, figure: Any, title: str) -> None:
        """Write the figure to each of them. Raises `FigureError`, `OutputError`."""
        from gpusim.report.figures.output import write_html, write_png

        if self.html is not None:
            write_html(self.html, figure, title)
        if self.png is not None:
            write_png(self.png, figure)

    def announce(self) -> None:
        """Say where they are."""
        for path in (self.html, self.png):
            if path is not None:
                tell(f"figure written to {path}")


def check_figures(html_file: str | None, png_file: str | None) -> FigureFiles:
    """The files asked for, with what they need known to be there before long work. Raises as `FigureFiles.write`."""
    files = FigureFiles(check_output(html_file), check_output(png_file))
    if files:
        with needs_plotly():
            from gpusim.report.figures.output import check_png
        if files.png is not None:
            check_png()
    return files
