"""Short representations of values: one line for a terminal, a small table for a notebook.

Names come from files and are untrusted. Here they are made visible, shortened, and escaped in HTML.
"""

from __future__ import annotations

import dataclasses
import html
from collections.abc import Collection, Iterable, Sequence
from typing import Any, Final

from gpusim.text import MESSAGE_CHARACTERS, shortened, visible

#: Maximum length of the `repr` of a public value, and of a name in it.
REPR_CHARACTERS: Final = 200
NAME_CHARACTERS: Final = 60
TEXT_CHARACTERS: Final = 30
#: Maximum number of rows of a table in a notebook.
MOST_ROWS: Final = 20


def short_name(name: str) -> str:
    """Return a name for a `repr`: visible, at most `NAME_CHARACTERS` long."""
    return _cut(visible(name), NAME_CHARACTERS)


def short_repr(kind: str, text: str) -> str:
    """Return `<Kind text>`, visible and below `REPR_CHARACTERS`."""
    return f"<{kind} {_cut(visible(text), REPR_CHARACTERS - len(kind) - 4)}>"


def short_fields(value: Any) -> str:
    """Return `<Kind field=value, ...>`, below `REPR_CHARACTERS`, for a dataclass or struct.

    Texts are cut, collections counted, and other values of gpusim named; what is empty is left out.
    """
    names = [each.name for each in dataclasses.fields(value)] if dataclasses.is_dataclass(value) else None
    given = {name: getattr(value, name) for name in names or value.__struct_fields__ if not name.startswith("_")}
    parts = [f"{name}={_short_field(each)}" for name, each in given.items() if each not in (None, "", ())]
    return short_repr(type(value).__name__, ", ".join(parts))


class ShortRepr:
    """Base class of dataclasses with a short `repr`: see `short_fields`."""

    __slots__ = ()

    def __repr__(self) -> str:
        return short_fields(self)


def _short_field(value: object) -> str:
    if isinstance(value, str):
        return repr(_cut(visible(value), TEXT_CHARACTERS))
    if value is None or isinstance(value, bool | int | float):
        return _cut(repr(value), TEXT_CHARACTERS)
    if isinstance(value, Collection) and not dataclasses.is_dataclass(value):
        return f"[{len(value):,}]"
    return type(value).__name__


def html_table(title: str, header: Sequence[str], rows: Iterable[Sequence[object]]) -> str:
    """Return a table as HTML with escaped text; rows after the first `MOST_ROWS` are counted, not shown."""
    listed = list(rows)
    head = "".join(f"<th>{_cell(name)}</th>" for name in header)
    body = "".join(f"<tr>{''.join(f'<td>{_cell(cell)}</td>' for cell in row)}</tr>" for row in listed[:MOST_ROWS])
    if len(listed) > MOST_ROWS:
        body += f'<tr><td colspan="{max(1, len(header))}">{len(listed) - MOST_ROWS:,} more</td></tr>'
    # A title may be a sentence, whose end is a warning, so it is cut where messages are.
    heading = html.escape(shortened(visible(title), MESSAGE_CHARACTERS))
    return f"<p><strong>{heading}</strong></p><table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>"


def _cell(value: object) -> str:
    return html.escape(shortened(visible(str(value))))


def _cut(text: str, most: int) -> str:
    return text if len(text) <= most else f"{text[: most - 3]}..."
