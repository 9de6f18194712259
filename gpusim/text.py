"""Text from files on its way out of the program: to a terminal, a page, a CSV cell, an error line.

Names in a trace are anybody's text. What leaves here moves no cursor, turns no line around and hides nothing.
"""

from __future__ import annotations

import re
from typing import Any, Final
from unicodedata import category

#: Longest value that a message repeats, and longest message; both with the mark of what was left out.
VALUE_CHARACTERS: Final = 200
MESSAGE_CHARACTERS: Final = 1_900  # 2,000 with what commands write before it
#: A cell that begins so is a formula to a spreadsheet.
FORMULA_MARKS: Final = ("=", "+", "-", "@", "\t", "\r")

#: Unicode's categories of what is not seen or acts: controls, formats (directions, zero width), lone surrogates, and
#: separators of lines and paragraphs.
_HIDDEN: Final = frozenset(("Cc", "Cf", "Cs", "Zl", "Zp"))
_LAYOUT: Final = "\n\t"
_MAYBE_HIDDEN: Final = re.compile(r"[^ -~]")
_SHORT: Final = {"\n": r"\n", "\r": r"\r", "\t": r"\t"}
# A value in a message stands between two quotes of one kind (msgspec has backticks), or has no space.
_QUOTE: Final = re.compile(r"""['"`]""")
_LONG_WORD: Final = re.compile(rf"""[^\s'"`]{{{VALUE_CHARACTERS + 1},}}""")


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


def short_value(value: object) -> str:
    """A value as a message repeats it: one visible line of at most `VALUE_CHARACTERS`."""
    return shortened(visible(" ".join(str(value).split())))


def message(text: str) -> str:
    """One visible line for a user: each value in it is cut to `VALUE_CHARACTERS`, all of it to `MESSAGE_CHARACTERS`.

    A message of messages is as good as one: what has been cut stays as it is.
    """
    line = visible(" ".join(text.split()))
    return shortened(_LONG_WORD.sub(lambda match: shortened(match[0]), _cut_quoted(line)), MESSAGE_CHARACTERS)


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


def _cut_quoted(line: str) -> str:
    """`line` with what stands between quotes cut. A quote within a word, as in "it's", begins and ends nothing.

    One pass: values are as long as somebody likes.
    """
    pieces, done, opened = [], 0, -1
    for match in _QUOTE.finditer(line):
        at = match.start()
        if opened < 0:
            if not line[max(0, at - 1) : at].isalnum():
                opened = at
        elif line[at] == line[opened] and not line[at + 1 : at + 2].isalnum():
            if at - opened - 1 > VALUE_CHARACTERS:
                pieces += [line[done : opened + 1], shortened(line[opened + 1 : at])]
                done = at
            opened = -1
    return "".join((*pieces, line[done:]))
