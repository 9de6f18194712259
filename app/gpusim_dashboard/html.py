"""HTML snippets: text from files is escaped, tables have headers for screen readers, bars are boxes.

They fit any width and show before plotly.js has loaded.
"""

from __future__ import annotations

import base64
import keyword
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from html import escape
from typing import Final

import streamlit as st

from gpusim.text import shortened, visible

#: Tables with more columns than this become a list of cards on a phone.
MOST_ON_A_PHONE = 3
#: A string, a comment or a word of Python.
TOKEN = re.compile(r"""(?P<string>"[^"\n]*"|'[^'\n]*')|(?P<comment>#[^\n]*)|(?P<word>[^\W\d]\w*)""")
#: Copies the code beside a button that is clicked; selects it where a browser keeps the clipboard from pages.
COPY: Final = """<script>
if (!window.gpusimCopies) {
  window.gpusimCopies = true;
  document.addEventListener('click', async (event) => {
    const button = event.target.closest?.('.g-code button');
    if (!button) return;
    const code = button.parentElement.querySelector('code');
    try {
      await navigator.clipboard.writeText(code.textContent);
      button.textContent = 'Copied';
    } catch {
      getSelection().selectAllChildren(code);
      button.textContent = 'Selected';
    }
    setTimeout(() => { button.textContent = 'Copy'; }, 2000);
  });
}
</script>"""


@dataclass(frozen=True)
class Head:
    """A column's header."""

    name: str
    numbers: bool = False


def text(words: str) -> str:
    """Escape text that may come from a file, shortened if it is very long."""
    return escape(shortened(visible(words)))


def sentence(words: str) -> str:
    """Escape text of our own, unshortened; names in it are already short."""
    return escape(visible(words))


def show(markup: str) -> None:
    """Show a piece of HTML on the page."""
    st.html(markup)


def answer(kind: str, first: str, *more: str) -> None:
    """Show the answer to the page's question, then details; `kind` is `yes`, `no` or `trend`.

    All arguments are plain text.
    """
    parts = [f"<p><strong>{sentence(first)}</strong></p>", *(f"<p>{sentence(words)}</p>" for words in more if words)]
    show(f'<div class="g-answer {kind}">{"".join(parts)}</div>')


def code(name: str, lines: str, python: bool = False) -> None:
    """Show code with a button that copies it; `python`: with bold keywords and slanted comments.

    Not `st.code`: its highlighter is 1.5 MB of JavaScript, which keeps a browser busy longer than the rest of a page.
    """
    shown = escape(lines, quote=False)  # quotes stay, as the pattern looks for strings
    if python:
        shown = TOKEN.sub(_marked, shown)
    show(
        f'<div class="g-code"><button type="button" aria-label="Copy: {text(name)}">Copy</button>'
        f'<pre tabindex="0" role="region" aria-label="{text(name)}"><code>{shown}</code></pre></div>'
    )


def _marked(match: re.Match[str]) -> str:
    """A token of escaped Python as HTML."""
    if match["comment"]:
        return f"<em>{match[0]}</em>"
    return f"<strong>{match[0]}</strong>" if match["word"] and keyword.iskeyword(match["word"]) else match[0]


def copies() -> None:
    """Make the buttons of `code` work; at the end of a page, as it takes a line."""
    st.html(COPY, unsafe_allow_javascript=True)


def table(caption: str, heads: Sequence[Head], rows: Iterable[tuple[Sequence[str], bool]]) -> None:
    """Show a table of HTML cells. Each row has its cells and whether it is the best one.

    The first cell is the row's header.
    """
    lines = ["<thead><tr>"]
    lines += [f'<th scope="col"{_number(head)}>{text(head.name)}</th>' for head in heads]
    lines.append("</tr></thead><tbody>")
    for cells, best in rows:
        lines.append('<tr class="best">' if best else "<tr>")
        for place, (cell, head) in enumerate(zip(cells, heads, strict=True)):
            tag = "td" if place else "th"
            scope = "" if place else ' scope="row"'
            lines.append(f'<{tag}{scope}{_number(head)} data-label="{text(head.name)}">{cell}</{tag}>')
        lines.append("</tr>")
    stack = " g-stack" if len(heads) > MOST_ON_A_PHONE else ""
    show(
        f'<div class="g-table{stack}" tabindex="0" role="region" aria-label="{text(caption)}"><table>'
        f"{''.join(lines)}</tbody></table></div>"
    )


