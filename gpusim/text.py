"""Text from files on its way out of the program: to a terminal, a page, a CSV cell, an error line.

Names in a trace are anybody's text. What leaves here moves no cursor, turns no line around and hides nothing.
"""

from __future__ import annotations

import re
from typing import Any, Final
from unicodedata import category

#: Longest value that a message repeats, and longest message; both with the mark of what was left out.
VALUE_CHARACTERS: Final = 200
MESSAGE_CHARACTERS: Final = 2_000
#: A cell that begins so is a formula to a spreadsheet.
FORMULA_MARKS: Final = ("=", "+", "-", "@", "\t", "\r")

#: Unicode's categories of what is not seen or acts: controls, formats (directions, zero width), lone surrogates, and
#: separators of lines and paragraphs.
_HIDDEN: Final = frozenset(("Cc", "Cf", "Cs", "Zl", "Zp"))
_LAYOUT: Final = "\n\t"
_MAYBE_HIDDEN: Final = re.compile(r"[^ -~]")
_SHORT: Final = {"\n": r"\n", "\r": r"\r", "\t": r"\t"}
_LONG: Final = f"{{{VALUE_CHARACTERS + 1},}}"
# A value in a message: between two quotes of one kind (no apostrophe; msgspec has backticks), or without a space.
_LONG_VALUE: Final = re.compile(rf"""(?<!\w)(?:'[^']{_LONG}'|"[^"]{_LONG}"|`[^`]{_LONG}`)(?!\w)|[^\s'"`]{_LONG}""")


def visible(text: str, *, layout: bool = False) -> str:
    r"""`text` with every control, invisible or direction character as its escape, such as `\x1b` or `\u202e`.

    With `layout`, line feeds and tabs stay: for text whose lines are our own.
    """
    return _MAYBE_HIDDEN.sub(lambda match: _escape(match[0], _LAYOUT if layout else ""), text)


def shortened(text: str, most: int = VALUE_CHARACTERS) -> str:
    """`text`, or as much of its beginning as fits into `most` characters with a mark of what was left out."""
    if len(text) <= most:
        return text
    mark = f"... ({len(text):,} characters)"
    return text[: most - len(mark)] + mark


def message(text: str) -> str:
    """One visible line for a user: each value in it is cut to `VALUE_CHARACTERS`, all of it to `MESSAGE_CHARACTERS`.

    A message of messages is as good as one: what has been cut stays as it is.
    """
    line = visible(" ".join(text.split()))
    return shortened(_LONG_VALUE.sub(_cut, line), MESSAGE_CHARACTERS)


def csv_cell(value: Any) -> Any:
    """A cell of a CSV file: numbers as they are, text visible and never a formula."""
    if not isinstance(value, str):
        return value
    cell = visible(value)
    return f"'{cell}" if value.startswith(FORMULA_MARKS) else cell


def json_ascii(text: str) -> str:
    r"""A JSON document with the same values and no control or invisible character: each is a `\u....`."""
    return _MAYBE_HIDDEN.sub(lambda match: _json_escape(match[0]), text)


def _escape(character: str, kept: str) -> str:
    if character in kept or category(character) not in _HIDDEN:
        return character
    code = ord(character)
    if code <= 0xFF:
        return _SHORT.get(character, f"\\x{code:02x}")
    return f"\\u{code:04x}" if code <= 0xFFFF else f"\\U{code:08x}"


def _json_escape(character: str) -> str:
    if character in _LAYOUT or category(character) not in _HIDDEN:
        return character
    units = character.encode("utf-16-be", "surrogatepass").hex()
    return "".join(f"\\u{units[place : place + 4]}" for place in range(0, len(units), 4))


def _cut(match: re.Match[str]) -> str:
    value = match[0]
    quote = value[0] if value[0] in "'\"`" else ""
    return f"{quote}{shortened(value[1:-1] if quote else value)}{quote}"
