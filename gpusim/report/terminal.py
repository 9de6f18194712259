"""Safe text on a terminal: no markup in strings, no control characters, and styles separate from text."""

from __future__ import annotations

import os
from typing import Any

from rich.console import Console, RenderableType
from rich.table import Table as RichTable
from rich.text import Text

from gpusim.text import visible

#: Width of output without a terminal, if `COLUMNS` is not set.
WIDTH = 120
MAX_WIDTH = 10_000


class PlainConsole(Console):
    """Console without markup; control characters other than line feeds and tabs are made visible."""

    def __init__(self, **options: Any) -> None:
        super().__init__(markup=False, emoji=False, highlight=False, **options)

    def render_str(self, text: str, **options: Any) -> Text:
        """Render as in rich, without control characters."""
        return super().render_str(visible(text, layout=True), **options)


class Table(RichTable):
    """Table that makes each string cell one visible line."""

    def add_column(self, header: RenderableType = "", *args: Any, **options: Any) -> None:
        """Add a column as in rich."""
        super().add_column(_cell(header), *args, **options)

    def add_row(self, *cells: RenderableType | None, **options: Any) -> None:
        """Add a row as in rich."""
        super().add_row(*(None if cell is None else _cell(cell) for cell in cells), **options)


def console(*, stderr: bool = False) -> Console:
    """Return a console on standard output or error, as wide as the terminal, `COLUMNS` or `WIDTH`."""
    plain = PlainConsole(stderr=stderr)
    if plain.is_terminal:
        return plain
    columns = os.environ.get("COLUMNS", "")
    wide = columns.isascii() and columns.isdigit() and 0 < int(columns) < MAX_WIDTH
    return PlainConsole(stderr=stderr, width=int(columns) if wide else WIDTH)


def styled(*parts: str | tuple[str, str]) -> Text:
    """Return a text of parts, each a string, or a string with its style."""
    text = Text()
    for part in parts:
        words, style = (part, "") if isinstance(part, str) else part
        text.append(visible(words, layout=True), style)
    return text


def _cell(cell: RenderableType) -> RenderableType:
    return visible(cell) if isinstance(cell, str) else cell