def _number(head: Head) -> str:
    return ' class="num"' if head.numbers else ""


def small(words: str) -> str:
    """A text in small letters on a line of its own, as part of a cell."""
    return f"<div class='g-takes'>{text(words)}</div>"


def tag(words: str) -> str:
    """A word in a frame, behind a name."""
    return f" <span class='g-tag'>{text(words)}</span>"


def bar(share: float, start: float = 0.0, kind: str = "") -> str:
    """A bar of length `share` of the width, from `start` on; `kind` is `gain`, `loss`, `low` or empty."""
    if share <= 0.0:
        return ""
    width, left = (max(0.0, min(1.0, value)) for value in (share, start))
    return f'<div class="g-bar {kind}" style="width:{width:.2%};margin-left:{left:.2%}"></div>'


def spans(parts: Iterable[tuple[float, float, str]], mark: float) -> str:
    """Bars on one line, each with its start, end (shares of the width) and kind, and a mark."""
    bars = "".join(
        f'<div class="g-span {kind}" style="left:{min(a, b):.2%};width:{max(abs(b - a), 0.002):.2%}"></div>'
        for a, b, kind in parts
    )
    return f'<div class="g-spans">{bars}<div class="g-mark" style="left:{mark:.2%}"></div></div>'


def stack(parts: Iterable[tuple[float, str]]) -> str:
    """Bars end to end, each with its share of the width and its colour."""
    pieces = "".join(
        f'<i style="width:{share:.2%};background:{text(colour)}"></i>' for share, colour in parts if share > 0.0
    )
    return f'<div class="g-pieces">{pieces}</div>'


def heat(caption: str, corner: str, names: Sequence[str], cells: Sequence[Sequence[float]], top: float) -> None:
    """Show a table of shares as a heat map; `top` has the strongest colour."""
    head = "".join(f'<th scope="col">{text(name)}</th>' for name in names)
    rows = []
    for name, line in zip(names, cells, strict=True):
        boxes = "".join(
            f'<td class="num" style="background:color-mix(in srgb, #D55E00 {60 * min(1.0, value / top):.0f}%, '
            f'transparent)">{value:.1%}</td>'
            for value in line
        )
        rows.append(f'<tr><th scope="row">{text(name)}</th>{boxes}</tr>')
    show(
        f'<div class="g-table g-heat" tabindex="0" role="region" aria-label="{text(caption)}"><table><thead><tr>'
        f'<th scope="col">{text(corner)}</th>{head}</tr></thead><tbody>{"".join(rows)}</tbody></table></div>'
    )


def legend(entries: Iterable[tuple[str, str] | tuple[str, str, str]]) -> str:
    """A legend of names and colours; a third string is the shape of the points."""
    parts = []
    for name, colour, *shape in entries:
        mark = (
            f'<b aria-hidden="true" style="color:{text(colour)}">{text(shape[0])}</b>'
            if shape
            else f'<i style="background:{text(colour)}"></i>'
        )
        parts.append(f"<span>{mark}{text(name)}</span>")
    return f'<div class="g-legend">{"".join(parts)}</div>'


def picture(svg: str, words: str) -> str:
    """An SVG as an image, with alternative text."""
    data = base64.b64encode(svg.encode()).decode()
    return f'<img class="g-glyph" alt="{text(words)}" src="data:image/svg+xml;base64,{data}">'
