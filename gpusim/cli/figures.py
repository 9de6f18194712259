"""Figures as output files of commands, `--html FILE` and `--png FILE`; imports plotly only for these options."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import click

from gpusim.cli.common import check_output, tell
from gpusim.errors import FigureError, OutputError

Function = TypeVar("Function", bound=Callable[..., Any])

#: Suffixes of figures and data, which promise their kind of file.
SUFFIXES = (".html", ".htm", ".png", ".pdf", ".svg", ".jpg", ".jpeg", ".json", ".gz", ".csv")
MISSING_PLOTLY = "figures need plotly, which is not installed (pip install 'gpusim[app]')"


def figure_options(function: Function) -> Function:
    """Add `--html FILE` and `--png FILE`."""
    function = click.option(
        "--png", "png_file", metavar="FILE", help="Write the figure as PNG; needs Chrome or Chromium."
    )(function)
    return click.option("--html", "html_file", metavar="FILE", help="Write the figure as a page for a browser.")(
        function
    )


@contextmanager
def needs_plotly() -> Iterator[None]:
    """Raise `FigureError`, a one-line message, if plotly is missing."""
    try:
        yield
    except ModuleNotFoundError as cause:
        if cause.name is None or cause.name.partition(".")[0] != "plotly":
            raise
        raise FigureError(MISSING_PLOTLY) from cause


@dataclass(frozen=True)
class FigureFiles:
    """Output files of a figure."""

    html: Path | None
    png: Path | None

    def __bool__(self) -> bool:
        """True if any file is requested."""
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
    """Return the requested files after checking their requirements before long work. Raises as `FigureFiles.write`."""
    files = FigureFiles(check_output(html_file), check_output(png_file))
    _check_suffix(files.html, "a page for a browser", (".html", ".htm"))
    _check_suffix(files.png, "a PNG image", (".png",))
    if files:
        with needs_plotly():
            from gpusim.report.figures.output import check_png
        if files.png is not None:
            check_png()
    return files


def _check_suffix(file: Path | None, content: str, suffixes: tuple[str, ...]) -> None:
    """Raise `OutputError` for a name that promises another kind of file."""
    suffix = "" if file is None else file.suffix.lower()
    if suffix in SUFFIXES and suffix not in suffixes:
        raise OutputError(str(file), f"would hold {content}; use the suffix {suffixes[0]}")
