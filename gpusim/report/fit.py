"""Tables that fit the terminal: names and numbers stay whole, and the least important columns are left out by name."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

from rich.cells import cell_len
from rich.console import Console
from rich.table import Column
from rich.text import Text

from gpusim.report.terminal import Table

#: Minimum width of a folded column, and width that it keeps by leaving out other columns, if not stated.
LEAST_FOLDED, READABLE_FOLDED = 8, 20
#: Break point in the cell of a number: before a share, which then goes below the number.
_BEFORE_SHARE = re.compile(r" +(?=[+-]?[\d.]+%)")


@dataclass(frozen=True, slots=True)
class _Widths:
    """Widths of a column: full, minimum (longest unbreakable part), and readable."""

    natural: int
    least: int
    readable: int
    """Width for which other columns are left out."""


def print_table(
    out: Console,
    table: Table,
    drop: Sequence[str] = (),
    fold: Sequence[str] = (),
    readable: int = READABLE_FOLDED,
) -> None:
    """Print `table` within the width of `out`.

    If it is too wide with `readable` characters for each column of `fold`, columns are left out in the order of `drop`,
    and a line below names them. Then text breaks between words, and names in the columns of `fold` break anywhere. The
    first column and numbers stay whole: a table that is still too wide is printed wider than `out`.
    """
    left_out: list[str] = []
    for name in (*drop, None):
        kept = [column for column in table.columns if str(column.header) not in left_out]
        widths = [_widths(column, first=column is table.columns[0], fold=fold, readable=readable) for column in kept]
        rebuilt = _rebuilt(table, kept)
        room = out.width - _overhead(out, rebuilt)
        if name is None or sum(width.readable for width in widths) <= room:
            break
        left_out.append(name)
    shared = _shared_out(widths, room)
    for column, width in zip(rebuilt.columns, shared, strict=True):
        column.width = column.min_width = width
    before = out.width
    out.width = max(before, before - room + sum(shared))
    try:
        out.print(rebuilt)
    finally:
        out.width = before
    if left_out:
        out.print(f"({', '.join(left_out)}: only in a wider terminal)")


def _widths(column: Column, first: bool, fold: Sequence[str], readable: int) -> _Widths:
    header, *cells = (_plain(cell) for cell in (column.header, *column.cells))
    natural = max(map(cell_len, (header, *cells)))
    if str(column.header) in fold:
        least = max(LEAST_FOLDED, cell_len(header))
        return _Widths(natural, min(natural, least), min(natural, max(least, readable)))
    parts = list(header.split())
    for cell in cells:
        if first:
            parts.append(cell)
        elif column.justify == "right":
            parts += _BEFORE_SHARE.split(cell.strip())
        else:
            parts += cell.split()
    least = max(map(cell_len, parts), default=0)
    return _Widths(natural, least, least)


def _shared_out(widths: Sequence[_Widths], room: int) -> list[int]:
    """Return widths that fit `room` if the minimum widths do; the column with the most slack shrinks first.

    No column shrinks below its readable width while another can shrink to its own.
    """
    shares = [width.natural for width in widths]
    for floors in ([width.readable for width in widths], [width.least for width in widths]):
        while sum(shares) > room:
            spare = [width - floor for width, floor in zip(shares, floors, strict=True)]
            if max(spare) <= 0:
                break
            shares[spare.index(max(spare))] -= 1
    return shares


def _rebuilt(table: Table, kept: Sequence[Column]) -> Table:
    """Return the same table with only these columns."""
    rebuilt = Table(box=table.box, show_edge=table.show_edge, pad_edge=table.pad_edge, header_style=table.header_style)
    for column in kept:
        rebuilt.add_column(column.header, justify=column.justify, style=column.style, overflow="fold")
    cells = [list(column.cells) for column in kept]
    for number, row in enumerate(table.rows):
        rebuilt.add_row(*(column[number] for column in cells), style=row.style, end_section=row.end_section)
    return rebuilt


def _overhead(out: Console, table: Table) -> int:
    """Return the width of lines and spaces between the columns."""
    wide = out.options.update(width=10_000)
    for column in table.columns:
        column.width = column.min_width = 1
    total = table.__rich_measure__(out, wide).maximum
    return total - len(table.columns)


def _plain(cell: object) -> str:
    return cell.plain if isinstance(cell, Text) else str(cell)
