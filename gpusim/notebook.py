"""Short representations of values: one line for a terminal, a small table for a notebook.

Names come from files and are untrusted. Here they are made visible, shortened, and escaped in HTML.
"""

from __future__ import annotations

import html
from collections.abc import Iterable, Sequence
from typing import Final

from gpusim.text import shortened, visible

#: Maximum length of the `repr` of a public value, and of a name in it.
REPR_CHARACTERS: Final = 200
NAME_CHARACTERS: Final = 60
#: Maximum number of rows of a table in a notebook.
MOST_ROWS: Final = 20


def short_name(name: str) -> str:
    """Return a name for a `repr`: visible, at most `NAME_CHARACTERS` long."""
    return _cut(visible(name), NAME_CHARACTERS)


def short_repr(kind: str, text: str) -> str:
    """Return `<Kind text>`, visible and below `REPR_CHARACTERS`."""
    return f"<{kind} {_cut(visible(text), REPR_CHARACTERS - len(kind) - 4)}>"


def html_table(title: str, header: Sequence[str], rows: Iterable[Sequence[object]]) -> str:
    """Return a table as HTML with escaped text; rows after the first `MOST_ROWS` are counted, not shown."""
    listed = list(rows)
    head = "".join(f"<th>{_cell(name)}</th>" for name in header)
    body = "".join(f"<tr>{''.join(f'<td>{_cell(cell)}</td>' for cell in row)}</tr>" for row in listed[:MOST_ROWS])
    if len(listed) > MOST_ROWS:
        body += f'<tr><td colspan="{max(1, len(header))}">{len(listed) - MOST_ROWS:,} more</td></tr>'
    return f"<p><strong>{_cell(title)}</strong></p><table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>"


def _cell(value: object) -> str:
    return html.escape(shortened(visible(str(value))))


def _cut(text: str, most: int) -> str:
    return text if len(text) <= most else f"{text[: most - 3]}..."
