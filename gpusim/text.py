"""Safe output of text from files: to a terminal, a page, a CSV cell, an error line.

Names in a trace are untrusted. Output from here moves no cursor, reverses no text and hides nothing.
"""

from __future__ import annotations

import re
from typing import Any, Final
from unicodedata import category

#: Maximum length of a value in a message, and of a message; both include the mark of the omitted part.
VALUE_CHARACTERS: Final = 200
MESSAGE_CHARACTERS: Final = 1_900  # 2,000 with the prefix of commands
#: Spreadsheets treat a cell that starts with these as a formula.
FORMULA_MARKS: Final = ("=", "+", "-", "@", "\t", "\r")

#: Unicode categories of invisible or acting characters: controls, formats (directions, zero width), lone surrogates,
#: and separators of lines and paragraphs.
_HIDDEN: Final = frozenset(("Cc", "Cf", "Cs", "Zl", "Zp"))
_LAYOUT: Final = "\n\t"
_MAYBE_HIDDEN: Final = re.compile(r"[^ -~]")
_SHORT: Final = {"\n": r"\n", "\r": r"\r", "\t": r"\t"}
# A value in a message is in quotes of one kind (msgspec uses backticks), or has no space.
_QUOTE: Final = re.compile(r"""['"`]""")
_LONG_WORD: Final = re.compile(rf"""[^\s'"`]{{{VALUE_CHARACTERS + 1},}}""")


def visible(text: str, *, layout: bool = False) -> str:
    r"""Return `text` with control, invisible and direction characters escaped, such as `\x1b` or `\u202e`.

    With `layout`, line feeds and tabs stay, for text with lines made by gpusim.
    """
    return _MAYBE_HIDDEN.sub(lambda match: _escape(match[0], _LAYOUT if layout else ""), text)


def shortened(text: str, most: int = VALUE_CHARACTERS) -> str:
    """Return `text`, cut to `most` characters with a mark of the omitted part."""
    if len(text) <= most:
        return text
    mark = f"... ({len(text):,} characters)"
    return text[: most - len(mark)] + mark


def short_value(value: object) -> str:
    """Return a value for a message: one visible line of at most `VALUE_CHARACTERS`."""
    return shortened(visible(" ".join(str(value).split())))


def message(text: str) -> str:
    """Return one visible line for a user, with values cut to `VALUE_CHARACTERS` and the line to `MESSAGE_CHARACTERS`.

    Applying it to a message again changes nothing: cut values stay as they are.
    """
    line = visible(" ".join(text.split()))
    return shortened(_LONG_WORD.sub(lambda match: shortened(match[0]), _cut_quoted(line)), MESSAGE_CHARACTERS)


def first_line(cause: BaseException) -> str:
    """Return the first line of an error's text that is not empty, or its type."""
    return next((line for line in str(cause).splitlines() if line.strip()), type(cause).__name__)


def csv_cell(value: Any) -> Any:
    """Return a cell of a CSV file: numbers unchanged, text visible and never a formula."""
    if not isinstance(value, str):
        return value
    cell = visible(value)
    return f"'{cell}" if value.startswith(FORMULA_MARKS) else cell


def json_ascii(text: str) -> str:
    r"""Return an equal JSON document with control and invisible characters written as `\u....`."""
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
    """Return `line` with text in quotes cut; a quote within a word, as in "it's", does not count.

    It takes one pass, since values may have any length.
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
